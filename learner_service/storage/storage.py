"""What every storage does: hand out unrolls to write rows to, and batches to learn from.

An unroll is L joint transitions of each of the n environments of one session, so L + 1 time steps,
called rows here and, counted by environment, environment rows. The last one is there for its
reward, discount and observation, and is the first row of the next unroll.

The inference thread appends, the thread that learns takes (sync: the same one); one lock guards
what they share, none the rows of open unrolls.
"""

import copy
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeVar

import torch
from torch import Tensor

from learner_service.runtime.readback import to_host
from learner_service.runtime.streams import Turns
from learner_service.storage.arena import DTYPES, Arena
from learner_service.storage.feed import B, Feed
from learner_service.storage.frames import Frames
from shared.spec import ACTION_MASK, EnvSpec, action_layout
from shared.timestep import Array, StepType

OBSERVATION = "observation/"
NEXT = "next/"  # prefix of the arrays of row t + k, of transitions
FILLED_WITH_ONES = ("discount", OBSERVATION + ACTION_MASK)  # of an ABORTED row; else 0
R = TypeVar("R")
_LAST, _ABORTED = int(StepType.LAST), int(StepType.ABORTED)


def row_layout(
    spec: EnvSpec, extras: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """What is kept of one row of one environment: name -> (shape, dtype).

    Observations carry the prefix OBSERVATION; everything is in wire dtype.
    """
    a = spec.num_agents
    dtype, shape = action_layout(spec.action)
    layout: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "step_type": ((), torch.uint8),
        "reward": ((a,), torch.float32),
        "discount": ((), torch.float32),
        "action": ((a, *shape), DTYPES[dtype.name]),
    }
    for o in spec.observations:
        layout[OBSERVATION + o.name] = (
            ((a, *o.shape) if o.per_agent else o.shape),
            DTYPES[o.dtype],
        )
    for name, extra in extras.items():
        layout[name] = ((a, *extra), torch.float32)
    return layout


def row_bytes(spec: EnvSpec, extras: Mapping[str, tuple[int, ...]]) -> int:
    """Bytes of one row of one environment."""
    layout = row_layout(spec, extras).values()
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in layout)


class Unroll:
    """L + 1 rows of n environments, on the device: a block of an arena's columns.

    Attributes:
        arrays: name -> [L + 1, n, ...]; observations carry the prefix OBSERVATION. "memory", if
            the policy has one, is [1, n, A, H]: what the first row was acted with.
        host: the same arrays for NumPy, if they are on the host; else empty.
        first_column: of the arena.
        cursor: rows written so far.
        start: first row that is still to be learned from; earlier ones were, or are too old.
        rows: joint transitions of each environment from there on, L at most; fewer if it was
            closed before it was full.
        taken: environments that were learned from, the first ones.
        first_version: policy version that chose the action of row `start`.
        versions: of each row's action; -1 where that is not known.
        first_slot: the session's first slot, for a reproducible order.
        sequence: number of this unroll within its session.
    """

    def __init__(self, arena: Arena, first_column: int, length: int, num_envs: int) -> None:
        self.length = length
        self.num_envs = num_envs
        self.first_column = first_column
        self.place(arena)
        self.begin(0, 0)

    def place(self, arena: Arena) -> None:
        """Look its arrays up; the arena has moved, or the length is another."""
        columns = slice(self.first_column, self.first_column + self.num_envs)
        self.arrays = {k: v[: self.length + 1, columns] for k, v in arena.arrays.items()}
        on_host = all(array.device.type == "cpu" for array in self.arrays.values())
        self.host: dict[str, Array] = (
            {name: array.numpy() for name, array in self.arrays.items()} if on_host else {}
        )

    def begin(self, first_slot: int, sequence: int) -> None:
        """Start from the first row."""
        self.cursor = 0
        self.start = 0
        self.first_version = -1
        self.rows = self.length
        self.first_slot = first_slot
        self.sequence = sequence
        self.taken = 0
        self.versions = [-1] * (self.length + 1)
        self._acted: tuple[int, Tensor | None] = (0, None)

    def act(self, version: int, memory: Tensor | None) -> None:
        """Note what the action of the newest row was chosen by.

        Of an unroll's first row `memory` is in `arrays` already.

        Args:
            version: of the policy.
            memory: [n, A, H] what the policy remembered before that row, if it has a memory.
        """
        row = self.cursor - 1
        self.versions[row] = version
        if row == 0:
            self.first_version = version
        self._acted = row, memory  # last: the thread that learns may cut here from now on

    def cut(self) -> "Unroll | None":
        """Split off the transitions so far; rows are still written behind them.

        Returns:
            a copy of rows `start` up to the newest one that was acted on, which becomes the first
            of those to come; None if there is no transition yet.
        """
        row, memory = self._acted
        if row <= self.start:
            return None
        head = copy.copy(self)
        head.arrays = {
            name: (array if name == "memory" else array[self.start : row + 1]).clone()
            for name, array in self.arrays.items()
        }
        head.host = {}
        head.rows = head.length = row - self.start
        head.start, head.cursor = 0, head.rows + 1
        head.versions = self.versions[self.start : row + 1]
        self._skip(row - self.start)
        if memory is not None:
            self.arrays["memory"][0].copy_(memory)
            if memory.is_cuda:  # another stream's, which may overwrite it once no reference is left
                memory.record_stream(torch.cuda.current_stream(memory.device))
        return head

    def skip_older(self, version: int) -> int:
        """Leave out transitions older than a policy version; returns how many of each environment.

        With a memory all are left out: what was remembered in the middle is not kept.
        """
        young = self.rows
        if "memory" not in self.arrays:
            acted = self.versions[self.start : self.start + self.rows]
            young = next((i for i, v in enumerate(acted) if v >= version), self.rows)
        self._skip(young)
        return young

    def _skip(self, rows: int) -> None:
        self.start += rows
        self.rows -= rows
        self.first_version = self.versions[self.start]

    @property
    def full(self) -> bool:
        """Whether all L + 1 rows are there."""
        return self.cursor == self.length + 1

    @property
    def has_transitions(self) -> bool:
        """Whether there is a step to learn from, full or not."""
        kinds = self.arrays["step_type"][self.start : self.cursor]
        acted = (kinds[:-1] < _LAST) & (kinds[1:] != _ABORTED)
        return bool(to_host(acted.any()))

    def close(self) -> None:
        """Fill it up with ABORTED rows, zeros as they come over the wire: no more will come."""
        for name, array in self.arrays.items():
            if name != "memory":
                array[self.cursor :] = int(name in FILLED_WITH_ONES)
        self.arrays["step_type"][self.cursor :] = _ABORTED
        self.cursor, self.rows = self.length + 1, self.cursor - 1 - self.start


