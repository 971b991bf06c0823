"""A training run: its processes, folder, state and what is made of it."""
