"""The inference loop: rows from the wire to the device, actions back, trajectories kept."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from learner_service.algorithms.base import Policy
from learner_service.runtime.cuda_graph import Graphs
from learner_service.runtime.streams import enter_stream
from learner_service.serving.accounts import Accounts
from learner_service.serving.batcher import DynamicBatcher, Request
from learner_service.serving.evaluation import EvaluationScheduler
from learner_service.serving.league import League
from learner_service.serving.packed import make_staging
from learner_service.serving.session import Session
from learner_service.serving.slot_memory import SlotMemory
from learner_service.serving.snapshots import Snapshots
from learner_service.serving.staging import RowTarget
from learner_service.storage.storage import UnrollStorage
from learner_service.storage.unroll import Unroll
from learner_service.telemetry.device_clock import DeviceClock
from learner_service.telemetry.metrics import LearnerMetrics
from learner_service.telemetry.progress import Progress
from shared.ledger import enter, state
from shared.spec import EnvSpec
from shared.timestep import Array, StepType

_IDLE_S = 0.2
# NumPy compares with ints faster.
_FIRST, _LAST = int(StepType.FIRST), int(StepType.LAST)


@dataclass(slots=True)
class _ServingBatch:
    """Time steps of training sessions that are served together.

    Attributes:
        requests: that are answered.
        acting: where their rows go.
        others: where rows go that are not acted on there.
        filled: unrolls that are full with these.
    """

    requests: list[Request] = field(default_factory=list)
    acting: list[RowTarget] = field(default_factory=list)
    others: list[RowTarget] = field(default_factory=list)
    filled: list[Unroll] = field(default_factory=list)


class InferenceLoop:
    """Serves batches of requests. Everything here runs on the inference thread, but for `wake`.

    A request whose session has filled its unroll while learning is behind is blocked: its session
    gets no answer until there is room, which is all the back-pressure there is.

    Attributes:
        draining: rows are kept, but training sessions are not answered any more, once the batch
            under way is.
        turns: batches served, empty ones included.
        prepared: set once it can act; nothing is learned before, while acts are captured.
    """

    def __init__(
        self,
        *,
        spec: EnvSpec,
        batcher: DynamicBatcher,
        storage: UnrollStorage[Any],
        snapshots: Snapshots,
        generator: torch.Generator,
        scheduler: EvaluationScheduler,
        progress: Progress,
        metrics: LearnerMetrics,
        clock: DeviceClock,
        learn_ready: Callable[[], bool] | None,
        league: League,
        evaluation_generator: torch.Generator | None,
        graphs: Graphs,
        most_rows: int = 0,
    ) -> None:
        """Wire the loop up.

        Args:
            spec: the run's spec.
            batcher: where requests come from.
            storage: where rows go.
            snapshots: of the policy that acts.
            generator: randomness of exploration.
            scheduler: notified of completed evaluations.
            progress: counters.
            metrics: Prometheus metrics.
            clock: notified when the device works.
            learn_ready: sync pipeline: learns from what is ready, between storing rows and acting
                on them, and returns whether the run continues; None: another thread does (async).
            league: acts for the teams that the policy does not act for.
            evaluation_generator: randomness of evaluations; None: they are greedy.
            graphs: CUDA graphs of acting.
            most_rows: of a batch.
        """
        self._spec = spec
        self._batcher = batcher
        self._storage = storage
        self._snapshots = snapshots
        self._generator = generator
        self._scheduler = scheduler
        self._progress = progress
        self._metrics = metrics
        self._learn_ready = learn_ready
        self._clock, self._league = clock, league
        self._evaluation_generator = evaluation_generator
        self._accounts = Accounts(spec, batcher, storage, progress, metrics)
        self._staging, self._graphs = make_staging(storage, metrics.copied, graphs), graphs
        size = snapshots.policy.memory_size
        self._memory = SlotMemory(spec.num_agents, size, storage.device) if size else None
        self._blocked: list[Request] = []
        self._blocked_lock = threading.Lock()
        self._ended: deque[Session] = deque()
        self._most_rows = most_rows
        self._environments = 0  # of training sessions that have sent rows
        self.draining = False
        self.turns = 0
        self.prepared = threading.Event()

    def run(self) -> None:
        """Serve until the batcher is closed."""
        enter_stream(self._storage.device, urgent=True)
        for policy in self._snapshots.each():
            self._staging.prepare(policy, self._generator, self._memory, self._most_rows)
        self.prepared.set()
        while True:
            enter("wait_learning" if self._blocked else "wait_environments")
            requests = self._batcher.next_batch(_IDLE_S)
            enter("store")
            self._metrics.gauge("queue_depth").set(self._batcher.depth)
            if requests:
                self._take_turn(requests)
            while self._ended:  # not before: these requests may be of a session that has ended
                self._remove(self._ended.popleft())
            self.turns += 1
            if requests is None:
                return

    def _take_turn(self, requests: list[Request]) -> None:
        """Serve a batch. A function: no name of it may keep the requests of an ended session."""
        fresh = [r for r in requests if not (r.stored or r.session.evaluating)]
        updating, started = self._batcher.updating, time.monotonic()
        self._serve(requests, started)
        self._accounts.note_latency(requests, fresh, updating, started)

    def during_update(self, updating: bool) -> None:
        """An update begins or ends. Called by the thread that learns."""
        self._batcher.updating = updating

    def wake(self) -> None:
        """Queue blocked requests if there may be room. Called by any thread."""
        with self._blocked_lock:
            if not self._blocked or not self._storage.may_begin():
                return
            blocked, self._blocked = self._blocked, []
        self._batcher.submit(*blocked)

    def end(self, session: Session) -> None:
        """A session's stream is gone. Called by the server."""
        session.closed = True
        self._ended.append(session)

    def _remove(self, session: Session) -> None:
        """Keep what a session has sent; drop and count its last row, which nothing was done on."""
        with self._blocked_lock:
            self._blocked = [r for r in self._blocked if r.session is not session]
        request = self._batcher.withdraw(session)
        if session.evaluation is not None:
            self._scheduler.end(session.evaluation, session.complete, session.given_up)
            return
        if self._memory is not None:
            self._memory.dismiss(session)
        if request is not None and not request.stored:
            batch = _ServingBatch()
            placed = self._keep(request, batch)
            if placed is not None:
                batch.others.append(placed)
                self._load(batch)
        if not session.messages:
            return
        self._environments -= session.num_envs
        self._storage.connect(self._environments)
        rows = session.num_envs
        if session.unroll is not None:
            rows = self._storage.add_open(session.unroll)
            session.unroll = None
            self.wake()  # its place is free: no update may follow that would wake the others
        self._progress.drop("session", rows)
        self._metrics.counter("rows_dropped", reason="session").inc(rows)
        self._metrics.counter("episodes_dropped", reason="session").inc(session.num_envs)

    def _serve(self, requests: list[Request], now: float) -> None:
        wait = self._metrics.histogram("queue_wait_seconds")
        away = self._metrics.histogram("environment_seconds")
        for request in requests:
            if not request.stored:  # else it was blocked: the learner made it wait, not the queue
                wait.observe(now - request.arrived)
                if request.session.answered:
                    away.observe(request.arrived - request.session.answered)
        for request in requests:
            if request.session.evaluating and not request.session.closed:
                self._evaluate(request)
        training = [r for r in requests if not r.session.evaluating]
        if training:
            self._serve_training(training)

    def _serve_training(self, requests: list[Request]) -> None:
        """Store time steps; sync: learn from what is ready; then act and answer."""
        batch = _ServingBatch()
        for request in requests:
            self._admit(request, batch)
        updating, began = self._batcher.updating, time.monotonic()
        self._load(batch)
        loaded = time.monotonic() - began
        if self._learn_ready is not None and not self._learn_ready():
            self._staging.store()
            return  # the run is complete: requests are not answered any more
        if not batch.requests:
            return
        if self.draining:
            self._staging.store()
            return
        enter("act")
        began = time.monotonic() - loaded  # learning, if it is done here, does not count
        with self._snapshots.acting() as snapshot, self._clock.working("act"):
            policy, version = snapshot.policy, snapshot.version
            memory = self._staging.act(policy, self._generator, self._memory)
            # Before the wait for the actions: the device has both to do.
            others = self._other_teams(batch.requests, policy, self._generator)
            host = self._staging.actions()
        enter("store")
        self._accounts.note_act(time.monotonic() - began, updating)
        replies = []
        stop = 0
        for place, request in enumerate(batch.requests):
            session = request.session
            start, stop = stop, stop + session.num_envs
            action = _joined(host[start:stop], others.get(place))
            assert session.unroll is not None
            session.unroll.act(version, None if memory is None else memory[start:stop])
            if self._learn_ready is not None:
                session.taken.append(action.copy())
            replies.append((request, session.pack(request.sequence, version, action)))
        self._metrics.histogram("batch_envs").observe(stop)
        enter("reply")
        _deliver(replies)

    def _load(self, batch: _ServingBatch) -> None:
        """Store the rows that are not acted on, and hand over the unrolls that are full now."""
        with state("transfer"):
            self._staging.load(batch.acting, batch.others)
        for unroll in batch.filled:
            self._storage.add(unroll)

    def _admit(self, request: Request, batch: _ServingBatch) -> None:
        """Add a session's rows to a batch: to be acted on if they may be now, else to be stored."""
        session = request.session
        placed = None if request.stored else self._keep(request, batch)
        answered = not session.closed and not self.draining
        if answered and session.unroll is not None:
            assert placed is not None
            batch.requests.append(request)
            batch.acting.append(placed)
            return
        if placed is not None:
            batch.others.append(placed)
        if answered and self._begin(request, batch.filled):
            batch.requests.append(request)
            batch.acting.append(_append(request))

    def _begin(self, request: Request, filled: list[Unroll]) -> bool:
        """Begin a session's unroll, if it may; else the request is blocked."""
        session = request.session
        with self._blocked_lock:  # against `wake` missing a request blocked just now
            admitted = self._storage.may_begin(filled)
            if not admitted:
                self._blocked.append(request)
        self._metrics.gauge("parked_sessions").set(len(self._blocked))
        if not admitted:
            return False
        session.unroll = self._storage.begin(
            session.num_envs, session.first_slot, session.unrolls, filled
        )
        session.unrolls += 1
        return True

    def _keep(self, request: Request, batch: _ServingBatch) -> RowTarget | None:
        """Count a session's rows; returns their place in its unroll, if one is open."""
        session, unroll = request.session, request.session.unroll
        request.stored = session.waiting = True
        session.observe(request.timestep.step_type)
        if session.messages == 1:
            if self._memory is not None:
                self._memory.admit(session)
            self._environments += session.num_envs
            self._storage.connect(self._environments)
        self._accounts.count(session, request.timestep)
        if unroll is None:
            return None
        placed = _append(request)
        if unroll.full:
            batch.filled.append(unroll)
            session.unroll = None
        return placed

    def _evaluate(self, request: Request) -> None:
        session = request.session
        evaluation = session.evaluation
        assert evaluation is not None
        complete = evaluation.observe(request.timestep)
        last = int((request.timestep.step_type == _LAST).sum())
        self._metrics.counter("episodes", mode="evaluate").inc(last)
        staging, policy = self._staging, evaluation.policy
        staging.load([RowTarget(request.timestep)])
        memory = None
        if policy.memory_size:
            memory = _load_memory(session, policy, staging.step_type(), self._spec.num_agents)
        enter("evaluate")
        generator = self._evaluation_generator
        self._snapshots.published.wait()  # its policy too
        with self._clock.working("evaluate"):
            with self._graphs.eager("evaluate", session.num_envs):
                acted = policy.act(staging.observation(), generator, memory)
            others = self._other_teams([request], policy, generator)
            action = _joined(staging.to_host(acted["action"]), others.get(0))
        session.memory = acted.get("memory")
        enter("reply")
        message = session.pack(request.sequence, evaluation.updates, action)
        _deliver([(request, message)])
        if complete and not session.complete:
            session.complete = True
            self._scheduler.finished(evaluation)

    def _other_teams(
        self, requests: Sequence[Request], policy: Policy, generator: torch.Generator | None
    ) -> dict[int, Array]:
        """In a league, what the teams act that the policy does not act for, by request's place."""
        games = {}
        for place, request in enumerate(requests):
            session, other = request.session, request.other
            if session.pairing is None or other is None:
                continue
            begins = other.step_type == _FIRST
            slots = np.arange(session.num_envs) if session.evaluating else session.slots
            self._league.draw(session.pairing, begins, slots, session.episode)
            note = None if session.evaluating else self._progress.finish_episode
            self._league.score(session.pairing, request.timestep, other, note)
            games[place] = session.pairing, other
        if not games:
            return {}
        how = policy, generator, self._staging, self._graphs
        answers = self._league.act([*games.values()], *how)
        return dict(zip(games, answers, strict=True))


def _joined(own: Array, others: Array | None) -> Array:
    """The actions of both teams; in a league there are two."""
    return own if others is None else np.concatenate([own, others], axis=1)


def _load_memory(session: Session, policy: Policy, step_type: Tensor, num_agents: int) -> Tensor:
    """What a policy remembers in an evaluation, [n, A, H]; episodes begin with 0."""
    memory = session.memory
    if memory is None:
        shape = session.num_envs, num_agents, policy.memory_size
        return torch.zeros(shape, device=step_type.device)
    return memory.masked_fill((step_type == _FIRST).view(-1, 1, 1), 0)


def _append(request: Request) -> RowTarget:
    """The next row of a session's unroll."""
    session = request.session
    unroll = session.unroll
    assert unroll is not None
    row, unroll.cursor = unroll.cursor, unroll.cursor + 1
    return RowTarget(request.timestep, unroll, row, session.first_slot)


def _deliver(replies: list[tuple[Request, bytes]]) -> None:
    """Hand answers to the server's event loop, waking it once."""
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
