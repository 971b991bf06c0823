"""Topic `acting`: from a request's arrival to its answer, idle and while updates run.

A whole learner of terrain-reference in this process, but for gRPC: sessions hand rows to its
batcher and wait for the answers, without an environment between. Each answer is put down to what
the learner thread did meanwhile: an update, or waiting for rows.
"""

import asyncio
import math
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from murmur.benchmarks.gpu_topics.figures import CASES, SMALL, WORKERS, Figure, Value
from murmur.benchmarks.gpu_topics.parts import quantile, synthetic
from murmur.benchmarks.gpu_topics.topics import Context
from murmur.env_service.environment import make_environment
from murmur.learner_service.context import RunContext
from murmur.learner_service.run import Run
from murmur.learner_service.serving.requests import EnvSession, Request
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.config.files import load
from murmur.shared.process.ledger import Ledger
from murmur.shared.rpc import rollout_pb2 as pb
from murmur.shared.wire.spec import EnvSpec
from murmur.shared.wire.timestep import StepType, TimeStep

# Sessions, environments of each, and seconds from one turn of a session to its next: first those of
# a run on 16 cores, where each steps on its own; 0: all ask again at once.
_SIZES = ((2 * WORKERS, 32, 0.06), (16, 4, 0.0), (1, 64, 0.0), (1, 1, 0.0))
_WAITS = ("wait_rows", "start", "log")  # of the learner thread, while it makes no update
_DEADLINE_S = 30.0
_ENOUGH = 100  # idle acts
_ACT_MS, _SESSION_MS = 0.45, 0.03  # expected: one session's act, eager; each further session
_GOALS = (64, 2 * WORKERS * 32)  # environments whose acts must not wait for updates


@dataclass
class Latencies:
    """Milliseconds from arrival to answer.

    Attributes:
        idle: latencies of acts during which the learner waited.
        busy: latencies of acts during which the learner began, made or ended an update.
    """

    idle: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)


def plan_acting(context: Context) -> list[Figure]:
    """Plan the latency figures by sessions and environments."""
    del context
    figures = []
    for sessions, envs, period_s in _SIZES:
        together = 1 if period_s else sessions
        expected = _ACT_MS + (together - 1) * _SESSION_MS
        for when, slower in (("idle", 1.0), ("during updates", 2.0)):
            subject = _subject(sessions, envs)
            for q, factor in ((50, 1.0), (99, 2.0)):
                goal = 5.0 if q == 99 and sessions * envs in _GOALS and when != "idle" else None
                name = f"{subject}: p{q} {when}, ms"
                figures.append(Figure(name, goal, expected=slower * factor * expected))
    return figures


def _subject(sessions: int, envs: int) -> str:
    total = sessions * envs
    return f"acting, {total} environments in {sessions} session{'s' if sessions > 1 else ''}"


def acting(context: Context) -> dict[str, Value]:
    """Measure from a request's arrival to its answer, idle and while updates run."""
    values: dict[str, Value] = {}
    small = ((1, 16, 0.0), (2, 2, 0.01))
    for sessions, envs, period_s in context.effort.choose(small, _SIZES, _SIZES):
        subject = _subject(sessions, envs)
        if context.has(subject):
            continue
        warm_up = context.effort.choose(3, 60, 60)
        found = latencies(_config(context), sessions, envs, warm_up, context.share(6), period_s)
        for when, times in (("idle", found.idle), ("during updates", found.busy)):
            for q in (50, 99):
                name = f"{subject}: p{q} {when}, ms"
                values[name] = quantile(times, q / 100) if times else None
            values[f"{subject}: acts {when}"] = len(times)
        context.save(values)
    return {**context.known, **values}


def _config(context: Context) -> ExperimentConfig:
    """Return terrain-reference; rows may be old, so that no session waits for updates."""
    terrain = next(case for case in CASES if case.name == "coma, terrain-reference")
    case = context.effort.choose(SMALL, terrain, terrain)
    fixed = (
        *(f"learner.device={context.device}", "learner.max_policy_lag=1000"),
        "evaluation.every_updates=0",
        *("run.max_updates=0", "run.max_minutes=0", "env_server.num_workers=1"),
    )
    return load(case.config, [*case.changes, *fixed], {})


