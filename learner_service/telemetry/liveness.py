"""Whether the learner's threads move: what GET /healthz asks, and a liveness probe acts on.

A thread that waits for rows or environments changes its state of the ledger several times a second,
one that learns at every forward and backward pass. So a thread that stays in one state for many
minutes hangs: in a device that does not answer, a file system, a lock.
"""

import threading
from collections.abc import Callable

from murmur.shared.process.ledger import Ledger

# torch.compile does all its work in the first pass of a process.
_COMPILING = 10.0


class Liveness:
    """Says which thread hangs. Read by any thread."""

    def __init__(self, stalled_after_s: float, compiling: Callable[[], bool]) -> None:
        """Watch no thread yet.

        Args:
            stalled_after_s: longest time that a thread may stay in one state; 0: any time.
            compiling: whether a pass may take ten times as long, because torch compiles in it.
        """
        self._stalled_after_s, self._compiling = stalled_after_s, compiling
        self._watched: list[tuple[threading.Thread, Ledger]] = []

    def watch(self, thread: threading.Thread, ledger: Ledger) -> None:
        """Watch a thread that keeps a ledger, until it ends."""
        self._watched.append((thread, ledger))

    def trouble(self) -> str:
        """Name the thread that hangs, where it does, and since when; "" if none does."""
        if not self._stalled_after_s:
            return ""
        limit = self._stalled_after_s * (_COMPILING if self._compiling() else 1.0)
        for thread, ledger in list(self._watched):
            state, seconds = ledger.current()
            if seconds > limit and thread.is_alive():
                return (
                    f"stalled: thread '{ledger.thread}' is in state '{state}' for {seconds:.0f} s, "
                    f"at most {limit:g} s are expected (learner.stalled_after_s="
                    f"{self._stalled_after_s:g})"
                )
        return ""
