"""Unrolls: the time steps that sessions write, and the transitions that are learned from.

An unroll is L joint transitions of each of the n environments of one session, so L + 1 time steps.
The last time step is there for its reward, discount and observation, and is the first one of the
session's next unroll.

Unrolls lie side by side in an arena, as blocks of columns, so that one operation writes to many.
On the host every array has a piece of its own, [time steps, columns, ...]. On a device all that is
kept of one time step of one environment lies together, as one record: then one indexed write
stores the time steps of a batch, whatever the number of its arrays and sessions.
"""

import copy
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from learner_service.device.readback import to_host
from shared.wire.spec import ACTION_MASK, EnvSpec, action_layout
from shared.wire.timestep import Array, StepType

OBSERVATION = "observation/"
NEXT = "next/"  # prefix of the arrays of row t + k, of transitions
DTYPES = {
    "uint8": torch.uint8,
    "int32": torch.int32,
    "float16": torch.float16,
    "float32": torch.float32,
}  # of arrays on the wire, by name
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
    a = spec.num_agents
    dtype, shape = action_layout(spec.action)
    return {
        "step_type": ((), torch.uint8),
        "reward": ((a,), torch.float32),
        "discount": ((), torch.float32),
        "action": ((a, *shape), DTYPES[dtype.name]),
        **{
            OBSERVATION + o.name: ((a, *o.shape) if o.per_agent else o.shape, DTYPES[o.dtype])
            for o in spec.observations
        },
        **{name: ((a, *extra), torch.float32) for name, extra in extras.items()},
    }


def array_bytes(layout: Layout) -> dict[str, int]:
    """Return the bytes of each array of a layout."""
    return {name: math.prod(shape) * dtype.itemsize for name, (shape, dtype) in layout.items()}


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
    """The order of a time step's arrays in memory: those that the policy gives, then the widest.

    Attributes:
        fields: name -> Field.
        outputs: names of those that a policy gives.
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

    Column 0 belongs to no unroll: what is to be stored nowhere is written to its first time step.

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
            the policy has one, is [1, n, A, H]: the recurrent state at the first time step.
        host: NumPy views of the arrays, if they are on the host; else empty.
        first_column: its first column in the arena.
        cursor: time steps written so far.
        start: first time step that is still to be learned from; earlier ones were, or are too old.
        transitions: joint transitions of each environment from there on, L at most; fewer if it
            was closed before it was full.
        taken: environments that were learned from, the first ones.
        first_version: policy version that chose the action of time step `start`.
        versions: policy version of each time step's action; -1 where that is not known.
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
        self._acted: tuple[int, Tensor | None] = (0, None)

    def act(self, version: int, memory: Tensor | None) -> None:
        """Note what chose the action of the newest time step.

        Of an unroll's first time step `memory` is in `arrays` already.

        Args:
            version: policy version.
            memory: [n, A, H] recurrent state before that time step, if the policy has one.
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
