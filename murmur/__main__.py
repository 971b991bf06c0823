"""`python -m murmur`: the same as the command `murmur`."""

from murmur.cli import main

main()
