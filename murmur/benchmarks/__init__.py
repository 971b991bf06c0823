"""Benchmarks: each module has a DESCRIPTION and run(quick); see benchmarks/README.md."""
