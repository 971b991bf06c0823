"""Storages: the acting side writes unrolls to them, the learner samples batches from them.

The inference thread writes, the thread that learns samples (sync: the same one); one lock guards
what they share, none the time steps of open unrolls.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from learner_service.device.streams import Turns
from learner_service.storage.frames import Frames
from learner_service.storage.unroll import OBSERVATION, Arena, Unroll, time_step_layout
from shared.wire.spec import EnvSpec


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
        return {
            k.removeprefix(OBSERVATION): v
            for k, v in self.arrays.items()
            if k.startswith(OBSERVATION)
        }


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
        on_room: called when there may be room for what was refused before.
    """

    def __init__(self, device: torch.device) -> None:
        """Make an empty storage."""
        self.device = device
        self.inserted = self.dropped = 0
        self.environments_limit = 0
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
        turns: turns of the inference thread, which writes, and the thread that learns.
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
        self.turns = Turns(device)
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
                    with self.turns.take():
                        self.arena.fit(self.length + 1)
                    unroll.place(self.arena)
            else:
                with self.turns.take():
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
        with self._changed, self.turns.take():
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
