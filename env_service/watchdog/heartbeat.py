"""What a worker is doing, where another process can see it."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Position = tuple[int, int, int, int]


class Heartbeat:
    """What a worker is doing, where its parent can see it: a page of shared memory.

    Written by the worker, read by the parent; each field is one aligned word. The worker's
    sessions have rows of their own on it, one for each copy.
    """

    _HEAD = 8

    def __init__(self, memory: Any, num_envs: int) -> None:  # noqa: ANN401 - a buffer
        """Read and write `memory`, of `size(num_envs)` words of 64 bits."""
        words = np.frombuffer(memory, np.uint64)
        self._turn, self._first, self._count = words[0:1], words[1:2], words[2:3]
        self.at = words[3:5].view(np.int64)
        self._closing, self._gave_up, self._stop = words[5:6], words[6:7], words[7:8]
        rows = words[self._HEAD :].reshape(2, num_envs)
        self._seeds, self._steps = rows[0], rows[1].view(np.int64)

    @classmethod
    def size(cls, num_envs: int) -> int:
        """Words of 64 bits that the heartbeat of `num_envs` environments takes."""
        return cls._HEAD + 2 * num_envs

    @classmethod
    def private(cls, num_envs: int) -> "Heartbeat":
        """A heartbeat in private memory, which no process watches."""
        return cls(bytearray(8 * cls.size(num_envs)), num_envs)

    def part(self, first: int, num_envs: int) -> "SessionHeartbeat":
        """The rows of one session."""
        rows = slice(first, first + num_envs)
        return SessionHeartbeat(self, first, self._seeds[rows], self._steps[rows], self.at)

    def begin_making(self) -> None:
        """Environments are being imported and made; set before the worker starts."""
        self.at[1] = 1

    def note_start(self) -> None:
        """The worker has imported murmur: from now on all time is the environments'."""
        self.at[1] = 2

    def end_making(self) -> None:
        """They are there."""
        self.at[1] = 0

    def enter(self, first: int, num_envs: int) -> None:
        """A session's environment begins a step."""
        self._first[0], self._count[0], self.at[0], self.at[1] = first, num_envs, -1, 0
        self._turn[0] += np.uint64(1)

    def leave(self) -> None:
        """It has ended."""
        self._turn[0] += np.uint64(1)

    def begin_closing(self) -> None:
        """All sessions are over; what is left is to close the environments and to exit."""
        self._closing[0] = 1

    def ask_to_stop(self) -> None:
        """The parent wants the worker to end: an environment may have taken SIGTERM's handler."""
        self._stop[0] = 1

    @property
    def stop_asked(self) -> bool:
        """See `ask_to_stop`."""
        return bool(self._stop[0])

    def give_up(self) -> None:
        """The worker has logged an error that the user must fix; another start cannot help.

        An exit code alone does not say so: an environment may end the process with any code.
        """
        self._gave_up[0] = 1

    @property
    def gave_up(self) -> bool:
        """See `give_up`."""
        return bool(self._gave_up[0])

    @property
    def making(self) -> bool:
        """Whether an environment is being made, at the start or after a fault."""
        return bool(self.at[1])

    @property
    def closing(self) -> bool:
        """See `begin_closing`."""
        return bool(self._closing[0])

    @property
    def turns(self) -> int:
        """How often a step began or ended: odd during one."""
        return int(self._turn[0])

    @property
    def position(self) -> Position:
        """Changes whenever there is progress.

        Steps begun or ended, the copy being stepped, whether one is being made, whether all close.
        """
        return int(self._turn[0]), int(self.at[0]), int(self.at[1]), int(self._closing[0])

    def where(self) -> str:
        """Text: which episode the step under way is of."""
        first, count, at = int(self._first[0]), int(self._count[0]), int(self.at[0])
        if count == 1 or at >= 0:
            i = first + max(at, 0)
            return f"in the episode with seed {self._seeds[i]} at step {self._steps[i]}"
        seeds, steps = self._seeds[first : first + count], self._steps[first : first + count]
        return (
            f"in one of {count} episodes (seeds {', '.join(map(str, seeds))}) "
            f"at steps {steps.min()} to {steps.max()}"
        )

    def sample(self) -> tuple[int, int]:
        """Index and split of the sample being read, where a worker reads samples."""
        return int(self._seeds[0]), int(self._steps[0])


@dataclass(frozen=True)
class SessionHeartbeat:
    """A session's rows in the worker's heartbeat.

    Attributes:
        whole: the worker's.
        first: number of the first row.
        seeds: [N] seeds of the episodes under way.
        steps: [N] their steps since FIRST.
        at: [2] the copy being stepped, where copies are stepped one by one, else -1; and 1 while
            an environment is being made, else 0.
    """

    whole: Heartbeat
    first: int
    seeds: NDArray[np.uint64]
    steps: NDArray[np.int64]
    at: NDArray[np.int64]

    def enter(self, restart: NDArray[np.bool_]) -> None:
        """The session's environment begins a step; copies to restart begin their episode."""
        self.steps[:] += 1
        self.steps[restart] = 0
        self.whole.enter(self.first, len(self.steps))
