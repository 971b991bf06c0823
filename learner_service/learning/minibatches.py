"""Minibatches of a rollout: all of its rows in a random order, gathered once for each pass.

A row is a joint transition; by `Rows.of_single_agents` that of one agent.

On a CPU rows that do not count are left out. On a GPU they weigh nothing, and fill minibatches up
to one size: see `fixed_shapes`.

Ranks of a group make as many minibatches as one learner with all their rows would. Minibatch k of
the group is that of all ranks together; where a rank has no row for it, rows of weight 0 stand in.

Where an expert said what it would have done, a minibatch's loss has a part for it: `imitation`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from murmur.learner_service.layers.inputs import Inputs
from murmur.learner_service.layers.recurrent import RecurrentState
from murmur.learner_service.learning.returns import of_agents
from murmur.learner_service.ranks.group import ALONE, Group
from murmur.learner_service.storage.rollout import Rollout
from murmur.shared.wire.timestep import StepType

IMITATION_LOGGED = ("imitation_loss", "imitation_share")


@dataclass
class Minibatch:
    """M joint rows of a pass, those of whole environments with memory; fields as those of Pass."""

    actor: Inputs
    critic: Inputs
    columns: dict[str, Tensor]
    share: Tensor
    cost: Tensor
    actor_state: RecurrentState | None
    critic_state: RecurrentState | None
    rates: Tensor | None


@dataclass
class Pass:
    """All minibatches of a pass over the rows, one behind the other.

    Attributes:
        number: n of them.
        actor: the policy's inputs, [n * M, A, ...].
        critic: the critic's; may be the same object.
        columns: name -> [n * M, A, ...].
        share: [n, M, A] a row's weight: 1 / (counting rows of its parameter group in this
            minibatch), 0 for a row that does not count. So a weighted sum is the sum of the groups'
            means. Of several ranks: (number of ranks) / (counting rows on all ranks), and the
            gradients of ranks are averaged.
        cost: [n, M, A] -share, for what is to be maximised.
        counts: [n] flags, 1 if any row of the minibatch counts, of any rank, else 0.
        sharing: [S, A] result of `sharing_agents`.
        actor_state: recurrent state of n * m environments.
        critic_state: recurrent state of the critic, as `actor_state`.
        rates: [n, groups] learning rates in a CUDA graph, 0 where nothing counts; None: they stay
            as they are, and a minibatch where nothing counts is left out.
    """

    number: int
    actor: Inputs
    critic: Inputs
    columns: dict[str, Tensor]
    share: Tensor
    cost: Tensor
    counts: Tensor
    sharing: Tensor
    actor_state: RecurrentState | None = None
    critic_state: RecurrentState | None = None
    rates: Tensor | None = None

    def at(self, i: int) -> Minibatch:
        """Return minibatch i: views of this pass."""
        length, envs = self.share.shape[1], 0
        if self.actor_state is not None:
            envs = len(self.actor_state.memory) // self.number
        rows, columns = slice(i * length, (i + 1) * length), slice(i * envs, (i + 1) * envs)
        actor = self.actor.each(lambda x: x[rows])
        actor_state, critic_state = (
            state and state.columns(columns) for state in (self.actor_state, self.critic_state)
        )
        return Minibatch(
            actor,
            actor if self.critic is self.actor else self.critic.each(lambda x: x[rows]),
            {name: x[rows] for name, x in self.columns.items()},
            self.share[i],
            self.cost[i],
            actor_state,
            critic_state,
            None if self.rates is None else self.rates[i],
        )


def number_of_minibatches(
    number: int,
    times: float,
    group: Group = ALONE,
    *,
    units: int = 0,
    width: int = 0,
    block: int = 1,
) -> int:
    """Return the number of minibatches of a pass, the same on all ranks.

    Args:
        number: configured number of minibatches.
        times: ratio of a Rollout: an update may have more rows than were asked for.
        group: its ranks' mean counts.
        units: largest number of units that may count.
        width: units that a minibatch has room for; 0: for any number.
        block: minibatches that are learned from at once; there is a whole number of blocks.
    """
    number = round(number * group.agree({"times": times}, "sum")["times"] / group.size)
    if not width:
        return number
    # Of several ranks one may have a unit less of each minibatch: it begins with padding.
    room = block * (width - (group.size > 1))
    least = round(group.agree({"least": -(-units // room)}, "max")["least"])
    return block * max(1, round(number / block), least)


def deviations(x: Tensor, share: Tensor, sharing: Tensor, group: Group = ALONE) -> Tensor:
    """Return standard deviations over each parameter group's rows, [..., S].

    Args:
        x: [..., M, A].
        share: [..., M, A] share of Minibatch.
        sharing: [S, A] result of `sharing_agents`.
        group: group of the ranks that hold the rows.
    """
    if len(sharing) == 1:
        rows, weights = x.flatten(-2).unsqueeze(-2), share.flatten(-2).unsqueeze(-1)
        mean = rows @ weights
        group.mean_([mean])
        variance = (rows - mean).square() @ weights
        group.mean_([variance])
        return variance.sqrt().flatten(-2)
    means = (x * share).sum(-2) @ sharing.T
    group.mean_([means])
    squares = (x - of_agents(means, sharing).unsqueeze(-2)).square() * share
    variances = squares.sum(-2) @ sharing.T
    group.mean_([variances])
    return variances.sqrt()


def shares(weight: Tensor, sharing: Tensor, group: Group = ALONE) -> tuple[Tensor, Tensor]:
    """Compute each row's share of its minibatch's loss, and whether any row of an agent counts.

    Args:
        weight: [n, rows, A] mask, 1 for a row that counts, else 0.
        sharing: [S, A] result of `sharing_agents`.
        group: group of the ranks that hold the minibatches' rows.

    Returns:
        [n, rows, A], which a minibatch's loss is summed with, and [n] 1 or 0.
    """
    fewest, one = 1 / group.size, len(sharing) == 1
    counted = weight.sum((1, 2), keepdim=True) if one else weight.sum(1)  # [n, 1, 1] or [n, A]
    if group.size > 1:
        group.mean_([counted])
    if one:
        return weight / counted.clamp_min(fewest), (counted.flatten() > 0).float()
    share = (counted @ sharing.T).clamp_min(fewest).reciprocal() @ sharing
    return weight * share.unsqueeze(1), (counted.amax(1) > 0).float()


def recurrent_states(batch: Rollout) -> tuple[RecurrentState, RecurrentState]:
    """Return initial states of policy and critic for a batch of a recurrent policy.

    The policy starts from the state that it had when it acted. A critic does not act, so it starts
    from zeros at the unroll's first row.
    """
    memory = batch.arrays["memory"][0]
    first = batch.arrays["step_type"] == int(StepType.FIRST)
    return RecurrentState(memory, first), RecurrentState(torch.zeros_like(memory), first)


@dataclass
class Rows:
    """All joint transitions of a batch: R rows, each of all A agents at one step, time outermost.

    Inputs and columns may hold more than R rows, those of last observations behind the others; no
    minibatch takes from these.

    Attributes:
        actor: the policy's inputs.
        critic: the critic's; may be the same object.
        columns: name -> [R or more, A, ...], what else belongs to a row.
        weight: [R, A] mask, 1 where the agent's transition counts, else 0.
        sharing: [S, A] result of `sharing_agents`.
        actor_state: recurrent state of the policy before each environment's first row. Minibatches
            are then of whole environments. None: they are of single rows.
        critic_state: recurrent state of the critic.
        group: group of the ranks that learn together, each from rows of its own.
    """

    actor: Inputs
    critic: Inputs
    columns: dict[str, Tensor]
    weight: Tensor
    sharing: Tensor
    actor_state: RecurrentState | None = None
    critic_state: RecurrentState | None = None
    group: Group = ALONE
    _length: int = field(init=False)  # rows of a unit of minibatches
    _units: Tensor = field(init=False)  # valid units
    _by_rank: list[float] = field(init=False, default_factory=list)  # valid units, once asked for

    def __post_init__(self) -> None:
        """Find the units that count."""
        state = self.actor_state
        self._length = 1 if state is None or state.first is None else len(state.first)
        counted = self.weight.view(self._length, -1, self.weight.shape[1]).amax((0, 2)) > 0
        self._units = counted.nonzero().squeeze(1)

    def of_single_agents(self) -> "Rows":
        """Return the same rows with each agent's as a joint row of one agent, [R * A, 1, ...].

        Minibatches are then of agents' rows: agents must share one parameter group, and no network
        may mix them.
        """
        rows, agents = self.weight.shape
        columns = {
            name: x[:rows].reshape(rows * agents, 1, *x.shape[2:])
            for name, x in self.columns.items()
        }
        actor, critic = self.actor.grouped(1), self.critic.grouped(1)
        weight = self.weight.reshape(-1, 1)
        sharing = self.sharing[:, :1]
        return Rows(actor, critic, columns, weight, sharing, group=self.group)

    def shuffled(self, number: int, generator: torch.Generator) -> Pass:
        """Deal all rows that count to `number` minibatches, shuffled, like cards.

        Minibatches have equally many units, give or take one. Units of the ranks are dealt one
        after the other, as if they were one pack.

        Args:
            number: number of minibatches; there are fewer if there are fewer units.
            generator: draws the order.
        """
        group, size, skipped = self.group, len(self._units), 0
        if group.size == 1:
            number = min(number, size)
        else:
            self._by_rank = self._by_rank or group.gather(size)
            number = min(number, int(sum(self._by_rank)))
            # The minibatch that this rank's first unit goes to; those before it get padding.
            skipped = int(sum(self._by_rank[: group.rank])) % max(1, number)
        if number == 0:  # environments that fail at once, or an episode's end alone
            none = self.weight
            return Pass(0, self.actor, self.critic, {}, none, none, none, self.sharing)
        device = self._units.device
        order = torch.randperm(size, device=device, generator=generator)
        order = self._units.index_select(0, order)
        width = max(1, -(-(skipped + size) // number))
        spare = width * number - skipped - size  # places behind this rank's last unit
        if skipped or spare:
            order = F.pad(order, (skipped, spare))
        units = order.view(-1, number).T.contiguous()  # [n, m]
        index = units.unsqueeze(1)
        if self.actor_state is not None:  # [n, L, m] rows of whole environments
            step = len(self.weight) // self._length
            first = torch.arange(0, len(self.weight), step, device=device)
            index = index + first.view(1, -1, 1)
        rows = index.flatten()
        weight = self.weight.index_select(0, rows).view(number, self._length, width, -1)
        if skipped:
            weight[:skipped, :, 0] = 0
        columns, rest = divmod(spare, number)
        if columns:
            weight[:, :, -columns:] = 0
        if rest:
            weight[-rest:, :, -columns - 1] = 0
        share, any_counts = shares(weight.flatten(1, 2), self.sharing, group)
        actor = self.actor.each(lambda x: x.index_select(0, rows))
        critic = (
            actor
            if self.critic is self.actor
            else self.critic.each(lambda x: x.index_select(0, rows))
        )
        found = {name: x.index_select(0, rows) for name, x in self.columns.items()}
        actor_state, critic_state = (
            state and state.columns(units.flatten())
            for state in (self.actor_state, self.critic_state)
        )
        return Pass(
            number,
            actor,
            critic,
            found,
            share,
            -share,
            any_counts,
            self.sharing,
            actor_state,
            critic_state,
        )


class Imitation(NamedTuple):
    """Imitation part of a minibatch's loss.

    Attributes:
        term: summand of the loss, L = -E[log pi(expert | o)]: values, and their weights [M, A].
        logged: columns by the names IMITATION_LOGGED: -log pi(expert | o) [M, A], 0 where no expert
            was asked, and a mask [M, A], 1 where one was.
        expert_mask: [M, A] bool, rows where an expert was asked.
    """

    term: tuple[Tensor, Tensor]
    logged: dict[str, Tensor]
    expert_mask: Tensor


def average_over_expert_rows(means: Tensor, first: int) -> None:
    """Make the mean imitation loss of all rows that of the rows where an expert was asked.

    Args:
        means: means for the log, changed in place.
        first: index at which IMITATION_LOGGED begins.
    """
    means[first] /= means[first + 1].clamp_min(1e-8)


def imitation(expert: Tensor, log_prob: Callable[[Tensor], Tensor], cost: Tensor) -> Imitation:
    """Compute the imitation part of a minibatch's loss.

    DAgger: Ross, Gordon, Bagnell 2011, "A Reduction of Imitation Learning and Structured Prediction
    to No-Regret Online Learning" (arXiv:1011.0686); of a dataset's rows, behavior cloning. Rows
    that have an expert's action raise its probability, in place of the policy gradient and of the
    entropy; other rows learn as ever.

    Args:
        expert: [M, A, ...] the expert's actions; negative or NaN where no expert was asked.
        log_prob: log pi [M, A] of actions [M, A, ...].
        cost: [M, A] cost of the minibatch's rows; see Pass.
    """
    if expert.is_floating_point():
        asked, taken = ~expert[..., 0].isnan(), expert.nan_to_num(0.0)
    else:
        asked, taken = expert >= 0, expert.clamp_min(0)
        asked = asked if asked.dim() == cost.dim() else asked[..., 0]
    found = log_prob(taken)
    logged = -found.detach().masked_fill(~asked, 0), asked.float()
    named = dict(zip(IMITATION_LOGGED, logged, strict=True))
    return Imitation((found, cost * asked), named, asked)
