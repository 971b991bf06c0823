"""Rows of a batch on their way: from messages to unrolls and the policy, actions back.

A row is a time step of one environment. On the host rows are written straight into their unrolls.
Recurrent states stay on the device, by slot.

To a device there is one packed copy, one indexed write, and one copy back. The rows of a batch are
gathered in pinned memory as records. With them travels where they are stored: so one operation
stores all of them with the actions, whatever the number of arrays and sessions. Up to some size the
rest is one CUDA graph: batches are filled up to a power of two with copies of their first row,
which are stored nowhere. The graphs of all sizes are captured before the first rows come, and none
later, while environments wait: larger batches are acted on without a graph. No graph knows where
rows are stored, so that more sessions leave them as they are.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from murmur.learner_service.device.cuda_graph import CALLS_TO_CAPTURE, Captured, Graphs
from murmur.learner_service.device.readback import Readback
from murmur.learner_service.device.streams import Fence
from murmur.learner_service.learning.base import Policy
from murmur.learner_service.serving.requests import EnvSession
from murmur.learner_service.storage.storage import Record, Unroll, UnrollStorage
from murmur.shared.process.process import logger
from murmur.shared.wire.dataset import OBSERVATION
from murmur.shared.wire.spec import ACTION_MASK
from murmur.shared.wire.timestep import Array, StepType, TimeStep

_FIRST = int(StepType.FIRST)
_INDEX_BYTES = 8
_INDICES = 3
# Of pinned memory: rows to act on, rows that are only stored, rows that opponents see.
_NUM_BUFFERS = 3
_LEAST_ROWS, _MOST_ROWS = 16, 1024  # of a graph
_MOST_BYTES = 32 << 20  # of rows that graphs are captured for beforehand
_MAX_GRAPHS = 2 * (_MOST_ROWS // _LEAST_ROWS).bit_length()  # sizes of each of two snapshots


class SlotMemory:
    """One row for each slot: read and written by index, whatever the number of sessions.

    Used by the inference thread. A session's `memory` is a view of its slots' rows.

    Attributes:
        table: [1 + slots, A, Z]; row 0 belongs to no slot.
    """

    def __init__(self, num_agents: int, size: int, device: torch.device) -> None:
        """Begin with an empty table.

        Args:
            num_agents: number of agents, A.
            size: numbers that an agent's policy remembers, Z.
            device: device of the table.
        """
        self.table = torch.zeros((1, num_agents, size), device=device)
        self._sessions: list[EnvSession] = []

    def admit(self, session: EnvSession) -> None:
        """Take up a session, with what its `memory` holds if it resumes."""
        stop = 1 + session.first_slot + session.num_envs
        if stop > len(self.table):
            self._grow(stop)
        resumed = session.memory
        session.memory = self._rows(session)
        if resumed is None:
            session.memory.zero_()
        else:
            session.memory.copy_(resumed)
        self._sessions.append(session)

    def dismiss(self, session: EnvSession) -> None:
        """Remove a session that has ended."""
        if session in self._sessions:
            self._sessions.remove(session)

    @staticmethod
    def places(slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the table's rows of slots."""
        return slots + 1

    def load(self, places: Tensor, begins: Tensor) -> Tensor:
        """Return rows of the table, [B, A, Z], zero where an episode begins."""
        return self.table.index_select(0, places).masked_fill_(begins.view(-1, 1, 1), 0)

    def remember(self, places: Tensor, memory: Tensor) -> None:
        """Write recurrent states [B, A, Z] to rows of the table."""
        self.table.index_copy_(0, places, memory)

    def _grow(self, at_least: int) -> None:
        old = self.table
        self.table = old.new_zeros((max(at_least, 2 * len(old)), *old.shape[1:]))
        self.table[: len(old)] = old
        for session in self._sessions:
            session.memory = self._rows(session)

    def _rows(self, session: EnvSession) -> Tensor:
        first = 1 + session.first_slot
        return self.table[first : first + session.num_envs]


