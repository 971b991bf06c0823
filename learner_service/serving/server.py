"""The gRPC server: places, and the lockstep of each session.

Runs on one event loop in a thread of its own; inference and learning run elsewhere.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator

import grpc
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from numpy.typing import NDArray

from learner_service.serving.access import Access, AuditLog, Refused, SessionRecord
from learner_service.serving.batcher import Request
from learner_service.serving.handshake import Handshake, Host, read_hello
from learner_service.serving.league import split
from learner_service.serving.load import Load
from learner_service.serving.places import Place, Places
from learner_service.serving.session import Session
from learner_service.serving.supply import SupplyDesk
from learner_service.serving.validation import check_contents, check_order
from learner_service.telemetry.metrics import LearnerMetrics
from shared.addresses import host_and_port
from shared.channel import SERVER_OPTIONS, stream_handler
from shared.codec import ObservationCodec
from shared.config import LearnerConfig
from shared.credentials import CredentialFolder, server_credentials
from shared.errors import ResourceError, WireError
from shared.notices import GIVEN_UP, unpack_notices
from shared.row_check import RowCheck
from shared.rpc import rollout_pb2 as pb
from shared.timestep import StepType, TimeStep

_MORE_STREAMS = 256
_STOP_POLL_S = 0.01
_STOP_S = 5.0  # for sessions to notice that they have ended
_FIRST_ROWS_PATIENCE = 10  # environments may compile and load before their first rows
_MID, _LAST = int(StepType.MID), int(StepType.LAST)


class RolloutServer:
    """Serves Rollout.Play and grpc.health.v1. All methods run on the event loop.

    Attributes:
        port: the port it listens on, once started.
        places: the sessions that are admitted.
        stopping: set from outside: no session is admitted any more.
    """

    def __init__(
        self,
        host: Host | None,
        config: LearnerConfig,
        metrics: LearnerMetrics,
        credentials: CredentialFolder | None = None,
        supply: SupplyDesk | None = None,
        rank: int = 0,
        size: int = 1,
    ) -> None:
        """Prepare to listen on config.host and config.port (0: any free port).

        A run has a `host` for sessions of environments, or a desk for sessions of samples. `rank`
        of `size` is this learner's number among those of its run.

        Without credentials all are admitted, in plain text: shared.credentials.credentials_for
        decides where that is right.
        """
        self._host, self._address, self.port = host, config.host, config.port
        self._metrics = metrics
        self._timeout_s = config.session_timeout_s or None
        self._max_abs_reward = config.max_abs_reward
        self._credentials = credentials
        self._audit = AuditLog(config.max_audit_lines, metrics)
        identities = config.max_sessions_per_identity
        self._access = Access(credentials, identities, metrics, self._audit)
        # Beyond the sessions there are health checks, and streams that are about to be refused.
        self._max_streams = config.max_sessions + config.max_evaluation_sessions + _MORE_STREAMS
        self._received = metrics.counter("received_bytes")
        self.places = Places(config, metrics)
        self._load = Load(self.places, rank, size)
        self._streams = 0
        self.stopping = False
        self._handshake = None if host is None else Handshake(host)
        self._supply = supply
        self._arrived: list[Request] = []  # in this turn of the event loop
        self._server: grpc.aio.Server | None = None

    @property
    def training_sessions(self) -> int:
        """See Load. Read by any thread."""
        return self._load.training_sessions

    async def start(self) -> None:
        """Listen.

        Raises:
            ResourceError: if the port is not available.
        """
        server = grpc.aio.server(
            interceptors=[self._access],
            options=SERVER_OPTIONS,
            maximum_concurrent_rpcs=self._max_streams,
        )
        server.add_generic_rpc_handlers((stream_handler(self._play), self._load.handler()))
        health = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(health, server)
        await health.set("", health_pb2.HealthCheckResponse.SERVING)
        where = host_and_port(self._address, self.port)
        try:
            if self._credentials is None:
                bound = server.add_insecure_port(where)
            else:
                bound = server.add_secure_port(where, server_credentials(self._credentials))
        except RuntimeError:
            bound = 0
        if not bound:
            raise ResourceError(
                f"cannot bind {where}: another program uses it or the "
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
        record = SessionRecord()
        self._streams += 1
        try:
            with self._place(context, record) as place:
                hello = await read_hello(context, record, self._access)
                with self._load.counted(hello):
                    if hello.mode == pb.MODE_SUPPLY:
                        supply = self._supply_desk()
                        with self._counted(record.mode):
                            await supply.serve(hello, context, record, place)
                    else:
                        handshake = self._handshake_of(hello)
                        session = await handshake.greet(hello, context, record, place)
                        with self._counted(record.mode):
                            await self._lockstep(session, context, record)
            record.outcome = "OK"
        except Refused as refused:
            counter = "rejected" if session else "sessions_refused"
            self._metrics.counter(counter, reason=refused.reason).inc()
            record.outcome = f"{refused.code.name}: {refused.details}"
            record.reason = refused.reason
            await context.abort(refused.code, refused.details)
        finally:
            if session is not None:
                assert self._host is not None
                self._host.end(session)
            self._streams -= 1
            level = logging.INFO if record.outcome in ("OK", "CANCELLED") else logging.WARNING
            self._audit.write(level, record.reason or record.outcome, record)

    @contextlib.contextmanager
    def _counted(self, mode: str) -> Iterator[None]:
        """A session, while it lasts."""
        gauge = self._metrics.gauge("sessions", mode=mode)
        gauge.inc()
        try:
            yield
        finally:
            gauge.dec()

    def _handshake_of(self, hello: pb.Hello) -> Handshake:
        """Who greets sessions of environments.

        Raises:
            Refused: if the run has none.
        """
        if self._handshake is None:
            raise Refused(
                grpc.StatusCode.FAILED_PRECONDITION,
                "mode",
                f"worker '{hello.worker_id}' brings an environment, this run learns from a source "
                "of samples; start the server with the run's configuration",
            )
        return self._handshake

    def _supply_desk(self) -> SupplyDesk:
        """Who serves sessions of samples.

        Raises:
            Refused: if the run has none.
        """
        if self._supply is None:
            raise Refused(
                grpc.StatusCode.FAILED_PRECONDITION,
                "mode",
                "this run trains in an environment, it takes no samples; start the server with "
                "the run's configuration",
            )
        return self._supply

    @contextlib.contextmanager
    def _place(
        self, context: grpc.aio.ServicerContext[bytes, bytes], record: SessionRecord
    ) -> Iterator[Place]:
        """One of the places for sessions, while the stream lasts.

        Raises:
            Refused: if there is none left, at all or for this identity.
        """
        self._access.enter(context, record)
        try:
            if self.stopping:
                raise Refused(
                    grpc.StatusCode.UNAVAILABLE, "stopping", "the learner is stopping; reconnect"
                )
            with self.places.take(record.role) as place:
                yield place
        finally:
            self._access.leave(record)

    async def _lockstep(
        self,
        session: Session,
        context: grpc.aio.ServicerContext[bytes, bytes],
        record: SessionRecord,
    ) -> None:
        """Observation -> Action, until the worker closes its side."""
        codec = ObservationCodec(session.spec, session.num_envs)
        check = RowCheck(session.spec, session.num_envs, self._max_abs_reward)
        requests = self._metrics.counter("requests", mode=record.mode)
        loop = asyncio.get_running_loop()
        expected = 1
        ended: NDArray[np.bool_] | None = None  # [n] episodes that the last message ended
        patience_s = self._timeout_s and self._timeout_s * _FIRST_ROWS_PATIENCE
        none_ended, all_mid = np.zeros(session.num_envs, np.bool_), bytes([_MID]) * session.num_envs
        while True:
            try:
                observation = await self._receive(codec, context, session, patience_s)
                if observation is None:
                    return
                patience_s = self._timeout_s
                sequence, timestep = observation
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
                    over = step_type >= _LAST
                    ended = over if over.any() else none_ended
                check_contents(check, timestep)
            except WireError as error:
                raise Refused(
                    grpc.StatusCode.INVALID_ARGUMENT,
                    "contents",
                    f"worker '{session.worker_id}': {error}",
                ) from None
            record.messages = expected
            expected += 1
            requests.inc()
            reply: asyncio.Future[bytes] = loop.create_future()
            other = None
            if session.order is not None:
                timestep = session.from_worker(timestep)
            if session.pairing is not None:
                timestep, other = split(session.spec, timestep)
            self._submit(Request(session, sequence, timestep, reply, other))
            await self._answer(context, await reply)

    async def _receive(
        self,
        codec: ObservationCodec,
        context: grpc.aio.ServicerContext[bytes, bytes],
        session: Session,
        patience_s: float | None,
    ) -> tuple[int, TimeStep] | None:
        """The next observation, all of its parts; None if the worker has closed its side."""
        try:
            async with asyncio.timeout(patience_s):
                while True:
                    message = await context.read()
                    if not isinstance(message, bytes):  # grpc.aio.EOF
                        return None
                    self._received.inc(len(message))
                    if notices := unpack_notices(message):
                        self._metrics.notices.add(notices)
                        session.given_up |= any(n.kind == GIVEN_UP for n in notices)
                        continue
                    observation = codec.receive(message)
                    if observation is not None:
                        return observation
        except TimeoutError:
            raise Refused(
                grpc.StatusCode.DEADLINE_EXCEEDED,
                "idle",
                f"worker '{session.worker_id}' has sent no whole observation for {patience_s:g} s "
                "(learner.session_timeout_s): a silent session does not keep its environments' "
                "places",
            ) from None

    async def _answer(self, context: grpc.aio.ServicerContext[bytes, bytes], reply: bytes) -> None:
        """Send an action; a worker that never reads does not keep its place."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await context.write(reply)
        except TimeoutError:
            raise Refused(
                grpc.StatusCode.DEADLINE_EXCEEDED,
                "idle",
                f"an answer was not read for {self._timeout_s:g} s (learner.session_timeout_s)",
            ) from None

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
        assert self._host is not None
        self._host.batcher.submit(*arrived)
