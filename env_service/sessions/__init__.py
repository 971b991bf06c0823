"""Sessions with the learner: training, evaluation, reconnection."""
