"""The gRPC server: handshakes, slots, and the lockstep of each session.

Runs on one event loop in a thread of its own; inference and learning run elsewhere.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator
from typing import Protocol

import grpc
import numpy as np
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from numpy.typing import NDArray

from learner_service.serving.access import Access, Refused, Visit, audit
from learner_service.serving.batcher import DynamicBatcher, Request
from learner_service.serving.evaluation import EvaluationGate
from learner_service.serving.league import split
from learner_service.serving.session import Session
from learner_service.serving.validation import check_contents, check_order, check_results
from learner_service.telemetry.metrics import LearnerMetrics
from shared.channel import MAX_HELLO_BYTES, SERVER_OPTIONS
from shared.codec import ObservationCodec, check_size
from shared.config import LearnerConfig
from shared.credentials import CredentialFolder, server_credentials
from shared.errors import MurmurError, ResourceError, SpecError, WireError
from shared.rpc import METHOD, PROTOCOL_VERSION
from shared.rpc import rollout_pb2 as pb
from shared.spec import (
    MAX_ENVS,
    MAX_NAME_CHARACTERS,
    EnvSpec,
    first_difference,
    spec_from_proto,
)
from shared.timestep import StepType

_EVALUATION_POLL_S = 0.05
_STOP_POLL_S = 0.01
_STOP_S = 5.0  # for sessions to notice that they have ended
HELLO_TIMEOUT_S = 10.0
_FIRST_ROWS_PATIENCE = 10  # environments may compile and load before their first rows
_MAX_SLOT = 1 << 20  # the run remembers an episode's number for each slot it has seen
_MID, _LAST = int(StepType.MID), int(StepType.LAST)


class Host(Protocol):
    """What the server needs of the run it serves."""

    run_seed: int
    batcher: DynamicBatcher
    gate: EvaluationGate
    spec: EnvSpec | None

    @property
    def policy_version(self) -> int:
        """Updates the acting policy has had."""

    def open(self, spec: EnvSpec) -> None:
        """Build the run for the spec of its first training session."""

    def team(self, spec: EnvSpec, training: bool) -> EnvSpec:
        """The part of a session's agents that the run's policy acts for."""

    def pair(self, session: Session) -> None:
        """Get ready to act for the agents that the run's policy does not act for."""

    def admit(self, hello: pb.Hello, spec: EnvSpec) -> tuple[Session, list[pb.SlotStart]]:
        """A training session's place, and where its environments start."""

    def end(self, session: Session) -> None:
        """The session's stream is gone."""


_MODE_NAMES = {pb.MODE_TRAIN: "train", pb.MODE_EVALUATE: "evaluate"}


