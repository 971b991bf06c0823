"""Returns in units of their running deviation."""

import torch
from torch import Tensor, nn

from learner_service.algorithms.returns import of_agents
from learner_service.group.group import ALONE, Group


class ValueNorm(nn.Module):
    """Running mean and deviation of returns, with the bias of the first steps taken out.

    Each parameter group has its own: agents with networks of their own may be paid differently.
    Yu et al. 2022, section 5.1. The statistics cover about ten updates. Theirs of a hundred lag
    behind the returns; what a network makes up for meanwhile is too much once they have followed,
    and returns contain its values. With one or two optimiser steps an update both then swing
    without bound. PopArt (van Hasselt et al. 2016, arXiv:1602.07714) prevents that, too, by
    rescaling the network, but its values follow rising returns so late that VMAS balance reached
    45 in place of 52.
    """

    mean: Tensor
    square: Tensor
    weight: Tensor
    _sharing: Tensor

    def __init__(self, sharing: Tensor, decay: float = 0.9) -> None:
        """`sharing` [S, A] is of `sharing_agents`; `decay` what the past weighs at every update."""
        super().__init__()
        self._decay = decay
        self.register_buffer("_sharing", sharing, persistent=False)
        for name in ("mean", "square", "weight"):
            self.register_buffer(name, torch.zeros(len(sharing)))

    def update(self, returns: Tensor, counted: Tensor, group: Group = ALONE) -> None:
        """Update by returns [R, A] where `counted` is 1; a group without any keeps its statistics.

        The returns are those of all ranks of the group.
        """
        counts, sums, squares = (
            self._sharing @ x.sum(0)
            for x in (counted, returns * counted, returns.square() * counted)
        )
        group.sum_([counts, sums, squares])
        fresh, counts = (1 - self._decay) * (counts > 0).float(), counts.clamp_min(1)
        self.mean.lerp_(sums / counts, fresh)
        self.square.lerp_(squares / counts, fresh)
        self.weight.lerp_(torch.ones_like(self.weight), fresh)

    def _statistics(self) -> tuple[Tensor, Tensor]:
        """Each agent's mean and deviation, [A]."""
        weight = self.weight.clamp_min(1e-8)
        mean = self.mean / weight
        variance = self.square / weight - mean.square()
        started = self.weight > 0
        std = torch.where(started, variance.clamp_min(1e-4).sqrt(), 1.0)
        return of_agents(mean, self._sharing), of_agents(std, self._sharing)

    def normalize(self, x: Tensor) -> Tensor:
        """[..., A] to units of the deviation."""
        mean, std = self._statistics()
        return (x - mean) / std

    def denormalize(self, x: Tensor) -> Tensor:
        """Back again."""
        mean, std = self._statistics()
        return x * std + mean
