"""Dynamic batching of inference requests across sessions; arrays are NumPy's, no tensors yet.

The terms and the behaviour are those of Triton's dynamic batcher: whatever is pending goes as one
batch as soon as the device is free; only if a preferred size is set does the oldest request wait,
and never longer than the limit. With a latency target both are tuned to it, during updates
and between them each. It never waits for all sessions, which would undo double buffering (except
in sync mode, where waiting for everyone is the point).
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from learner_service.serving.latency import LatencyTuner, Limits
from learner_service.serving.session import Session
from shared.config.learner import BatcherConfig
from shared.timestep import TimeStep


@dataclass(eq=False)
class Request:
    """One session's rows, waiting for actions.

    Attributes:
        session: who asks.
        sequence: the number to answer with.
        timestep: [n, ...] time steps, views of the message; in a league those of the learning team.
        reply: gets the packed Action message; belongs to the server's event loop.
        other: in a league, the same rows of the other team.
        arrived: time.monotonic() of arrival.
        stored: whether the rows were counted and written; a blocked request comes twice.
    """

    session: Session
    sequence: int
    timestep: TimeStep
    reply: "asyncio.Future[bytes]"
    other: TimeStep | None = None
    arrived: float = field(default_factory=time.monotonic)
    stored: bool = False


class DynamicBatcher:
    """A queue between the server's event loop (submit) and the inference thread (next_batch).

    Bounded by the lockstep of the protocol: each session has at most one request in it. What
    arrives crosses threads by a SimpleQueue, which is C code and wakes its reader for a tenth of
    what a Condition costs; the rest belongs to the inference thread.

    Attributes:
        updating: set by the learner while an update is under way.
        tuners: by phase, "update" and "idle", if there is a latency target.
    """

    def __init__(self, config: BatcherConfig, wait_for_envs: int = 0) -> None:
        """Make an empty batcher.

        Args:
            config: limits.
            wait_for_envs: training environments that must all be pending before a batch goes (the
                sync pipeline); 0: never wait for all.
        """
        self._config = config
        self._wait_for_envs = wait_for_envs
        self._pending: deque[Request] = deque()
        self._arrivals: SimpleQueue[Sequence[Request] | None] = SimpleQueue()
        self._closed = False
        self.updating = False
        target_s = config.latency_target_ms / 1e3
        phases = ("update", "idle") if target_s else ()
        self.tuners = {phase: LatencyTuner(target_s) for phase in phases}

    @property
    def phase(self) -> str:
        """Whether it is the time of an update."""
        return "update" if self.updating else "idle"

    @property
    def limits(self) -> Limits:
        """What a batch waits for."""
        if self.tuners:
            return self.tuners[self.phase].limits
        return Limits(self._config.preferred_batch_envs, self._config.max_wait_ms / 1e3)

    def submit(self, *requests: Request) -> None:
        """Queue requests. Called by the event loop and by the thread that unblocks requests."""
        self._arrivals.put(requests)

    def close(self) -> None:
        """Let `next_batch` return None from now on."""
        self._arrivals.put(None)

    @property
    def depth(self) -> int:
        """Requests pending; those that arrived in one turn of the event loop count as one."""
        return len(self._pending) + self._arrivals.qsize()

    def next_batch(self, timeout_s: float) -> list[Request] | None:
        """The next batch, in slot order in sync mode, else in order of arrival.

        Returns:
            requests; empty if none came in time; None once closed.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            while not self._arrivals.empty():
                self._receive(self._arrivals.get())
            if self._closed:
                return None
            wait = self._wait_s()
            if wait == 0:
                return self._take()
            left = deadline - time.monotonic()
            if left <= 0:
                return []
            with contextlib.suppress(Empty):
                self._receive(self._arrivals.get(timeout=min(wait, left)))

    def withdraw(self, session: Session) -> Request | None:
        """Take back the request of a session that has ended, if it is still pending."""
        while not self._arrivals.empty():
            self._receive(self._arrivals.get())
        for request in self._pending:
            if request.session is session:
                self._pending.remove(request)
                return request
        return None

    def _receive(self, arrived: Sequence[Request] | None) -> None:
        if arrived is None:
            self._closed = True
        else:
            self._pending.extend(arrived)

    def _wait_s(self) -> float:
        """How long to wait for more before a batch goes; 0: go now."""
        if not self._pending:
            return float("inf")
        if self._wait_for_envs:
            if any(r.session.evaluating for r in self._pending):
                return 0.0
            pending = sum(r.session.num_envs for r in self._pending if not r.session.closed)
            return 0.0 if pending >= self._wait_for_envs else float("inf")
        preferred, wait_s = self.limits
        if preferred and sum(r.session.num_envs for r in self._pending) < preferred:
            oldest = min(r.arrived for r in self._pending)
            return max(0.0, oldest + wait_s - time.monotonic())
        return 0.0

    def _take(self) -> list[Request]:
        if self._wait_for_envs:
            # Evaluation never waits for training, nor training for evaluation.
            evaluating = [r for r in self._pending if r.session.evaluating]
            chosen = evaluating or sorted(self._pending, key=lambda r: r.session.first_slot)
            self._pending = deque(r for r in self._pending if r not in chosen)
            return chosen
        chosen, envs = [], 0
        while self._pending:
            n = self._pending[0].session.num_envs
            if chosen and envs + n > self._config.max_batch_envs:
                break
            chosen.append(self._pending.popleft())
            envs += n
        return chosen
