"""Returns and their running deviation, surrogates, target updates: what algorithms share."""

import copy
import math
from typing import TypeVar

import torch
from torch import Tensor, nn

from murmur.learner_service.learning.exploration import LEAST
from murmur.learner_service.preprocess.running_moments import CROWD_ROWS, agents_of_slices, crowd
from murmur.learner_service.ranks.group import ALONE, Group

M = TypeVar("M", bound=nn.Module)
_REACH = 100.0  # deviations from the mean, ranges of a batch: returns may be rare and large


def lambda_returns(
    reward: Tensor,
    discount: Tensor,
    bootstrap: Tensor,
    last: Tensor,
    gamma: Tensor | float,
    lambda_: Tensor | float,
) -> Tensor:
    """TD(lambda) targets of all steps at once.

    G_t = r_{t+1} + gamma d_{t+1} [(1 - lambda) V_{t+1} + lambda G_{t+1}], and V_{t+1} in place of
    the bracket where row t+1 ends its episode or the unroll: there is no G beyond.
    Sutton and Barto 2018, section 12.1, in recursive form. No gradient reaches the inputs.

    Args:
        reward: [T, B, A] r_{t+1}, the result of the action of row t.
        discount: [T, B, A] (or [T, B, 1]) d_{t+1}: 0 if the episode terminated there, else 1.
        bootstrap: [T, B, A] V_{t+1}, value of row t+1, for example Q(s_{t+1}, a_{t+1}).
        last: [T, B] bool, whether row t+1 is LAST.
        gamma: discount factor; [T, B, A] if steps differ.
        lambda_: 0 is one-step TD, 1 is Monte Carlo; or [T, B, A].

    Returns:
        [T, B, A]; the values at rows t that are themselves LAST mean nothing: mask them.
    """
    reward, bootstrap = reward.detach(), bootstrap.detach()
    carry = torch.where(last.unsqueeze(-1), 0.0, lambda_).to(reward.dtype)  # weight of G_{t+1}
    carry[-1] = 0  # beyond the unroll the bracket is V itself
    scale = gamma * discount  # gamma d_{t+1}
    constant = torch.addcmul(reward, scale * (1 - carry), bootstrap)
    return linear_recurrence(constant, (scale * carry).expand_as(constant))


def vtrace_returns(
    reward: Tensor,
    discount: Tensor,
    value: Tensor,
    last: Tensor,
    log_ratio: Tensor,
    gamma: Tensor | float,
    lambda_: Tensor | float,
    clip: float,
) -> tuple[Tensor, Tensor]:
    """V-trace value targets, and advantages for a surrogate that holds the action's own ratio.

    delta_t = r_{t+1} + gamma d_{t+1} V_{t+1} - V_t
    rho_t   = min(clip, pi(a_t) / mu(a_t))
    A_t     = delta_t + gamma lambda d_{t+1} rho_{t+1} A_{t+1}
    v_t     = V_t + rho_t A_t

    Espeholt et al. 2018, "IMPALA", equation 1 and remark 2 (arXiv:1802.01561), with both bounds
    equal. Where the acting policy mu is the current policy pi, v is `lambda_returns` and A is GAE.
    No gradient reaches the inputs.

    Args:
        reward: [T, B, A] r_{t+1}, the result of the action of row t.
        discount: [T, B, A] (or [T, B, 1]) d_{t+1}: 0 if the episode terminated there, else 1.
        value: [T + 1, B, A] V of all rows.
        last: [T, B] bool, whether row t+1 is LAST.
        log_ratio: [T, B, A] log pi(a_t) - log mu(a_t); 0 where no action counts.
        gamma: discount factor; [T, B, A] if steps differ.
        lambda_: 0 is one-step TD; 1 is V-trace as published; or [T, B, A].
        clip: upper bound of the importance ratio, for the target and for the trace.

    Returns:
        [T, B, A] v and A; those of rows t that are themselves LAST mean nothing: mask them.
    """
    reward, value = reward.detach(), value.detach()
    rho = log_ratio.detach().exp().clamp_max(clip)
    scale = gamma * discount
    carry = torch.where(last.unsqueeze(-1), 0.0, lambda_).to(reward.dtype)
    carry[-1] = 0  # no correction is known beyond the unroll
    delta = torch.addcmul(reward, scale, value[1:]) - value[:-1]
    trace = scale * carry * rho.roll(-1, 0)
    advantage = linear_recurrence(delta, trace)
    return torch.addcmul(value[:-1], rho, advantage), advantage


