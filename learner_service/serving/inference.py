"""The inference loop: rows from the wire to the device, actions back, trajectories kept."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from learner_service.algorithms.base import Policy
from learner_service.serving.batcher import DynamicBatcher, Request
from learner_service.serving.evaluation import EvaluationGate
from learner_service.serving.league import League
from learner_service.serving.session import Session
from learner_service.storage.storage import OBSERVATION, Storage
from learner_service.telemetry.device_clock import DeviceClock
from learner_service.telemetry.metrics import LearnerMetrics
from learner_service.telemetry.progress import Progress
from shared.ledger import enter, state
from shared.spec import EnvSpec
from shared.timestep import Array, StepType, TimeStep

_IDLE_S = 0.2
# NumPy compares with ints faster.
_FIRST, _MID, _LAST = int(StepType.FIRST), int(StepType.MID), int(StepType.LAST)
_VOID = int(StepType.VOID)


class _Staging:
    """Pinned host memory that rows of a batch are gathered in, and one copy to the device."""

    def __init__(self, spec: EnvSpec, device: torch.device) -> None:
        self._spec, self._device = spec, device
        self._pinned = device.type == "cuda"
        self._copied = torch.cuda.Event() if self._pinned else None  # type: ignore[no-untyped-call]
        self._host: dict[str, Tensor] = {}
        self._views: dict[str, Array] = {}

    def load(self, requests: Sequence[Request], total: int) -> dict[str, Tensor]:
        """All rows of the requests, [total, ...] by name, on the device.

        Valid until the next call; observations carry the prefix OBSERVATION.
        """
        if self._copied is not None:
            self._copied.synchronize()  # else rows on their way would be written over
        start = 0
        for request in requests:
            stop = start + request.session.num_envs
            for name, array in _arrays(request.timestep):
                view = self._views.get(name)
                if view is None or len(view) < total:
                    view = self._grow(name, array, total)
                view[start:stop] = array
            start = stop
        if self._copied is None:
            return {name: host[:total] for name, host in self._host.items()}
        rows = {
            name: host[:total].to(self._device, non_blocking=True)
            for name, host in self._host.items()
        }
        self._copied.record()
        return rows

    def _grow(self, name: str, array: Array, total: int) -> Array:
        """Room for more rows; those gathered so far are kept."""
        old = self._host.get(name)
        dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
        host = torch.empty((total, *array.shape[1:]), dtype=dtype, pin_memory=self._pinned)
        if old is not None:
            host[: len(old)] = old
        self._host[name], self._views[name] = host, host.numpy()
        return self._views[name]


def _arrays(timestep: TimeStep) -> list[tuple[str, Array]]:
    """What is stored of a time step."""
    return [
        ("step_type", timestep.step_type),
        ("reward", timestep.reward),
        ("discount", timestep.discount),
        *((OBSERVATION + k, v) for k, v in timestep.observation.items()),
    ]


class InferenceLoop:
    """Serves batches of requests. Everything here runs on the inference thread, but for `wake`.

    A request whose session has filled its unroll while learning is behind is parked: its session
    gets no answer until there is room, which is all the back-pressure there is.

    Attributes:
        acting: held while the policy acts, and while it is published to.
        draining: rows are kept, but training sessions are not answered any more, once the batch
            under way is.
        turns: batches served, empty ones included.
    """

    def __init__(
        self,
        spec: EnvSpec,
        batcher: DynamicBatcher,
        storage: Storage[Any],
        policy: Policy,
        generator: torch.Generator,
        gate: EvaluationGate,
        progress: Progress,
        metrics: LearnerMetrics,
        clock: DeviceClock,
        learn: Callable[[], bool] | None,
        league: League,
        evaluation_generator: torch.Generator | None,
    ) -> None:
        """Wire the loop up.

        Args:
            spec: the run's spec.
            batcher: where requests come from.
            storage: where rows go.
            policy: acts; published to under `acting`.
            generator: randomness of exploration.
            gate: told of completed evaluations.
            progress: counters.
            metrics: Prometheus metrics.
            clock: told when the device works.
            learn: sync pipeline: learns from what is ready, between storing rows and acting on
                them, and returns whether the run goes on; None: another thread does (async).
            league: acts for the teams that the policy does not act for.
            evaluation_generator: randomness of evaluations; None: they are greedy.
        """
        self._spec, self._batcher, self._storage = spec, batcher, storage
        self._policy, self._generator, self._gate = policy, generator, gate
        self._progress, self._metrics, self._learn = progress, metrics, learn
        self._clock, self._league = clock, league
        self._evaluation_generator = evaluation_generator
        self._staging = _Staging(spec, storage.device)
        self._parked: list[Request] = []
        self._parked_lock = threading.Lock()
        self._ended: deque[Session] = deque()
        self._environments = 0  # of training sessions that have sent rows
        self.acting = threading.Lock()
        self.draining = False
        self.turns = 0

    def run(self) -> None:
        """Serve until the batcher is closed."""
        while True:
            enter("wait_learning" if self._parked else "wait_environments")
            requests = self._batcher.next_batch(_IDLE_S)
            enter("store")
            self._metrics.gauge("queue_depth").set(self._batcher.depth)
            if requests:
                fresh = [r for r in requests if not (r.stored or r.session.evaluating)]
                updating, started = self._batcher.updating, time.monotonic()
                self._serve(requests, started)
                self._note_latency(requests, fresh, updating, started)
            while self._ended:  # not before: these requests may be of a session that has ended
                self._forget(self._ended.popleft())
            self.turns += 1
            if requests is None:
                return

    def _note_latency(
        self, requests: list[Request], fresh: list[Request], updating: bool, started: float
    ) -> None:
        """Time from arrival to actions of those that were not made to wait by the learner.

        Args:
            requests: the batch, served.
            fresh: those of it that came to train and had not been parked before.
            updating: whether an update was under way when the batch began.
            started: when it began.
        """
        now, batcher = time.monotonic(), self._batcher
        self._metrics.histogram("inference_seconds").observe(now - started)
        phase = "update" if updating or batcher.updating else "idle"
        latencies = [now - r.arrived for r in fresh if not r.session.waiting]
        acting = self._metrics.histogram("acting_seconds", phase=phase)
        for latency in latencies:
            acting.observe(latency)
        if phase in batcher.tuners:
            tuner = batcher.tuners[phase]
            envs = sum(r.session.num_envs for r in requests)
            tuner.observe(latencies, envs, now - started, now)
            self._metrics.gauge("batch_wait_seconds", phase=phase).set(tuner.wait_s)
            self._metrics.gauge("batch_preferred_envs", phase=phase).set(tuner.preferred_envs)

    def during_update(self, updating: bool) -> None:
        """An update begins or ends. Called by the learner thread."""
        self._batcher.updating = updating

    def wake(self) -> None:
        """There may be room: queue parked requests again. Called by any thread."""
        with self._parked_lock:
            if not self._parked or not self._storage.may_begin():
                return
            parked, self._parked = self._parked, []
        self._batcher.submit(*parked)

    def end(self, session: Session) -> None:
        """A session's stream is gone. Called by the server."""
        session.closed = True
        self._ended.append(session)

    def _forget(self, session: Session) -> None:
        """Keep what a session has sent; drop and count its last row, which nothing was done on."""
        with self._parked_lock:
            self._parked = [r for r in self._parked if r.session is not session]
        request = self._batcher.withdraw(session)
        if session.evaluation is not None:
            self._gate.end(session.evaluation, session.complete)
            return
        if request is not None and not request.stored:
            self._keep(request, self._staging.load([request], session.num_envs))
        if not session.rows:
            return
        self._environments -= session.num_envs
        self._storage.connect(self._environments)
        rows = session.num_envs
        if session.unroll is not None:
            rows *= session.unroll.cursor
            rows -= self._storage.put_open(session.unroll)
            session.unroll = None
            self.wake()  # its place is free: no update may follow that would wake the others
        self._progress.drop("session", rows)
        self._metrics.counter("rows_dropped", reason="session").inc(rows)
        self._metrics.counter("episodes_dropped", reason="session").inc(session.num_envs)

    def _serve(self, requests: list[Request], now: float) -> None:
        wait = self._metrics.histogram("queue_wait_seconds")
        away = self._metrics.histogram("environment_seconds")
        for request in requests:
            if not request.stored:  # else it was parked: the learner made it wait, not the queue
                wait.observe(now - request.arrived)
                if request.session.answered:
                    away.observe(request.arrived - request.session.answered)
        for request in requests:
            if request.session.evaluating and not request.session.closed:
                self._evaluate(request)
        training = [r for r in requests if not r.session.evaluating]
        if training:
            self._train(training)

    def _train(self, requests: list[Request]) -> None:
        total = sum(r.session.num_envs for r in requests)
        with state("transfer"):
            rows = self._staging.load(requests, total)
        self._metrics.copied.to_device += sum(x.nbytes for x in rows.values())
        admitted: list[tuple[Request, slice]] = []
        start = 0
        for request in requests:
            stop = start + request.session.num_envs
            if self._store(request, {k: v[start:stop] for k, v in rows.items()}):
                admitted.append((request, slice(start, stop)))
            start = stop
        if self._learn is not None and not self._learn():
            return  # the run is complete: nobody is answered any more
        if not admitted or self.draining:
            return
        if len(admitted) < len(requests):
            rows = {k: torch.cat([v[s] for _, s in admitted]) for k, v in rows.items()}
        observation = {
            k.removeprefix(OBSERVATION): v for k, v in rows.items() if k.startswith(OBSERVATION)
        }
        memory = None
        if self._policy.memory_size:
            agents = self._spec.num_agents
            memory = _recall(
                [r.session for r, _ in admitted], self._policy, rows["step_type"], agents
            )
        enter("act")
        with self.acting, self._clock.working("act"):
            acted = self._policy.act(observation, self._generator, memory)
            version = self._progress.updates
            host = acted["action"].cpu().numpy()
            self._metrics.copied.to_host += host.nbytes
            start, actions = 0, []
            for request, _ in admitted:
                own = host[start : (start := start + request.session.num_envs)]
                actions.append(self._with_other_team(request, own, self._policy, self._generator))
        enter("store")
        remembered = acted.pop("memory", None)
        replies = []
        start = 0
        for (request, _), action in zip(admitted, actions, strict=True):
            session = request.session
            stop = start + session.num_envs
            unroll = session.unroll
            assert unroll is not None
            for name, value in acted.items():
                unroll.arrays[name][unroll.cursor - 1].copy_(value[start:stop])
            unroll.act(version, None if memory is None else memory[start:stop])
            if remembered is not None:
                session.memory = remembered[start:stop]
            if self._learn is not None:
                session.taken.append(action.copy())
            replies.append((request, request.session.pack(request.sequence, version, action)))
            start = stop
        self._metrics.histogram("batch_envs").observe(start)
        enter("reply")
        _deliver(replies)

    def _store(self, request: Request, rows: dict[str, Tensor]) -> bool:
        """Write a session's rows to its unroll; returns whether they may be acted on now."""
        session = request.session
        if not request.stored:
            self._keep(request, rows)
        if session.closed or self.draining:
            return False
        if session.unroll is not None:
            return True
        with self._parked_lock:  # against `wake` missing a request parked just now
            if not self._storage.may_begin():
                self._parked.append(request)
                self._metrics.gauge("parked_sessions").set(len(self._parked))
                return False
        self._metrics.gauge("parked_sessions").set(len(self._parked))
        session.unroll = self._storage.begin(session.num_envs, session.first_slot, session.unrolls)
        session.unrolls += 1
        _append(session, rows)
        return True

    def _keep(self, request: Request, rows: dict[str, Tensor]) -> None:
        """Count a session's rows and write them to its unroll, if one is open."""
        session = request.session
        request.stored = session.waiting = True
        self._count(session, request.timestep)
        if session.unroll is not None:
            _append(session, rows)
            if session.unroll.full:
                self._storage.put(session.unroll)
                session.unroll = None

    def _count(self, session: Session, timestep: TimeStep) -> None:
        """Episodes, steps and results."""
        step_type = timestep.step_type
        session.observe(step_type)
        if session.rows == 1:
            self._environments += session.num_envs
            self._storage.connect(self._environments)
        self._metrics.counter("rows_received").inc(session.num_envs)
        if session.resumed and session.rows == 1:
            return
        self._progress.rows_received += session.num_envs
        acted = int(((step_type == _MID) | (step_type == _LAST)).sum())
        self._progress.env_steps_received += acted
        if not self._storage.learns_once:  # else they are counted once they are learned from
            self._progress.env_steps += acted
        self._metrics.counter("env_steps").inc(acted)
        self._metrics.counter("agent_steps").inc(acted * self._spec.num_agents)
        session.episode_return += timestep.reward.sum(1)
        last = step_type == _LAST
        if last.any():
            finished = int(last.sum())
            self._progress.episodes += finished
            self._metrics.counter("episodes", mode="train").inc(finished)
            self._progress.finish_episode("return", session.episode_return[last])
            session.episode_return[last] = 0
            for name, values in timestep.metrics.items():
                if name != "return":
                    self._progress.finish_episode(name, values[last])
        void = step_type == _VOID
        if void.any():
            self._metrics.counter("episodes_dropped", reason="environment").inc(int(void.sum()))
            session.episode_return[void] = 0

    def _evaluate(self, request: Request) -> None:
        session = request.session
        evaluation = session.evaluation
        assert evaluation is not None
        complete = evaluation.observe(request.timestep)
        last = int((request.timestep.step_type == _LAST).sum())
        self._metrics.counter("episodes", mode="evaluate").inc(last)
        rows = self._staging.load([request], session.num_envs)
        self._metrics.copied.to_device += sum(x.nbytes for x in rows.values())
        observation = {
            k.removeprefix(OBSERVATION): v for k, v in rows.items() if k.startswith(OBSERVATION)
        }
        policy, memory = evaluation.policy, None
        if policy.memory_size:
            memory = _recall([session], policy, rows["step_type"], self._spec.num_agents)
        enter("evaluate")
        generator = self._evaluation_generator
        with self._clock.working("evaluate"):
            acted = policy.act(observation, generator, memory)
            action = acted["action"].cpu().numpy()
            self._metrics.copied.to_host += action.nbytes
            action = self._with_other_team(request, action, policy, generator)
        session.memory = acted.get("memory")
        enter("reply")
        message = session.pack(request.sequence, evaluation.updates, action)
        _deliver([(request, message)])
        if complete and not session.complete:
            session.complete = True
            self._gate.finished(evaluation)

    def _with_other_team(
        self, request: Request, action: Array, policy: Policy, generator: torch.Generator | None
    ) -> Array:
        """The actions of all agents, given those of the policy's: in a league there are more."""
        session, other = request.session, request.other
        if session.pairing is None or other is None:
            return action
        begins = other.step_type == _FIRST
        slots = np.arange(session.num_envs) if session.evaluating else session.slots
        self._league.draw(session.pairing, begins, slots, session.episode)
        note = None if session.evaluating else self._progress.finish_episode
        self._league.score(session.pairing, request.timestep, other, note)
        theirs = self._league.act(session.pairing, other, policy, generator)
        return np.concatenate([action, theirs], axis=1)


def _recall(sessions: list[Session], policy: Policy, step_type: Tensor, num_agents: int) -> Tensor:
    """What the policy remembers in the sessions' environments, [B, A, H]; episodes begin with 0."""
    device = step_type.device
    memory = torch.cat(
        [
            torch.zeros((s.num_envs, num_agents, policy.memory_size), device=device)
            if s.memory is None
            else s.memory.to(device)
            for s in sessions
        ]
    )
    return memory.masked_fill_((step_type == _FIRST).view(-1, 1, 1), 0)


def _append(session: Session, rows: dict[str, Tensor]) -> None:
    """Write rows at the unroll's cursor."""
    unroll = session.unroll
    assert unroll is not None
    for name, array in rows.items():
        unroll.arrays[name][unroll.cursor].copy_(array)
    unroll.cursor += 1


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
