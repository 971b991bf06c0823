"""The state of a worker in shared memory, for its parent process."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Position = tuple[int, int, int, int]
_ONE = np.uint64(1)


def _flag(word: int, meaning: str) -> property:
    """Make a flag in one word of a heartbeat."""

    def get(heartbeat: "Heartbeat") -> bool:
        return bool(heartbeat._words[word])

    def set_(heartbeat: "Heartbeat", value: bool) -> None:
        heartbeat._words[word] = value

    return property(get, set_, doc=meaning)


class Heartbeat:
    """The state of a worker, in shared memory that its parent reads.

    Written by the worker, read by the parent; each field is one aligned word. Each session of the
    worker has its own rows, one for each copy.

    Attributes:
        head: [3] number of begins and ends of steps (odd during a step), number of the first row of
            the session that steps, and number of its rows.
        at: [2] number of the copy being stepped, or -1, and not 0 while one is being made.
    """

    _HEAD = 8
    closing = _flag(5, "All sessions are over; the environments are closed and the worker exits.")
    # An exit code would not be enough: an environment may end the process with any code.
    gave_up = _flag(6, "The log has an error that the user must fix: a restart cannot help.")
    # SIGTERM would not be enough: an environment may have replaced its handler.
    stop_asked = _flag(7, "The parent asks the worker to end.")

    def __init__(self, memory: Any, num_envs: int) -> None:  # noqa: ANN401 - a buffer
        """Map the fields on `memory`, of `size(num_envs)` words of 64 bits."""
        words = np.frombuffer(memory, np.uint64)
        self.head = words[0:3]
        self.at = words[3:5].view(np.int64)
        self._words = words
        rows = words[self._HEAD :].reshape(2, num_envs)
        self._seeds, self._steps = rows[0], rows[1].view(np.int64)

    @classmethod
    def size(cls, num_envs: int) -> int:
        """Return the number of 64-bit words of a heartbeat of `num_envs` environments."""
        return cls._HEAD + 2 * num_envs

    @classmethod
    def private(cls, num_envs: int) -> "Heartbeat":
        """Make a heartbeat in private memory, which no process watches."""
        return cls(bytearray(8 * cls.size(num_envs)), num_envs)

    def part(self, first: int, num_envs: int) -> "SessionHeartbeat":
        """Return the rows of one session."""
        rows = slice(first, first + num_envs)
        return SessionHeartbeat(self, first, self._seeds[rows], self._steps[rows], self.at)

    def begin_making(self) -> None:
        """Mark that environments are being imported and made; set before the worker starts."""
        self.at[1] = 1

    def note_start(self) -> None:
        """Mark that the worker has imported murmur; from now on environments take the time."""
        self.at[1] = 2

    def end_making(self) -> None:
        """Mark that the environments are made."""
        self.at[1] = 0

    @property
    def making(self) -> bool:
        """Return whether an environment is being made, at the start or after a fault."""
        return bool(self.at[1])

    @property
    def turns(self) -> int:
        """Return the number of begins and ends of steps: odd during a step."""
        return int(self.head[0])

    @property
    def position(self) -> Position:
        """Return a value that changes whenever there is progress.

        Steps begun or ended, copy being stepped, 1 or 2 while one is made, 1 while all close.
        """
        return int(self.head[0]), int(self.at[0]), int(self.at[1]), int(self.closing)

    def where(self) -> str:
        """Describe the episode of the step under way."""
        first, count, at = int(self.head[1]), int(self.head[2]), int(self.at[0])
        if count == 1 or at >= 0:
            i = first + max(at, 0)
            return f"in the episode with seed {self._seeds[i]} at step {self._steps[i]}"
        seeds, steps = self._seeds[first : first + count], self._steps[first : first + count]
        return (
            f"in one of {count} episodes (seeds {', '.join(map(str, seeds))}) "
            f"at steps {steps.min()} to {steps.max()}"
        )

    def sample(self) -> tuple[int, int]:
        """Return index and split of the sample being read, in a worker that reads samples."""
        return int(self._seeds[0]), int(self._steps[0])


@dataclass(frozen=True)
class SessionHeartbeat:
    """A session's rows in the worker's heartbeat.

    Attributes:
        whole: heartbeat of the worker.
        first: number of the first row.
        seeds: [N] seeds of the episodes under way.
        steps: [N] number of steps of each episode since FIRST.
        at: [2] number of the copy being stepped, or -1 if copies are not stepped one by one; and
            not 0 while an environment is being made.
    """

    whole: Heartbeat
    first: int
    seeds: NDArray[np.uint64]
    steps: NDArray[np.int64]
    at: NDArray[np.int64]

    def enter(self, restart: NDArray[np.bool_] | None = None) -> None:
        """Mark that the session's environment begins a step, or is read by a baseline.

        Args:
            restart: [N] bool, true for copies that begin an episode; None if there is no step.
        """
        if restart is not None:
            self.steps[:] += 1
            self.steps[restart] = 0
        head, at = self.whole.head, self.at
        head[1], head[2], at[0], at[1] = self.first, len(self.steps), -1, 0
        head[0] += _ONE

    def leave(self) -> None:
        """Mark that the step has ended."""
        self.whole.head[0] += _ONE
