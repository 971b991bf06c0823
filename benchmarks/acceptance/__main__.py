"""`python -m benchmarks.acceptance`: see run.py."""

from benchmarks.acceptance.run import main
from murmur.results import run_command

if __name__ == "__main__":
    run_command(main)
