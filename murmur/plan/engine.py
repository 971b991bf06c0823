"""The event loop of the simulation: timers, and threads that take turns on processors.

Processors are given out as Linux does under SCHED_BATCH, which murmur's processes run under: a
thread that wakes does not interrupt the one that runs. It waits in line for a free processor, and a
thread that has used up its slice while others wait goes to the end of the line.
"""

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import Any

Done = Callable[[Any], None]

SLICE_S = 3e-3  # of Linux's scheduler, on two processors and more
_NOTHING = 1e-12  # work below this is rounding


class Engine:
    """Event loop that runs events in the order of their times.

    Attributes:
        now: simulated seconds since the start.
        stopped: flag that an event sets to end the simulation.
    """

    def __init__(self) -> None:
        """Start at time 0 without events."""
        self.now = 0.0
        self.stopped = False
        self._timers: list[tuple[float, int, Done, Any]] = []
        self._numbers = count()

    def after(self, seconds: float, done: Done, argument: object = None) -> None:
        """Call `done(argument)` after a delay in seconds."""
        heappush(self._timers, (self.now + seconds, next(self._numbers), done, argument))

    def run(self) -> None:
        """Run until an event stops it, or no event is left."""
        timers = self._timers
        while timers and not self.stopped:
            self.now, _, done, argument = heappop(timers)
            done(argument)


class Pool:
    """Processors, or a device, on which threads take turns.

    Attributes:
        size: number of processors.
        engine: engine with the clock that it follows.
    """

    def __init__(self, engine: Engine, size: int, slice_s: float = SLICE_S) -> None:
        """Start with all processors free.

        Args:
            engine: engine of the simulation.
            size: number of processors.
            slice_s: longest turn of a thread while others wait.
        """
        self.engine = engine
        self.size = size
        self._slice_s = slice_s
        self._free = size
        self._line: deque[Thread] = deque()
        self._used_s, self._at = 0.0, 0.0

    @property
    def used_s(self) -> float:
        """Processor seconds used up to now."""
        return self._used_s + (self.engine.now - self._at) * (self.size - self._free)

    def ready(self, thread: "Thread") -> None:
        """Queue a thread that has a job."""
        if self._free:
            self._count()
            self._free -= 1
            self._run(thread, self._slice_s)
        else:
            self._line.append(thread)

    def _count(self) -> None:
        self._used_s, self._at = self.used_s, self.engine.now

    def _run(self, thread: "Thread", turn_s: float) -> None:
        """Run a thread, which has a processor, on its first job."""
        span = min(thread.jobs[0][0], turn_s)
        self.engine.after(span, self._ran, (thread, span, turn_s - span))

    def _ran(self, turn: tuple["Thread", float, float]) -> None:
        """End a turn; continue the thread, or give the next one its turn."""
        thread, span, left = turn
        job = thread.jobs[0]
        job[0] -= span
        if job[0] <= _NOTHING:
            job[1](job[2])  # may give jobs to this thread or to others
            thread.jobs.popleft()
        if thread.jobs and (left > 0 or not self._line):
            self._run(thread, left if left > 0 else self._slice_s)
            return
        if thread.jobs:
            self._line.append(thread)
        else:
            thread.rest()
        if self._line:
            self._run(self._line.popleft(), self._slice_s)
        else:
            self._count()
            self._free += 1


class Thread:
    """Thread that works off jobs on a pool, one after the other.

    An interpreter is one too, whatever number of Python threads it has: they take turns on it.
    """

    __slots__ = ("_began", "_busy_s", "jobs", "pool")

    def __init__(self, pool: Pool) -> None:
        """Start a thread without a job."""
        self.pool = pool
        self.jobs: deque[list[Any]] = deque()  # [work left, done, argument]
        self._busy_s = self._began = 0.0

    @property
    def busy_s(self) -> float:
        """Seconds in which it had a job, up to now."""
        return self._busy_s + (self.pool.engine.now - self._began if self.jobs else 0.0)

    def add(self, work: float, done: Done, argument: object = None) -> None:
        """Queue a job by its processor seconds; `done(argument)` is called at its end."""
        self.jobs.append([work, done, argument])
        if len(self.jobs) == 1:
            self._began = self.pool.engine.now
            self.pool.ready(self)

    def rest(self) -> None:
        """Note that the thread has run out of jobs. The pool calls it."""
        self._busy_s += self.pool.engine.now - self._began
