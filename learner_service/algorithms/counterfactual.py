"""Formulas of COMA."""

from torch import Tensor

from learner_service.algorithms.exploration import LEAST


def counterfactual_advantage(lead: Tensor, pi: Tensor) -> Tensor:
    """How much better the action taken was than this agent's average, the others held fixed.

    A = Q(s, u) - sum_k pi(k) Q(s, (u_without_a, k)) = sum_k pi(k) lead(k). No gradient reaches lead
    or pi. Foerster et al. 2018, section 4 (arXiv:1705.08926).

    Args:
        lead: [..., K] critic's value of the action taken less that of each own action, the other
            agents' actions held fixed.
        pi: [..., K] probabilities of the acting policy.

    Returns:
        [...] advantage.
    """
    return (pi.detach() * lead.detach()).sum(-1)


def taken(x: Tensor, action: Tensor) -> Tensor:
    """Of x [..., K] what belongs to the actions taken [...]."""
    return x.gather(-1, action.unsqueeze(-1)).squeeze(-1)


def bounded_log(pi: Tensor) -> Tensor:
    """Logarithms of probabilities, bounded where a saturated policy underflows to zero."""
    return (pi + LEAST).log()
