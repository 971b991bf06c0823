"""Replay: transitions are kept in a ring on the device and learned from many times.

Unrolls are added as they fill, one column of the ring for each of their environments. A transition
(o_t, a_t, r, o_{t+k}) is made when it is sampled, k <= n steps long: it ends at the end of its
episode or of its column, whichever comes first, and is bootstrapped there unless the episode
terminated. Within it an agent's own rewards end with its life; a team's continue.

`updates_per_interval` updates are due for every `update_interval` transitions added.

On CUDA a draw, and the writing of new priorities, are graphs of a pool of their own. Nothing that
they give to another graph lies in a pool: a draw ends with a copy to memory set aside for the next
batch, and another graph copies that to where the update reads it, so that the batch after it can be
drawn on a second stream meanwhile. Acting's writes wait for a draw, but never for an update.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import override

from murmur.learner_service.device.cuda_graph import Captured, Graphs, Outputs, copy_all
from murmur.learner_service.device.device import restore_generator
from murmur.learner_service.device.memory import count, require_room, room
from murmur.learner_service.device.readback import to_host
from murmur.learner_service.device.streams import Fence
from murmur.learner_service.ranks.group import ALONE, Group
from murmur.learner_service.storage.frames import Frames
from murmur.learner_service.storage.storage import (
    Arena,
    Batch,
    SavedPart,
    Unroll,
    UnrollStorage,
    array_bytes,
    is_transition,
)
from murmur.shared.config import Section
from murmur.shared.process.errors import ConfigError, ResourceError
from murmur.shared.process.ledger import enter
from murmur.shared.process.process import logger
from murmur.shared.wire.dataset import OBSERVATION, Dataset, Episodes
from murmur.shared.wire.spec import AGENT_MASK, EnvSpec
from murmur.shared.wire.timestep import StepType

_BRANCHES = 128
_LAST, _ABORTED = int(StepType.LAST), int(StepType.ABORTED)
_CHUNK_BYTES = 32 << 20  # what is saved as one file
_MIN_PRIORITY = 1e-5
_SHARE = 0.8  # of the memory that is free
_COLUMNS_AT_ONCE = 256  # of a dataset
_HOST = torch.device("cpu")
# Tensors of a batch that a draw sets, beside its arrays.
_DRAWN = "reward", "discount", "weight", "index", "age", "largest_weight"


class SumTree:
    """N priorities under sums of 128: a million are three levels.

    A draw descends from the root: at each level one cumulative sum over 128 numbers and one search
    in it, for the whole batch at once. Sums are added up again from their 128 parts whenever
    one changes, so they do not drift.

    Attributes:
        leaves: [N] priorities; a view, to read.
        root: [128] sums of all priorities, in as many parts; a view, to read.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        """Make a tree of priorities that are zero.

        Args:
            size: N, number of priorities.
            device: device of the priorities.
        """
        number = size
        self._levels: list[Tensor] = []  # leaves first
        while True:
            blocks = -(-size // _BRANCHES)
            self._levels.append(torch.zeros(blocks * _BRANCHES, device=device))
            if blocks == 1:
                break
            size = blocks
        self.leaves, self.root = self._levels[0][:number], self._levels[-1]

    def set(self, index: Tensor, priority: Tensor) -> None:
        """Set priorities.

        Args:
            index: [M] int64 indices; if one comes twice, its larger priority counts.
            priority: [M] float32, >= 0.
        """
        leaves = self._levels[0]
        leaves[index] = 0.0
        leaves.scatter_reduce_(0, index, priority, "amax")
        for below, above in zip(self._levels, self._levels[1:], strict=False):
            index = index // _BRANCHES
            above[index] = below.view(-1, _BRANCHES)[index].sum(1)

    def set_range(self, start: int, priority: Tensor) -> None:
        """Set the priorities at start, start + 1, ...: [M] float32."""
        self._levels[0][start : start + len(priority)] = priority
        stop = start + len(priority)
        for below, above in zip(self._levels, self._levels[1:], strict=False):
            start, stop = start // _BRANCHES, -(-stop // _BRANCHES)
            above[start:stop] = below.view(-1, _BRANCHES)[start:stop].sum(1)

    def sample(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw indices in proportion to their priority, one from each of `count` strata.

        Schaul, Quan, Antonoglou, Silver 2016, "Prioritized Experience Replay", appendix B.2.1
        (arXiv:1511.05952). Those of priority zero are never drawn; the total must not be zero.

        Returns:
            [count] int64 indices, and [count] their probabilities.
        """
        device = self._levels[0].device
        total = self.root.sum()
        # float64: float32 has but sixteen numbers for each of a million.
        left = torch.rand(count, generator=generator, device=device, dtype=torch.float64)
        left = (torch.arange(count, device=device) + left) * (total.double() / count)
        index: Tensor | None = None
        for level in reversed(self._levels):
            blocks = level.view(-1, _BRANCHES)
            if index is None:  # all draws begin at the root
                sums = blocks[0].cumsum(0, dtype=torch.float64)
            elif len(blocks) < count:  # add up each block once, else that of each draw
                sums = blocks.cumsum(1, dtype=torch.float64).index_select(0, index)
            else:
                sums = blocks.index_select(0, index).cumsum(1, dtype=torch.float64)
            # Rounding must not carry a draw past the last that has any priority.
            left = torch.minimum(left, sums[..., -1] * (1 - 1e-9))
            at = left if index is None else left.unsqueeze(1)
            branch = torch.searchsorted(sums, at, right=True)
            before = sums.gather(-1, (branch - 1).clamp_min(0))
            left = (at - torch.where(branch > 0, before, 0.0)).view(count)
            branch = branch.view(count)
            index = branch if index is None else torch.add(branch, index, alpha=_BRANCHES)
        assert index is not None
        return index, self._levels[0].index_select(0, index) / total


class ReplayConfig(Section):
    """Options of the replay of off-policy algorithms.

    A row is one step of one environment, all its agents. Numbers of rows are of all learners of a
    run together; each has its share.
    """

    capacity_rows: int = Field(
        1_000_000, ge=1, description="rows kept by all learners together; then the oldest go"
    )
    capacity_bytes: int = Field(
        0, ge=0, description="limit on the memory of all learners' replays together; 0: none"
    )
    start_rows: int = Field(
        1000, ge=1, description="rows that all learners together collect before the first update"
    )
    batch_size: int = Field(
        256,
        ge=0,
        description="rows of an update, of all learners together; 0: as many as fit the memory and "
        "the replay",
    )
    # A row is learned from 256 / 8 = 32 times, as in EPyMARL (32 episodes for each played) and
    # nearly in BenchMARL (21).
    update_interval: int = Field(
        8,
        ge=1,
        description="rows of all learners together from one burst of updates to the next; smaller: "
        "more updates",
    )
    updates_per_interval: int = Field(1, ge=1, description="updates of a burst")
    n_step: int = Field(1, ge=1, description="steps of reward before bootstrapping")
    unroll_steps: int = Field(
        8,
        ge=1,
        description="rows of an environment that are put at once; memory: 1/unroll_steps "
        "more than capacity_rows",
    )
    prioritized: bool = Field(False, description="sample rows of large error more often")
    alpha: float = Field(0.6, ge=0, le=1, description="prioritized: 0 is uniform, 1 proportional")
    beta: float = Field(
        0.4, ge=0, le=1, description="prioritized: how far the bias is corrected at first, 1: all"
    )
    beta_updates: int = Field(
        100_000, ge=1, description="prioritized: updates until beta has grown to 1"
    )
    dataset: str = Field(
        "",
        description="folder of `murmur record`: a new run's replay begins with its transitions, "
        "which count for start_rows; empty: with none",
    )
    prefetch: bool = Field(
        True, description="CUDA: gather the next batch on a second stream during an update"
    )


@dataclass
class ReplayBatch(Batch):
    """Transitions, B of them; of a SequenceReplay, whose arrays are of sequences, B = L * S.

    Attributes:
        arrays: name -> [B, ...] at t: observations with the prefix OBSERVATION, action, extras.
        next_arrays: name -> [B, ...] observations at t + k, with the prefix OBSERVATION.
        reward: [B, A] discounted sum of r_{t+1} ... r_{t+k}; but for a team, those of an agent that
            dies end with the step in which it does.
        discount: [B, A] (or [B, 1] for a team or where agents do not die) gamma^k, 0 if the episode
            or the agent's life ended: the weight of the value at t + k.
        weight: [B] importance weights, at most 1.
        index: [B] place of each transition in the ring.
        age: [B] age of the ring's column, to tell whether it was overwritten meanwhile.
        td_error: [B] |error| of its values, set by the algorithm: the new priorities.
        version: empty: any policy's transitions will do.
        largest_weight: scalar, that weights were divided by.
        error_memory: [B] memory that td_error is written to, of a batch whose tensors are the
            memory of all batches in turn, so that graphs read and write them where they are; else
            None.
    """

    next_arrays: dict[str, Tensor]
    reward: Tensor
    discount: Tensor
    weight: Tensor
    index: Tensor
    age: Tensor
    td_error: Tensor | None = None
    largest_weight: Tensor = field(default_factory=lambda: torch.ones(()))
    error_memory: Tensor | None = None

    @property
    def size(self) -> int:
        """B."""
        return len(self.index)

    def changed(self, change: Callable[[Tensor], Tensor]) -> "ReplayBatch":
        """Return a batch with a function applied to every tensor that a draw sets."""
        drawn: dict[str, Any] = {name: change(getattr(self, name)) for name in _DRAWN}
        return ReplayBatch(
            {name: change(x) for name, x in self.arrays.items()},
            {name: change(x) for name, x in self.next_arrays.items()},
            **drawn,
        )

    def copied_to(self, memory: "ReplayBatch | None") -> "ReplayBatch":
        """Copy what a draw sets to the memory of batches like this one, made if there is none."""
        if memory is None:
            errors = torch.zeros(len(self.index), device=self.index.device)
            return replace(self.changed(torch.clone), error_memory=errors)
        copy_all(memory._tensors(), self._tensors())
        return memory

    def _tensors(self) -> list[Tensor]:
        """List all that a draw sets."""
        drawn = (getattr(self, name) for name in _DRAWN)
        return [x for x in (*self.arrays.values(), *self.next_arrays.values(), *drawn) if x.numel()]


def n_step_returns(
    flat: Mapping[str, Tensor],
    here: Tensor,
    t: Tensor,
    gamma: float,
    n_step: int,
    length: int,
    *,
    mortal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Sum the rewards of up to n steps that follow time steps of a replay's columns.

    The discount of an agent that dies stays 0, so later rewards and a later life count nothing.

    Args:
        flat: name -> [columns * (L + 1), ...].
        here: [B] index of each time step.
        t: [B] index of each within its column.
        gamma: discount factor.
        n_step: number of rewards that are summed, at most.
        length: L, transitions of one column.
        mortal: whether an agent's rewards end with its life.

    Returns:
        [B, A] sums, [B, A] or [B, 1] discount of what follows, and [B] index of what follows.
    """
    step_type, there = flat["step_type"], here + 1
    reward = discount = continues = torch.empty(0)
    for step in range(1, n_step + 1):
        if step > 1:
            beyond = (there + 1).clamp_max(len(step_type) - 1)
            continues = (step_type[there] != _LAST) & (step_type[beyond] != _ABORTED)
            continues &= t + step <= length
            there = torch.where(continues, beyond, there)
            continues = continues.unsqueeze(1)
        # The weight of what follows against the reward that leads there: [B, A] or [B, 1].
        weight = gamma * flat["discount"].index_select(0, there).unsqueeze(1)
        if mortal:
            weight = weight * (flat[OBSERVATION + AGENT_MASK].index_select(0, there) != 0)
        received = flat["reward"].index_select(0, there)
        if step == 1:
            reward, discount = received, weight
        else:
            reward = reward + torch.where(continues, discount, 0.0) * received
            discount = torch.where(continues, discount * weight, discount)
    return reward, discount, there


class ReplayStorage(UnrollStorage[ReplayBatch]):
    """Storage in a replay; see the module. Uniform is prioritized with all priorities equal.

    Attributes, beside those of an UnrollStorage:
        graphs: CUDA graphs of draws and priorities.
        capacity: transitions there is room for.
        offline: whether updates follow one another, whatever environments add.
    """

    offline = False
    _prefetched: ReplayBatch | None = None
    # Memory of a drawn batch and of the one that is learned from, if draws are captured.
    _drawn: ReplayBatch | None = None
    _taken: ReplayBatch | None = None

    def __init__(
        self,
        config: ReplayConfig,
        spec: EnvSpec,
        gamma: float,
        max_unrolls_ahead: int | None,
        device: torch.device,
        extras: Mapping[str, tuple[int, ...]],
        seed: int,
        *,
        team: bool = False,
        section: str = "replay",
        memory_size: int = 0,
        frames: Frames | None = None,
        group: Group = ALONE,
        cuda_graph: bool = True,
    ) -> None:
        """Make an empty replay.

        Args:
            config: options.
            spec: spec of the run.
            gamma: discount factor, for sums over n steps.
            max_unrolls_ahead: unrolls of every environment that acting may be ahead of the updates
                due; None: any number (the caller alternates acting and learning itself).
            device: device of the ring.
            extras: name -> shape of the policy's outputs beside the action.
            seed: seed of the sampling.
            team: whether the team's value is learned: what the dead get is then the team's too.
            section: dotted name of the section that `config` is of, for messages.
            memory_size: numbers of an agent's recurrent state, kept of each column's first time
                step.
            frames: images to stack, if any.
            group: ranks, a replay each; new transitions have the largest priority of all.
            cuda_graph: whether draws and new priorities may be captured; ranks capture none.

        Raises:
            ConfigError: if the options contradict each other.
            ResourceError: if the device has not the memory.
            SpecError: if it has it for the ring, but not for a batch beside it.
        """
        super().__init__(spec, config.unroll_steps, device, extras, memory_size, frames)
        self._config, self._section = config, section
        self._group, self._gamma = group, gamma
        self._max_unrolls_ahead = max_unrolls_ahead
        self._mortal = not team and any(o.name == AGENT_MASK for o in spec.observations)
        self._require_options()
        self._stacked = [OBSERVATION + image.name for image in frames.images] if frames else []
        self._previous = frames.depth - 1 if frames else 0  # frames before each column's first
        self._allocate()
        self.capacity = self._columns * self.length
        self._tree = SumTree(self.capacity, device)
        self._age = torch.zeros(self._columns, dtype=torch.long, device=device)
        self._max_priority = torch.ones((), device=device)
        self._generator = torch.Generator(device).manual_seed(seed)
        self._cursor = self._filled = 0  # columns
        self._updates = 0  # begun
        self._has_transitions = False  # whether there was ever one to draw
        self._first_burst = self._rate()[0], 0  # transitions added and updates where it is due
        self._changed_chunks: set[int] = set()
        # The power of errors that priorities are; 0: all transitions alike.
        self._alpha = config.alpha if config.prioritized else 0.0
        self._prefetches = config.prefetch and device.type == "cuda"  # elsewhere it gains nothing
        self._stream = torch.cuda.Stream(device) if self._prefetches else None  # type: ignore[no-untyped-call]
        self._before_draw, self._after_draw = Fence(device), Fence(device)
        # Not the algorithm's: a draw may run beside an update.
        self.graphs = Graphs(device, enabled=cuda_graph and group.size == 1)
        self._beta = torch.ones((), device=device)  # the power of importance weights
        self._draw = Captured(
            "draw", self._draw_ahead, self.graphs, (self._generator,), in_place=True
        )
        self._take = Captured("take", self._take_drawn, self.graphs, in_place=True)
        self._prioritise = Captured("priorities", self._set_priorities, self.graphs, in_place=True)

    def _require_options(self) -> None:
        """Refuse options that contradict each other."""
        c = self._config
        if c.n_step > c.unroll_steps:
            raise ConfigError(
                f"{self._section}.n_step={c.n_step} is more than unroll_steps="
                f"{c.unroll_steps}, the longest stretch kept together; raise unroll_steps"
            )

    def _allocate(self) -> None:
        """Set the ring's memory aside; refuse a size that is too small or does not fit."""
        c, device = self._config, self.device
        sizes = array_bytes(self._layout)
        previous = {name: self._previous * (name in self._stacked) for name in sizes}
        remembered = 1, self.spec.num_agents, self._memory_size  # of each column's first time step
        column = sum(size * (self.length + 1 + previous[name]) for name, size in sizes.items())
        column += 4 * math.prod(remembered)
        columns = -(-c.capacity_rows // c.unroll_steps)
        if c.capacity_bytes:
            columns = min(columns, c.capacity_bytes // column)
        rows = columns * c.unroll_steps
        for name, wanted in (("start_rows", c.start_rows), ("batch_size", c.batch_size)):
            if rows < wanted:
                raise ConfigError(
                    f"the replay has room for {rows} rows, fewer than {self._section}.{name}="
                    f"{wanted}; raise capacity_rows or capacity_bytes, or lower {name}"
                )
        free, need = room(device), columns * column
        if need > free * _SHARE:
            possible = int(free * _SHARE) // column * c.unroll_steps
            raise ResourceError(
                f"a replay of {rows:,} rows takes {need / 2**30:.1f} GiB, more than {_SHARE:.0%} "
                f"of the {free / 2**30:.1f} GiB that {device} has free; set "
                f"{self._section}.capacity_rows to at most {possible}"
            )
        count(need)
        drawn = sum(  # stacks of frames, and those of the observation that follows
            size * (1 + previous[name]) * (1 + name.startswith(OBSERVATION))
            for name, size in sizes.items()
        )
        # A graph gathers a batch and copies it, and the last one is learned from meanwhile.
        batches = 2 + c.prefetch if device.type == "cuda" else 1
        require_room(
            c.batch_size * drawn * batches,
            f"a batch of {c.batch_size:,} rows drawn from the replay, each of "
            f"{drawn:,} bytes with its next observations,",
            f"lower {self._section}.batch_size, or observe less (environment.resize, gray)",
            device,
        )
        self._columns, self._chunk_columns = columns, max(1, _CHUNK_BYTES // column)
        # The ring: [columns, L + 1, A, ...], of stacked images frames before them first.
        self._arrays = {
            name: torch.zeros(
                (columns, self.length + 1 + previous[name], *shape), dtype=dtype, device=device
            )
            for name, (shape, dtype) in self._layout.items()
        }
        if self._memory_size:
            self._arrays["memory"] = torch.zeros((columns, *remembered), device=device)

    # --- acting

    def may_begin(self, filled: Sequence[Unroll] = ()) -> bool:
        """Tell whether acting may continue.

        It may while no more updates are due than `max_unrolls_ahead` unrolls of every environment
        bring.
        """
        if self._max_unrolls_ahead is None:
            return True
        c = self._config
        with self._changed:
            bursts = math.ceil(
                self._max_unrolls_ahead * self._peak_envs * self.length / c.update_interval
            )
            new = sum(u.num_envs * u.transitions for u in filled)
            return self._due(new) <= bursts * c.updates_per_interval

    def add(self, unroll: Unroll) -> None:
        """Copy an unroll into the ring, over its oldest columns."""
        assert unroll.full
        first, n, chunk = 0, unroll.num_envs, self._chunk_columns
        with self._changed, self.memory_lock:
            self._after_draw.wait()
            while first < n:  # more than once where the ring begins again, or is smaller
                start = self._cursor
                stop = min(start + n - first, self._columns)
                envs = slice(first, first + stop - start)
                for name, kept in self._arrays.items():
                    values = unroll.arrays[name][:, envs].transpose(0, 1)
                    kept[start:stop, self._previous * (name in self._stacked) :] = values
                if self._frames is not None:
                    previous = self._frames.of_memory(unroll.arrays["memory"][0, envs])
                    for name, frames in previous.items():
                        self._arrays[OBSERVATION + name][start:stop, : self._previous] = frames
                self._age[start:stop] += 1
                # New transitions get the largest priority so far; where there is none, 0.
                begins = is_transition(self._arrays["step_type"][start:stop].T).T
                priority = torch.where(begins, self._max_priority, 0.0).flatten()
                self._tree.set_range(start * self.length, priority)
                self._changed_chunks.update(range(start // chunk, (stop - 1) // chunk + 1))
                self._cursor = stop % self._columns
                self._filled = max(self._filled, stop)
                first = envs.stop
            self.release(unroll)
            self.inserted += n * unroll.transitions
            self._changed.notify_all()

    def fill(self) -> None:
        """Begin with this rank's share of the configured dataset, if one is; the replay is empty.

        Its transitions are there to be drawn, and count for start_rows. Updates follow from the
        transitions of environments alone.

        Raises:
            ConfigError: if the dataset cannot be read, is of another environment, or does not fit.
        """
        if not self._config.dataset:
            return
        key, ranks = f"{self._section}.dataset", self._group.size
        dataset = Dataset(self._config.dataset, key)
        dataset.require_spec(self.spec)
        number = transitions = 0
        for episodes in dataset.parts():
            count = len(episodes.length)
            own = (number + np.arange(count)) % ranks == self._group.rank
            number += count
            rows = int(episodes.length[own].sum())
            if self._filled + math.ceil((rows - 1) / self.length) > self._columns:
                raise ConfigError(
                    f"{key}={self._config.dataset}: its {dataset.num_transitions:,} transitions of "
                    f"{dataset.num_episodes:,} episodes do not fit into {self._section}."
                    f"capacity_rows={self._config.capacity_rows * ranks}; set it to "
                    f"{dataset.columns(self.length) * self.length} or more, and capacity_bytes to 0"
                )
            if rows:
                self._fill_columns(episodes if own.all() else episodes.chosen(own))
                transitions += rows - int(own.sum())
        self.inserted = 0  # those of environments
        self._free.clear()
        self._first_burst = max(0, self._rate()[0] - transitions), 0
        logger.info(
            "replay: begins with %s; room for %s rows", dataset.describe(), f"{self.capacity:,}"
        )

    def _fill_columns(self, episodes: Episodes) -> None:
        """Add episodes as one stream of rows, cut into columns; the last one is filled up."""
        length, frames = self.length, self._frames
        firsts: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        if frames is not None:
            firsts["memory"] = (self.spec.num_agents, frames.memory_size), torch.float32
        whole, rest = divmod(int(episodes.length.sum()) - 1, length)
        starts = np.arange(whole + (rest > 0)) * length
        cuts = [*range(0, whole, _COLUMNS_AT_ONCE), *([whole] if rest else [])]
        for first, last in pairwise([*cuts, len(starts)]):
            begins, steps = starts[first:last], length if first < whole else rest
            arena = Arena(self._layout, firsts, _HOST, records=None)
            unroll = arena.allocate(len(begins), length, 0)
            rows = np.arange(steps + 1)[:, None] + begins
            for name in self._layout:
                unroll.arrays[name][: steps + 1] = torch.from_numpy(episodes.arrays[name][rows])
            if frames is not None:
                unroll.arrays["memory"][0] = frames.before(episodes, begins)
            unroll.cursor = steps + 1
            if not unroll.full:
                unroll.close()
            self._open.append(unroll)
            self._open_envs += unroll.num_envs
            self.add(unroll)

    # --- learning

    def _rate(self) -> tuple[int, int, int]:
        """Return what the count of updates due follows from, beside the transitions added."""
        c = self._config
        return max(c.start_rows, c.batch_size), c.update_interval, c.updates_per_interval

    def _due(self, new: int = 0) -> int:
        """Count the updates due, those for new transitions included, that have not begun."""
        c = self._config
        start, updates = self._first_burst
        bursts = max(0, 1 + (self.inserted + new - start) // c.update_interval)
        if self.offline:
            bursts, updates = 1, self._updates
        if bursts and not (self._has_transitions or self._find_transitions()):
            return 0
        return bursts * c.updates_per_interval - (self._updates - updates)

    def _find_transitions(self) -> bool:
        """Look for a transition: environments that fail at once bring ABORTED time steps alone."""
        with self.memory_lock:
            self._has_transitions = bool(to_host(self._tree.root.sum()) > 0)
        return self._has_transitions

    @property
    @override
    def ready(self) -> bool:
        return self._due() > 0

    @property
    def pace(self) -> str:
        """Describe how often updates are made, of all learners together."""
        start, interval, updates = self._rate()
        ranks = self._group.size
        if self.offline:
            size = ranks * self._config.batch_size
            return f"replay: updates of {size:,} rows follow one another (run.offline)"
        learners = f" of all {ranks} learners" if ranks > 1 else ""
        return (
            f"replay: {updates} update{'s' * (updates > 1)} of {ranks * self._config.batch_size:,} "
            f"rows for every {ranks * interval:,} new rows{learners} "
            f"({self._section}.update_interval), after the first {ranks * start:,}"
        )

    @property
    def ready_rows(self) -> int:
        """Transitions in the ring."""
        return self._filled * self.length

    def sample(self, version: int, timeout_s: float) -> ReplayBatch | None:
        """Sample, if an update is due; see Storage. Nothing is ever too old.

        On a CPU `_sample` alone draws. The rest is CUDA's: a graph of it, and a draw made ahead, on
        a stream beside the update. What the batch holds is overwritten by the next call there.
        """
        draw = self._captured_draw if self.graphs.enabled else self._sample
        self._draw.prepare({"beta": self._beta} if self._config.prioritized else {})
        self._take.prepare({})
        with self._changed:
            if not self._changed.wait_for(lambda: self.ready, timeout_s):
                return None
            enter("sample")
            with self.memory_lock:
                self._after_draw.wait()
                batch = self._prefetched or draw()
                if self.graphs.enabled and self._prefetches:
                    self._take({})
                    assert self._taken is not None
                    batch = self._taken
                self.updating = True
                self._updates += 1
                self._prefetched = None
                if self._prefetches:  # before this update's errors and what is added meanwhile
                    self._before_draw.mark()
                    with torch.cuda.stream(self._stream) if self._stream else nullcontext():
                        self._before_draw.wait()
                        self._prefetched = draw()
                        self._after_draw.mark()
        return replace(batch, td_error=None)

    def _captured_draw(self) -> ReplayBatch:
        """Draw a batch by the graph of `_sample`."""
        self._draw({"beta": self._beta.fill_(self._beta_now)} if self._config.prioritized else {})
        assert self._drawn is not None
        return self._drawn

    @property
    def _beta_now(self) -> float:
        c = self._config
        return min(1.0, c.beta + (1 - c.beta) * self._updates / c.beta_updates)

    @torch.no_grad()
    def _draw_ahead(self, _: Mapping[str, Tensor]) -> Outputs:
        """Draw to the memory of drawn batches; captured."""
        self._drawn = self._sample().copied_to(self._drawn)
        return {}

    @torch.no_grad()
    def _take_drawn(self, _: Mapping[str, Tensor]) -> Outputs:
        """Copy what was drawn to where it is learned from; captured."""
        assert self._drawn is not None
        self._taken = self._drawn.copied_to(self._taken)
        return {}

    @torch.no_grad()
    def _sample(self) -> ReplayBatch:
        """Draw transitions; the lock is held."""
        c, length = self._config, self.length
        index, probability = self._tree.sample(c.batch_size, self._generator)
        column, t = index // length, index % length
        flat = {
            name: array.flatten(0, 1)
            for name, array in self._arrays.items()
            if name not in self._stacked
        }
        here = index + column  # columns have a time step more than transitions
        reward, discount, there = n_step_returns(
            flat, here, t, self._gamma, c.n_step, length, mortal=self._mortal
        )
        arrays = {
            name: array.index_select(0, here)  # faster than array[here]
            for name, array in flat.items()
            if name not in ("reward", "discount", "step_type")
        }
        next_arrays = {
            name: array.index_select(0, there)
            for name, array in flat.items()
            if name.startswith(OBSERVATION)
        }
        if self._frames is not None:
            for name in self._stacked:
                image, kinds = self._arrays[name], flat["step_type"]
                arrays[name] = self._frames.stack_rows(image, kinds, here, t)
                after = t + there - here
                next_arrays[name] = self._frames.stack_rows(image, kinds, there, after)
        if c.prioritized:
            beta: Tensor | float = self._beta_now
            if self.device.type == "cuda":  # a graph reads the power that was set before it ran
                beta = self._beta if self.graphs.enabled else self._beta.fill_(beta)
            # (N P)^-beta over its maximum: N cancels. Schaul et al. 2016, section 3.4.
            weight = probability**-beta
            largest = weight.max()
            weight = weight / largest
        else:
            weight = torch.ones_like(probability)
            largest = weight[0]
        age = self._age[column]
        return ReplayBatch(
            arrays, next_arrays, reward, discount, weight, index, age, largest_weight=largest
        )

    def done(self, batch: ReplayBatch) -> None:
        """Set new priorities, but for transitions that were overwritten since.

        Where a time step has none, no transition begins there now: it was overwritten while a
        checkpoint was written, after its batch had been saved. An error that is not finite sets
        none.
        """
        if self._config.prioritized:
            if batch.td_error is None:
                raise ValueError("a prioritized replay needs the algorithm to set td_error")
            error = batch.td_error.detach()
            learned_from = self._taken or self._drawn
            if learned_from is not None and learned_from.error_memory is not None:
                # Transforms and eager updates give errors elsewhere; a graph reads them here.
                if batch.td_error is not learned_from.error_memory:
                    learned_from.error_memory.copy_(error)
                error = learned_from.error_memory
            given = {"td_error": error, "index": batch.index, "age": batch.age}
            if self._group.size > 1:
                given["largest"] = self._priorities(error)[1]
                self._group.largest_([given["largest"]])
            self._prioritise.prepare(given)
            with self._changed, self.memory_lock:
                self._after_draw.wait()
                self._prioritise(given)
        self.updating = False
        self.on_room()

    def _priorities(self, td_error: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return priorities [B] of errors, the largest that is finite, and which ones are."""
        priority = (td_error + _MIN_PRIORITY) ** self._alpha
        finite = priority.isfinite()
        return priority, torch.where(finite, priority, 0.0).max(), finite

    @torch.no_grad()
    def _set_priorities(self, given: Mapping[str, Tensor]) -> Outputs:
        """Set those of a batch; captured. The lock is held."""
        priority, largest, finite = self._priorities(given["td_error"])
        index = given["index"]
        same = self._age[index // self.length] == given["age"]
        kept = self._tree.leaves[index]
        changed = same & (kept > 0) & finite
        self._tree.set(index, torch.where(changed, priority, kept))
        largest = given.get("largest", largest)
        self._max_priority.copy_(torch.maximum(self._max_priority, largest))
        return {}

    # --- checkpoints

    @override
    def state_dict(self) -> dict[str, Any]:
        with self._changed, self.memory_lock:
            prefetched = None
            if self._prefetched is not None:
                # No other draw could give it again: transitions and errors came since. Ages
                # restart with a resumed run: of what was overwritten, the batch has none.
                self._after_draw.wait()
                batch = self._prefetched
                same = self._age[batch.index // self.length] == batch.age
                batch = replace(batch, td_error=None, age=torch.where(same, 0, -1))
                prefetched = {k: x for k, x in vars(batch).items() if k != "error_memory"}
            state = {
                "columns": self._columns,
                "length": self.length,
                "inserted": self.inserted,
                "updates": self._updates,
                "rate": self._rate(),
                "first_burst": self._first_burst,
                "cursor": self._cursor,
                "filled": self._filled,
                "alpha": self._alpha,
                "priorities": self._tree.leaves[: self._filled * self.length].clone(),
                "max_priority": self._max_priority.clone(),
                "generator": self._generator.get_state(),
                "prefetched": prefetched,
            }
        return to_host(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of a checkpoint.

        With another rate of updates a burst is due here, and the count continues from here. With
        another alpha priorities are what they would be, had it been so from the start.

        Raises:
            ConfigError: if the replay has another size than the one saved.
        """
        for name, here in (("columns", self._columns), ("length", self.length)):
            if state[name] != here:
                raise ConfigError(
                    f"the checkpoint's replay has {state[name]} {name}, this one {here}; resume "
                    "with the capacity_rows, capacity_bytes and unroll_steps it was saved with"
                )
        self.inserted, self._updates = state["inserted"], state["updates"]
        start, *_ = rate = self._rate()
        if state.get("rate", rate) == rate:  # older checkpoints lack it
            self._first_burst = state.get("first_burst", (start, 0))
        else:
            self._first_burst = max(start, self.inserted), self._updates
        self._cursor, self._filled = state["cursor"], state["filled"]
        alpha = state.get("alpha", self._alpha)  # older checkpoints lack it
        power = self._alpha / alpha if alpha else 0.0
        priorities = state["priorities"].to(self.device)
        self._tree.set_range(0, torch.where(priorities > 0, priorities**power, 0.0))
        self._max_priority.copy_(state["max_priority"] ** power)
        restore_generator(self._generator, state["generator"])
        self.graphs.reset()
        prefetched = state.get("prefetched")  # older checkpoints lack it, or have another shape
        shape = self._config.batch_size, self.spec.num_agents if self._mortal else 1
        drawn_alike = alpha == self._alpha
        if prefetched is not None and drawn_alike and prefetched["discount"].shape == shape:
            self._prefetched = ReplayBatch(**prefetched).changed(lambda x: x.to(self.device))
            if self.graphs.enabled:
                self._prefetched = self._drawn = self._prefetched.copied_to(None)
        self._changed_chunks = set()

    def load_parts(self, parts: Sequence[SavedPart], rank: int, size: int) -> None:
        """Deal the ranks' columns by age; a burst of updates is due here."""
        state, arrays = deal(parts, rank, size, self._columns, self._chunk_columns)
        self.load_state_dict(state)
        if arrays:
            self.load_chunk(0, arrays)
        self._changed_chunks = set(range(-(-self._filled // self._chunk_columns)))

    def chunks(self) -> Mapping[int, Callable[[], dict[str, Tensor]]]:
        """Return runs of columns that changed since the last call."""
        with self._changed:
            changed, self._changed_chunks = self._changed_chunks, set()
        return {number: partial(self._chunk, number) for number in sorted(changed)}

    def _chunk(self, number: int) -> dict[str, Tensor]:
        start = number * self._chunk_columns
        with self._changed, self.memory_lock:
            columns = slice(start, start + self._chunk_columns)
            copies = {name: array[columns].clone() for name, array in self._arrays.items()}
        return to_host(copies)

    @override
    def load_chunk(self, number: int, arrays: Mapping[str, Tensor]) -> None:
        start = number * self._chunk_columns
        stop = start + len(arrays["step_type"])
        for name, array in arrays.items():
            self._arrays[name][start:stop] = array.to(self.device)
        # Columns that were overwritten while the chunks were saved are newer than the priorities.
        begins = is_transition(self._arrays["step_type"][start:stop].T).T.flatten()
        priorities = self._tree.leaves[start * self.length : stop * self.length]
        self._tree.set_range(start * self.length, torch.where(begins, priorities, 0.0))


def deal(
    parts: Sequence[SavedPart], rank: int, size: int, columns: int, chunk_columns: int
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Deal every size-th column of all parts, by age: what was added last is overwritten last.

    Args:
        parts: saved replays with the same arrays; some may be empty.
        rank: rank that gets its share.
        size: number of learners.
        columns: number of columns it has room for; the oldest are lost where that is too few.
        chunk_columns: columns of each saved chunk.

    Returns:
        what `ReplayStorage.state_dict` would return of the rank's replay, and its columns.
    """
    of_parts = []
    for at, part in enumerate(parts):
        filled, total = part.state["filled"], part.state["columns"]
        oldest = part.state["cursor"] if filled == total else 0
        place = (oldest + np.arange(filled)) % total
        of_parts.append(np.stack([np.full(filled, at), place, np.arange(filled, 0, -1)]))
    part_number, source, age = np.concatenate(of_parts, 1)  # age 1: the newest
    order = np.lexsort((part_number, -age))[rank::size]
    lost = max(0, len(order) - columns)
    part_number, source = part_number[order[lost:]], source[order[lost:]]
    count, first = len(source), parts[0].state
    length = first["length"]
    priorities = torch.zeros(count, length)
    arrays: dict[str, Tensor] = {}
    for at, part in enumerate(parts):
        target = np.flatnonzero(part_number == at)
        columns_here = source[target]
        priorities[target] = part.state["priorities"].view(-1, length)[columns_here]
        for number, read in sorted(part.chunks.items()):
            chunk, start = read(), number * chunk_columns
            inside = (columns_here >= start) & (columns_here < start + len(chunk["step_type"]))
            for name, array in chunk.items():
                if name not in arrays:
                    arrays[name] = torch.zeros((count, *array.shape[1:]), dtype=array.dtype)
                arrays[name][target[inside]] = array[columns_here[inside] - start]
    if lost:
        logger.warning("%d rows of the replay have no room here", lost * length)
    generators = {part.rank: part.state["generator"] for part in parts}
    state = {
        **first,
        "columns": columns,
        "inserted": sum(part.state["inserted"] for part in parts) // size,
        "rate": None,  # another than this rank's: a burst is due
        "cursor": count % columns,
        "filled": count,
        "priorities": priorities.flatten(),
        "max_priority": max(part.state["max_priority"] for part in parts),
        "generator": generators.get(rank, torch.empty(0, dtype=torch.uint8)),
        "prefetched": None,
    }
    return state, arrays


class SequenceReplay(ReplayStorage):
    """Draws whole columns of the ring: unrolls, with the recurrent state at their first step.

    Kapturowski, Ostrovski, Quan, Munos, Dabney 2019, "Recurrent Experience Replay in Distributed
    Reinforcement Learning" (R2D2), section 3: sequences of fixed length are kept with the recurrent
    state that acting had at their first step ("stored state"), and learned from as a whole.

    A batch's `arrays` are then [L + 1, B, ...], `memory` [1, B, A, Z]; it has as many sequences B
    as make `batch_size` transitions. A column is drawn in proportion to its transitions.
    """

    def _require_options(self) -> None:
        """Refuse options that only single transitions have, and stacked frames."""
        c = self._config
        for name, value, only in (
            ("prioritized", c.prioritized, False),
            ("n_step", c.n_step, 1),
        ):
            if value != only:
                raise ConfigError(
                    f"{self._section}.{name}={str(value).lower()} is not supported with a "
                    f"recurrent network: it is for single rows, and memory is learned from "
                    f"whole sequences; set it to {str(only).lower()}, or network.recurrent=0"
                )
        if self._frames is not None:
            raise ConfigError(
                f"network.frame_stack={self._frames.depth} and network.recurrent cannot be "
                "combined with a replay; set network.frame_stack=1, or network.recurrent=0"
            )
        if c.dataset:
            raise ConfigError(
                f"{self._section}.dataset={c.dataset} is not supported with a recurrent network: a "
                "dataset has no recurrent states, with which sequences begin; set "
                "network.recurrent=0, or leave it out"
            )
        super()._require_options()

    @torch.no_grad()
    def _sample(self) -> ReplayBatch:
        """Draw sequences; the lock is held."""
        sequences = max(1, round(self._config.batch_size / self.length))
        drawn, _ = self._tree.sample(sequences, self._generator)
        column = drawn // self.length
        arrays = {
            name: array.index_select(0, column).transpose(0, 1).contiguous()
            for name, array in self._arrays.items()
        }
        step = torch.arange(self.length, device=self.device).unsqueeze(1)
        index = (column * self.length + step).flatten()  # [L * B]
        age = self._age[column].repeat(self.length)
        none = index.new_zeros(0, dtype=torch.float32)
        return ReplayBatch(arrays, {}, none, none, none, index, age, largest_weight=none)
