"""Learning: what algorithms are made of, from losses and returns to options and policies."""
