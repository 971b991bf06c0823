"""The panels of each dashboard."""
