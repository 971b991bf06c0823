"""The learner's side of the wire, with connections that can be cut and frozen.

gRPC would say goodbye in order. So in front of its server stands a relay of bytes, which can stop
passing them on, or reset the connection.
"""

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable
from typing import Self

import grpc
from grpc import aio

from murmur.shared.process.errors import ResourceError, WireError
from murmur.shared.rpc import rollout_pb2 as pb
from murmur.shared.wire.channel import MAX_HELLO_BYTES, SERVER_OPTIONS, stream_handler
from murmur.shared.wire.codec import parse
from murmur.shared.wire.credentials import CredentialFolder, server_credentials
from murmur.shared.wire.notices import NOTICES_TAG, Notice, unpack_notices

_CHUNK_BYTES = 1 << 16
_READ_AHEAD = 4  # messages that may lie unread: more than one breaks the contract already
_AWAY_S = 1.0
_LOST_S = 0.3

Status = tuple[grpc.StatusCode, str]


class Ended(Exception):  # noqa: N818 - an event
    """End of the stream, or of its connection, by the environment server."""


class Silent(Exception):  # noqa: N818 - an event
    """Timeout of a wait for a message."""


class Session:
    """One stream. Its gRPC side runs in a task of its own; the examination reads and writes.

    Attributes:
        hello: first message; empty if it is something else.
        problem: error in the first message, if there is none or it cannot be read.
        silent: True if the stream ended without any message.
        role: role of the token; empty in plain text, "none" without a known token.
        notices: notices that it sent for the user.
    """

    def __init__(
        self, context: aio.ServicerContext[bytes, bytes], first: object, role: str
    ) -> None:
        """Begin with a stream and its first message."""
        self._context, self.role = context, role
        self._messages: asyncio.Queue[bytes | None] = asyncio.Queue(_READ_AHEAD)
        self.over: asyncio.Future[Status | None] = asyncio.get_running_loop().create_future()
        self.notices: list[Notice] = []
        self._lost = asyncio.Event()  # it has canceled the stream, or its connection is lost
        self.hello = pb.Hello()
        self.problem, self.silent = "", False
        if not isinstance(first, bytes):
            self.silent, self.problem = True, "the stream ended before Hello"
            return
        try:
            self.hello = parse(pb.WorkerMessage, first, "hello", MAX_HELLO_BYTES)
        except WireError as error:
            self.problem = f"the first message: {error}"

    @property
    def name(self) -> str:
        """The worker's own name for itself."""
        return self.hello.worker_id

    @property
    def unread(self) -> bool:
        """Return whether an unread message is there."""
        return not self._messages.empty()

    async def read(self, timeout_s: float) -> bytes:
        """Read the next message.

        Raises:
            Ended: if there will be none.
            Silent: if none comes in time.
        """
        try:
            message = await asyncio.wait_for(self._messages.get(), timeout_s)
        except TimeoutError:
            raise Silent(f"nothing came within {timeout_s:g} s") from None
        if message is None:
            raise Ended(
                "the environment server "
                + ("ended the stream" if self._lost.is_set() else "closed its side of the stream")
            )
        return message

    async def write(self, message: bytes) -> None:
        """Send a message; it is lost if the peer is gone."""
        with contextlib.suppress(aio.AioRpcError, aio.BaseError, asyncio.InvalidStateError):
            await self._context.write(message)

    def end(self, status: Status | None) -> None:
        """End the stream, in order (None: OK)."""
        if not self.over.done():
            self.over.set_result(status)

    async def pump(self) -> None:
        """Take messages as they come; notices are for the user."""
        while isinstance(message := await self._context.read(), bytes):
            if message.startswith(NOTICES_TAG):
                with contextlib.suppress(WireError):
                    self.notices += unpack_notices(message)
                    continue
            await self._messages.put(message)
        await self._messages.put(None)

    async def closed_in_order(self) -> bool:
        """Return whether the environment server closed its side; valid once `read` raised Ended.

        gRPC ends the messages of a stream that was cut in the same way, and says so a moment later.
        """
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._lost.wait(), _LOST_S)
        return not self._lost.is_set()

    def lost(self) -> None:
        """Notify readers that the stream is gone."""
        self._lost.set()
        while not self._messages.empty():
            self._messages.get_nowait()
        self._messages.put_nowait(None)


# Called for every stream: None accepts it, a status refuses it.
Door = Callable[[Session], Status | None]


