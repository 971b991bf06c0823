"""The CPU service: environments, vectorisation and the session to the learner. No torch here."""
