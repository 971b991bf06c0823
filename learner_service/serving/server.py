"""The gRPC server: it listens, admits streams, and hands each to what serves its sessions.

Runs on one event loop in a thread of its own; inference and learning run elsewhere.
"""

import asyncio
from dataclasses import dataclass
from typing import Protocol

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from murmur.learner_service.serving.admission import Admission, Admitted, Context, Refused
from murmur.learner_service.serving.lockstep import read_hello
from murmur.shared.config.learner import PORT, LearnerConfig
from murmur.shared.process.addresses import host_and_port
from murmur.shared.process.errors import ResourceError, WireError
from murmur.shared.rpc import rollout_pb2 as pb
from murmur.shared.wire.channel import SERVER_OPTIONS, STOPPING, stream_handler
from murmur.shared.wire.credentials import CredentialFolder, server_credentials

_MORE_STREAMS = 256
_STOP_S = 3.0  # for sessions to notice that they have ended


class SessionHandler(Protocol):
    """Serves the sessions of a run: of environments, or of samples."""

    async def serve(self, hello: pb.Hello, context: Context, stream: Admitted) -> None:
        """Serve one session, from its Hello to the end of its stream.

        Raises:
            Refused: if there can be no such session.
            WireError: if it breaks the contract.
        """


@dataclass(eq=False)
class RolloutServer:
    """Serves Rollout.Play and grpc.health.v1. All methods run on the event loop.

    Attributes:
        handler: handler of the sessions.
        admission: interceptor that admits streams.
        config: configuration of the learner.
        credentials: certificates; None: all are admitted, in plain text, and
            murmur.shared.wire.credentials.credentials_for decides where that is right.
        asked: port to listen on; None: config.port, or the usual one.
        or_any: flag to listen on any free port if that is in use.
        port: the port it listens on, once started.
    """

    handler: SessionHandler
    admission: Admission
    config: LearnerConfig
    credentials: CredentialFolder | None = None
    asked: int | None = None
    or_any: bool = False

    def __post_init__(self) -> None:
        """Prepare to listen on config.host."""
        ports = (self.asked, self.config.port, PORT)
        self.port = next(port for port in ports if port is not None)
        self._streams: set[asyncio.Task[None]] = set()
        self._why_ended = ""
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        """Listen.

        Raises:
            ResourceError: if the port is not available.
        """
        # Beyond the sessions there are health checks, and streams that are about to be refused.
        sessions = self.config.max_sessions + self.config.max_evaluation_sessions
        server = grpc.aio.server(
            interceptors=[self.admission],
            options=SERVER_OPTIONS,
            maximum_concurrent_rpcs=sessions + _MORE_STREAMS,
        )
        server.add_generic_rpc_handlers((stream_handler(self._play), self.admission.load_handler()))
        health = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(health, server)
        await health.set("", health_pb2.HealthCheckResponse.SERVING)
        where = host_and_port(self.config.host, self.port)
        bound = self._bind(server, where)
        if not bound and self.or_any:
            bound = self._bind(server, host_and_port(self.config.host, 0))
        if not bound:
            raise ResourceError(
                f"cannot bind {where}: another program uses it or the "
                "address is not this machine's; set learner.port to a free one, or to 0 for any"
            )
        self.port = bound
        await server.start()
        self._server = server

    def _bind(self, server: grpc.aio.Server, where: str) -> int:
        """Bind an address; return its port, or 0 if it is not available."""
        try:
            if self.credentials is None:
                return int(server.add_insecure_port(where))
            return int(server.add_secure_port(where, server_credentials(self.credentials)))
        except RuntimeError:
            return 0

    async def stop(self, why: str = STOPPING) -> None:
        """End all streams with UNAVAILABLE: workers come back when a learner does.

        Args:
            why: details of the status.
        """
        if self._server is not None:
            self._why_ended = why
            for stream in self._streams:
                stream.cancel()
            await self._streams_end()
            await self._server.stop(None)
            await self._streams_end()

    async def _streams_end(self) -> None:
        """Wait until all streams have ended, in bounded time."""
        if self._streams:
            await asyncio.wait(self._streams, timeout=_STOP_S)

    async def _play(self, _requests: object, context: Context) -> None:
        """Serve one session, from Hello to the end of its stream."""
        task = asyncio.current_task()
        assert task is not None
        self._streams.add(task)
        try:
            async with self.admission.admit(context) as stream:
                hello = await read_hello(context, stream)
                try:
                    await self.handler.serve(hello, context, stream)
                except WireError as error:
                    words = f"worker '{hello.worker_id}': {error}"
                    raise Refused(grpc.StatusCode.INVALID_ARGUMENT, "contents", words) from None
        except asyncio.CancelledError:
            if not self._why_ended:
                raise
            await context.abort(grpc.StatusCode.UNAVAILABLE, self._why_ended)
        finally:
            self._streams.discard(task)
