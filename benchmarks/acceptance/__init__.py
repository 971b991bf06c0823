"""Acceptance tests: what is known to be learnable, and what the algorithms make of it."""