class RowTarget(NamedTuple):
    """A time step of each environment of one session, and its place in an unroll.

    Attributes:
        timestep: [n, ...] rows.
        unroll: the rows' unroll; None: they are not stored.
        step: index of the time step in the unroll.
        first_slot: slot of the first environment.
    """

    timestep: TimeStep
    unroll: Unroll | None = None
    step: int = 0
    first_slot: int = -1

    @property
    def num_envs(self) -> int:
        """Return the number of rows, n."""
        return len(self.timestep.step_type)


class ForwardRows(NamedTuple):
    """Rows that a policy acts on without storing them: those of evaluations and of opponents.

    Attributes:
        policy: policy that acts.
        rows: time steps of some sessions, [B, ...] side by side.
        memory: [B, A, Z] recurrent state before the rows; None: of zeros, or the policy has none.
    """

    policy: Policy
    rows: Sequence[TimeStep]
    memory: Tensor | None


@dataclass(eq=False)
class Staging(ABC):
    """Brings batches to where the policy acts. Used by the inference thread.

    A batch is loaded; then it is acted on and its actions are read, or it is stored without that.

    Attributes:
        generator: randomness of exploration.
        memory: recurrent states of the training sessions; None: the policy has none.
        graphs: CUDA graphs of the inference thread.
    """

    generator: torch.Generator
    memory: SlotMemory | None
    graphs: Graphs

    @abstractmethod
    def prepare(self, policy: Policy) -> None:
        """Do beforehand what the first acts would take time for. No random number is used up."""

    @abstractmethod
    def load(self, acting: Sequence[RowTarget], others: Sequence[RowTarget] = ()) -> None:
        """Take a batch.

        Args:
            acting: rows to act on.
            others: rows that are only to be stored: they are when this returns.
        """

    @abstractmethod
    def store(self) -> None:
        """Store the rows to act on: they will not be acted on after all."""

    @abstractmethod
    def act(self, policy: Policy) -> Tensor | None:
        """Act on the rows; store them with the actions and the policy's other outputs.

        Returns:
            [B, A, Z] recurrent state before the rows; None: the policy has none.
        """

    @abstractmethod
    def actions(self) -> Array:
        """Wait for the actions of `act`, [B, A] or [B, A, U] on the host, valid until the next."""

    def forward_rows(
        self, groups: Sequence[ForwardRows], generator: torch.Generator | None
    ) -> tuple[Array, list[Tensor | None]]:
        """Act with several policies on rows that are not stored, and wait for the actions.

        Args:
            groups: policies with their rows.
            generator: randomness of the actions; None: they are greedy.

        Returns:
            [B, A] or [B, A, U] actions of all groups side by side on the host, valid until the
            next call; and of each group its recurrent state now, None if its policy has none.
        """
        observation, step_type = self._gather([row for group in groups for row in group.rows])
        actions: list[Tensor] = []
        memories: list[Tensor | None] = []
        stop = 0
        for policy, rows, memory in groups:
            start, stop = stop, stop + sum(len(row.step_type) for row in rows)
            own = {name: array[start:stop] for name, array in observation.items()}
            if policy.memory_size:
                begins = (step_type[start:stop] == _FIRST).view(-1, 1, 1)
                if memory is None:
                    shape = stop - start, rows[0].reward.shape[1], policy.memory_size
                    memory = torch.zeros(shape, device=begins.device)
                memory = memory.masked_fill(begins, 0)
            with self.graphs.eager("rows", stop - start, generator is None):
                acted = policy.act(own, generator, memory)
            actions.append(acted["action"])
            memories.append(acted.get("memory"))
        together = actions[0] if len(actions) == 1 else torch.cat(actions)
        return self._to_host(together), memories

    @abstractmethod
    def _gather(self, rows: Sequence[TimeStep]) -> tuple[dict[str, Tensor], Tensor]:
        """Copy rows side by side to where policies act; valid until the next call.

        Returns:
            observation name -> [B, ...]; and [B] step types.
        """

    @abstractmethod
    def _to_host(self, action: Tensor) -> Array:
        """Wait for actions that are not stored, on the host, valid until the next call."""


