"""The way of an observation from an environment's step to the gradient, counted."""
