"""Formulas of COMA."""

from torch import Tensor


def counterfactual_advantage(q: Tensor, pi: Tensor, q_taken: Tensor) -> Tensor:
    """How much better the action taken was than this agent's average, the others held fixed.

    A = Q(s, u) - sum_k pi(k) Q(s, (u_without_a, k)). No gradient reaches q or pi.
    Foerster et al. 2018, section 4 (arXiv:1705.08926).

    Args:
        q: [..., K] critic's value of each own action, the other agents' actions held fixed.
        pi: [..., K] probabilities of the acting policy.
        q_taken: [...] of q that of the action taken.

    Returns:
        [...] advantage.
    """
    q, pi, q_taken = q.detach(), pi.detach(), q_taken.detach()
    return q_taken - (pi * q).sum(-1)


def taken(x: Tensor, action: Tensor) -> Tensor:
    """Of x [..., K] what belongs to the actions taken [...]."""
    return x.gather(-1, action.unsqueeze(-1)).squeeze(-1)


def bounded_log(pi: Tensor) -> Tensor:
    """Logarithms of probabilities, bounded where a saturated policy underflows to zero.

    The bound also keeps the gradient of an illegal action's 0 log 0 at zero.
    """
    return (pi + 1e-10).log()
