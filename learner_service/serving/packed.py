"""Acting on a device: one packed copy there, one indexed write, one copy back.

The rows of a batch are gathered in pinned memory as records. With them travels where they are
stored: so one operation stores all of them with the actions, whatever the number of arrays and
sessions. Up to some size the rest is one CUDA graph: batches are filled up to a power of two with
copies of their first row, which are stored nowhere. The graphs of all sizes are captured before the
first rows come, and none later, while environments wait: larger batches are acted on without a
graph. No graph knows where rows are stored, so that more sessions leave them as they are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from murmur.learner_service.device.cuda_graph import CALLS_TO_CAPTURE, Captured, Graphs
from murmur.learner_service.device.readback import Readback
from murmur.learner_service.device.streams import Fence
from murmur.learner_service.learning.base import Policy
from murmur.learner_service.serving.staging import HostStaging, RowTarget, SlotMemory, Staging
from murmur.learner_service.storage.storage import Record, UnrollStorage
from murmur.learner_service.telemetry.copied import Copied
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


def make_staging(
    storage: UnrollStorage[Any],
    memory_size: int,
    generator: torch.Generator,
    graphs: Graphs,
    copied: Copied,
    most_rows: int = 0,
) -> Staging:
    """Return the staging for the storage's device.

    Args:
        storage: storage of the rows.
        memory_size: numbers that an agent's policy remembers, Z; 0: none.
        generator: randomness of exploration.
        graphs: CUDA graphs of the inference thread.
        copied: counters of bytes to the device and back.
        most_rows: rows of the largest batch that is expected.
    """
    agents, device = storage.spec.num_agents, storage.device
    memory = SlotMemory(agents, memory_size, device) if memory_size else None
    if storage.arena.record is None:
        return HostStaging(generator, memory, graphs)
    return PackedStaging(generator, memory, graphs, storage, copied, most_rows)


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
    """Staging of a policy that acts on a device, as the module says.

    Attributes:
        storage: storage of the rows.
        copied: counters of bytes to the device and back.
        most_rows: rows of the largest batch that is expected.
    """

    storage: UnrollStorage[Any]
    copied: Copied
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
        self.copied.to_device += step_type.nbytes + sum(x.nbytes for x in arrays.values())
        observation = {name: torch.from_numpy(x).to(self._device) for name, x in arrays.items()}
        return observation, torch.from_numpy(step_type).to(self._device)

    @override
    def _to_host(self, action: Tensor) -> Array:
        self._return(self._others_back, action)
        return self._arrived(self._others_back)

    def _return(self, back: Readback, action: Tensor) -> None:
        """Copy actions to the host behind what the device has to do."""
        back.send(action)
        self.copied.to_host += action.nbytes

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
        self.copied.to_device += num_bytes
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
