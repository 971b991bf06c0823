"""`python -m murmur.benchmarks.acceptance`: see run.py."""

import sys

from murmur.benchmarks.acceptance.run import main

if __name__ == "__main__":
    sys.exit(main())
