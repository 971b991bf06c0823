"""The learner's real server with a host that answers every row with zeros, for several at once."""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import grpc
import numpy as np

from murmur.learner_service.serving.admission import Admission
from murmur.learner_service.serving.lockstep import EnvSessions
from murmur.learner_service.serving.requests import EnvSession, Request
from murmur.learner_service.serving.server import RolloutServer
from murmur.learner_service.telemetry.metrics import LearnerMetrics
from murmur.shared.config.learner import LearnerConfig
from murmur.shared.rpc import LOAD_METHOD
from murmur.shared.rpc import rollout_pb2 as pb
from murmur.shared.wire.channel import STOPPING
from murmur.shared.wire.credentials import CredentialFolder
from murmur.shared.wire.spec import EnvSpec, action_layout
from tests.waiting import wait_until

_DRAIN_S = 0.5


class Host:
    """Takes every environment; counts the sessions and where they sit."""

    run_seed, policy_version = 1, 0

    def __init__(self, pause_s: float, waits_for: Callable[[], bool]) -> None:
        self.batcher: Any = self
        self.arrivals = self
        self.scheduler: Any = self
        self.spec: EnvSpec | None = None
        self.curriculum = None
        self.sessions: list[EnvSession] = []
        self.begun = self.opened = self.answered = 0
        self._pause_s, self._waits_for = pause_s, waits_for
        self.draining, self.waiting = False, 0

    def open(self, spec: EnvSpec) -> None:
        """In a thread of its own; Welcome comes when it has returned."""
        self.opened += 1
        wait_until(self._waits_for)
        self.spec = spec

    def team(self, spec: EnvSpec, training: bool) -> EnvSpec:
        return spec

    def pair(self, session: EnvSession) -> None:
        raise AssertionError("there is no league")

    def admit(self, hello: pb.Hello, spec: EnvSpec) -> tuple[EnvSession, list[pb.SlotStart]]:
        n = hello.num_envs
        session = EnvSession(hello.worker_id, spec, n, 0, np.zeros(n, np.int64))
        self.sessions.append(session)
        self.begun += 1
        return session, [pb.SlotStart()] * n

    def end(self, session: EnvSession) -> None:
        self.sessions.remove(session)

    def put(self, requests: Sequence[Request]) -> None:
        loop = asyncio.get_running_loop()
        if self.draining:
            self.waiting += len(requests)
            return
        for request in requests:
            loop.call_later(self._pause_s, self._answer, request)

    def _answer(self, request: Request) -> None:
        session = request.session
        dtype, shape = action_layout(session.spec.action)
        action = np.zeros((session.num_envs, session.spec.num_agents, *shape), dtype)
        self.answered += 1
        if not request.reply.done():
            request.reply.set_result(session.codec.pack(request.sequence, 0, action))


class ServingLearner:
    """One learner; `with ServingLearner() as learner: learner.address`. It can come back."""

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        rank: int = 0,
        size: int = 1,
        max_sessions: int = 64,
        credentials: CredentialFolder | None = None,
        pause_s: float = 0.002,
        waits_for: Callable[[], bool] = lambda: True,
        ends_with: str = STOPPING,
    ) -> None:
        self._ends_with = ends_with
        self.host, self._pause_s = Host(pause_s, waits_for), pause_s
        self._where, self.port = host, port
        self._max_sessions, self._credentials = max_sessions, credentials
        self._rank, self._size = rank, size
        self._ready, self._waits_for = threading.Event(), waits_for

    @property
    def address(self) -> str:
        return f"{self._where}:{self.port}"

    @property
    def listens(self) -> bool:
        return self._ready.is_set()

    @property
    def environments(self) -> int:
        """Of the sessions that play."""
        return sum(session.num_envs for session in list(self.host.sessions))

    def __enter__(self) -> "ServingLearner":
        self.host = Host(self._pause_s, self._waits_for)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._ready.wait(30)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)
        self._ready.clear()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        config = LearnerConfig(host=self._where, port=self.port, max_sessions=self._max_sessions)
        metrics = LearnerMetrics()
        admission = Admission(config, metrics, self._credentials, self._rank, self._size)
        sessions = EnvSessions(self.host, config, metrics)
        server = RolloutServer(sessions, admission, config, self._credentials)
        await server.start()
        self.port = server.port
        self._ready.set()
        await self._stop.wait()
        admission.stopping = self._ends_with
        # As Run.drain: what ends while a worker writes has no status that the worker could read.
        self.host.draining, drained = True, time.monotonic() + _DRAIN_S
        while self.host.waiting < len(self.host.sessions) and time.monotonic() < drained:
            await asyncio.sleep(0.01)
        await server.stop(self._ends_with)


def load(address: str) -> pb.LoadReply:
    """What a learner answers, in plain text."""
    with grpc.insecure_channel(address) as channel:
        ask = channel.unary_unary(LOAD_METHOD, None, pb.LoadReply.FromString)
        reply: pb.LoadReply = ask(b"", timeout=10)
        return reply
