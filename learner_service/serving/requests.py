"""Requests for actions: the sessions that ask, and the batcher that joins them across sessions.

The batcher's terms and behaviour are those of Triton's dynamic batcher: whatever is pending goes as
one batch as soon as the device is free; only if a preferred size is set does the oldest request
wait, and never longer than the limit. It never waits for all sessions, which would undo double
buffering (except in sync mode, where waiting for everyone is the point). Requests hold NumPy's
arrays, views of the messages: they become tensors in `staging`.
"""

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from queue import Empty, SimpleQueue

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from murmur.learner_service.serving.evaluation import Evaluation
from murmur.learner_service.serving.game import Game, Pairing
from murmur.learner_service.storage.storage import Unroll
from murmur.shared.config.episode_options import Values
from murmur.shared.config.learner import BatcherConfig
from murmur.shared.wire.codec import ActionCodec
from murmur.shared.wire.spec import ADJACENCY, EnvSpec
from murmur.shared.wire.timestep import Array, StepType, TimeStep

# NumPy compares with ints faster.
_FIRST, _MID, _LAST = int(StepType.FIRST), int(StepType.MID), int(StepType.LAST)


@dataclass(eq=False)
class EnvSession:
    """State of a session. Written by the inference thread, except `closed` and `given_up`.

    Attributes:
        worker_id: name of the worker, for logs.
        spec: spec of the environments; in a league, of both teams.
        num_envs: number of environments, n.
        first_slot: the environments sit in slots first_slot .. first_slot + n - 1; -1: the session
            evaluates.
        closed: whether the stream is gone, set by the event loop; no request is answered any more.
        waiting: whether the last time step is kept and not answered yet.
        resumed: whether its first rows were counted before the checkpoint that the run continued
            from.
        unroll: unroll of the time steps under way; None between two of them.
        unrolls: number of unrolls begun.
        messages: number of time steps that came, [n, ...] each.
        complete: whether its evaluation has been reported.
        given_up: whether the worker has said that it gives up its evaluation, set by the event
            loop.
        answered: time.monotonic() of the last answer; 0 before the first.
        episode: [n] number of the episode under way in each slot.
        started: [n] index into `taken` of the first action of the episode under way.
        taken: actions sent, kept in sync mode for an exact resume.
        all_mid: bytes of a step_type of nothing but MID.
        going_on: whether no environment's last row was LAST or ABORTED.
        over: [n] whether the last row was LAST or ABORTED: the next one is of another episode.
        episode_return: [n] sum of rewards of the episode under way, over agents.
        untrained: [n] whether the episode under way began before the first update.
        evaluation: the evaluation it carries out, if it evaluates.
        memory: [n, A, Z] recurrent state of the episodes under way; None: the policy has none.
        pairing: opponents that play the other team; None: there is none.
        game: both sides of a league's games; None: there is no league.
        order: [A] the worker's row of each agent of the run; None: both have one order.
        values: values of the curriculum that the worker was told last; None: there is none.
        begun: [n] values that the episode under way in each slot began with.
    """

    worker_id: str
    spec: EnvSpec
    num_envs: int
    first_slot: int
    episode: NDArray[np.int64]
    closed: bool = False
    waiting: bool = False
    resumed: bool = False
    unroll: Unroll | None = None
    unrolls: int = 0
    messages: int = 0
    complete: bool = False
    given_up: bool = False
    answered: float = 0.0
    taken: list[Array] = field(default_factory=list)
    going_on: bool = True
    evaluation: Evaluation | None = None
    memory: Tensor | None = None
    pairing: Pairing | None = None
    game: Game | None = None
    order: NDArray[np.intp] | None = None
    values: Values | None = None

    def __post_init__(self) -> None:
        """Begin before the first time step."""
        self.started = np.zeros(self.num_envs, np.int64)
        self.all_mid = bytes([_MID]) * self.num_envs
        self.over = np.zeros(self.num_envs, np.bool_)
        self.episode_return = np.zeros(self.num_envs)
        self.untrained = np.zeros(self.num_envs, np.bool_)
        self.begun = np.full(self.num_envs, self.values, object)

    @property
    def evaluating(self) -> bool:
        """Whether the session evaluates: nothing is stored."""
        return self.evaluation is not None

    @property
    def slots(self) -> NDArray[np.int64]:
        """Slots of its environments, [n]."""
        return np.arange(self.first_slot, self.first_slot + self.num_envs)

    @cached_property
    def codec(self) -> ActionCodec:
        """Codec of its answers; `order` is known when the first one is packed."""
        agents = None if self.order is None else np.argsort(self.order)
        return ActionCodec(self.spec, self.num_envs, agents)

    def tell(self, message: bytes, values: Values) -> bytes:
        """Return a packed answer that also tells the worker other values of the curriculum."""
        self.values = values
        return self.codec.with_options(message, values.options)

    def of_game(self, own: Array, others: Array) -> Array:
        """Return the actions [n, A, ...] of a league's game, of its team and of the others."""
        assert self.game is not None
        action = np.concatenate([own, others], axis=1)
        return action if self.game.order is None else action[:, self.game.order]

    def of_agents(
        self, timestep: TimeStep, agents: NDArray[np.intp] | list[int] | slice
    ) -> TimeStep:
        """Return a time step of some agents, or of all in another order."""
        seen = {
            o.name: timestep.observation[o.name][:, agents]
            if o.per_agent
            else timestep.observation[o.name]
            for o in self.spec.observations
        }
        if self.spec.gives_adjacency:  # among these agents
            seen[ADJACENCY] = seen[ADJACENCY][:, :, agents]
        return replace(timestep, reward=timestep.reward[:, agents], observation=seen)

    def observe(self, step_type: NDArray[np.uint8]) -> bool:
        """Note which episodes begin with these rows; those of its first rows were agreed on.

        An episode whose FIRST row is ABORTED has begun and failed: it has a number like any other.

        Returns:
            whether all rows are MID, as most are.
        """
        self.messages += 1
        all_mid = step_type.tobytes() == self.all_mid
        if self.going_on and all_mid:
            return True
        begins = (step_type == _FIRST) | self.over
        self.over = step_type >= _LAST
        self.going_on = not self.over.any()
        if not begins.any():
            return all_mid
        if self.messages > 1:
            self.episode += begins
        self.begun[begins] = self.values
        self.started[begins] = len(self.taken)
        # Forget actions that no episode under way began with.
        oldest = int(self.started.min())
        if oldest:
            del self.taken[:oldest]
            self.started -= oldest
        return all_mid

    def open_actions(self, index: int) -> bytes:
        """Return the actions of an environment's episode under way, as sent over the wire."""
        return b"".join(
            np.ascontiguousarray(a[index]).tobytes() for a in self.taken[self.started[index] :]
        )


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
            places. The inference thread's; all else is set by the event loop, before it arrives.
    """

    session: EnvSession
    sequence: int
    timestep: TimeStep
    reply: "asyncio.Future[bytes]"
    other: TimeStep | None = None
    arrived: float = field(default_factory=time.monotonic)
    stored: bool = False


class DynamicBatcher:
    """A queue between the server's event loop (arrivals) and the inference thread (next_batch).

    Bounded by the lockstep of the protocol: each session has at most one request in it. What
    arrives crosses threads by a SimpleQueue, which is C code and wakes its reader for a tenth of
    what a Condition costs; the rest belongs to the inference thread.

    Attributes:
        arrivals: requests that the event loop and `wake` put, blocked ones a second time.
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
        self.arrivals: SimpleQueue[Sequence[Request]] = SimpleQueue()
        self._closed = False
        self.depth = 0

    def close(self) -> None:
        """Let `next_batch` return None from now on."""
        self._closed = True
        self.arrivals.put(())  # wakes it

    def next_batch(self, timeout_s: float) -> list[Request] | None:
        """Return the next batch, in slot order in sync mode, else in order of arrival.

        Returns:
            requests; empty if none came in time; None once closed.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            while not self.arrivals.empty():
                self._pending.extend(self.arrivals.get())
            if self._closed:
                return None
            batch, wait_s = self._take()
            left_s = deadline - time.monotonic()
            if batch or left_s <= 0:
                self.depth = len(self._pending)
                return batch
            with contextlib.suppress(Empty):
                self._pending.extend(self.arrivals.get(timeout=min(wait_s, left_s)))

    def withdraw(self, session: EnvSession) -> Request | None:
        """Take back the request of a session that has ended, if it is still pending."""
        while not self.arrivals.empty():
            self._pending.extend(self.arrivals.get())
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
