"""Checkpoints: what a run keeps on disk."""
