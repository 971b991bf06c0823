"""The learning loop: sample, update, publish, log, checkpoint, evaluate."""
