"""Signs of life between the ranks: a rank that is paused or cut off is noticed within seconds."""

import threading
from typing import TYPE_CHECKING

from shared.process.process import end_process, logger

if TYPE_CHECKING:
    from torch.distributed import Store

SILENT_S = 20.0  # far above what a healthy process can keep its interpreter from other threads
_BEATS = 10  # within the limit
_LEFT = 1 << 40  # added to the count of a rank that leaves in order


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
            self._store.add(_key(self._rank), _LEFT)
        except RuntimeError:  # the rank that keeps the store has left already
            logger.debug("the store is gone")

    def _beat(self) -> None:
        """One thread: count on, and read the next rank's count."""
        try:
            while not self._ended.wait(self._silent_s / _BEATS):
                self._store.add(_key(self._rank), 1)
                self._seen = self._store.add(_key(self._next), 0)
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


def _key(rank: int) -> str:
    return f"heartbeat/{rank}"