def linear_recurrence(constant: Tensor, factor: Tensor) -> Tensor:
    """x_t = constant_t + factor_t x_{t+1}, with x_T = 0, for all t in log2(T) rounds.

    After a round x_t is in terms of x_{t+k} for a k twice as large, since two steps make one:
    c_t + f_t (c_{t+k} + f_{t+k} x_{t+2k}) = (c_t + f_t c_{t+k}) + (f_t f_{t+k}) x_{t+2k}.
    Hillis and Steele 1986, "Data Parallel Algorithms" (doi:10.1145/7902.7903).

    Args:
        constant: [T, ...].
        factor: [T, ...], same shape.

    Returns:
        [T, ...].
    """
    length, k = len(constant), 1
    beyond = 1 << max(0, (length - 1).bit_length() - 1)  # zeros, as far as the last round looks
    here, there = constant.new_zeros(2, 2, length + beyond, *constant.shape[1:]).unbind()
    here[0, :length], here[1, :length] = constant, factor
    while k < length:
        c, f = here
        torch.addcmul(c[:length], f[:length], c[k : k + length], out=there[0, :length])
        torch.mul(f[:length], f[k : k + length], out=there[1, :length])
        here, there, k = there, here, 2 * k
    return here[0, :length]


def clipped_surrogate(log_ratio: Tensor, advantage: Tensor, clip: float) -> Tensor:
    """PPO's pessimistic bound on the gain of a changed policy.

    min(r A, clip(r, 1 - clip, 1 + clip) A) = min(r A, A + clip |A|), r = exp(log_ratio).
    Schulman et al. 2017, "Proximal Policy Optimization Algorithms", equation 7 (arXiv:1707.06347).

    Args:
        log_ratio: [R] log pi_new(a) - log pi_old(a); carries the gradient.
        advantage: [R].
        clip: bound on the ratio's distance from 1.

    Returns:
        [R] to be maximised.
    """
    return torch.clamp(log_ratio.exp() * advantage, max=most_gain(advantage, clip))


def most_gain(advantage: Tensor, clip: float) -> Tensor:
    """Return the bound of `clipped_surrogate`, A + clip |A|."""
    return torch.add(advantage, advantage.abs(), alpha=clip)


def mean_over(x: Tensor, counted: Tensor, dim: int) -> Tensor:
    """Mean along a dimension over what counts (1, else 0); 0 where nothing does."""
    return (x * counted).sum(dim) / counted.sum(dim).clamp_min(1)


def of_agents(x: Tensor, sharing: Tensor) -> Tensor:
    """Each agent's number, [..., A], or [..., 1] where all share, of those of sets [..., S]."""
    if len(sharing) == 1:
        return x
    return torch.mv(sharing.T, x) if x.dim() == 1 else x @ sharing


def moments_by_slice(
    x: Tensor, counted: Tensor, sharing: Tensor, group: Group = ALONE
) -> tuple[Tensor, Tensor]:
    """Find each parameter group's mean, and biased variance, over its agents' rows that count.

    Args:
        x: [R, A].
        counted: [R, A] mask, 1 where an agent's row counts, else 0.
        sharing: [S, A] result of `sharing_agents`.
        group: group of the ranks that hold the rows.

    Returns:
        [S] means and [S] variances; 0 where no row counts.
    """
    sums, counts = sharing @ (x * counted).sum(0), sharing @ counted.sum(0)
    if group.size > 1:
        group.sum_([sums, counts])
    counts = counts.clamp_min(1)
    mean = sums / counts
    squares = sharing @ ((x - of_agents(mean, sharing)).square() * counted).sum(0)
    if group.size > 1:
        group.sum_([squares])
    return mean, squares / counts


