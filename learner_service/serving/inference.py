"""The inference loop: rows from the wire to the device, actions back, trajectories kept."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from murmur.learner_service.device.streams import enter_stream
from murmur.learner_service.serving.curriculum import Curriculum
from murmur.learner_service.serving.evaluation import EvaluationScheduler
from murmur.learner_service.serving.league import League
from murmur.learner_service.serving.requests import DynamicBatcher, EnvSession, Request, deliver
from murmur.learner_service.serving.snapshots import Snapshots
from murmur.learner_service.serving.staging import ForwardRows, RowTarget, Staging
from murmur.learner_service.storage.storage import Unroll, UnrollStorage
from murmur.learner_service.telemetry.device_clock import DeviceClock
from murmur.learner_service.telemetry.metrics import LearnerMetrics
from murmur.learner_service.telemetry.progress import Progress
from murmur.shared.process.ledger import enter, state
from murmur.shared.wire.timestep import Array, StepType, TimeStep

# NumPy compares with ints faster.
_MID, _LAST, _ABORTED = int(StepType.MID), int(StepType.LAST), int(StepType.ABORTED)
# An act waited if it took _WAITED_S and _WAITED_TIMES the usual, in which an act weighs _NEWER.
_WAITED_S, _WAITED_TIMES, _NEWER = 0.01, 5.0, 0.02
_IDLE_S = 0.2


@dataclass(eq=False)
class ServingStats:
    """Rows, episodes, results and latencies of serving. Used by the inference thread.

    Attributes:
        storage: storage of the transitions.
        progress: counters of the run, and results of episodes.
        metrics: Prometheus metrics.
        clock: clock of the device's work.
        curriculum: curriculum of the run, which results of episodes move; None: there is none.
        queue_wait: histogram of the time from a request's arrival to its batch.
        environment: histogram of the time from an answer to the session's next request.
    """

    storage: UnrollStorage[Any]
    progress: Progress
    metrics: LearnerMetrics
    clock: DeviceClock
    curriculum: Curriculum | None = None

    def __post_init__(self) -> None:
        """Begin to count."""
        self._num_agents = self.storage.spec.num_agents
        self._acting_agents = self.storage.spec.acting_agents
        metrics = self.metrics
        # Looked up once: these are counted for each request.
        self.queue_wait = metrics.histogram("queue_wait_seconds")
        self.environment = metrics.histogram("environment_seconds")
        self._rows = metrics.counter("rows_received")
        self._env_steps = metrics.counter("env_steps")
        self._agent_steps = metrics.counter("agent_steps")
        self._usual_s = 0.0  # of an act

    def note_act(self, seconds: float, updating: bool) -> None:
        """Count an act that waited, told by its time beside that of the acts before.

        Args:
            seconds: time of copying observations, the policy, and copying actions, s.
            updating: whether an update was under way when it began.
        """
        usual = self._usual_s or seconds
        most = _WAITED_TIMES * usual
        self._usual_s = usual + _NEWER * (min(seconds, most) - usual)
        if seconds >= _WAITED_S and seconds >= most:
            phase = "update" if updating or self.storage.updating else "idle"
            self.metrics.counter("acts_waited", phase=phase).inc()
            self.metrics.counter("acts_waited_seconds", phase=phase).inc(seconds - usual)

    def note_batch(self, latencies: Sequence[float], seconds: float, updating: bool) -> None:
        """Count a batch and how long its requests have waited.

        Args:
            latencies: time from arrival to actions of training requests that the learner did not
                make wait, s.
            seconds: time of serving the batch, s.
            updating: whether an update was under way when the batch began.
        """
        self.metrics.histogram("inference_seconds").observe(seconds)
        phase = "update" if updating or self.storage.updating else "idle"
        acting = self.metrics.histogram("acting_seconds", phase=phase)
        for latency in latencies:
            acting.observe(latency)

    def count(self, session: EnvSession, timestep: TimeStep, all_mid: bool) -> None:
        """Count the steps, episodes and results of rows that a session sent.

        Args:
            session: session of the rows, which has observed them.
            timestep: [n, ...] rows.
            all_mid: whether all rows are MID.
        """
        step_type = timestep.step_type
        self._rows.inc(session.num_envs)
        if session.resumed and session.messages == 1:
            return
        self.progress.rows_received += session.num_envs
        acted = len(step_type)
        if not all_mid:
            acted = int(((step_type == _MID) | (step_type == _LAST)).sum())
        self.progress.env_steps_received += acted
        if not self.storage.learns_once:  # else they are counted once they are learned from
            self.progress.env_steps += acted
        self._env_steps.inc(acted)
        self._agent_steps.inc(acted * self._acting_agents)
        session.episode_return += timestep.reward.sum(1)
        untrained = self.progress.updates == 0
        if self._num_agents > 1 and (untrained or not all_mid):
            # Agents compete if a row rewards one and punishes another. Once the policy has learned,
            # only the last rows of episodes are counted.
            reward = timestep.reward if untrained else timestep.reward[step_type == _LAST]
            counts = self.progress.rewards_at_odds
            counts[0] += int(reward.any(1).sum())
            counts[1] += int(((reward.min(1) < 0) & (reward.max(1) > 0)).sum())
        if session.messages == 1:
            session.untrained[:] = untrained
        if all_mid:
            return
        last = step_type == _LAST
        if last.any():
            finished = int(last.sum())
            self.progress.episodes += finished
            self.metrics.counter("episodes", mode="train").inc(finished)
            early = session.untrained[last].tolist()
            for value, is_early in zip(session.episode_return[last].tolist(), early, strict=True):
                self.progress.finish_return(value, is_early)
            if self.curriculum is not None:
                self.curriculum.note(session.begun, last, session.episode_return, timestep.metrics)
            for name, values in timestep.metrics.items():
                if name != "return":
                    self.progress.recent[name].extend(values[last].tolist())
        if aborted := int((step_type == _ABORTED).sum()):
            self.metrics.counter("episodes_dropped", reason="environment").inc(aborted)
        session.episode_return[session.over], session.untrained[session.over] = 0, untrained


@dataclass(slots=True)
class _Served:
    """Time steps of training sessions that are served together.

    Attributes:
        requests: requests that are answered.
        acting: places of their rows, in the same order.
        others: places of rows that are stored there and acted on elsewhere or not at all: the last
            rows of full unrolls.
        filled: unrolls that are full with these rows.
    """

    requests: list[Request] = field(default_factory=list)
    acting: list[RowTarget] = field(default_factory=list)
    others: list[RowTarget] = field(default_factory=list)
    filled: list[Unroll] = field(default_factory=list)


@dataclass(eq=False, kw_only=True)
class InferenceLoop:
    """Serves batches of requests. Everything here runs on the inference thread, but for `wake`.

    A request whose session has filled its unroll while learning is behind is blocked: its session
    gets no answer until there is room, which is all the back-pressure there is. Then the request
    is queued again; its rows are observed only once.

    Attributes:
        batcher: source of requests.
        storage: storage of the transitions.
        snapshots: snapshots of the policy that acts.
        staging: brings rows to the policy, and actions back.
        scheduler: scheduler that completed and ended evaluations are reported to.
        league: acts for the teams that the policy does not act for.
        stats: counts of what is served.
        sampling: randomness of evaluations' actions; None: they are greedy.
        learn: learns from what is ready, between storing rows and acting on them, and returns
            whether the run continues (the sync pipeline); None: another thread learns (async).
        draining: rows are kept, but training sessions are not answered any more, once the batch
            under way is.
        batches_served: number of batches, empty ones included.
        prepared: set once it can act; nothing is learned before, while acts are captured.
    """

    batcher: DynamicBatcher
    storage: UnrollStorage[Any]
    snapshots: Snapshots
    staging: Staging
    scheduler: EvaluationScheduler
    league: League
    stats: ServingStats
    sampling: torch.Generator | None = None
    learn: Callable[[], bool] | None = None
    draining: bool = False
    batches_served: int = 0
    prepared: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        """Serve no session yet."""
        self._metrics = self.stats.metrics
        self._blocked: list[Request] = []
        self._blocked_lock = threading.Lock()
        self._ended: deque[EnvSession] = deque()
        self._environments = 0  # of training sessions that have sent rows

    def run(self) -> None:
        """Serve until the batcher is closed."""
        enter_stream(self.storage.device, urgent=True)
        for policy in self.snapshots.each():
            self.staging.prepare(policy)
        self.prepared.set()
        while True:
            enter("wait_learning" if self._blocked else "wait_environments")
            requests = self.batcher.next_batch(_IDLE_S)
            enter("store")
            self._metrics.gauge("queue_depth").set(self.batcher.depth)
            if requests:
                self.serve(requests)
            while self._ended:  # not before: these requests may be of a session that has ended
                self._remove(self._ended.popleft())
            self.batches_served += 1
            if requests is None:
                return

    def serve(self, requests: list[Request]) -> None:
        """Serve a batch: observe its time steps, act on them, store and deliver the actions."""
        started, updating = time.monotonic(), self.storage.updating
        # Training requests that are served for the first time.
        fresh = [r for r in requests if not (r.stored or r.session.evaluating)]
        for request in requests:
            if not request.stored:  # else it was blocked: the learner made it wait, not the queue
                self.stats.queue_wait.observe(started - request.arrived)
                if answered := request.session.answered:  # else it is the session's first
                    self.stats.environment.observe(request.arrived - answered)
            if request.session.evaluating and not request.session.closed:
                self._evaluate(request)

        # Assign: time steps get their places in unrolls, are written there (on CUDA those to be
        # acted on together with their actions), and full unrolls go to the storage.
        batch, training = _Served(), [r for r in requests if not r.session.evaluating]
        for request in training:
            self._assign(request, batch)
        busy, began = self.storage.updating, time.monotonic()
        with state("transfer"):
            self.staging.load(batch.acting, batch.others)
        loading_s = time.monotonic() - began
        for unroll in batch.filled:
            self.storage.add(unroll)

        running = True
        if self.learn is not None and training:
            running = self.learn()  # the sync pipeline makes its updates here, before it acts
        if not running or not batch.requests or self.draining:
            self.staging.store()  # the run ends, or no session may be answered: rows are kept
        else:
            # Act. The other teams act before the wait for the actions: the device has both to do.
            enter("act")
            began = time.monotonic() - loading_s
            with self.snapshots.acting() as snapshot, self.stats.clock.working("act"):
                policy, version = snapshot.policy, snapshot.version
                memory = self.staging.act(policy)
                others: dict[EnvSession, Array] = {}
                if games := [r for r in batch.requests if r.other is not None]:
                    recent = self.stats.progress.recent
                    generator = self.staging.generator
                    others = self.league.play(games, policy, generator, self.staging, recent)
                actions = self.staging.actions()
            enter("store")
            self.stats.note_act(time.monotonic() - began, busy)

            # Store what each unroll and each exact resume need of the actions; deliver them.
            replies, stop = [], 0
            curriculum = self.stats.curriculum
            values = None if curriculum is None else curriculum.current
            for request in batch.requests:
                session = request.session
                start, stop = stop, stop + session.num_envs
                action = actions[start:stop]  # [n, A] or [n, A, U]
                if session in others:
                    action = session.of_game(action, others[session])
                assert session.unroll is not None
                session.unroll.act(version, None if memory is None else memory[start:stop])
                if self.learn is not None:
                    session.taken.append(action.copy())
                message = session.codec.pack(request.sequence, version, action)
                if values is not None and session.values is not values:
                    message = session.tell(message, values)
                replies.append((request, message))
            self._metrics.histogram("batch_envs").observe(stop)
            enter("reply")
            deliver(replies)

        now = time.monotonic()
        latencies = [now - r.arrived for r in fresh if not r.session.waiting]
        self.stats.note_batch(latencies, now - started, updating)

    def _assign(self, request: Request, batch: _Served) -> None:
        """Count a session's rows and give them their places, once; see whether it is acted for."""
        session, unroll, timestep = request.session, request.session.unroll, request.timestep
        target = None  # where the rows are acted on
        if not request.stored:
            request.stored = session.waiting = True
            all_mid = session.observe(timestep.step_type)
            if session.messages == 1:
                if self.staging.memory is not None:
                    self.staging.memory.admit(session)
                self._environments += session.num_envs
                self.storage.connect(self._environments)
            self.stats.count(session, timestep, all_mid)
            # These rows end the previous transition, so they belong to its unroll; a full unroll's
            # last row also begins the next unroll, and is acted on there.
            if unroll is not None:
                target = RowTarget(timestep, unroll, unroll.cursor, session.first_slot)
                unroll.cursor += 1
                if unroll.full:
                    batch.filled.append(unroll)
                    session.unroll = None
        if target is not None and (session.unroll is None or session.closed or self.draining):
            batch.others.append(target)
        if session.closed or self.draining:
            return
        if session.unroll is None:
            # The rows also begin the next unroll, if learning is not too far behind.
            with self._blocked_lock:  # against `wake` missing a request blocked just now
                admitted = self.storage.may_begin(batch.filled)
                if not admitted:
                    self._blocked.append(request)
            self._metrics.gauge("parked_sessions").set(len(self._blocked))
            if not admitted:
                return
            n, first_slot, number = session.num_envs, session.first_slot, session.unrolls
            session.unroll = self.storage.begin(n, first_slot, number, batch.filled)
            session.unrolls += 1
            session.unroll.cursor = 1
            target = RowTarget(timestep, session.unroll, 0, first_slot)
        assert target is not None
        batch.requests.append(request)
        batch.acting.append(target)

    def _evaluate(self, request: Request) -> None:
        """Note the results in an evaluation's rows, act on the rows and deliver the actions."""
        session, timestep = request.session, request.timestep
        evaluation = session.evaluation
        assert evaluation is not None
        complete = evaluation.observe(timestep)
        last = int((timestep.step_type == _LAST).sum())
        self._metrics.counter("episodes", mode="evaluate").inc(last)
        enter("evaluate")
        policy, sampling, staging = evaluation.policy, self.sampling, self.staging
        self.snapshots.published.wait()  # evaluations' policies are behind this mark, too
        with self.stats.clock.working("evaluate"):
            own = ForwardRows(policy, [timestep], session.memory)
            action, (session.memory,) = staging.forward_rows([own], sampling)
            if request.other is not None:
                action = action.copy()  # the other team's actions may overwrite it
                others = self.league.play([request], policy, sampling, staging, None)
                action = session.of_game(action, others[session])
        enter("reply")
        message = session.codec.pack(request.sequence, evaluation.updates, action)
        deliver([(request, message)])
        if complete and not session.complete:
            session.complete = True
            self.scheduler.finished(evaluation)

    def wake(self) -> None:
        """Queue blocked requests if there may be room. Called by any thread."""
        with self._blocked_lock:
            if not self._blocked or not self.storage.may_begin():
                return
            blocked, self._blocked = self._blocked, []
        self.batcher.arrivals.put(blocked)

    def end(self, session: EnvSession) -> None:
        """Note that a session's stream is gone. Called by the server."""
        session.closed = True
        self._ended.append(session)

    def _remove(self, session: EnvSession) -> None:
        """Keep what a session has sent; drop and count its last row, which nothing was done on."""
        with self._blocked_lock:
            self._blocked = [r for r in self._blocked if r.session is not session]
        request = self.batcher.withdraw(session)
        if session.evaluating:
            assert session.evaluation is not None
            self.scheduler.end(session.evaluation, session.complete, session.given_up)
            return
        if self.staging.memory is not None:
            self.staging.memory.dismiss(session)
        if request is not None and not request.stored:
            batch = _Served()
            self._assign(request, batch)
            with state("transfer"):
                self.staging.load((), batch.others)
            for unroll in batch.filled:
                self.storage.add(unroll)
        if not session.messages:
            return
        self._environments -= session.num_envs
        self.storage.connect(self._environments)
        rows = session.num_envs
        if session.unroll is not None:
            rows = self.storage.add_open(session.unroll)
            session.unroll = None
            self.wake()  # its place is free: no update may follow that would wake the others
        self.stats.progress.drop("session", rows)
        self._metrics.counter("rows_dropped", reason="session").inc(rows)
        self._metrics.counter("episodes_dropped", reason="session").inc(session.num_envs)
