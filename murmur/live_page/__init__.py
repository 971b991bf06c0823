"""The live page of a run: a small HTTP server on loopback, and what it shows."""

PORT = 6106  # unless it is in use
