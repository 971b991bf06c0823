"""Dynamic batching of inference requests across sessions; arrays are NumPy's, no tensors yet.

The terms and the behaviour are those of Triton's dynamic batcher: whatever is pending goes as one
batch as soon as the device is free; only if a preferred size is set does the oldest request wait,
and never longer than the limit. It never waits for all sessions, which would undo double buffering
(except in sync mode, where waiting for everyone is the point).
"""

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from murmur.learner_service.serving.session import EnvSession
from murmur.shared.config.learner import BatcherConfig
from murmur.shared.wire.timestep import TimeStep


@dataclass(eq=False)
class Request:
    """One session's rows, waiting for actions.

    Attributes:
        session: session that asks; of both threads, see EnvSession.
        sequence: number to answer with.
        timestep: [n, ...] time steps, views of the message; in a league those of the learning team.
        reply: future of the packed Action message; belongs to the server's event loop.
        other: rows of the other team at the same steps, in a league.
        arrived: time.monotonic() of arrival.
        stored: whether it was served once and then blocked: its rows were counted and have their
            places. The inference thread's; all else is set by the event loop, before `submit`.
    """

    session: EnvSession
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
        depth: requests that the last batch left pending.
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
        self._arrivals: SimpleQueue[Sequence[Request]] = SimpleQueue()
        self._closed = False
        self.depth = 0

    def submit(self, *requests: Request) -> None:
        """Queue requests, blocked ones a second time. Called by the event loop and by `wake`."""
        self._arrivals.put(requests)

    def close(self) -> None:
        """Let `next_batch` return None from now on."""
        self._closed = True
        self._arrivals.put(())  # wakes it

    def next_batch(self, timeout_s: float) -> list[Request] | None:
        """Return the next batch, in slot order in sync mode, else in order of arrival.

        Returns:
            requests; empty if none came in time; None once closed.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            while not self._arrivals.empty():
                self._pending.extend(self._arrivals.get())
            if self._closed:
                return None
            batch, wait_s = self._take()
            left_s = deadline - time.monotonic()
            if batch or left_s <= 0:
                self.depth = len(self._pending)
                return batch
            with contextlib.suppress(Empty):
                self._pending.extend(self._arrivals.get(timeout=min(wait_s, left_s)))

    def withdraw(self, session: EnvSession) -> Request | None:
        """Take back the request of a session that has ended, if it is still pending."""
        while not self._arrivals.empty():
            self._pending.extend(self._arrivals.get())
        for request in self._pending:
            if request.session is session:
                self._pending.remove(request)
                return request
        return None

    def _take(self) -> tuple[list[Request], float]:
        """Take the batch that goes now from the pending requests.

        Returns:
            requests; if there are none, how long to wait for more, s.
        """
        pending = self._pending
        if not pending:
            return [], math.inf
        if self._wait_for_envs:
            # Evaluation never waits for training, nor training for evaluation.
            chosen = [r for r in pending if r.session.evaluating]
            if not chosen:
                present = sum(r.session.num_envs for r in pending if not r.session.closed)
                if present < self._wait_for_envs:
                    return [], math.inf
                chosen = sorted(pending, key=lambda r: r.session.first_slot)
            self._pending = deque(r for r in pending if r not in chosen)
            return chosen, 0.0
        preferred = self._config.preferred_batch_envs
        if preferred and sum(r.session.num_envs for r in pending) < preferred:
            oldest = min(r.arrived for r in pending)
            left_s = oldest + self._config.max_wait_ms / 1e3 - time.monotonic()
            if left_s > 0:
                return [], left_s
        chosen, envs = [], 0
        while pending:
            envs += pending[0].session.num_envs
            if chosen and envs > self._config.max_batch_envs:
                break
            chosen.append(pending.popleft())
        return chosen, 0.0


def deliver(replies: Sequence[tuple[Request, bytes]]) -> None:
    """Hand answers to the server's event loop, waking it once. Called by the inference thread."""
    now = time.monotonic()
    for request, _ in replies:
        request.session.answered, request.session.waiting = now, False

    def set_results() -> None:
        for request, message in replies:
            if not request.reply.done():
                request.reply.set_result(message)

    loop: asyncio.AbstractEventLoop = replies[0][0].reply.get_loop()
    if not loop.is_closed():
        loop.call_soon_threadsafe(set_results)
