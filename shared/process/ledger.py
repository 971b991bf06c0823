"""The time ledger: a thread is always in exactly one named state, and every second is counted.

A thread adopts a ledger with `Ledger.adopt`; from then on all code on the thread calls
`enter("state")` without an argument for the ledger. On threads without a ledger (tests, tools) the
call does nothing.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

Key = TypeVar("Key", str, float)
_current = threading.local()


def cpu_wait_seconds(thread: int | None) -> float:
    """Return seconds that a thread of this process was ready to run and had no processor.

    The kernel's run delay, proc(5) schedstat; 0 where it is not counted.

    Args:
        thread: native id of the thread; None: it has not begun.
    """
    try:
        return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


class Ledger:
    """Seconds by state of one thread. Written by that thread, read by any.

    Attributes:
        thread: name of the thread, the `thread` label of the metric.
        watcher: callback for every state that the thread enters, on that thread; or None.
    """

    def __init__(self, thread: str, state: str = "start") -> None:
        """Begin in a state."""
        self.thread = thread
        self.watcher: Callable[[str], None] | None = None
        self._seconds: dict[str, float] = {}
        # One tuple, replaced whole: a reader never sees half a change of state.
        self._now = (state, time.perf_counter(), 0.0)
        self._clock: int | None = None
        self._native_id: int | None = None
        self._cpu_s = self._cpu_wait_s = 0.0

    def adopt(self) -> None:
        """Make this the ledger of the calling thread."""
        _current.ledger = self
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        self._native_id = threading.get_native_id()

    def cpu_seconds(self) -> float:
        """Return the thread's processor time, s; if it has ended, as of the last call before."""
        if self._clock is not None:
            with suppress(OSError):  # it has ended
                self._cpu_s = time.clock_gettime(self._clock)
        return self._cpu_s

    def cpu_wait_seconds(self) -> float:
        """Return seconds that the thread waited for a processor; if it has ended, as last read."""
        self._cpu_wait_s = max(self._cpu_wait_s, cpu_wait_seconds(self._native_id))
        return self._cpu_wait_s

    def enter(self, state: str) -> str:
        """Change the thread's state; return the state it was in."""
        before, since, had = self._now
        now = time.perf_counter()
        self._seconds[before] = had + now - since
        self._now = (state, now, self._seconds.get(state, 0.0))
        watcher = self.watcher
        if watcher is not None:
            watcher(state)
        return before

    def current(self) -> tuple[str, float]:
        """Return the thread's state, and the seconds since it entered that state."""
        state, since, _ = self._now
        return state, time.perf_counter() - since

    def seconds(self) -> dict[str, float]:
        """Return the seconds by state up to now; they add up to the ledger's age."""
        while True:
            state, since, had = now = self._now
            totals = dict(self._seconds)
            totals[state] = had + time.perf_counter() - since
            if self._now is now:  # else the state changed while we looked
                return totals


def since(
    before: Mapping[str, Mapping[Key, float]], after: Mapping[str, Mapping[Key, float]]
) -> dict[str, dict[Key, float]]:
    """Subtract two readings of totals, such as a ledger's, by thread and state."""
    return {
        name: {key: total - before.get(name, {}).get(key, 0.0) for key, total in totals.items()}
        for name, totals in after.items()
    }


def enter(state: str) -> str | None:
    """Change the calling thread's state; return the one it was in, None without a ledger."""
    ledger: Ledger | None = getattr(_current, "ledger", None)
    return None if ledger is None else ledger.enter(state)


@contextmanager
def state(name: str) -> Iterator[None]:
    """Enter a state for the block, then return to the state before."""
    before = enter(name)
    try:
        yield
    finally:
        if before is not None:
            enter(before)


class ThreadClock(Ledger):
    """Clock of a thread that names no states: `serve` while it has the processor, else `wait`.

    For event loops. Only reading it takes time.
    """

    def __init__(self, thread: threading.Thread) -> None:
        """Watch a started thread."""
        assert thread.ident is not None
        super().__init__(thread.name)
        self._native_id = thread.native_id
        self._clock = time.pthread_getcpuclockid(thread.ident)

    def seconds(self) -> dict[str, float]:
        """Return the seconds by state since the clock began; they add up to its age."""
        _, age = self.current()
        serve = min(self.cpu_seconds(), age)
        return {"serve": serve, "wait": age - serve}
