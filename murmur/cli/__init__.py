"""The command line `murmur`: one module for each group of commands.

Commands import what they need when they run. A machine with only the environment side installed
(no torch) can still serve environments, and `murmur --help` starts fast.
"""

# The order of these imports is the order of the commands in `murmur --help`.
from murmur.cli import run, many, results, diagnose, configure  # noqa: F401, I001
from murmur.cli.app import app, main

__all__ = ["app", "main"]
