"""Notices ranks without a session: each update takes rows of all ranks, so the others wait."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from shared.process.process import end_process, logger

if TYPE_CHECKING:
    from torch.distributed import Store

_LOOK_EVERY_S = 2.0
_TELL_AFTER_S = 10.0  # sessions that have lost a learner, or move, come back sooner
_TELL_EVERY_S = 30.0


class _Gauge(Protocol):
    def set(self, value: float) -> None:
        """Show a number."""


@dataclass(eq=False)
class SessionWatch:
    """Publishes a rank's number of sessions in the store; rank 0 watches those of all ranks.

    The rounds of the learning threads cannot tell: in the sync pipeline a rank without a session
    takes part in none. This thread says which rank the others wait for. It ends the process with
    code 1 if a run that has made updates makes none for `timeout_s`; all ranks then start again.

    Attributes:
        store: store of all ranks, over a connection of its own.
        rank: number of this process.
        size: number of ranks.
        sessions: sessions of this rank that bring rows, those that wait for Welcome included.
        updates: updates made; None once the run makes no more.
        gauge: number of ranks without a session.
        timeout_s: longest wait for such a rank, seconds.
        look_every_s: time between two looks, seconds.
        tell_after_s: time until the first line of the log, seconds.
    """

    store: "Store"
    rank: int
    size: int
    sessions: Callable[[], int]
    updates: Callable[[], int | None]
    gauge: _Gauge
    timeout_s: float
    look_every_s: float = _LOOK_EVERY_S
    tell_after_s: float = _TELL_AFTER_S

    def __post_init__(self) -> None:
        """Begin to watch."""
        self._told_at = 0.0  # 0: nothing is said of the wait under way
        self._ended = threading.Event()
        self._thread = threading.Thread(name="watch-sessions", target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; the interpreter must not end one that talks to the store."""
        self._ended.set()
        self._thread.join(1.0)

    def _run(self) -> None:
        since, at = time.monotonic(), self.updates()
        try:
            while True:
                self.store.set(_key(self.rank), str(self.sessions()))
                if self.rank == 0:
                    idle, updates = self._idle_ranks(), self.updates()
                    self.gauge.set(len(idle))
                    if updates is None or updates != at or not 0 < len(idle) < self.size:
                        since, at = time.monotonic(), updates
                        self._resolve(idle)
                    else:
                        self._tell(idle, time.monotonic() - since, updates)
                if self._ended.wait(self.look_every_s):
                    return
        except RuntimeError as error:  # all are ending
            logger.debug("the ranks' store does not answer: %s", error)

    def _idle_ranks(self) -> list[int]:
        """Ranks that have said that they have no session."""
        there = [rank for rank in range(self.size) if self.store.check([_key(rank)])]
        return [rank for rank in there if not int(self.store.get(_key(rank)))]

    def _tell(self, idle: list[int], waited_s: float, updates: int) -> None:
        """Say now and then who is waited for, and since when; end a wait that is too long."""
        names = f"{'rank' if len(idle) == 1 else 'ranks'} {', '.join(map(str, idle))}"
        why = (
            f"{names} of {self.size} {'has' if len(idle) == 1 else 'have'} no session, and every "
            f"update takes rows of all ranks: no update for {waited_s:.0f} s"
        )
        advice = (
            "start at least as many sessions (env_server.num_workers x sessions_per_worker) as "
            "learners, name all learners in every env_server.learner, and let sessions move "
            "(env_server.balance_every_s)"
        )
        if updates and waited_s > self.timeout_s:
            logger.error("%s (learner.group_timeout_s); %s", why, advice)
            end_process(1)
        now = time.monotonic()
        if waited_s > self.tell_after_s and now - self._told_at > _TELL_EVERY_S:
            self._told_at = now
            logger.warning("%s; %s", why, advice)

    def _resolve(self, idle: list[int]) -> None:
        """Say that the wait is over, if it was mentioned; without any session it is another one."""
        if self._told_at and not idle:
            logger.info("all ranks have sessions again")
        self._told_at = 0.0


def _key(rank: int) -> str:
    return f"sessions/{rank}"