class RolloutServer:
    """Serves Rollout.Play and grpc.health.v1. All methods run on the event loop.

    Attributes:
        port: the port it listens on, once started.
        stopping: set from outside: nobody is let in any more.
    """

    def __init__(
        self,
        host: Host,
        config: LearnerConfig,
        metrics: LearnerMetrics,
        credentials: CredentialFolder | None = None,
    ) -> None:
        """Prepare to listen on config.host and config.port (0: any free port).

        Without credentials everybody is let in, in plain text: shared.credentials.credentials_for
        decides where that is right.
        """
        self._host, self._address, self.port = host, config.host, config.port
        self._max_sessions, self._metrics = config.max_sessions, metrics
        self._timeout_s = config.session_timeout_s or None
        self._credentials = credentials
        self._access = Access(credentials, config.max_sessions_per_identity, metrics)
        self._sessions = self._streams = 0
        self.stopping = False
        self._opening = asyncio.Lock()
        self._arrived: list[Request] = []  # in this turn of the event loop
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        """Listen.

        Raises:
            ResourceError: if the port cannot be had.
        """
        # No deserialiser and no serialiser: messages stay bytes (see shared.codec).
        handler = grpc.stream_stream_rpc_method_handler(self._play)
        _, service, method = METHOD.split("/")
        server = grpc.aio.server(interceptors=[self._access], options=SERVER_OPTIONS)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service, {method: handler}),)
        )
        health = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(health, server)
        await health.set("", health_pb2.HealthCheckResponse.SERVING)
        try:
            where = f"{self._address}:{self.port}"
            if self._credentials is None:
                bound = server.add_insecure_port(where)
            else:
                bound = server.add_secure_port(where, server_credentials(self._credentials))
        except RuntimeError:
            bound = 0
        if not bound:
            raise ResourceError(
                f"port {self._address}:{self.port} cannot be had: another program uses it or the "
                "address is not this machine's; set learner.port to a free one, or to 0 for any"
            )
        self.port = bound
        await server.start()
        self._server = server

    async def stop(self) -> None:
        """End all streams with UNAVAILABLE: workers come back when a learner does."""
        if self._server is not None:
            await self._server.stop(None)
            deadline = time.monotonic() + _STOP_S
            while self._streams and time.monotonic() < deadline:
                await asyncio.sleep(_STOP_POLL_S)

    async def _play(
        self, _requests: object, context: grpc.aio.ServicerContext[bytes, bytes]
    ) -> None:
        """One session, from Hello to the end of its stream."""
        session: Session | None = None
        visit = Visit()
        self._streams += 1
        try:
            with self._place(context, visit):
                session = await self._handshake(context, visit)
                self._metrics.gauge("sessions", mode=visit.mode).inc()
                try:
                    await self._lockstep(session, context, visit)
                finally:
                    self._metrics.gauge("sessions", mode=visit.mode).dec()
            visit.outcome = "OK"
        except Refused as refused:
            counter = "rejected" if session else "sessions_refused"
            self._metrics.counter(counter, reason=refused.reason).inc()
            visit.outcome = f"{refused.code.name}: {refused.details}"
            await context.abort(refused.code, refused.details)
        finally:
            if session is not None:
                self._host.end(session)
            self._streams -= 1
            level = logging.INFO if visit.outcome in ("OK", "CANCELLED") else logging.WARNING
            audit.log(level, "%s", visit.line())

    @contextlib.contextmanager
    def _place(
        self, context: grpc.aio.ServicerContext[bytes, bytes], visit: Visit
    ) -> Iterator[None]:
        """One of the places for sessions, while the stream lasts.

        Raises:
            Refused: if there is none left, for anybody or for this identity.
        """
        self._access.enter(context, visit)
        try:
            if self.stopping:
                raise Refused(
                    grpc.StatusCode.UNAVAILABLE, "stopping", "the learner is stopping; dial again"
                )
            if self._sessions >= self._max_sessions:
                raise Refused(
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    "limit",
                    f"{self._sessions} sessions are connected, the limit is learner.max_sessions="
                    f"{self._max_sessions}",
                )
            self._sessions += 1
            try:
                yield
            finally:
                self._sessions -= 1
        finally:
            self._access.leave(visit)

    async def _handshake(
        self, context: grpc.aio.ServicerContext[bytes, bytes], visit: Visit
    ) -> Session:
        """Hello -> Welcome."""
        try:
            first = await asyncio.wait_for(context.read(), HELLO_TIMEOUT_S)
        except TimeoutError:
            raise Refused(
                grpc.StatusCode.DEADLINE_EXCEEDED,
                "hello",
                f"no Hello within {HELLO_TIMEOUT_S:g} s: a silent stream does not keep its place",
            ) from None
        hello = _parse_hello(first)
        visit.worker = hello.worker_id
        if hello.protocol_version != PROTOCOL_VERSION:
            raise Refused(
                grpc.StatusCode.FAILED_PRECONDITION,
                "protocol",
                f"worker '{hello.worker_id}' speaks protocol version {hello.protocol_version}, "
                f"this learner {PROTOCOL_VERSION}; use the same release of murmur on both sides",
            )
        if not 1 <= hello.num_envs <= MAX_ENVS or hello.mode not in _MODE_NAMES:
            raise Refused(
                grpc.StatusCode.INVALID_ARGUMENT,
                "hello",
                f"worker '{hello.worker_id}' says Hello with num_envs={hello.num_envs} "
                f"(1 to {MAX_ENVS}), mode={hello.mode} ({', '.join(pb.Mode.keys())})",
            )
        visit.mode = _MODE_NAMES[hello.mode]
        self._access.check_mode(visit, hello.mode)
        try:
            spec = spec_from_proto(hello.spec)
            check_size(spec, hello.num_envs)
            training = hello.mode == pb.MODE_TRAIN
            while self._host.spec is None and not training:
                await asyncio.sleep(_EVALUATION_POLL_S)  # there is nothing to evaluate yet
            team = self._host.team(spec, training)
            async with self._opening:
                if self._host.spec is None:
                    loop = asyncio.get_running_loop()
                    await loop.run_in_executor(None, self._host.open, team)
            assert self._host.spec is not None
            difference = first_difference(self._host.spec, team)
            if difference:
                raise SpecError(
                    f"worker '{hello.worker_id}' brings another environment than this run's: "
                    f"{difference} (here: the learner, there: the worker)"
                )
        except MurmurError as error:
            raise Refused(grpc.StatusCode.FAILED_PRECONDITION, "spec", str(error)) from None
        starts: list[pb.SlotStart] = []
        if hello.mode == pb.MODE_EVALUATE:
            session = await self._evaluation(hello, spec)
        else:
            try:
                session, starts = self._host.admit(hello, spec)
            except MurmurError as error:
                raise Refused(grpc.StatusCode.FAILED_PRECONDITION, "mode", str(error)) from None
        if team.num_agents < spec.num_agents:
            self._host.pair(session)
        welcome = pb.Welcome(
            first_slot=max(session.first_slot, 0),
            policy_version=self._host.policy_version,
            run_seed=self._host.run_seed,
            slots=starts,
        )
        try:
            await context.write(pb.LearnerMessage(welcome=welcome).SerializeToString())
        except BaseException:
            self._host.end(session)
            raise
        return session

    async def _evaluation(self, hello: pb.Hello, spec: EnvSpec) -> Session:
        """A session for the next evaluation, as soon as one is due."""
        while (evaluation := self._host.gate.start()) is None:
            await asyncio.sleep(_EVALUATION_POLL_S)
        zeros = np.zeros(hello.num_envs, np.int64)
        return Session(hello.worker_id, spec, hello.num_envs, -1, zeros, evaluation=evaluation)

    async def _lockstep(
        self, session: Session, context: grpc.aio.ServicerContext[bytes, bytes], visit: Visit
    ) -> None:
        """Observation -> Action, until the worker closes its side."""
        codec = ObservationCodec(session.spec, session.num_envs)
        requests = self._metrics.counter("requests", mode=visit.mode)
        received = self._metrics.counter("received_bytes")
        loop = asyncio.get_running_loop()
        expected = 1
        ended: NDArray[np.bool_] | None = None  # [n] episodes that the last message ended
        patience_s = self._timeout_s and self._timeout_s * _FIRST_ROWS_PATIENCE
        none_ended, all_mid = np.zeros(session.num_envs, np.bool_), bytes([_MID]) * session.num_envs
        while True:
            try:
                async with asyncio.timeout(patience_s):
                    message = await context.read()
            except TimeoutError:
                raise Refused(
                    grpc.StatusCode.DEADLINE_EXCEEDED,
                    "idle",
                    f"worker '{session.worker_id}' has sent nothing for {patience_s:g} s "
                    "(learner.session_timeout_s): a silent session does not keep its environments' "
                    "places",
                ) from None
            patience_s = self._timeout_s
            if not isinstance(message, bytes):  # grpc.aio.EOF
                return
            try:
                sequence, timestep = codec.unpack(message)
                if sequence != expected:  # first: it explains rows that do not follow
                    raise Refused(
                        grpc.StatusCode.FAILED_PRECONDITION,
                        "sequence",
                        f"worker '{session.worker_id}' sent sequence number {sequence}, "
                        f"expected {expected}",
                    )
                step_type = timestep.step_type
                if ended is not none_ended or step_type.tobytes() != all_mid:  # not the usual one
                    check_order(session, step_type, ended)
                    check_results(timestep)
                    over = step_type >= _LAST
                    ended = over if over.any() else none_ended
                check_contents(session.spec, timestep)
            except WireError as error:
                raise Refused(
                    grpc.StatusCode.INVALID_ARGUMENT,
                    "contents",
                    f"worker '{session.worker_id}': {error}",
                ) from None
            visit.messages = expected
            expected += 1
            requests.inc()
            received.inc(len(message))
            reply: asyncio.Future[bytes] = loop.create_future()
            other = None
            if session.pairing is not None:
                timestep, other = split(session.spec, timestep)
            self._submit(Request(session, sequence, timestep, reply, other))
            await context.write(await reply)

    def _submit(self, request: Request) -> None:
        """Hand over requests once per turn of the event loop, not one by one.

        Whatever else has arrived by then goes with the same batch, and the inference thread is
        woken once.
        """
        if not self._arrived:
            asyncio.get_running_loop().call_soon(self._flush)
        self._arrived.append(request)

    def _flush(self) -> None:
        arrived, self._arrived = self._arrived, []
        self._host.batcher.submit(*arrived)


