"""Places and memory for sessions: training and evaluation have their own, and cannot take others'.

A stream has a place from its beginning, and is admitted only if the memory that its messages may
take is there too. So what all streams together can make the learner hold is known beforehand: no
order in which they send can exceed it.
"""

from typing import Literal, TypeAlias

import grpc

from learner_service.serving.access import Refused
from learner_service.telemetry.metrics import LearnerMetrics
from shared.config import LearnerConfig

Mode: TypeAlias = Literal["train", "evaluate"]
_MIB = 1024 * 1024


class Places:
    """Counts the places and bytes that are taken. Used on the event loop."""

    def __init__(self, config: LearnerConfig, metrics: LearnerMetrics) -> None:
        """All places are free."""
        self._sessions: dict[Mode, tuple[str, int]] = {
            "train": ("learner.max_sessions", config.max_sessions),
            "evaluate": ("learner.max_evaluation_sessions", config.max_evaluation_sessions),
        }
        self._mib: dict[Mode, tuple[str, float]] = {
            "train": ("learner.max_in_flight_mib", config.max_in_flight_mib),
            "evaluate": (
                "learner.max_evaluation_in_flight_mib",
                config.max_evaluation_in_flight_mib,
            ),
        }
        self._metrics = metrics
        self.taken: dict[Mode, int] = {"train": 0, "evaluate": 0}
        self.reserved: dict[Mode, int] = {"train": 0, "evaluate": 0}

    def take(self, role: str) -> "Place":
        """A place for a new stream, until Hello says its mode: an evaluator's is for evaluation.

        Raises:
            Refused: if there is none.
        """
        return Place(self, "evaluate" if role == "evaluator" else "train")

    def free(self, mode: Mode) -> int:
        """Free places."""
        return max(0, self._sessions[mode][1] - self.taken[mode])

    def enter(self, mode: Mode) -> None:
        """Take a place.

        Raises:
            Refused: naming the limit.
        """
        name, limit = self._sessions[mode]
        if self.taken[mode] >= limit:
            what = "training" if mode == "train" else "evaluation"
            raise Refused(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "limit",
                f"{self.taken[mode]} {what} sessions are connected, the limit is {name}={limit}",
            )
        self.taken[mode] += 1

    def leave(self, mode: Mode, num_bytes: int) -> None:
        """Give a place and its memory back."""
        self.taken[mode] -= 1
        self._reserve(mode, -num_bytes)

    def reserve(self, mode: Mode, num_bytes: int) -> None:
        """Set memory aside for the messages of one session.

        Raises:
            Refused: naming the bytes and the limit.
        """
        name, limit = self._mib[mode]
        taken = self.reserved[mode]
        if taken + num_bytes > limit * _MIB:
            never = num_bytes > limit * _MIB
            code = grpc.StatusCode
            raise Refused(
                code.FAILED_PRECONDITION if never else code.RESOURCE_EXHAUSTED,
                "memory",
                f"the messages of this session take {num_bytes / _MIB:.1f} MiB, those of the "
                f"sessions connected {taken / _MIB:.1f} MiB, the limit is {name}={limit:g}; "
                "raise it, or use fewer environments in a session",
            )
        self._reserve(mode, num_bytes)

    def _reserve(self, mode: Mode, num_bytes: int) -> None:
        self.reserved[mode] += num_bytes
        self._metrics.gauge("in_flight_bytes", mode=mode).set(self.reserved[mode])


class Place:
    """The place of one stream; a context that gives it back."""

    def __init__(self, places: Places, mode: Mode) -> None:
        """Take a place of this mode.

        Raises:
            Refused: if there is none.
        """
        places.enter(mode)
        self._places, self._mode, self._bytes = places, mode, 0

    def __enter__(self) -> "Place":
        """It is taken already."""
        return self

    def __exit__(self, *_: object) -> None:
        """Give it back."""
        self._places.leave(self._mode, self._bytes)

    def claim(self, mode: Mode, num_bytes: int) -> None:
        """Change to a place of this mode, with memory for this number of bytes of messages.

        Raises:
            Refused: if there is no such place, or not the memory.
        """
        if mode != self._mode:
            self._places.enter(mode)
            self._places.leave(self._mode, self._bytes)
            self._mode = mode
        self._places.reserve(mode, num_bytes)
        self._bytes = num_bytes
