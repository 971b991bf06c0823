"""Exploration of discrete actions: a share of uniform random ones that falls with experience."""

import torch
from torch import Tensor, nn

from learner_service.networks.distributions import ILLEGAL, explore, over_actions


def policy_probabilities(logits: Tensor, mask: Tensor | None, epsilon: Tensor | float) -> Tensor:
    """Behaviour policy: (1 - epsilon) softmax over legal actions + epsilon uniform over them.

    Args:
        logits: [R, K].
        mask: [R, K] 1 = legal, or None if all are; finite also where none is, as of the dead.
        epsilon: scalar.

    Returns:
        [R, K] probabilities, exactly zero where illegal.
    """
    if mask is not None:
        logits = logits.masked_fill(mask == 0, ILLEGAL)
    return explore(over_actions(torch.softmax, logits), mask, epsilon)


class Exploration(nn.Module):
    """Epsilon, which falls with the environment steps learned from; all of it on the device."""

    env_steps: Tensor
    epsilon: Tensor

    def __init__(self, start: float, end: float, over: int) -> None:
        """Epsilon falls linearly from start to end over so many environment steps."""
        super().__init__()
        self._start, self._end, self._over = start, end, over
        self.register_buffer("env_steps", torch.zeros(()))  # at most as many as matter
        self.register_buffer("epsilon", torch.tensor(start))

    def anneal(self) -> None:
        """Set epsilon for the steps so far."""
        done = (self.env_steps / self._over).clamp(max=1)
        self.epsilon.copy_(self._start + (self._end - self._start) * done)

    def advance(self, env_steps: Tensor) -> None:
        """Count the steps of an update."""
        self.env_steps.add_(env_steps).clamp_(max=self._over)
