"""`python -m murmur.benchmarks.acceptance`: see run.py."""

from murmur.benchmarks.acceptance.run import main
from murmur.results import run_command

if __name__ == "__main__":
    run_command(main)
