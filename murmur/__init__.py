"""The front door: one command line; the only code that knows both services."""