class Peer:
    """Server at one address that acts as a learner. Used by one event loop."""

    def __init__(
        self, host: str, port: int, door: Door, credentials: CredentialFolder | None
    ) -> None:
        """Prepare to listen; `door` decides about every stream."""
        self._host = host
        self.port = port
        self._door = door
        self._credentials = credentials
        self._inner_port = 0
        self._relay: asyncio.Server | None = None
        self._links: set[_Link] = set()

    async def __aenter__(self) -> Self:
        """Listen for connections.

        Raises:
            ResourceError: if the port is not available.
        """
        await self._start_server()
        try:
            await self._start_relay()
        except ResourceError:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop and cut all connections."""
        await self._stop_relay()
        self.cut()
        await self._server.stop(0)

    def cut(self) -> None:
        """Reset all connections, as a machine that was switched off and on does."""
        for link in list(self._links):
            link.reset()

    def freeze(self) -> None:
        """Pass nothing on any more on the connections there are; new ones work."""
        for link in self._links:
            link.freeze()

    async def restart(self) -> None:
        """Stop as a server does (GOAWAY), be away for a second, come back at the same address."""
        await self._stop_relay()
        await self._server.stop(0)
        await asyncio.sleep(_AWAY_S)
        await self._start_server()
        await self._start_relay()

    async def _start_server(self) -> None:
        server = aio.server(options=SERVER_OPTIONS)
        server.add_generic_rpc_handlers((stream_handler(self._play),))
        if self._credentials is None:
            self._inner_port = server.add_insecure_port("127.0.0.1:0")
        else:
            secure = server_credentials(self._credentials)
            self._inner_port = server.add_secure_port("127.0.0.1:0", secure)
        await server.start()
        self._server = server

    async def _start_relay(self) -> None:
        try:
            self._relay = await asyncio.start_server(self._accept, self._host, self.port)
        except OSError as error:
            raise ResourceError(
                f"cannot bind {self._host}:{self.port}: {error.strerror or error}; "
                "choose another port, or stop the program that uses it"
            ) from None
        self.port = self._relay.sockets[0].getsockname()[1]

    async def _stop_relay(self) -> None:
        if self._relay is not None:
            self._relay.close()  # waiting for its connections would wait for frozen ones
            self._relay = None

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = _Link()
        self._links.add(link)
        try:
            await link.run(reader, writer, self._inner_port)
        finally:
            self._links.discard(link)

    async def _play(self, _: object, context: aio.ServicerContext[bytes, bytes]) -> None:
        """Serve one stream, from its first message to its end."""
        session = Session(context, await context.read(), self._role(context))
        refused = self._door(session)
        if refused is not None:
            await context.abort(*refused)
        pump = asyncio.create_task(session.pump())
        try:
            status = await session.over
            if status is not None:
                await context.abort(*status)
        except asyncio.CancelledError:
            session.lost()
            raise
        finally:
            pump.cancel()

    def _role(self, context: aio.ServicerContext[bytes, bytes]) -> str:
        if self._credentials is None:
            return ""
        for key, value in context.invocation_metadata() or ():
            if key == "authorization" and isinstance(value, str) and value.startswith("Bearer "):
                return self._credentials.current().role_of(value[7:]) or "none"
        return "none"


class _Link:
    """One connection, relayed byte by byte."""

    def __init__(self) -> None:
        self._flows = asyncio.Event()
        self._flows.set()
        self._writers: list[asyncio.StreamWriter] = []
        self._task: asyncio.Task[None] | None = None

    async def run(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int
    ) -> None:
        """Relay until either side ends, or `reset`."""
        self._task = asyncio.current_task()
        self._writers.append(writer)
        try:
            inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", port)
            self._writers.append(inner_writer)
            await asyncio.gather(
                self._pass_on(reader, inner_writer), self._pass_on(inner_reader, writer)
            )
        except (OSError, asyncio.CancelledError):
            pass  # one side is gone, or `reset`
        finally:
            for one in self._writers:
                one.transport.abort()

    def freeze(self) -> None:
        """Pass nothing on any more; the connection stays open."""
        self._flows.clear()

    def reset(self) -> None:
        """End both sides with RST."""
        for writer in self._writers:
            connection: socket.socket = writer.get_extra_info("socket")
            linger = struct.pack("ii", 1, 0)  # on, for 0 s: what is unsent is thrown away
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.transport.abort()
        if self._task is not None:
            self._task.cancel()

    async def _pass_on(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(_CHUNK_BYTES):
            await self._flows.wait()
            sink.write(data)
            await sink.drain()
        await self._flows.wait()
        sink.close()
