"""Skeleton of the algorithms that learn from a replay."""

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, Self

import torch
from pydantic import Field
from torch import Tensor, nn
from typing_extensions import override

from murmur.learner_service.device.cuda_graph import Outputs
from murmur.learner_service.layers.casting import publish
from murmur.learner_service.layers.forward import forward
from murmur.learner_service.layers.recurrent import RecurrentState
from murmur.learner_service.layers.stacked import count_slices
from murmur.learner_service.learning.actor_critic import ActorCritic
from murmur.learner_service.learning.base import Policy, TransformedPolicy
from murmur.learner_service.learning.options import (
    About,
    AlgorithmConfig,
    Change,
    Gamma,
    GradNorm,
    SharingConfig,
)
from murmur.learner_service.learning.policies import SnapshotPolicy
from murmur.learner_service.learning.returns import annealed, mean_over
from murmur.learner_service.learning.sequences import Sequences
from murmur.learner_service.ranks.group import Group
from murmur.learner_service.storage.replay import (
    ReplayBatch,
    ReplayConfig,
    ReplayStorage,
    SequenceReplay,
)
from murmur.learner_service.storage.storage import NEXT
from murmur.shared.process.errors import ConfigError
from murmur.shared.wire.dataset import OBSERVATION
from murmur.shared.wire.spec import AGENT_MASK, EnvSpec

PRIORITY = "priority"


def alive_mask(observed: Tensor | None) -> Tensor | None:
    """[B, A] float32, 1 where an agent is alive; None where all are.

    Args:
        observed: [B, A] observation AGENT_MASK; None: the environment does not say who is alive.
    """
    return None if observed is None else (observed != 0).float()


def of_alive(x: Tensor, alive: Tensor | None) -> Tensor:
    """Numbers [B, A] of the agents that are alive, 0 of the others; see alive_mask."""
    return x if alive is None else x * alive


def mean_of_alive(x: Tensor, alive: Tensor | None) -> Tensor:
    """[B] mean of [B, A] over the agents that are alive, 0 where none is; see alive_mask."""
    return x.mean(1) if alive is None else mean_over(x, alive, 1)


def agent_shares(slices: tuple[int, ...], device: torch.device) -> Tensor:
    """[A] weight of each agent's loss: one over the agents that share its parameter group."""
    return torch.tensor([1 / slices.count(s) for s in slices], device=device)


def alive_rows(
    alive: Tensor, observation: Mapping[str, Tensor], group: Group, *, masked: bool = False
) -> Tensor:
    """[A] rows on which each agent lives, at least 1 in all; the mean over the ranks.

    Args:
        alive: [B, A] result of `alive_mask`, or [B, 1] mask of the team.
        observation: observation that belongs to the mask. All live where the environment does not
            say: on all ranks alike.
        group: group of the ranks.
        masked: whether `alive` leaves out other rows, too.
    """
    rows = alive.sum(0)
    if masked or AGENT_MASK in observation:
        group.mean_([rows])
    return rows.clamp_min(1 / group.size)


def agents_loss(loss: Tensor, alive: Tensor | None, rows: Tensor | None, shares: Tensor) -> Tensor:
    """One loss whose gradient for each parameter group is that of its own agents' mean.

    Each agent's loss is averaged over the rows on which it lives; then over the agents that share
    weights, but summed over parameter groups. So agents with weights of their own learn as if each
    had an optimiser and a loss to itself.

    Args:
        loss: [B, A] loss of each row and agent.
        alive: [B, A] mask, 1 where it counts; None: everywhere.
        rows: [A] result of `alive_rows`; None: all.
        shares: [A] result of `agent_shares`.
    """
    return (of_alive(loss, alive).sum(0) / (len(loss) if rows is None else rows) * shares).sum()


