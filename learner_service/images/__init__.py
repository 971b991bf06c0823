"""Learning from the images of a source: their sessions, and what follows an epoch."""
