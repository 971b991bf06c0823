"""The production path: the learner's server and the environment server's sessions, and no network.

What is the learner's is imported by its process alone, as in production.
"""

import asyncio
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry

from murmur.benchmarks._no_op import Gate, no_op_timestep, run_loop
from murmur.env_service.environment import VectorEnvironment
from murmur.env_service.metrics import WorkerMetrics
from murmur.env_service.sessions.expert import Expert
from murmur.env_service.sessions.ranks import Ranks
from murmur.env_service.sessions.worker import WorkerSession, run_until
from murmur.env_service.watchdog.faults import FaultCount, GuardedEnvironment
from murmur.shared.config import PluginConfig
from murmur.shared.config.experiment import EnvServerConfig, ExperimentConfig
from murmur.shared.config.learner import BatcherConfig, LearnerConfig
from murmur.shared.rpc import rollout_pb2 as pb
from murmur.shared.wire.codec import ActionCodec
from murmur.shared.wire.spec import EnvSpec
from murmur.shared.wire.timestep import Array, StepType, TimeStep

_BATCH_S = 0.5e-3  # of a batch in `production 0.5 ms`


class NoOp(VectorEnvironment):
    """Environment that only waits for its turn."""

    def __init__(self, spec: EnvSpec, num_envs: int, gate: Gate, stream: int) -> None:
        """Prepare to step through `gate`."""
        self.spec, self.num_envs = spec, num_envs
        self._gate, self._stream = gate, stream
        self._timestep = no_op_timestep(spec, num_envs)
        self._first = replace(self._timestep, step_type=np.full(num_envs, StepType.FIRST, np.uint8))

    def step(
        self, action: Array, restart: NDArray[np.bool_], seeds: NDArray[np.uint64]
    ) -> TimeStep:
        """Return FIRST, then the same rows for ever."""
        self._gate.step(self._stream)
        return self._first if restart[0] else self._timestep


class _Host:
    """A run without a network: sessions get slots, and a thread answers with constant actions."""

    run_seed, policy_version = 1, 1
    curriculum = None

    def __init__(self, spec: EnvSpec, num_envs: int, slow: bool) -> None:
        from murmur.learner_service.serving.evaluation import EvaluationScheduler
        from murmur.learner_service.serving.requests import DynamicBatcher

        self.batcher = DynamicBatcher(BatcherConfig())
        self.scheduler = EvaluationScheduler(lambda _: None)
        self.spec: EnvSpec | None = spec
        self._codec = ActionCodec(spec, num_envs)
        self._action = np.zeros((num_envs, spec.num_agents), np.int32)
        self._sessions, self._slow = 0, slow

    def open(self, spec: EnvSpec) -> None:
        """Do nothing: the spec is known."""

    def team(self, spec: EnvSpec, training: bool) -> EnvSpec:
        """Return a spec of all agents."""
        return spec

    def pair(self, session: object) -> None:
        """Do nothing: there are no opponents."""

    def admit(self, hello: pb.Hello, spec: EnvSpec) -> tuple[Any, list[pb.SlotStart]]:
        """Admit a session to the next free slots."""
        from murmur.learner_service.serving.requests import EnvSession

        n = hello.num_envs
        first = self._sessions * n
        self._sessions += 1
        session = EnvSession(hello.worker_id, spec, n, first, np.zeros(n, np.int64))
        return session, [pb.SlotStart() for _ in range(n)]

    def end(self, session: object) -> None:
        """Do nothing: there is no state of a session."""

    def answer(self) -> None:
        """Answer requests, as the inference thread."""
        from murmur.learner_service.serving.requests import deliver

        while (requests := self.batcher.next_batch(0.2)) is not None:
            if requests:
                if self._slow:
                    time.sleep(_BATCH_S)
                deliver([(r, self._codec.pack(r.sequence, 1, self._action)) for r in requests])


def serve_production(
    pipe: Any,  # noqa: ANN401
    spec: EnvSpec,
    num_envs: int,
    slow: bool,
) -> None:
    from murmur.learner_service.serving.admission import Admission
    from murmur.learner_service.serving.lockstep import EnvSessions
    from murmur.learner_service.serving.server import RolloutServer
    from murmur.learner_service.telemetry.metrics import LearnerMetrics

    sys.setswitchinterval(5e-4)  # as the learner does
    host = _Host(spec, num_envs, slow)
    threading.Thread(target=host.answer, daemon=True).start()

    async def serve() -> None:
        config, metrics = LearnerConfig(port=0), LearnerMetrics()
        sessions = EnvSessions(host, config, metrics)
        server = RolloutServer(sessions, Admission(config, metrics), config)
        await server.start()
        pipe.send(server.port)
        await asyncio.Event().wait()

    run_loop(serve())


def play_production(
    port: int, spec: EnvSpec, num_envs: int, _: bool, streams: int, gate: Gate
) -> None:
    config = ExperimentConfig(
        environment=PluginConfig(name="no-op"),
        env_server=EnvServerConfig(learner=f"127.0.0.1:{port}"),
    )

    async def play() -> None:
        stop = asyncio.Event()
        metrics = WorkerMetrics("train", CollectorRegistry())
        async with Ranks(config, metrics, "environment") as ranks:
            faults = FaultCount(0, lambda *_: None)
            environments = [
                GuardedEnvironment(partial(NoOp, spec, num_envs, gate, i), faults)
                for i in range(streams)
            ]
            sessions = [
                WorkerSession(
                    environment,
                    Expert(config, environment, asked=True),
                    f"no-op/{i}",
                    i * num_envs,
                    stop,
                )
                for i, environment in enumerate(environments)
            ]
            plays = [session.run(ranks.choice(num_envs), metrics) for session in sessions]
            await run_until(stop, metrics, plays)

    run_loop(play())
