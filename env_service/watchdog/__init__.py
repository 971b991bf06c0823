"""Containment of environment failures, so that a failure loses only its episode."""
