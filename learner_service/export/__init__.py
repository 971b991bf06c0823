"""Exports of policies and segmenters to other runtimes."""