class Storage(Feed[B]):
    """See the module.

    Attributes, beside those of a Feed:
        length: L, transitions of one unroll.
        arena: memory of the unrolls.
        turns: the inference thread, which writes, and the thread that learns use its memory in
            turns.
        learns_once: each row is learned from once; else it may be learned from again and again.
    """

    learns_once = False

    def __init__(
        self,
        spec: EnvSpec,
        length: int,
        device: torch.device,
        extras: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
        memory_size: int = 0,
        frames: Frames | None = None,
    ) -> None:
        """Make an empty storage; extras, memory_size and frames: see Algorithm."""
        super().__init__(device)
        self.spec, self.length = spec, length
        self._extras = extras
        self._memory_size = memory_size
        self._frames = frames
        self._open_envs = 0
        self._free: dict[int, list[Unroll]] = {}
        self._unrolls: list[Unroll] = []  # all there are
        agents = spec.num_agents
        numbers = memory_size + (frames.memory_size if frames else 0)
        remembered = {"memory": ((agents, numbers), torch.float32)} if numbers else {}
        layout = row_layout(spec, extras)
        records = None if device.type == "cpu" else ("action", *extras)
        self.arena = Arena(layout, remembered, device, records=records)
        self.turns = Turns(device)

    def connect(self, environments: int) -> None:
        """Note how many environments train; called by any thread."""

    def memory_bytes(self, environments: int, unrolls: int) -> int:
        """Bytes of an unroll of each environment, and of an update's unrolls: in order, shuffled.

        Args:
            environments: number that train.
            unrolls: of an update.
        """
        spec = self.spec if self._frames is None else self._frames.stacked_spec(self.spec)
        kept = row_bytes(self.spec, self._extras) * environments
        learned = 2 * row_bytes(spec, self._extras) * unrolls
        return (self.length + 1) * (kept + learned)

    def begin(
        self, num_envs: int, first_slot: int, sequence: int, filled: Sequence[Unroll] = ()
    ) -> Unroll:
        """An empty unroll, reused if one of that size is free.

        Args:
            num_envs: n.
            first_slot: the session's.
            sequence: number of the unroll within its session.
            filled: unrolls that are full and will be `add` next.
        """
        with self._changed:
            free = self._free.get(num_envs)
            self._open_envs += num_envs
            if not free:
                unroll = self._new(self.length, num_envs)
            else:
                unroll = free.pop()
                if unroll.length != self.length:
                    unroll.length = self.length
                    self._move(lambda: self.arena.fit(self.length + 1))
                    unroll.place(self.arena)
            unroll.begin(first_slot, sequence)
        return unroll

    def _new(self, length: int, num_envs: int) -> Unroll:
        """An unroll that was not there before."""
        first = self._move(lambda: self.arena.allocate(num_envs, length + 1, self._expected_envs))
        self._unrolls.append(Unroll(self.arena, first, length, num_envs))
        return self._unrolls[-1]

    def _move(self, allocate: Callable[[], R]) -> R:
        """Allocate in the arena; unrolls move with it."""
        grown = self.arena.grown
        with self.turns.take():
            allocated = allocate()
        if self.arena.grown != grown:
            for unroll in self._unrolls:
                unroll.place(self.arena)
        return allocated

    @property
    def _expected_envs(self) -> int:
        """Environments that will train, as far as that is known beforehand."""
        return 0

    def release(self, unroll: Unroll) -> None:
        """Give back an unroll that will not be filled."""
        with self._changed:
            self._open_envs -= unroll.num_envs
            self._give_back(unroll)

    def add_open(self, unroll: Unroll) -> int:
        """Hand over what an ended session left of an unroll, if there is something to learn.

        Returns:
            how many environment rows are lost, without those that an update cut off before.
        """
        with self._changed, self.turns.take():
            left = unroll.cursor - unroll.start
            if not unroll.has_transitions:
                self.release(unroll)
                return unroll.num_envs * left
            unroll.close()
        lost = unroll.num_envs * (left - unroll.rows)
        self.add(unroll)
        return lost

    def _give_back(self, unroll: Unroll) -> None:
        """Keep an unroll for `begin`; the lock is held."""
        self._free.setdefault(unroll.num_envs, []).append(unroll)

    @abstractmethod
    def may_begin(self, filled: Sequence[Unroll] = ()) -> bool:
        """Whether acting may continue, or has run as far ahead of learning as it may.

        Args:
            filled: unrolls that are full and will be `add` next.
        """

    @abstractmethod
    def add(self, unroll: Unroll) -> None:
        """Hand over a full unroll."""
