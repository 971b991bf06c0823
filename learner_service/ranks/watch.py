"""Watches on the other ranks through the store that they met in: signs of life, and sessions."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from murmur.shared.process.process import end_process, logger

if TYPE_CHECKING:
    from torch.distributed import Store

SILENT_S = 20.0  # far above what a healthy process can keep its interpreter from other threads
_BEATS = 10  # within the limit
_LEFT = 1 << 40  # added to the count of a rank that leaves in order
_LOOK_EVERY_S = 2.0
_TELL_AFTER_S = 10.0  # sessions that have lost a learner, or move, come back sooner
_TELL_EVERY_S = 30.0


class Heartbeat:
    """Counts in the store that the ranks met in, and watches the count of the next rank.

    A collective cannot tell a rank that is paused from one that is busy, and waits for both until
    `learner.group_timeout_s`. This thread beats whatever the others do, so silence is no work. It
    ends the process with code 1; the launcher then restarts all ranks.
    One thread talks to the store, another one watches: the store may be what is silent.
    """

    def __init__(self, store: "Store", rank: int, size: int, silent_s: float = SILENT_S) -> None:
        """Begin to beat and to watch.

        Args:
            store: store that all ranks reach, over a connection of its own.
            rank: rank of this process.
            size: number of ranks.
            silent_s: longest silence of another rank.
        """
        self._store = store
        self._rank = rank
        self._next = (rank + 1) % size
        self._size, self._silent_s = size, silent_s
        self._seen = 0  # the next rank's count, of which each change is a sign of life
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(name="heartbeat", target=self._beat, daemon=True),
            threading.Thread(name="watch-ranks", target=self._watch, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Tell the rank that watches this one not to wait for it."""
        self._ended.set()
        for thread in self._threads:  # the interpreter must not end one that talks to the store
            thread.join(1.0)
        try:
            self._store.add(f"heartbeat/{self._rank}", _LEFT)
        except RuntimeError:  # the rank that keeps the store has left already
            logger.debug("the store is gone")

    def _beat(self) -> None:
        """One thread: count on, and read the next rank's count."""
        try:
            while not self._ended.wait(self._silent_s / _BEATS):
                self._store.add(f"heartbeat/{self._rank}", 1)
                self._seen = self._store.add(f"heartbeat/{self._next}", 0)
        except RuntimeError as error:  # a silence, from here on: it may be that all are ending
            logger.debug("the ranks' store does not answer: %s", error)

    def _watch(self) -> None:
        """The other one. It counts its own turns: time in which this process was paused is none."""
        before, turns = self._seen, 0
        while self._seen < _LEFT and not self._ended.wait(self._silent_s / _BEATS):
            turns = turns + 1 if self._seen == before else 0
            before = self._seen
            if turns >= _BEATS:
                logger.error(
                    "rank %d of %d: no sign of life of rank %d for %g s: its process is paused, "
                    "or its machine or the link to it is gone; this process ends, so that all "
                    "ranks start again",
                    self._rank,
                    self._size,
                    self._next,
                    self._silent_s,
                )
                end_process(1)


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
        sessions: number of training sessions of this rank, before their Welcome too.
        updates: updates made; None once the run makes no more.
        show: shows the number of ranks without a session.
        timeout_s: longest wait for such a rank, seconds.
        look_every_s: time between two looks, seconds.
        tell_after_s: time until the first line of the log, seconds.
    """

    store: "Store"
    rank: int
    size: int
    sessions: Callable[[], int]
    updates: Callable[[], int | None]
    show: Callable[[float], None]
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
                self.store.set(f"sessions/{self.rank}", str(self.sessions()))
                if self.rank == 0:
                    idle, updates = self._idle_ranks(), self.updates()
                    self.show(len(idle))
                    moved = updates is not None and updates != at
                    if moved or updates is None or not 0 < len(idle) < self.size:
                        since, at = time.monotonic(), updates
                        # An update takes rows of all ranks. Without any session it is another wait.
                        if self._told_at and (moved or not idle):
                            logger.info("all ranks have sessions again")
                        self._told_at = 0.0
                    else:
                        self._tell(idle, time.monotonic() - since, updates)
                if self._ended.wait(self.look_every_s):
                    return
        except RuntimeError as error:  # all are ending
            logger.debug("the ranks' store does not answer: %s", error)

    def _idle_ranks(self) -> list[int]:
        """Ranks that have said that they have no session."""
        there = [rank for rank in range(self.size) if self.store.check([f"sessions/{rank}"])]
        return [rank for rank in there if not int(self.store.get(f"sessions/{rank}"))]

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
