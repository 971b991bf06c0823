"""Unrolls, which the acting side writes, and storages, from which the learner samples batches.

An unroll is L + 1 consecutive time steps of one environment, L transitions. An Unroll holds those
of the n environments of one session, side by side. The last time step is there for its reward,
discount and observation, and is the first one of the next unroll.

Unrolls lie side by side in an arena, as blocks of columns, so that one operation writes to many.
On the host every array has a piece of its own, [time steps, columns, ...]. On a device all that is
kept of one time step of one environment lies together, as one record: then one indexed write
stores the time steps of a batch, whatever the number of its arrays and sessions.

The inference thread writes, the thread that learns samples (sync: the same one); one lock guards
what they share, none the time steps of open unrolls.
"""

import copy
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from murmur.learner_service.device.readback import to_host
from murmur.learner_service.device.streams import stream_lock
from murmur.learner_service.storage.frames import Frames
from murmur.shared.wire.dataset import OBSERVATION, array_layout
from murmur.shared.wire.spec import ACTION_MASK, EnvSpec
from murmur.shared.wire.timestep import Array, StepType

NEXT = "next/"  # prefix of the arrays of row t + k, of transitions
_LAST, _ABORTED = int(StepType.LAST), int(StepType.ABORTED)
# What an ABORTED time step holds, as it comes over the wire; else 0.
_FILLED_WITH = {"step_type": _ABORTED, "discount": 1, OBSERVATION + ACTION_MASK: 1}
_ALIGNED = 8  # bytes: records are copied as int64
_OUTPUT = 4  # bytes of each number that a policy gives: int32 or float32

Layout = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


