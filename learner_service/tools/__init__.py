"""Work beside training: batch-size search, probe, export."""
