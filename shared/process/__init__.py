"""Processes: errors, files, ledgers, metrics, memory and signals."""
