"""What stands around the learner's server while it is fuzzed without a network.

The server, its door, its sessions and its metrics are the real ones. The host answers at once.
"""

import atexit
import logging
from collections.abc import Sequence
from typing import Any

import grpc
import numpy as np

from murmur.learner_service.serving.admission import Admission
from murmur.learner_service.serving.evaluation import Evaluation
from murmur.learner_service.serving.lockstep import EnvSessions
from murmur.learner_service.serving.requests import EnvSession, Request
from murmur.learner_service.serving.server import RolloutServer
from murmur.learner_service.telemetry.metrics import LearnerMetrics
from murmur.shared.config.learner import LearnerConfig
from murmur.shared.process.process import new_event_loop
from murmur.shared.rpc import rollout_pb2 as pb
from murmur.shared.wire.spec import ArraySpec, Discrete, EnvSpec

logging.getLogger("murmur.audit").setLevel(logging.CRITICAL)

SPEC = EnvSpec(
    "e",
    2,
    (ArraySpec("x", "float32", (2,)), ArraySpec("action_mask", "uint8", (3,))),
    Discrete(3),
    ("m",),
    10,
)


class Aborted(Exception):  # noqa: N818
    """The server ended the stream with a status."""

    def __init__(self, code: grpc.StatusCode) -> None:
        super().__init__(code)
        self.code = code


class Host:
    """Serves SPEC; sessions are open until the server ends them."""

    run_seed, policy_version, spec = 1, 0, SPEC
    curriculum = None

    def __init__(self) -> None:
        self.batcher: Any = self
        self.arrivals = self
        self.scheduler: Any = self
        self.open_sessions = 0
        self.rows = 0

    def open(self, spec: EnvSpec) -> None:
        raise AssertionError("the run is open")

    def team(self, spec: EnvSpec, training: bool) -> EnvSpec:
        return spec

    def pair(self, session: EnvSession) -> None:
        raise AssertionError("there is no league")

    def admit(self, hello: pb.Hello, spec: EnvSpec) -> tuple[EnvSession, list[pb.SlotStart]]:
        self.open_sessions += 1
        n = hello.num_envs
        first = hello.preferred_first_slot
        return EnvSession(hello.worker_id, spec, n, first, np.zeros(n, np.int64)), []

    def start(self) -> Evaluation:
        self.open_sessions += 1
        return Evaluation(None, 0, 0)  # type: ignore[arg-type]

    def end(self, session: EnvSession) -> None:
        self.open_sessions -= 1

    def put(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.rows += request.session.num_envs
            request.reply.set_result(b"action")


class Context:
    """A stream: messages that come, and what is written."""

    def __init__(self, messages: Sequence[bytes]) -> None:
        self._messages = iter(messages)
        self.written: list[bytes] = []

    async def read(self) -> object:
        return next(self._messages, grpc.aio.EOF)

    async def write(self, message: bytes) -> None:
        self.written.append(message)

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        assert details.isprintable(), details
        assert len(details) < 2000
        raise Aborted(code)

    def peer(self) -> str:
        return "fuzz"

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def auth_context(self) -> dict[str, Any]:
        return {}


HOST = Host()
CONFIG, METRICS = LearnerConfig(max_sessions=2), LearnerMetrics()


def server_of(host: Host) -> RolloutServer:
    """A server that is not started: streams are handed to it."""
    return RolloutServer(EnvSessions(host, CONFIG, METRICS), Admission(CONFIG, METRICS), CONFIG)


SERVER = server_of(HOST)
LOOP = new_event_loop()
atexit.register(LOOP.close)


def play(
    messages: Sequence[bytes], server: RolloutServer = SERVER, host: Host = HOST
) -> tuple[str, list[bytes]]:
    """A whole stream: its status, and what the server wrote."""
    context = Context(messages)
    status = "OK"
    try:
        LOOP.run_until_complete(server._play(None, context))  # type: ignore[arg-type]
    except Aborted as aborted:
        status = aborted.code.name
    assert host.open_sessions == 0, "a session was left behind"
    assert not server.admission.streams, "a place, or memory, was left behind"
    return status, context.written
