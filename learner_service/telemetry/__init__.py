"""What the learner reports: metrics, progress, clocks, profiles."""
