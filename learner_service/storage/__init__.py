"""Where trajectories live: on the learner's device, in wire dtype."""