@dataclass(eq=False)
class HostStaging(Staging):
    """Staging of a policy that acts on the host: rows are stored at once, and gathered to act."""

    def __post_init__(self) -> None:
        """Load nothing yet."""
        self._acting: Sequence[RowTarget] = ()
        self._actions: Array | None = None
        # Name and shape of a row -> [rows, ...] of the largest batch so far, as a tensor and for
        # NumPy: opponents may be shown more agents than the run's policy.
        self._gathered: dict[tuple[str, tuple[int, ...]], tuple[Tensor, Array]] = {}

    def prepare(self, policy: Policy) -> None:
        """Do nothing: acting on the host needs no preparation."""

    @override
    def load(self, acting: Sequence[RowTarget], others: Sequence[RowTarget] = ()) -> None:
        for timestep, unroll, step, _ in (*acting, *others):
            assert unroll is not None
            arrays = unroll.host
            arrays["step_type"][step] = timestep.step_type
            arrays["reward"][step] = timestep.reward
            arrays["discount"][step] = timestep.discount
            for name, array in timestep.observation.items():
                arrays[OBSERVATION + name][step] = array
        self._acting = acting

    def store(self) -> None:
        """Do nothing: `load` has stored the rows."""

    @override
    def act(self, policy: Policy) -> Tensor | None:
        acting, memory, before = self._acting, self.memory, None
        observation, step_type = self._gather([target.timestep for target in acting])
        if memory is not None:
            slots = [np.arange(target.num_envs) + target.first_slot for target in acting]
            places = torch.from_numpy(memory.places(np.concatenate(slots)))
            before = memory.load(places, step_type == _FIRST)
        acted = policy.act(observation, self.generator, before)
        if memory is not None:
            memory.remember(places, acted.pop("memory"))
        # The actions are stored beside their rows. Of the recurrent state the unroll keeps what its
        # first row was acted on with.
        outputs: dict[str, Array] = {name: value.numpy() for name, value in acted.items()}
        stop = 0
        for timestep, unroll, step, _ in acting:
            start, stop = stop, stop + len(timestep.step_type)
            assert unroll is not None
            for name, array in outputs.items():
                unroll.host[name][step] = array[start:stop]
            if before is not None and step == 0:
                unroll.host["memory"][0] = before[start:stop].numpy()
        self._actions = outputs["action"]
        return before

    @override
    def actions(self) -> Array:
        assert self._actions is not None
        return self._actions

    @override
    def _gather(self, rows: Sequence[TimeStep]) -> tuple[dict[str, Tensor], Tensor]:
        # A second copy, beside the one to the unroll: acting reads torch's own memory, side by side
        # and always aligned alike. Sums depend on alignment, and an unroll's columns vary in it.
        step_type = np.concatenate([row.step_type for row in rows])
        total, observation = len(step_type), {}
        for name, first in rows[0].observation.items():
            key = name, first.shape[1:]
            known = self._gathered.get(key)
            if known is None or len(known[0]) < total:
                dtype = getattr(torch, first.dtype.name)
                tensor = torch.empty((total, *first.shape[1:]), dtype=dtype)
                known = self._gathered[key] = tensor, tensor.numpy()
            tensor, array = known
            np.concatenate([row.observation[name] for row in rows], out=array[:total])
            observation[name] = tensor[:total]
        return observation, torch.from_numpy(step_type)

    @override
    def _to_host(self, action: Tensor) -> Array:
        array: Array = action.numpy()
        return array


class Packet:
    """N records, and three numbers of each, in one piece of memory.

    Attributes:
        data: [bytes] uint8.
        records: [N, bytes] uint8.
        index: [3, N] int64 indices: of each record's place in the arena; of its slot's recurrent
            state; of the column of the unroll that it is the first row of. 0: nowhere.
    """

    def __init__(self, data: Tensor, record: Record, num_rows: int) -> None:
        """Look at `Packet.size` bytes."""
        middle = num_rows * record.num_bytes
        self.data = data
        self.records = data[:middle].view(num_rows, record.num_bytes)
        self.index = data[middle:].view(torch.int64).view(_INDICES, num_rows)

    @staticmethod
    def size(record: Record, num_rows: int) -> int:
        """Bytes of a packet."""
        return num_rows * (record.num_bytes + _INDICES * _INDEX_BYTES)

    @staticmethod
    def rows(record: Record, num_bytes: int) -> int:
        """Records of a packet of this size in bytes."""
        return num_bytes // Packet.size(record, 1)


