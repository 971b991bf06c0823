"""Acting on a device: one packed copy there, one indexed write, one copy back.

The rows of a batch are gathered in pinned memory as records. With them travels where they are
stored: so one operation stores all of them with the actions, whatever the number of arrays and
sessions.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from learner_service.algorithms.base import Policy
from learner_service.runtime.streams import Fence
from learner_service.serving.slot_memory import SlotMemory
from learner_service.serving.staging import HostStaging, Placement, Staging
from learner_service.storage.arena import Record
from learner_service.storage.storage import OBSERVATION, Storage
from learner_service.telemetry.copied import Copied
from shared.timestep import Array, StepType

_FIRST = int(StepType.FIRST)
_INDEX_BYTES = 8
_INDICES = 3
_NUM_BUFFERS = 2  # of pinned memory: one is gathered in while the other may be on its way


def make_staging(storage: Storage[Any], copied: Copied) -> Staging:
    """What suits the storage's device; `copied` counts what goes there and back."""
    record = storage.arena.record
    return HostStaging() if record is None else PackedStaging(storage, record, copied)


class Packet:
    """N records, and three numbers of each, in one piece of memory.

    Attributes:
        data: [bytes] uint8.
        records: [N, bytes] uint8.
        index: [3, N] int64: where in the arena each is stored; where what its slot remembers is;
            the column of an unroll that it is the first row of. 0: nowhere.
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


class _Buffer:
    """Pinned memory for packets.

    Attributes:
        data: [bytes] uint8.
        views: name -> [rows, ...] of the records in it, for NumPy; more rows than any packet has.
        copied: marked when what is in it is on its way.
    """

    def __init__(self, record: Record, num_rows: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        size = Packet.size(record, num_rows)
        self.data = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        records = Packet(self.data, record, num_rows).records
        self.views = {name: field.of(records).numpy() for name, field in record.fields.items()}
        self.num_rows, self.copied = num_rows, Fence(device)


class PackedStaging(Staging):
    """See the module."""

    def __init__(self, storage: Storage[Any], record: Record, copied: Copied) -> None:
        self._copied = copied
        self._storage, self._record = storage, record
        self._device = storage.device
        self._buffers: list[_Buffer] = []
        self._packet: Packet | None = None
        self._back: Tensor | None = None
        self._came_back = Fence(storage.device)

    def load(self, acting: Sequence[Placement], others: Sequence[Placement] = ()) -> None:
        """See Staging."""
        if others:
            self._write(self._send(others))
        self._packet = self._send(acting) if acting else None

    def store(self) -> None:
        """See Staging."""
        if self._packet is not None:
            self._write(self._packet)

    def act(
        self, policy: Policy, generator: torch.Generator, memory: SlotMemory | None
    ) -> tuple[Array, Tensor | None]:
        """See Staging."""
        assert self._packet is not None
        action, before = self._step(self._packet, policy, generator, memory)
        return self.to_host(action), before

    def _step(
        self,
        packet: Packet,
        policy: Policy,
        generator: torch.Generator,
        memory: SlotMemory | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Act and store, all on the device."""
        stored, places, firsts = packet.index.unbind(0)
        before = None
        if memory is not None:
            begins = self._record.fields["step_type"].of(packet.records) == _FIRST
            before = memory.recall(places, begins)
        acted = policy.act(self._observation(packet), generator, before)
        if memory is not None and before is not None:
            memory.remember(places, acted.pop("memory"))
        records = self._record.filled(packet.records, acted)
        with self._storage.turns.take():
            arena = self._storage.arena
            arena.records.index_copy_(0, stored, records)
            if before is not None:
                arena.arrays["memory"][0].index_copy_(0, firsts, before)
        return acted["action"], before

    def observation(self) -> dict[str, Tensor]:
        """See Staging."""
        assert self._packet is not None
        return self._observation(self._packet)

    def _observation(self, packet: Packet) -> dict[str, Tensor]:
        return {
            name.removeprefix(OBSERVATION): field.of(packet.records)
            for name, field in self._record.fields.items()
            if name.startswith(OBSERVATION)
        }

    def step_type(self) -> Tensor:
        """See Staging."""
        assert self._packet is not None
        return self._record.fields["step_type"].of(self._packet.records)

    def to_host(self, action: Tensor) -> Array:
        """See Staging."""
        back = self._back
        if back is None or len(back) < len(action) or back.shape[1:] != action.shape[1:]:
            pinned = self._device.type == "cuda"
            back = self._back = torch.empty(action.shape, dtype=action.dtype, pin_memory=pinned)
        own = back[: len(action)]
        own.copy_(action, non_blocking=True)
        self._came_back.mark()
        self._copied.to_host += own.nbytes
        self._came_back.reached()
        array: Array = own.numpy()
        return array

    def _send(self, placements: Sequence[Placement]) -> Packet:
        """Gather rows and copy them to the device."""
        count = sum(p.num_envs for p in placements)
        buffer = self._free_buffer(count)
        size = Packet.size(self._record, count)
        self._gather(placements, buffer.views, Packet(buffer.data[:size], self._record, count))
        on_device = buffer.data[:size].to(self._device, non_blocking=True)
        buffer.copied.mark()
        self._copied.to_device += size
        return Packet(on_device, self._record, count)

    def _free_buffer(self, num_rows: int) -> _Buffer:
        """The buffer that was filled last but one."""
        buffer = self._buffers.pop(0) if len(self._buffers) == _NUM_BUFFERS else None
        if buffer is not None:
            buffer.copied.reached()  # else rows on their way would be written over
        if buffer is None or buffer.num_rows < num_rows:
            buffer = _Buffer(self._record, num_rows, self._device)
        self._buffers.append(buffer)
        return buffer

    def _gather(
        self, placements: Sequence[Placement], views: Mapping[str, Array], packet: Packet
    ) -> None:
        """Write rows, and where they go, to a buffer."""
        index = packet.index.numpy()
        for name in self._record.outputs:
            views[name][: index.shape[1]] = 0  # of rows that are not acted on: legal, whatever else
        columns, stop = self._storage.arena.columns, 0
        for timestep, unroll, row, first_slot in placements:
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
            index[0, start:stop] = column + row * columns
            index[1, start:stop] = SlotMemory.places(np.arange(stop - start) + first_slot)
            index[2, start:stop] = 0 if row else column

    def _write(self, packet: Packet) -> None:
        """Store records as they are."""
        words = packet.records.view(torch.int64)
        with self._storage.turns.take():
            self._storage.arena.records.index_copy_(0, packet.index[0], words)
