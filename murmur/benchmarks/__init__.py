"""Benchmarks: each module has a DESCRIPTION and run(quick); see README.md."""
