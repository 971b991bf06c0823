"""Unrolls and replays of transitions: on the learner's device, in wire dtype."""
