"""Experiments behind published figures. `murmur bench` lists those that a checkout can run."""
