"""A small source and an algorithm that notes every sample, for tests of supervised runs."""
