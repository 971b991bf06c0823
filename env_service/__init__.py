"""The CPU service: environments, vectorization and sessions with the learner. Without torch."""
