"""Several learners of one run: what they share, and how they agree."""
