"""What the learner takes batches from, and what a checkpoint holds of it."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor


class Taken(Protocol):
    """What the learner needs to know of a batch, whatever the algorithm makes of it."""

    arrays: dict[str, Tensor]

    @property
    def rows(self) -> int:
        """Joint transitions that an update learns from; of images, samples."""

    @property
    def version(self) -> Sequence[int]:
        """Policy versions whose lag is of interest; empty if none."""


@dataclass(frozen=True)
class SavedPart:
    """What a rank saved of its storage, for ranks of another number to share.

    Attributes:
        rank: that saved it.
        state: its `state_dict`.
        chunks: number -> reads that chunk's arrays.
    """

    rank: int
    state: Mapping[str, Any]
    chunks: Mapping[int, Callable[[], Mapping[str, Tensor]]]


B = TypeVar("B", bound=Taken)


class Feed(ABC, Generic[B]):
    """What the learner takes batches from: a Storage, or samples.

    Attributes:
        device: where rows live.
        inserted: environment rows put where they may be learned from more than once.
        environments_limit: environments whose unrolls may be under way at once; 0: any number.
        on_room: called when there may be room for what was refused before.
    """

    def __init__(self, device: torch.device) -> None:
        """Nothing has come yet."""
        self.device = device
        self.inserted = self.environments_limit = 0
        self.on_room: Callable[[], None] = lambda: None
        self._changed = threading.Condition()

    @property
    def chosen(self) -> dict[str, int]:
        """What was chosen by the environments there are, for the log; empty if nothing is."""
        return {}

    @property
    @abstractmethod
    def ready(self) -> bool:
        """Whether an update is due."""

    @property
    @abstractmethod
    def ready_rows(self) -> int:
        """Environment rows there are to learn from."""

    @property
    def waiting_rows(self) -> int:
        """Environment rows that wait to be learned from for the first time; they are saved."""
        return 0

    def due(self, version: int, timeout_s: float) -> tuple[bool, int]:
        """Wait until an update is due; for the ranks of a group, which take batches together.

        Args:
            version: the current policy version; until it changes, `sample` returns a batch.
            timeout_s: longest wait, seconds.

        Returns:
            whether an update is due; and the number of environment rows dropped because they were
            too old.
        """
        with self._changed:
            return self._changed.wait_for(lambda: self.ready, timeout_s), 0

    @abstractmethod
    def sample(self, version: int, timeout_s: float) -> tuple[B | None, int]:
        """What one update learns from.

        Args:
            version: the current policy version.
            timeout_s: longest wait, seconds.

        Returns:
            a batch, or None if no update was due in time; and the number of environment rows
            dropped because they were too old.
        """

    @abstractmethod
    def done(self, batch: B) -> None:
        """The update that `sample` started has ended."""

    def state_dict(self) -> dict[str, Any]:
        """What of it a checkpoint holds, beside its `chunks`."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; `load_chunk` comes after."""

    def load_parts(self, parts: Sequence[SavedPart], rank: int, size: int) -> None:
        """Continue from what another number of ranks saved: every part has one rank that does.

        Args:
            parts: of all ranks that saved.
            rank: of this feed.
            size: number of ranks now.

        Raises:
            ConfigError: if the feed is configured otherwise.
        """
        for part in parts:
            if part.rank % size == rank:
                self.load_state_dict(part.state)

    def chunks(self) -> Mapping[int, Callable[[], dict[str, Tensor]]]:
        """Parts that changed since the last call, to be saved each in a file of its own."""
        return {}

    def load_chunk(self, number: int, arrays: Mapping[str, Tensor]) -> None:
        """Take a saved part back."""
        raise NotImplementedError
