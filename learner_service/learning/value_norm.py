"""Returns in units of their running deviation."""

import math

import torch
from torch import Tensor, nn

from learner_service.learning.returns import of_agents
from learner_service.preprocess.running_moments import CROWD_ROWS, agents_of_sets, crowd
from learner_service.ranks.group import ALONE, Group

_REACH = 100.0  # deviations from the mean, ranges of a batch: returns may be rare and large


class ValueNorm(nn.Module):
    """Running mean and deviation of returns, with the bias of the first steps taken out.

    Each parameter group has its own: agents with networks of their own may be paid differently.
    Yu et al. 2022, section 5.1. The statistics cover about ten updates. Theirs of a hundred lag
    behind the returns; what a network makes up for meanwhile is too much once they have followed,
    and returns contain its values. With one or two optimiser steps an update both then swing
    without bound. PopArt (van Hasselt et al. 2016, arXiv:1602.07714) prevents that, too, by
    rescaling the network, but its values follow rising returns so late that VMAS balance reached
    45 in place of 52.

    One absurd reward would hide all others for some 200 updates. So returns are clipped to what is
    plausible, see RunningMoments, by 100 deviations and 100 ranges of the batch.

    Attributes:
        clipped: returns of the last batch that were clipped, of this rank, scalar.
        outlier: [2] the one that was clipped most, as it came and as it was taken.
    """

    mean: Tensor
    square: Tensor
    weight: Tensor
    _sharing: Tensor
    _set: Tensor

    def __init__(self, sharing: Tensor, decay: float = 0.9) -> None:
        """`sharing` [S, A] is of `sharing_agents`; `decay` what the past weighs at every update."""
        super().__init__()
        self._decay = decay
        self.register_buffer("_sharing", sharing, persistent=False)
        for name in ("mean", "square", "weight"):
            self.register_buffer(name, torch.zeros(len(sharing)))
        self.register_buffer("_set", sharing.argmax(0), persistent=False)
        self._agents_of = agents_of_sets(sharing)
        self.clipped = sharing.new_zeros(())  # of one rank: no part of the statistics
        self.outlier = sharing.new_zeros(2)

    def plausible(self, returns: Tensor, counted: Tensor, rows: Tensor | None = None) -> Tensor:
        """Clip returns.

        Args:
            returns: [R, A].
            counted: [R, A] mask, 1 for a return that counts, else 0.
            rows: scalar, R without padding: nothing waits for the device. None: nothing is padded,
                and it waits to see whether there is anything to clip.
        """
        valid = counted > 0
        mean, std = self._statistics()
        started = of_agents(self.weight, self._sharing) > 0
        reach = (_REACH * std).where(started, -math.inf)
        low, high = mean - reach, mean + reach
        if rows is None:
            self.clipped.zero_()
            outside = ((returns < low) | (returns > high)) & valid
            if len(returns) < CROWD_ROWS or not outside.any():
                return returns
        x, counts = returns.unsqueeze(-1), valid.unsqueeze(-1)
        crowds = [crowd(x, counts, agents, _REACH, 0.0, rows) for agents in self._agents_of]
        crowd_low, crowd_high = (torch.cat(ends) for ends in zip(*crowds, strict=True))  # [S]
        # By index: a product with 0 would make NaN of infinite ends.
        low = torch.minimum(low, crowd_low.index_select(0, self._set))
        high = torch.maximum(high, crowd_high.index_select(0, self._set))
        clipped = valid if rows is None else valid & (rows >= CROWD_ROWS)
        taken = torch.maximum(torch.minimum(returns, high), low).where(clipped, returns)
        excess = (returns - taken).abs().flatten()
        self.clipped.copy_((excess > 0).sum())
        at = excess.argmax(0, keepdim=True)
        self.outlier.copy_(torch.cat([x.flatten().gather(0, at) for x in (returns, taken)]))
        return taken

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