def latencies(
    config: ExperimentConfig,
    sessions: int,
    envs: int,
    warm_up: int,
    seconds: float,
    period_s: float = 0.0,
) -> Latencies:
    """Run a learner and ask it for actions.

    Args:
        config: configuration of the learner.
        sessions: number of sessions that ask at once.
        envs: number of environments of each session.
        warm_up: number of each session's answers that do not count.
        seconds: length of the measurement [s].
        period_s: interval between a session's requests [s]; 0: every session asks again at once.
    """
    spec = make_environment(config.environment, 1).spec
    with tempfile.TemporaryDirectory(prefix="murmur-bench-") as folder:
        run = Run(RunContext(config, Path(folder), None, False, threading.Event()))
        run.open(spec)
        try:
            if period_s:
                return asyncio.run(_each(run, spec, sessions, envs, warm_up, seconds, period_s))
            return asyncio.run(_ask(run, spec, sessions, envs, warm_up, seconds))
        finally:
            assert run.context.learner is not None
            run.context.learner.finished.set()
            run.end_input()
            run.context.close()


async def _ask(
    run: Run, spec: EnvSpec, count: int, envs: int, warm_up: int, seconds: float
) -> Latencies:
    sessions = [run.admit(pb.Hello(worker_id=str(i), num_envs=envs), spec)[0] for i in range(count)]
    (learner,) = (ledger for ledger in run.context.metrics.ledgers() if ledger.thread == "learner")
    first, later = _row(spec, envs, StepType.FIRST), _row(spec, envs, StepType.MID)
    found = Latencies()
    for turn in range(warm_up):
        await _answers(run, sessions, turn + 1, later if turn else first)
    turn = warm_up
    # Asked without a pause, the learner may never be idle: then wait until it is.
    for patient in (False, True):
        end = time.monotonic() + seconds / (2 if patient else 1)
        while time.monotonic() < end or turn < warm_up + 2:
            while patient and _updating(learner) and time.monotonic() < end:
                await asyncio.sleep(5e-4)
            turn += 1
            before = _updating(learner)
            started = time.perf_counter()
            await _answers(run, sessions, turn, later)
            took = 1e3 * (time.perf_counter() - started)
            (found.busy if before or _updating(learner) else found.idle).append(took)
        if len(found.idle) >= _ENOUGH:
            break
    return found


async def _each(
    run: Run, spec: EnvSpec, count: int, envs: int, warm_up: int, seconds: float, period_s: float
) -> Latencies:
    """Measure environments that step on their own: every session has its turn once in a period."""
    sessions = [run.admit(pb.Hello(worker_id=str(i), num_envs=envs), spec)[0] for i in range(count)]
    (learner,) = (ledger for ledger in run.context.metrics.ledgers() if ledger.thread == "learner")
    first, later = _row(spec, envs, StepType.FIRST), _row(spec, envs, StepType.MID)
    found = Latencies()

    async def session_turns(session: EnvSession, offset_s: float) -> None:
        await asyncio.sleep(offset_s)
        turn, end = 0, math.inf
        while turn < warm_up + 2 or time.monotonic() < end:
            turn += 1
            if turn == warm_up + 1:
                end = time.monotonic() + seconds
            before, started = _updating(learner), time.perf_counter()
            await _answers(run, [session], turn, later if turn > 1 else first)
            took = time.perf_counter() - started
            if turn > warm_up:
                (found.busy if before or _updating(learner) else found.idle).append(1e3 * took)
            await asyncio.sleep(max(period_s - took, 0.0))

    offsets = (i * period_s / count for i in range(count))
    await asyncio.gather(*(session_turns(s, at) for s, at in zip(sessions, offsets, strict=True)))
    return found


def _updating(learner: Ledger) -> bool:
    return learner.current()[0] not in _WAITS


async def _answers(run: Run, sessions: Sequence[EnvSession], sequence: int, row: TimeStep) -> None:
    """Submit a row of every session and wait until all are answered."""
    loop = asyncio.get_running_loop()
    requests = [Request(s, sequence, row, loop.create_future()) for s in sessions]
    run.batcher.arrivals.put(requests)
    await asyncio.wait_for(asyncio.gather(*(r.reply for r in requests)), _DEADLINE_S)


def _row(spec: EnvSpec, envs: int, kind: StepType) -> TimeStep:
    return TimeStep(
        step_type=np.full(envs, int(kind), np.uint8),
        reward=np.zeros((envs, spec.num_agents), np.float32),
        discount=np.ones(envs, np.float32),
        observation={name: x.numpy() for name, x in synthetic(spec, envs).items()},
        metrics={name: np.zeros(envs, np.float32) for name in spec.metrics},
    )