def time_step_layout(
    spec: EnvSpec, extras: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return what is kept of one time step of one environment: name -> (shape, dtype).

    Observations carry the prefix OBSERVATION; everything is in wire dtype.
    """
    given = array_layout(spec).items()
    layout = {name: (shape, getattr(torch, dtype.name)) for name, (dtype, shape) in given}
    for name, extra in extras.items():
        layout[name] = (spec.num_agents, *extra), torch.float32
    return layout


def array_bytes(layout: Layout) -> dict[str, int]:
    """Return the bytes of each array of a layout."""
    return {name: math.prod(shape) * dtype.itemsize for name, (shape, dtype) in layout.items()}


def observed(arrays: Mapping[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """Name -> observation of named arrays; prefix NEXT: those of row t + k."""
    prefix += OBSERVATION
    return {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)}


def is_transition(step_type: Tensor) -> Tensor:
    """Tell which time steps [T, ...] are followed by a transition: [T - 1, ...] bool.

    Their action was taken and led to the next one: they are not LAST, and neither is ABORTED.
    """
    return (step_type[:-1] < _LAST) & (step_type[1:] != _ABORTED)


@dataclass(frozen=True)
class Field:
    """One array of a record.

    Attributes:
        shape: shape within one record.
        dtype: type of the array.
        offset: bytes from the record's beginning.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def num_bytes(self) -> int:
        """Bytes within one record."""
        return math.prod(self.shape) * self.dtype.itemsize

    def of(self, records: Tensor) -> Tensor:
        """View this array of records [..., bytes] uint8: [..., *shape]."""
        own = records[..., self.offset : self.offset + self.num_bytes].view(self.dtype)
        return own.view(*records.shape[:-1], *self.shape)


class Record:
    """Order of a time step's arrays in memory: the policy's outputs, then the others by width.

    Attributes:
        fields: name -> Field.
        outputs: names of the policy's outputs.
        num_bytes: bytes of one record, a multiple of eight.
    """

    def __init__(self, layout: Layout, outputs: Collection[str] = ()) -> None:
        """Give each array its place.

        Args:
            layout: name -> (shape, dtype) of each array.
            outputs: names of a policy's outputs, of four bytes a number.
        """
        self.fields: dict[str, Field] = {}
        self.outputs = [name for name in layout if name in outputs]
        rest = sorted(layout.keys() - outputs, key=lambda x: (-layout[x][1].itemsize, x))
        offset = 0
        for name in (*self.outputs, *rest):
            self.fields[name] = Field(*layout[name], offset)
            offset += self.fields[name].num_bytes
            if name in outputs:
                assert layout[name][1].itemsize == _OUTPUT
                self._given = offset
        self.num_bytes = -(-offset // _ALIGNED) * _ALIGNED

    def filled(self, records: Tensor, outputs: Mapping[str, Tensor]) -> Tensor:
        """Copy records [N, bytes] uint8, with a policy's outputs for them: [N, words] int64."""
        parts = [outputs[name].reshape(len(records), -1) for name in self.outputs]
        parts = [part.view(torch.int32) for part in parts]
        rest = records.view(torch.int32)[:, self._given // _OUTPUT :]
        return torch.cat([*parts, rest], 1).view(torch.int64)


class Arena:
    """Memory for unrolls, which move with it. The storage's lock is held when it changes.

    Column 0 belongs to no unroll: rows to discard are written to its first time step.

    Attributes:
        record: order of a time step's arrays, where time steps are records; else None.
        arrays: name -> [time steps, columns, ...], views of the records where there are some.
        records: [time steps * columns, words] int64, all records; empty where there are none.
        columns: number of columns, column 0 included.
        grown: number of moves of the memory; views of `arrays` from before are out of date.
    """

    def __init__(
        self,
        layout: Layout,
        firsts: Layout,
        device: torch.device,
        *,
        records: Collection[str] | None,
    ) -> None:
        """Make an arena without memory.

        Args:
            layout: name -> (shape, dtype) of each time step.
            firsts: name -> (shape, dtype) of arrays kept for an unroll's first time step alone.
            device: device of the memory.
            records: names of a policy's outputs, if a time step is one record; else None.
        """
        self._layout, self._firsts = layout, firsts
        self._device = device
        self.record = None if records is None else Record(layout, records)
        self.arrays: dict[str, Tensor] = {}
        self.records = torch.empty(0)
        self.columns = self.grown = 0
        self._height = 0
        self._unrolls: list[Unroll] = []

    def allocate(self, num_envs: int, length: int, at_least: int) -> "Unroll":
        """Set a block of columns aside for a new unroll.

        Args:
            num_envs: n.
            length: L.
            at_least: columns to make room for if memory is allocated, in all.
        """
        first = 1 + sum(unroll.num_envs for unroll in self._unrolls)
        columns = self.columns
        if first + num_envs > columns:
            columns = max(first + num_envs, 2 * columns - 1, at_least + 1)
        self.fit(length + 1, columns)
        unroll = Unroll(self, first, length, num_envs)
        self._unrolls.append(unroll)
        return unroll

    def fit(self, height: int, columns: int = 0) -> None:
        """Grow to at least this number of time steps and columns."""
        height, columns = max(height, self._height), max(columns, self.columns)
        if (height, columns) == (self._height, self.columns):
            return
        before = self.arrays
        self._height, self.columns = height, columns
        if self.record is None:
            self.arrays = self._zeros(self._layout, height)
        else:
            shape = height, columns, self.record.num_bytes
            data = torch.zeros(shape, dtype=torch.uint8, device=self._device)
            self.records = data.view(torch.int64).flatten(0, 1)
            self.arrays = {name: self.record.fields[name].of(data) for name in self._layout}
        self.arrays |= self._zeros(self._firsts, 1)
        for name, old in before.items():
            self.arrays[name][: old.shape[0], : old.shape[1]] = old
        self.grown += 1
        for unroll in self._unrolls:
            unroll.place(self)

    def _zeros(self, layout: Layout, height: int) -> dict[str, Tensor]:
        return {
            name: torch.zeros((height, self.columns, *shape), dtype=dtype, device=self._device)
            for name, (shape, dtype) in layout.items()
        }


class Unroll:
    """L + 1 time steps of n environments, on the device: a block of an arena's columns.

    Attributes:
        arrays: name -> [L + 1, n, ...]; observations carry the prefix OBSERVATION. "memory", if
            the policy has one, is [1, n, A, Z]: the recurrent state at the first time step.
        host: NumPy views of the arrays, if they are on the host; else empty.
        first_column: its first column in the arena.
        cursor: time steps written so far.
        start: first time step that is still to be learned from; earlier ones were, or are too old.
        transitions: time steps of each environment from there on, the last one left out: L at
            most, fewer if it was closed before it was full.
        taken: environments that were learned from, the first ones.
        first_version: policy version that chose the action of time step `start`.
        versions: policy version of each time step's action; -1 where nothing acted yet, and in
            unrolls from a checkpoint, which keeps the first one alone.
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
        """Start from the first time step."""
        self.first_slot, self.sequence = first_slot, sequence
        self.cursor = self.start = 0
        self.taken = 0
        self.first_version = -1
        self.transitions = self.length
        self.versions = [-1] * (self.length + 1)
        # Newest time step acted on, and its `memory`: the inference thread writes it, the thread
        # that learns reads it in `cut`.
        self._acted: tuple[int, Tensor | None] = (0, None)

    def act(self, version: int, memory: Tensor | None) -> None:
        """Note what chose the action of the newest time step.

        Of an unroll's first time step `memory` is in `arrays` already.

        Args:
            version: policy version.
            memory: [n, A, Z] recurrent state before that time step, if the policy has one.
        """
        step = self.cursor - 1
        self.versions[step] = version
        if step == 0:
            self.first_version = version
        self._acted = step, memory  # last: the thread that learns may cut here from now on

    def cut(self) -> "Unroll | None":
        """Split off the transitions so far; time steps are still written behind them.

        Returns:
            a copy of the time steps from `start` to the newest one that was acted on, which
            becomes the first of those to come; None if there is no transition yet.
        """
        step, memory = self._acted
        count = step - self.start
        if count <= 0:
            return None
        head = copy.copy(self)
        head.arrays = {
            name: (array if name == "memory" else array[self.start : step + 1]).clone()
            for name, array in self.arrays.items()
        }
        head.host = {}
        head.transitions = head.length = count
        head.start, head.cursor = 0, count + 1
        head.versions = self.versions[self.start : step + 1]
        self._skip(count)
        if memory is not None:
            self.arrays["memory"][0].copy_(memory)
            if memory.is_cuda:  # another stream's, which may overwrite it once no reference is left
                memory.record_stream(torch.cuda.current_stream(memory.device))
        return head

    def drop_older(self, version: float) -> int:
        """Leave out transitions older than a policy version, and return their number.

        With a recurrent state all are left out: that of a time step in the middle is not kept.
        """
        if self.first_version >= version:
            return 0
        young = self.transitions
        if "memory" not in self.arrays:
            acted = self.versions[self.start : self.start + self.transitions]
            young = next((i for i, v in enumerate(acted) if v >= version), young)
        self._skip(young)
        return (self.num_envs - self.taken) * young

    def _skip(self, count: int) -> None:
        self.start += count
        self.transitions -= count
        self.first_version = self.versions[self.start]

    @property
    def full(self) -> bool:
        """Whether all L + 1 time steps are there."""
        return self.cursor == self.length + 1

    @property
    def has_transitions(self) -> bool:
        """Whether there is a transition to learn from, full or not."""
        written = self.arrays["step_type"][self.start : self.cursor]
        return bool(to_host(is_transition(written).any()))

    def close(self) -> None:
        """Fill it up with ABORTED time steps: no more will come."""
        for name, array in self.arrays.items():
            if name != "memory":
                array[self.cursor :] = _FILLED_WITH.get(name, 0)
        self.cursor, self.transitions = self.length + 1, self.cursor - 1 - self.start


def side_by_side(parts: Sequence[tuple[Unroll, int, int]]) -> tuple[dict[str, Tensor], int]:
    """Copy what is to be learned of unrolls, padded to one length with ABORTED time steps.

    Args:
        parts: unrolls, and the first and last (exclusive) of their environments.

    Returns:
        name -> [T, B, ...], and the number of ABORTED time steps added.
    """
    longest = max(unroll.transitions for unroll, _, _ in parts)
    views, padding = [], 0
    for unroll, first, last in parts:
        steps = slice(unroll.start, unroll.start + unroll.transitions + 1)
        view = {
            name: array[:, first:last] if name == "memory" else array[steps, first:last]
            for name, array in unroll.arrays.items()
        }
        missing = longest - unroll.transitions
        padding += missing * (last - first)
        views.append(lengthened(view, longest + 1) if missing else view)
    arrays = {}
    for name in views[0]:
        columns = [view[name] for view in views]
        shape = columns[0].shape[2:]
        if len(shape) > 2:  # on CUDA parts of up to four dimensions are copied by one kernel
            joined = torch.cat([x.flatten(2) for x in columns], 1)
            arrays[name] = joined.view(*joined.shape[:2], *shape)
        else:  # one part is copied, too: the unroll is free for new time steps from here on
            arrays[name] = torch.cat(columns, 1)
    return arrays, padding


def lengthened(arrays: dict[str, Tensor], length: int) -> dict[str, Tensor]:
    """Append ABORTED time steps to arrays [T, B, ...] up to a length; those of that length stay."""
    missing = length - len(arrays["step_type"])
    if not missing:
        return arrays
    filled = dict(arrays)
    for name, array in arrays.items():
        if name != "memory":
            aborted = torch.full_like(array[:1], _FILLED_WITH.get(name, 0))
            filled[name] = torch.cat([array, aborted.expand(missing, *array.shape[1:])])
    return filled


@dataclass
class Batch(ABC):
    """Data that one update learns from.

    Attributes:
        arrays: name -> array; observations carry the prefix OBSERVATION.
        version: policy versions whose lag is of interest; empty if none is.
    """

    arrays: dict[str, Tensor]
    version: Sequence[int] = field(default=(), kw_only=True)

    @property
    @abstractmethod
    def size(self) -> int:
        """Number of joint transitions; of images, samples."""

    def observation(self) -> dict[str, Tensor]:
        """Return the observations, by name."""
        return observed(self.arrays)


@dataclass(frozen=True)
class SavedPart:
    """A rank's saved storage, for another number of ranks to share.

    Attributes:
        rank: rank that saved it.
        state: its `state_dict`.
        chunks: number -> function that reads that chunk's arrays.
    """

    rank: int
    state: Mapping[str, Any]
    chunks: Mapping[int, Callable[[], Mapping[str, Tensor]]]


B = TypeVar("B", bound=Batch)


class Storage(ABC, Generic[B]):
    """The learner's source of batches.

    Attributes:
        device: device of the batches.
        inserted: transitions put where they may be learned from more than once.
        dropped: transitions dropped in this process because they were too old.
        environments_limit: environments whose unrolls may be under way at once; 0: any number.
        updating: an update is under way, from `sample` to `done`; read by the inference thread.
        on_room: called when there may be room for what was refused before.
    """

    def __init__(self, device: torch.device) -> None:
        """Make an empty storage."""
        self.device = device
        self.inserted = self.dropped = 0
        self.environments_limit = 0
        self.updating = False
        self.on_room: Callable[[], None] = lambda: None
        self._changed = threading.Condition()

    @property
    def chosen(self) -> dict[str, int]:
        """Values chosen by the number of environments, for the log; empty if none are."""
        return {}

    @property
    @abstractmethod
    def ready(self) -> bool:
        """Whether an update is due."""

    @property
    def settled(self) -> bool:
        """Return whether a sync run that is saved here can continue exactly."""
        return not self.ready

    @property
    @abstractmethod
    def ready_rows(self) -> int:
        """Transitions there are to learn from."""

    @property
    def waiting_rows(self) -> int:
        """Transitions that wait to be learned from for the first time; they are saved."""
        return 0

    def due(self, version: int, timeout_s: float) -> bool:
        """Wait until an update is due; for the ranks of a group, which sample together.

        Args:
            version: current policy version; until it changes, `sample` returns a batch.
            timeout_s: longest wait, seconds.
        """
        with self._changed:
            return self._changed.wait_for(lambda: self.ready, timeout_s)

    @abstractmethod
    def sample(self, version: int, timeout_s: float) -> B | None:
        """Return what one update learns from, or None if none was due in time.

        Args:
            version: current policy version.
            timeout_s: longest wait, seconds.
        """

    @abstractmethod
    def done(self, batch: B) -> None:
        """End the update that `sample` began."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds of it, beside its `chunks`."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; `load_chunk` comes after."""

    def load_parts(self, parts: Sequence[SavedPart], rank: int, size: int) -> None:
        """Continue from what another number of ranks saved: every part has one rank that does.

        Args:
            parts: parts of all ranks that saved.
            rank: rank of this storage.
            size: number of ranks now.

        Raises:
            ConfigError: if the storage is configured otherwise.
        """
        for part in parts:
            if part.rank % size == rank:
                self.load_state_dict(part.state)

    def chunks(self) -> Mapping[int, Callable[[], dict[str, Tensor]]]:
        """Return parts that changed since the last call, to be saved each in a file of its own."""
        return {}

    def load_chunk(self, number: int, arrays: Mapping[str, Tensor]) -> None:
        """Load a saved part."""
        raise NotImplementedError


class UnrollStorage(Storage[B]):
    """A storage of unrolls, which the inference thread begins, fills and adds.

    Attributes, beside those of a Storage:
        length: L, transitions of one unroll.
        arena: memory of the unrolls.
        memory_lock: orders the streams of the inference thread, which writes the arena, and of the
            thread that learns.
        learns_once: each transition is learned from once; else it may be again and again.
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
        self._memory_size, self._frames = memory_size, frames
        self._layout = time_step_layout(spec, extras)
        numbers = memory_size + (frames.memory_size if frames else 0)
        firsts = {"memory": ((spec.num_agents, numbers), torch.float32)} if numbers else {}
        records = None if device.type == "cpu" else ("action", *extras)
        self.arena = Arena(self._layout, firsts, device, records=records)
        self.memory_lock = stream_lock(device)
        self._expected = 0  # environments that will train, as far as that is known beforehand
        self._free: dict[int, list[Unroll]] = {}
        self._open: list[Unroll] = []
        # Of open unrolls: environments, the most there were, and those of the largest session.
        self._open_envs = self._peak_envs = 0
        self._largest_session = 0

    def connect(self, environments: int) -> None:
        """Note how many environments train; called by any thread."""

    @abstractmethod
    def may_begin(self, filled: Sequence[Unroll] = ()) -> bool:
        """Tell whether acting may continue, or has run as far ahead of learning as it may.

        Args:
            filled: unrolls that are full and will be `add` next.
        """

    def begin(
        self, num_envs: int, first_slot: int, sequence: int, filled: Sequence[Unroll] = ()
    ) -> Unroll:
        """Return an empty unroll, reused if one of that size is free.

        Args:
            num_envs: n.
            first_slot: the session's first slot.
            sequence: number of the unroll within its session.
            filled: unrolls that are full and will be `add` next.
        """
        with self._changed:
            if free := self._free.get(num_envs):
                unroll = free.pop()
                if unroll.length != self.length:
                    unroll.length = self.length
                    with self.memory_lock:
                        self.arena.fit(self.length + 1)
                    unroll.place(self.arena)
            else:
                with self.memory_lock:
                    unroll = self.arena.allocate(num_envs, self.length, self._expected)
            unroll.begin(first_slot, sequence)
            self._open.append(unroll)
            self._open_envs += num_envs
            at_once = self._open_envs - sum(u.num_envs for u in filled)
            self._peak_envs = max(self._peak_envs, at_once)
            self._largest_session = max(self._largest_session, num_envs)
        return unroll

    @abstractmethod
    def add(self, unroll: Unroll) -> None:
        """Hand over a full unroll."""

    def add_open(self, unroll: Unroll) -> int:
        """Hand over what an ended session left of an unroll, if there is something to learn.

        Returns:
            the number of time steps lost, without those that an update cut off before.
        """
        with self._changed, self.memory_lock:
            left = unroll.cursor - unroll.start
            if not unroll.has_transitions:
                self.release(unroll)
                return unroll.num_envs * left
            unroll.close()
        lost = unroll.num_envs * (left - unroll.transitions)
        self.add(unroll)
        return lost

    def release(self, unroll: Unroll) -> None:
        """Give back an unroll that will not be filled."""
        with self._changed:
            self._open.remove(unroll)
            self._open_envs -= unroll.num_envs
            self._free.setdefault(unroll.num_envs, []).append(unroll)