class OffPolicyConfig(SharingConfig, AlgorithmConfig):
    """Options of algorithms that learn from a replay."""

    replay: ReplayConfig = Field(ReplayConfig(), description="what is kept and how it is sampled")
    gamma: Gamma = 0.99
    max_grad_norm: GradNorm = 10.0

    @property
    @override
    def about(self) -> About:
        size, interval = self.replay.batch_size, self.replay.update_interval
        what = f"an update every {2 * interval} rows instead of {interval}"
        return About(
            open_batch_size="" if size else "replay.batch_size",
            learned_at_once=size,
            joint=True,
            divided=("replay.batch_size", "replay.update_interval"),
            rounded_up=("replay.capacity_rows", "replay.capacity_bytes", "replay.start_rows"),
            batch_size_advice="lower algorithm.replay.capacity_rows",  # it is on the device too
            cheaper_learning=(
                Change(
                    what,
                    {"replay.update_interval": 2 * interval},
                    "half the updates: learns less per row",
                    calls=0.5,
                    arithmetic=0.5,
                ),
            ),
        )

    @override
    def for_rank(self, size: int) -> Self:
        """Return the share of one of `size` learners; an update follows a row of each at least."""
        interval = max(size, self.replay.update_interval)
        return super(OffPolicyConfig, self.changed({"replay.update_interval": interval})).for_rank(
            size
        )


