"""Acceptance tests: tasks that are known to be learnable, and results of the algorithms on them."""