def _parse_hello(message: object) -> pb.Hello:
    """The first message of a stream."""
    if not isinstance(message, bytes):
        raise Refused(grpc.StatusCode.FAILED_PRECONDITION, "hello", "the stream ended before Hello")
    if len(message) > MAX_HELLO_BYTES:
        raise Refused(
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "hello",
            f"the first message has {len(message)} bytes, a Hello at most {MAX_HELLO_BYTES}",
        )
    try:
        parsed = pb.WorkerMessage.FromString(message)
    except DecodeError as error:
        raise Refused(
            grpc.StatusCode.INVALID_ARGUMENT,
            "hello",
            f"the first message is no WorkerMessage: {error}",
        ) from None
    if parsed.WhichOneof("message") != "hello":
        raise Refused(
            grpc.StatusCode.FAILED_PRECONDITION,
            "hello",
            f"the first message must be hello, got {parsed.WhichOneof('message')}",
        )
    hello = parsed.hello
    if len(hello.worker_id) > MAX_NAME_CHARACTERS or not hello.worker_id.isprintable():
        raise Refused(
            grpc.StatusCode.INVALID_ARGUMENT,
            "hello",
            f"worker_id {hello.worker_id[:40]!r} has {len(hello.worker_id)} characters; it may "
            f"have {MAX_NAME_CHARACTERS}, all printable",
        )
    if hello.preferred_first_slot >= _MAX_SLOT:
        raise Refused(
            grpc.StatusCode.INVALID_ARGUMENT,
            "hello",
            f"preferred_first_slot {hello.preferred_first_slot} is not below {_MAX_SLOT}",
        )
    return hello