def annealed(start: float, end: float, done: float, over: float) -> float:
    """Linear from start to end while `done` goes from 0 to `over`, then end; over 0: start."""
    return start + (end - start) * (min(1.0, done / over) if over else 0.0)


def target_of(network: M) -> M:
    """A target network: a copy for `polyak_update` to move, never trained itself."""
    return copy.deepcopy(network).requires_grad_(False)


@torch.no_grad()
def polyak_update(target: nn.Module, online: nn.Module, tau: float) -> None:
    """Move the target towards the online network: target += tau (online - target).

    tau = 1 copies. One kernel for all parameters; buffers are copied as they are.
    """
    torch._foreach_lerp_(
        [p.data for p in target.parameters()], [p.data for p in online.parameters()], tau
    )
    for old, new in zip(target.buffers(), online.buffers(), strict=True):
        old.copy_(new)


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
        self._agents_of = agents_of_slices(sharing)
        self.clipped = sharing.new_zeros(())  # of one rank: no part of the statistics
        self.outlier = sharing.new_zeros(2)

    def update(
        self,
        returns: Tensor,
        counted: Tensor,
        group: Group = ALONE,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Clip returns to plausible ones, and update the statistics by these.

        A parameter group without a return that counts keeps its statistics.

        Args:
            returns: [R, A].
            counted: [R, A] mask, 1 for a return that counts, else 0.
            group: group of the ranks that hold the returns.
            rows: scalar, R without padding: nothing waits for the device. None: nothing is padded,
                and it waits to see whether there is anything to clip.

        Returns:
            [R, A] returns, clipped.
        """
        # 1. Clip what both the statistics so far and the batch's crowd make implausible.
        valid = counted > 0
        mean, std = self.statistics()
        started = of_agents(self.weight, self._sharing) > 0
        reach = (_REACH * std).where(started, -math.inf)
        low, high = mean - reach, mean + reach
        clips = rows is not None
        if rows is None:
            self.clipped.zero_()
            outside = ((returns < low) | (returns > high)) & valid
            clips = len(returns) >= CROWD_ROWS and bool(outside.any())
        if clips:
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
            returns = taken
        # 2. The running statistics.
        counts, sums, squares = (
            self._sharing @ x.sum(0)
            for x in (counted, returns * counted, returns.square() * counted)
        )
        if group.size > 1:
            group.sum_([counts, sums, squares])
        fresh, counts = (1 - self._decay) * (counts > 0).float(), counts.clamp_min(1)
        self.mean.lerp_(sums / counts, fresh)
        self.square.lerp_(squares / counts, fresh)
        self.weight.lerp_(torch.ones_like(self.weight), fresh)
        return returns

    def statistics(self) -> tuple[Tensor, Tensor]:
        """Return each agent's mean and deviation, [A]."""
        weight = self.weight.clamp_min(1e-8)
        mean = self.mean / weight
        variance = self.square / weight - mean.square()
        started = self.weight > 0
        std = torch.where(started, variance.clamp_min(1e-4).sqrt(), 1.0)
        return of_agents(mean, self._sharing), of_agents(std, self._sharing)


def taken(x: Tensor, action: Tensor) -> Tensor:
    """Of x [..., K] what belongs to the actions taken [...]."""
    return x.gather(-1, action.unsqueeze(-1)).squeeze(-1)


def bounded_log(pi: Tensor) -> Tensor:
    """Logarithms of probabilities, bounded where a saturated policy underflows to zero."""
    return (pi + LEAST).log()
