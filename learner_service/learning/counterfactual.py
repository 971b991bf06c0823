"""Formulas of COMA."""

from torch import Tensor

from learner_service.learning.exploration import LEAST


def taken(x: Tensor, action: Tensor) -> Tensor:
    """Of x [..., K] what belongs to the actions taken [...]."""
    return x.gather(-1, action.unsqueeze(-1)).squeeze(-1)


def bounded_log(pi: Tensor) -> Tensor:
    """Logarithms of probabilities, bounded where a saturated policy underflows to zero."""
    return (pi + LEAST).log()
