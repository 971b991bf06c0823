"""Reports of the learner: metrics, progress, clocks, profiles."""
