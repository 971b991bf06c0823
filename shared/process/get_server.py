"""A small HTTP server that answers GET, bounded in time, connections and bytes."""

import asyncio
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus

from murmur.shared.process.process import logger

MAX_CONNECTIONS = 64  # one more ends the oldest
TIMEOUT_S = 5.0  # for a request to arrive, and for its answer to be taken
MAX_REQUEST_BYTES = 8192


@dataclass(frozen=True)
class Answer:
    """Answer to a request.

    Attributes:
        status: HTTP status.
        kind: content type.
        body: content.
        headers: further headers.
    """

    status: int
    kind: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)

    def encoded(self) -> bytes:
        """Return the bytes that go over the connection."""
        headers = {
            "Content-Type": self.kind,
            "Content-Length": len(self.body),
            "Connection": "close",
            **self.headers,
        }
        lines = [f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        return "\r\n".join([*lines, "\r\n"]).encode() + self.body


class GetServer:
    """HTTP server on one thread; subclasses give the answers.

    Every connection carries one request, which ends with the answer. A flood of half-sent requests
    ends the oldest connections; a normal request, which takes milliseconds, is still answered.
    """

    def __init__(self, sockets: Sequence[socket.socket], name: str) -> None:
        """Start the thread.

        Args:
            sockets: sockets that listen; closed by `close`.
            name: name of the thread.
        """
        self._sockets = sockets
        self._open: dict[asyncio.Task[None], None] = {}  # in order of arrival
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    async def answer(self, path: str, query: str, headers: Mapping[str, str]) -> Answer:
        """Answer a request.

        Args:
            path: path asked for.
            query: part of the address behind its question mark.
            headers: headers by name in lower case.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Stop listening, and end all connections."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(TIMEOUT_S)

    def _run(self) -> None:
        """Run the server until `close`. Runs on its own thread."""
        try:
            self._loop.run_until_complete(self._listen())
        finally:
            self._loop.close()
            for own in self._sockets:
                own.close()

    async def _listen(self) -> None:
        servers = [
            await asyncio.start_server(self._connected, sock=own, limit=MAX_REQUEST_BYTES)
            for own in self._sockets
        ]
        await self._stop.wait()
        for server in servers:
            server.close()
        for task in list(self._open):
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection: one request, one answer."""
        task = asyncio.current_task()
        assert task is not None
        self._open[task] = None
        if len(self._open) > MAX_CONNECTIONS:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.cancel()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                request = await reader.readuntil(b"\r\n\r\n")
            answer = await self._respond(request)
            async with asyncio.timeout(TIMEOUT_S):
                writer.transport.set_write_buffer_limits(0)  # `drain` waits for the last byte
                writer.write(answer.encoded())
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (TimeoutError, asyncio.CancelledError, OSError):
            pass  # too slow, too many, or gone
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # it closed its side too early, or sent too much
        finally:
            self._open.pop(task, None)
            writer.transport.abort()

    async def _respond(self, request: bytes) -> Answer:
        first, *lines = request.decode("latin-1").split("\r\n")
        words = first.split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return Answer(400, "text/plain", b"this is no HTTP/1 request\n")
        method, target, _ = words
        if method != "GET":
            return Answer(405, "text/plain", b"only GET\n", {"Allow": "GET"})
        path, _, query = target.partition("?")
        pairs = (line.partition(":") for line in reversed(lines))  # the first of a name counts
        headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        try:
            return await self.answer(path, query, headers)
        except Exception:  # the next request may succeed
            logger.exception("%s cannot be shown", path)
            return Answer(500, "text/plain", b"see the log\n")
