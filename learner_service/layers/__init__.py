"""Layers: what networks are made of, and what makes one of its configuration."""
