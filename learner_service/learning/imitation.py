"""Learning from what an expert would have done where the policy acted.

DAgger: Ross, Gordon, Bagnell 2011, "A Reduction of Imitation Learning and Structured Prediction to
No-Regret Online Learning" (arXiv:1011.0686). Rows that have an expert's action raise its
probability, in place of the policy gradient and of the entropy; other rows learn as ever.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from torch import Tensor

from shared.wire.spec import EXPERT_ACTION

LOGGED = ("imitation_loss", "imitation_share")


class Advice(NamedTuple):
    """Imitation part of a minibatch's loss.

    Attributes:
        terms: summands of the loss, L = -E[log pi(expert | o)]; empty in runs without an expert.
        logged: -log pi(expert | o) [M, A], 0 where none was asked, and whether one was, [M, A] 1 or
            0; empty without.
        told: [M, A] bool mask of rows where an expert was asked; None in runs without.
    """

    terms: list[tuple[Tensor, Tensor]]
    logged: list[Tensor]
    told: Tensor | None

    def spared(self, weight: Tensor) -> Tensor:
        """Weights [M, A] of other losses of the policy, 0 where an expert was asked."""
        return weight if self.told is None else weight.masked_fill(self.told, 0)


def mean_of_told(means: Tensor, told: list[Tensor], first: int) -> Tensor:
    """Make the mean loss of all rows, at `first` before the share, that of the rows told.

    Args:
        means: means for the log.
        told: empty in runs without an expert, whose means do not change.
        first: index at which LOGGED begins.
    """
    if told:
        means[first] /= means[first + 1].clamp_min(1e-8)
    return means


def advice(
    columns: Mapping[str, Tensor], log_prob: Callable[[Tensor], Tensor], cost: Tensor
) -> Advice:
    """Compute the imitation part of a minibatch's loss.

    Args:
        columns: columns of the minibatch, name -> [M, A, ...].
        log_prob: log pi [M, A] of actions [M, A].
        cost: [M, A] cost of the minibatch's rows; see Pass.
    """
    expert = columns.get(EXPERT_ACTION)
    if expert is None:
        return Advice([], [], None)
    told = expert >= 0
    found = log_prob(expert.clamp_min(0))
    logged = [-found.detach().masked_fill(~told, 0), told.float()]
    return Advice([(found, cost * told)], logged, told)
