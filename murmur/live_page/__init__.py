"""The live page of a run: a small HTTP server on loopback, and the page's content."""

PORT = 6106  # unless it is in use
