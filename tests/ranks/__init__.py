"""Several learners of one run against one learner."""
