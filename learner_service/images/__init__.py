"""Runs that learn from images: the run, its supply sessions, and what follows an epoch."""
