"""Exploration of discrete actions: a share of uniform random ones that falls with experience."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from typing_extensions import override

from murmur.learner_service.layers.distributions import (
    ILLEGAL,
    ActionDistribution,
    explore,
    legal_alone,
    one_hot,
    over_actions,
    sample,
)

LEAST = 1e-10  # probability in logarithms, where a saturated policy underflows to zero


def policy_probabilities(logits: Tensor, mask: Tensor | None, epsilon: Tensor | float) -> Tensor:
    """Behaviour policy: (1 - epsilon) softmax over legal actions + epsilon uniform over them.

    Args:
        logits: [..., K].
        mask: [..., K] 1 = legal, or None if all are; finite also where none is, as of the dead.
        epsilon: scalar.

    Returns:
        [..., K] probabilities, exactly zero where illegal.
    """
    pi = over_actions(torch.softmax, legal_alone(logits, mask))
    return explore(pi, mask, epsilon)


@dataclass
class EpsilonSoftmax(ActionDistribution):
    """`policy_probabilities`; its mode is the most probable legal action.

    Attributes:
        logits: [..., K] float32.
        mask: [..., K] 1 = legal, or None if all are.
        epsilon: scalar share of uniform random actions.
    """

    logits: Tensor
    mask: Tensor | None
    epsilon: Tensor

    @override
    def sample(self, generator: torch.Generator) -> Tensor:
        return sample(policy_probabilities(self.logits, self.mask, self.epsilon), generator)

    @override
    def mode(self) -> Tensor:
        return self.greedy_by()["logits"].argmax(-1)

    @override
    def greedy_by(self) -> dict[str, Tensor]:
        if self.mask is None:
            return {"logits": self.logits}
        return {"logits": self.logits.masked_fill(self.mask == 0, float("-inf"))}


@dataclass
class EpsilonGreedy(ActionDistribution):
    """The legal action of the highest value, or a uniform random one with probability epsilon.

    Attributes:
        values: [..., K] float32, those of illegal actions below all others.
        mask: [..., K] 1 = legal, or None if all are.
        epsilon: scalar share of uniform random actions.
    """

    values: Tensor
    mask: Tensor | None
    epsilon: Tensor

    @override
    def sample(self, generator: torch.Generator) -> Tensor:
        greedy = one_hot(self.mode(), self.values.shape[-1])
        return sample(explore(greedy, self.mask, self.epsilon), generator)

    @override
    def mode(self) -> Tensor:
        return self.values.argmax(-1)


def penalties(mask: Tensor) -> Tensor:
    """Return what `mixture` adds to logits: 0, or a large negative number where a mask is 0."""
    return (mask == 0).float() * ILLEGAL


def mixture(
    logits: Tensor, penalty: Tensor | None, keep: Tensor, floor: Tensor
) -> tuple[Tensor, Tensor]:
    """Softmax over legal actions, and `policy_probabilities`, none of them less than LEAST.

    Args:
        logits: [..., K].
        penalty: [..., K] result of `penalties`, or None if all actions are legal.
        keep: scalar 1 - epsilon.
        floor: [..., K] epsilon uniform over legal actions, or a scalar if all are; plus LEAST.
    """
    if penalty is not None:
        logits = logits + penalty
    softmax = over_actions(torch.softmax, logits)
    return softmax, torch.addcmul(floor, softmax, keep)


def mixture_gradient(of_softmax: Tensor, softmax: Tensor) -> Tensor:
    """Gradient of the logits of `mixture` [..., K], of that of the softmax."""
    backward = torch.ops.aten._softmax_backward_data
    found: Tensor = backward(of_softmax, softmax, -1, softmax.dtype)
    return found


def log_softmax(logits: Tensor, penalty: Tensor | None) -> Tensor:
    """[..., K] log-probabilities over legal actions, without exploration; see `mixture`."""
    return over_actions(torch.log_softmax, logits if penalty is None else logits + penalty)


class Exploration(nn.Module):
    """Epsilon, which falls with the environment steps learned from; all of it on the device.

    Attributes:
        env_steps: learned from.
        epsilon: the share of uniform random actions.
        keep: 1 - epsilon.
        floor: epsilon / K + LEAST.
    """

    STARTS_FRESH = True  # a fine-tuned run explores by its own schedule

    env_steps: Tensor
    epsilon: Tensor
    keep: Tensor
    floor: Tensor

    def __init__(self, start: float, end: float, over: int, num_actions: int) -> None:
        """Anneal epsilon linearly from `start` to `end` over `over` environment steps."""
        super().__init__()
        self._start = start
        self._end = end
        self._over = over
        self.register_buffer("env_steps", torch.zeros(()))  # at most as many as matter
        self.register_buffer("epsilon", torch.tensor(start))
        for name, value in (("keep", 1 - start), ("floor", start / num_actions + LEAST)):
            self.register_buffer(name, torch.tensor(value), persistent=False)
        self._num_actions = num_actions

    def anneal(self) -> None:
        """Set epsilon for the steps so far."""
        done = (self.env_steps / self._over).clamp(max=1)
        self.epsilon.copy_(self._start + (self._end - self._start) * done)
        self.keep.copy_(1 - self.epsilon)
        self.floor.copy_(self.epsilon / self._num_actions + LEAST)

    def advance(self, env_steps: Tensor) -> None:
        """Count the steps of an update."""
        self.env_steps.add_(env_steps).clamp_(max=self._over)