class _Buffer:
    """Pinned memory for packets.

    Attributes:
        data: [bytes] uint8.
        views: name -> [rows, ...] of the records in it, for NumPy; more rows than any packet has.
        copied: marked when what is in it is on its way.
        busy: whether it may still be.
    """

    def __init__(self, record: Record, num_rows: int, device: torch.device, copied: Fence) -> None:
        pinned = device.type == "cuda"
        size = Packet.size(record, num_rows)
        self.data = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        records = Packet(self.data, record, num_rows).records
        self.views = {name: field.of(records).numpy() for name, field in record.fields.items()}
        self.num_rows = num_rows
        self.copied = copied
        self.busy = False


@dataclass(eq=False)
class PackedStaging(Staging):
    """Staging of a policy that acts on a device, see the module.

    Attributes:
        storage: storage of the rows.
        copied: bytes copied so far, by direction; see LearnerMetrics.
        most_rows: rows of the largest batch that is expected.
    """

    storage: UnrollStorage[Any]
    copied: dict[str, int]
    most_rows: int

    def __post_init__(self) -> None:
        """Load nothing yet."""
        storage, graphs = self.storage, self.graphs
        record = storage.arena.record
        assert record is not None
        self._record = record
        self._device = storage.device
        self._fills_up = graphs.enabled
        self._buffers: list[_Buffer] = []
        self._packet: Packet | None = None
        self._acting, self._on_graph = 0, False  # rows of it; whether a graph acts on it
        self._most = _MOST_ROWS  # of the largest graph
        self._prepared = self._told = False  # all graphs are there; larger batches were spoken of
        self._filled_up: dict[int, Tensor] = {}  # by size: what graphs read
        self._captured_act = Captured(
            "act", self._act, graphs, [self.generator], max_graphs=_MAX_GRAPHS, in_place=True
        )
        self._before: dict[int, Tensor] = {}  # by size: what was remembered, which graphs read
        self._back, self._others_back = (Readback(storage.device, sleeps=False) for _ in range(2))

    @override
    def load(self, acting: Sequence[RowTarget], others: Sequence[RowTarget] = ()) -> None:
        if others:
            self._write(self._send(others))
        self._acting = sum(p.num_envs for p in acting)
        self._on_graph = self._fills_up and self._acting <= self._most
        self._packet = self._send(acting, fills_up=self._fills_up) if acting else None

    @override
    def store(self) -> None:
        if self._packet is not None:
            self._write(self._packet)

    @override
    def act(self, policy: Policy) -> Tensor | None:
        packet, memory = self._packet, self.memory
        assert packet is not None
        before = None if memory is None else self._remembered(packet, memory)
        given = {"packet": packet.data} | ({} if before is None else {"memory": before})
        if self._on_graph:
            outputs = self._captured_act(given, policy=policy)
        else:
            outputs = self._uncaptured_step(given, policy)
        self._return(self._back, outputs["action"][: self._acting])
        if memory is not None:
            memory.remember(packet.index[1], outputs["memory"])
        with self.storage.memory_lock:
            arena = self.storage.arena
            arena.records.index_copy_(0, packet.index[0], outputs["records"])
            if before is not None:
                arena.arrays["memory"][0].index_copy_(0, packet.index[2], before)
        # It outlives the next act.
        return before if before is None else before[: self._acting].clone()

    def prepare(self, policy: Policy) -> None:
        """Act beforehand on rows of every size, which are stored nowhere."""
        if not self._fills_up:
            return
        largest = min(_MOST_ROWS, max(_LEAST_ROWS, self.most_rows))
        while largest > _LEAST_ROWS and Packet.size(self._record, largest) > _MOST_BYTES:
            largest //= 2
        most = self._most = 1 << (largest - 1).bit_length()
        while len(self._buffers) < _NUM_BUFFERS:
            self._buffers.append(_Buffer(self._record, most, self._device, Fence(self._device)))
        self._back.reserve(most * self._record.fields["action"].num_bytes)
        random = self.generator.get_state()
        size = _LEAST_ROWS
        while True:
            packet = self._empty(size)
            given = {"packet": packet.data}
            if self.memory is not None:
                given["memory"] = self._remembered(packet, self.memory)
            for _ in range(CALLS_TO_CAPTURE):
                self._captured_act(given, policy=policy)
            if size >= most:
                break
            size *= 2
        self.generator.set_state(random)
        self._prepared = True

    def _empty(self, size: int) -> Packet:
        """A packet at the address that graphs of this size read: of zeros, all actions legal."""
        if size not in self._filled_up:
            num_bytes = Packet.size(self._record, size)
            data = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            self._filled_up[size] = data
        packet = Packet(self._filled_up[size].zero_(), self._record, size)
        mask = self._record.fields.get(OBSERVATION + ACTION_MASK)
        if mask is not None:
            mask.of(packet.records).fill_(1)
        return packet

    def _remembered(self, packet: Packet, memory: SlotMemory) -> Tensor:
        """Return the recurrent state before each row, where graphs read it."""
        begins = self._record.fields["step_type"].of(packet.records) == _FIRST
        before = memory.load(packet.index[1], begins)
        if len(before) > self._most:
            return before
        if len(before) not in self._before:
            self._before[len(before)] = torch.empty_like(before)
        return self._before[len(before)].copy_(before)

    def _uncaptured_step(self, given: Mapping[str, Tensor], policy: Policy) -> dict[str, Tensor]:
        """Act without a graph; the first time say so, and why."""
        size = Packet.rows(self._record, given["packet"].numel())
        self.graphs.eager_calls["act"] += 1
        if self._prepared and not self._told:
            self._told = True
            logger.warning(
                "a batch of %d environments is acted on without a CUDA graph, which is slower: "
                "before the first row graphs were captured for up to %d, and none is while "
                "environments wait. murmur_learner_eager_calls_total counts such batches; "
                "learner.batcher.max_batch_envs=%d and sessions of no more environments make none",
                self._acting,
                self._most,
                self._most,
            )
        with self.graphs.eager("act", size):
            return self._act(given, policy=policy)

    @override
    def actions(self) -> Array:
        return self._arrived(self._back)

    def _act(self, given: Mapping[str, Tensor], *, policy: Policy) -> dict[str, Tensor]:
        """Act, all on the device: what is captured. What others may move is written elsewhere.

        Returns:
            "action", "records" as they are stored, and what is remembered now as "memory".
        """
        data = given["packet"]
        packet = Packet(data, self._record, Packet.rows(self._record, data.numel()))
        acted = policy.act(self._observation(packet), self.generator, given.get("memory"))
        remembered = {"memory": acted.pop("memory")} if "memory" in given else {}
        records = self._record.filled(packet.records, acted)
        return {"action": acted["action"], "records": records, **remembered}

    def _observation(self, packet: Packet) -> dict[str, Tensor]:
        return {
            name.removeprefix(OBSERVATION): field.of(packet.records)
            for name, field in self._record.fields.items()
            if name.startswith(OBSERVATION)
        }

    @override
    def _gather(self, rows: Sequence[TimeStep]) -> tuple[dict[str, Tensor], Tensor]:
        if rows[0].reward.shape[1] != self.storage.spec.num_agents:
            return self._gather_game(rows)
        packet = self._send([RowTarget(row) for row in rows])
        return self._observation(packet), self._record.fields["step_type"].of(packet.records)

    def _gather_game(self, rows: Sequence[TimeStep]) -> tuple[dict[str, Tensor], Tensor]:
        """Copy rows of all agents of a league's game, which are no records of the run."""
        arrays = {
            name: np.concatenate([row.observation[name] for row in rows])
            for name in rows[0].observation
        }
        step_type = np.concatenate([row.step_type for row in rows])
        self.copied["to_device"] += step_type.nbytes + sum(x.nbytes for x in arrays.values())
        observation = {name: torch.from_numpy(x).to(self._device) for name, x in arrays.items()}
        return observation, torch.from_numpy(step_type).to(self._device)

    @override
    def _to_host(self, action: Tensor) -> Array:
        self._return(self._others_back, action)
        return self._arrived(self._others_back)

    def _return(self, back: Readback, action: Tensor) -> None:
        """Copy actions to the host behind what the device has to do."""
        back.send(action)
        self.copied["to_host"] += action.nbytes

    def _arrived(self, back: Readback) -> Array:
        """Wait for actions, and so for all that was sent before them."""
        actions: Array = back.wait()[0].numpy()
        for buffer in self._buffers:
            buffer.busy = False
        return actions

    def _send(self, placements: Sequence[RowTarget], *, fills_up: bool = False) -> Packet:
        """Gather rows and copy them to the device.

        Args:
            placements: targets of the rows.
            fills_up: whether to fill up: to a size that graphs have, where they read it; or,
                for libraries to see few shapes, to a multiple of the largest.
        """
        count = size = sum(p.num_envs for p in placements)
        if fills_up and count > self._most:
            size, fills_up = -(-count // self._most) * self._most, False
        elif fills_up:
            size = max(_LEAST_ROWS, 1 << (count - 1).bit_length())
        buffer = self._free_buffer(size)
        num_bytes = Packet.size(self._record, size)
        own = buffer.data[:num_bytes]
        self._fill(placements, buffer.views, Packet(own, self._record, size), count)
        if fills_up:
            if size not in self._filled_up:
                self._filled_up[size] = torch.empty_like(own, device=self._device)
            on_device = self._filled_up[size].copy_(own, non_blocking=True)
        else:
            on_device = own.to(self._device, non_blocking=True)
        buffer.copied.mark()
        buffer.busy = True
        self.copied["to_device"] += num_bytes
        return Packet(on_device, self._record, size)

    def _free_buffer(self, num_rows: int) -> _Buffer:
        """The buffer that was filled longest ago."""
        buffer = self._buffers.pop(0) if len(self._buffers) == _NUM_BUFFERS else None
        if buffer is not None and buffer.busy:
            buffer.copied.reached()  # else rows on their way would be written over
        if buffer is None or buffer.num_rows < num_rows:
            copied = Fence(self._device) if buffer is None else buffer.copied
            buffer = _Buffer(self._record, num_rows, self._device, copied)
        self._buffers.append(buffer)
        return buffer

    def _fill(
        self,
        placements: Sequence[RowTarget],
        views: Mapping[str, Array],
        packet: Packet,
        count: int,
    ) -> None:
        """Write rows, and where they go, to a buffer; fill it up with the first."""
        index = packet.index.numpy()
        for name in self._record.outputs:
            views[name][: index.shape[1]] = 0  # of rows that are not acted on: legal, whatever else
        columns, stop = self.storage.arena.columns, 0
        for timestep, unroll, step, first_slot in placements:
            start, stop = stop, stop + len(timestep.step_type)
            views["step_type"][start:stop] = timestep.step_type
            views["reward"][start:stop] = timestep.reward
            views["discount"][start:stop] = timestep.discount
            for name, array in timestep.observation.items():
                views[OBSERVATION + name][start:stop] = array
            if unroll is None:
                index[:, start:stop] = 0
                continue
            column = np.arange(unroll.first_column, unroll.first_column + stop - start)
            index[0, start:stop] = column + step * columns
            index[1, start:stop] = SlotMemory.places(np.arange(stop - start) + first_slot)
            index[2, start:stop] = 0 if step else column
        if count < index.shape[1]:
            for view in views.values():
                view[count : index.shape[1]] = view[0]
            index[:, count:] = 0

    def _write(self, packet: Packet) -> None:
        """Store records as they are."""
        words = packet.records.view(torch.int64)
        with self.storage.memory_lock:
            self.storage.arena.records.index_copy_(0, packet.index[0], words)


def make_staging(
    storage: UnrollStorage[Any],
    memory_size: int,
    generator: torch.Generator,
    graphs: Graphs,
    copied: dict[str, int],
    most_rows: int = 0,
) -> Staging:
    """Return the staging for the storage's device.

    Args:
        storage: storage of the rows.
        memory_size: numbers that an agent's policy remembers, Z; 0: none.
        generator: randomness of exploration.
        graphs: CUDA graphs of the inference thread.
        copied: bytes copied so far, by direction; see LearnerMetrics.
        most_rows: rows of the largest batch that is expected.
    """
    agents, device = storage.spec.num_agents, storage.device
    memory = SlotMemory(agents, memory_size, device) if memory_size else None
    if storage.arena.record is None:
        return HostStaging(generator, memory, graphs)
    return PackedStaging(generator, memory, graphs, storage, copied, most_rows)