class OffPolicyAlgorithm(ActorCritic[ReplayBatch]):
    """Learns from transitions, whatever policy made them. Used by the thread that learns.

    `_learn(rows)` gets all tensors of a batch by name, those of next_arrays with the prefix NEXT;
    or the arrays of sequences [L + 1, B, ...]. It multiplies the losses of critics by "weight" [B]
    and returns PRIORITY, the new td_error [B], too.
    """

    _config: OffPolicyConfig
    _learn: Callable[..., Outputs]  # the update of the networks, on the device; see Captured
    _team = False  # see ReplayStorage

    @override
    def _prepare(self) -> None:
        config, device = self._config, self._device
        # MASAC's option from before learner.cuda_graph.
        self.graphs.enabled &= getattr(config, "cuda_graph", True)
        self._captured = self._capture("update", self._learn)
        self._captured_in_place = self._capture("update", self._learn_in_place, in_place=True)
        replay = config.replay
        # A team learns from one loss: its gradient is one vector, clipped as a whole.
        of_loss = (0,) if self._team else self._slices
        self._num_slices, self._shares = count_slices(of_loss), agent_shares(of_loss, device)
        self.unroll_length = replay.unroll_steps
        self.rows_per_update = replay.batch_size * self._spec.num_agents
        interval = replay.update_interval * self._group.size  # rows of all ranks
        self._rows_between_updates = Fraction(interval, replay.updates_per_interval)
        # Rows that the updates stand for are a fraction, so that no rounding adds up.
        self._counts = {"updates": 0, "rows": 0, "rows_divisor": 1}
        self._exploration = torch.zeros(len(self._explores()), device=device)
        self._explored = [0.0] * len(self._exploration)  # the same on the host
        self._anneal()

    def update(self, batch: ReplayBatch) -> dict[str, Tensor]:
        """One update of the networks from a batch of transitions; sets its td_error.

        Returns:
            the scalars of `_learn`, and what `_explores` names.
        """
        self._counts["updates"] += 1
        self._set_rows(self._rows() + self._rows_between_updates)
        rows, options = batch.arrays, self._learn_options()
        if not self.memory_size:
            rows = rows | {NEXT + name: x for name, x in batch.next_arrays.items()}
            rows |= {"reward": batch.reward, "discount": batch.discount, "weight": batch.weight}
        if self._config.replay.prioritized and self._group.size > 1:
            # Weights are over the largest that any rank has drawn.
            largest = batch.largest_weight.clone()
            self._group.largest_([largest])
            rows["weight"] = batch.weight * (batch.largest_weight / largest)
        if self._device.type == "cpu" and not self.graphs.enabled:
            self.graphs.eager_calls["update"] += 1
            scalars = self._learn(rows, **options)
            batch.td_error = scalars.pop(PRIORITY)
        elif batch.error_memory is None:
            scalars = self._captured(rows, **options)
            batch.td_error = scalars.pop(PRIORITY)
        else:
            scalars = self._captured_in_place({**rows, PRIORITY: batch.error_memory}, **options)
            batch.td_error = batch.error_memory
        self._anneal()
        if explores := self._explores():
            scalars |= dict(zip(explores, self._exploration.clone().unbind(), strict=True))
        return scalars

    def _learn_in_place(self, rows: Mapping[str, Tensor], **options: bool) -> Outputs:
        """`_learn` that writes the new td_error to rows[PRIORITY], which no graph's pool holds."""
        outputs = self._learn({k: x for k, x in rows.items() if k != PRIORITY}, **options)
        rows[PRIORITY].copy_(outputs.pop(PRIORITY))
        return outputs

    def _transitions(
        self, rows: Mapping[str, Tensor]
    ) -> tuple[Mapping[str, Tensor], Tensor | None, Sequences | None]:
        """Return a batch's transitions, augmented, and which of them count.

        Args:
            rows: what `_learn` gets.

        Returns:
            transitions by name; [B, A] mask, 1 where an agent lives and, in a sequence, the row is
            a transition, or None: all count; and the sequences, None if networks do not remember.
        """
        sequences = None
        if self.memory_size:  # sequences are not augmented: see `make_storage`
            sequences = Sequences.of(rows, self._config.gamma)
            rows = sequences.rows
        elif self.transforms.draws:
            rows = self.transforms.draw(rows, self._generator)
        counted = alive_mask(rows.get(OBSERVATION + AGENT_MASK))
        if sequences is not None:
            counted = of_alive(rows["weight"].unsqueeze(1).expand_as(rows["reward"]), counted)
        return rows, counted, sequences

    def _outputs(
        self, network: nn.Module, obs: Mapping[str, Tensor], hidden: RecurrentState | None = None
    ) -> Tensor:
        """Return outputs [B, A, ...] float32 of agents' networks, of what they observe.

        Args:
            network: network of the agents, online or target.
            obs: observations of the rows, B = T * S of sequences, time outermost.
            hidden: recurrent state before the first row of sequences.
        """
        return forward(network, self._actor_inputs(obs), hidden, self._precision)[0]

    def _learn_options(self) -> dict[str, bool]:
        """Return arguments of `_learn` that choose the networks to move; empty: all move."""
        return {}

    @property
    def _average(self) -> nn.Module | None:
        """Return the network that evaluated policies act by; None: the one that learns."""
        return None

    @property
    @override
    def acting_parts(self) -> list[str]:
        averaged = [
            name
            for name, part in self.parts.items()
            if isinstance(part, nn.Module) and any(x is self._average for x in part.modules())
        ]
        return [*super().acting_parts, *averaged]

    @override
    def evaluated(self) -> Policy:
        policy = self.snapshot()
        if self._average is not None:
            inner = policy.inner if isinstance(policy, TransformedPolicy) else policy
            assert isinstance(inner, SnapshotPolicy)
            publish(self._average, inner.actor)
        return policy

    def _explores(self) -> dict[str, tuple[float, float, int]]:
        """Return exploration values by name: first, last, and the rows over which they fall."""
        return {}

    @property
    def _explores_by(self) -> Tensor | None:
        return self._exploration if len(self._exploration) else None

    def _anneal(self) -> None:
        """Set `_exploration`: linear over this number of rows."""
        for i, (start, end, over) in enumerate(self._explores().values()):
            value = annealed(start, end, float(self._rows()), over)
            if value != self._explored[i]:
                self._explored[i] = value
                self._exploration[i].fill_(value)

    def _rows(self) -> Fraction:
        return Fraction(int(self._counts["rows"]), int(self._counts["rows_divisor"]))

    def _set_rows(self, rows: Fraction) -> None:
        self._counts["rows"], self._counts["rows_divisor"] = rows.as_integer_ratio()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state, and let exploration continue from the rows that it counts."""
        super().load_state_dict(state)
        self._anneal()

    def make_storage(self, spec: EnvSpec, max_policy_lag: int | None) -> ReplayStorage:
        """Make a replay; acting may be max_policy_lag unrolls, not updates, ahead of those due.

        Raises:
            ConfigError: if sequences are to be augmented.
        """
        if self.memory_size and self.transforms.draws:
            raise ConfigError(
                "augment: a recurrent network with a replay learns from whole sequences, which are "
                "not augmented; leave out the section augment, or set network.recurrent=0"
            )
        kind = SequenceReplay if self.memory_size else ReplayStorage
        return kind(
            self._config.replay,
            spec,
            self._config.gamma,
            max_policy_lag,
            self._device,
            self.extras,
            self._group.own_seed(self._seed + 2),
            team=self._team,
            section="algorithm.replay",
            memory_size=self.memory_size,
            frames=self.frames,
            group=self._group,
            cuda_graph=self.graphs.enabled,
        )
