"""The metrics port: GET /metrics and GET /healthz, bounded in time, connections and bytes."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from shared.process.addresses import host_and_port, own_addresses
from shared.process.errors import ResourceError
from shared.process.process import logger

MAX_CONNECTIONS = 64  # one more ends the oldest
TIMEOUT_S = 5.0  # from the connection to the last byte of the answer
MAX_REQUEST_BYTES = 8192
_RENDER_SHARE = 0.3  # of a core; who asks for more gets the last text again
_RENDER_BURST_S = 0.5
_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed",
            500: "Internal Server Error", 503: "Service Unavailable"}  # fmt: skip


class MetricsServer:
    """HTTP server, on one thread, of /metrics (Prometheus text) and /healthz (200, or 503).

    Every connection carries one request, has TIMEOUT_S for it, and ends after the answer. A flood
    of half-sent requests ends the oldest connections; a normal request, which takes milliseconds,
    is still answered.

    Attributes:
        port: TCP port that the server listens on.
    """

    def __init__(
        self, host: str, port: int, registry: CollectorRegistry, trouble: Callable[[], str]
    ) -> None:
        """Bind the sockets and start the thread.

        Args:
            host: addresses to listen on, as in `own_addresses`.
            port: TCP port; 0: any free port.
            registry: metrics that /metrics shows.
            trouble: function that returns the reason why the process is not healthy, or "".

        Raises:
            ResourceError: if the port is not available.
            ConfigError: if `host` is no address of this machine.
        """
        self._registry, self._trouble = registry, trouble
        self._open: dict[asyncio.Task[None], None] = {}  # in order of arrival
        self._rendered: tuple[str, str, bytes] | None = None  # accept, content type, text
        self._render_s, self._render_at = _RENDER_BURST_S, time.monotonic()  # left, and when
        self._sockets: list[socket.socket] = []
        self.port = port
        for address in own_addresses(host, "metrics_host"):
            self._sockets.append(self._bind(address))
            self.port = self._sockets[0].getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def _bind(self, address: str) -> socket.socket:
        """Make a socket that listens on one address and `port`."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            return socket.create_server((address, self.port), family=family, backlog=128)
        except OSError as error:
            for other in self._sockets:
                other.close()
            raise ResourceError(
                f"cannot bind metrics port {host_and_port(address, self.port)}: {error.strerror}; "
                "set metrics_port to a free one, or to 0 for any"
            ) from None

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
                writer.transport.set_write_buffer_limits(0)  # `drain` waits for the last byte
                writer.write(self._answer(request))
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

    def _answer(self, request: bytes) -> bytes:
        """Return the whole answer to a request."""
        first, *lines = request.decode("latin-1").split("\r\n")
        words = first.split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return _response(400, "text/plain", b"this is no HTTP/1 request\n")
        method, path, _ = words
        if method != "GET":
            return _response(405, "text/plain", b"only GET\n")
        if path == "/healthz":
            why = self._trouble()
            return _response(503 if why else 200, "text/plain", f"{why or 'ok'}\n".encode())
        if path.partition("?")[0] != "/metrics":
            return _response(404, "text/plain", b"try /metrics or /healthz\n")
        headers = (line.partition(":") for line in lines)
        accept = next((value.strip() for name, _, value in headers if name.lower() == "accept"), "")
        try:
            return _response(200, *self._render(accept))
        except Exception:  # a collector's; the next request may succeed
            logger.exception("the metrics cannot be shown")
            return _response(500, "text/plain", b"see the log\n")

    def _render(self, accept: str) -> tuple[str, bytes]:
        """Return content type and text of all metrics; the last text if requests are too many."""
        now = time.monotonic()
        refill = _RENDER_SHARE * (now - self._render_at)
        self._render_s, self._render_at = min(_RENDER_BURST_S, self._render_s + refill), now
        last = self._rendered
        if last is not None and last[0] == accept and self._render_s <= 0:
            return last[1:]
        started = time.thread_time()
        encode, content_type = choose_encoder(accept)
        self._rendered = accept, content_type, encode(self._registry)
        self._render_s -= time.thread_time() - started
        return self._rendered[1:]


def _response(status: int, content_type: str, body: bytes) -> bytes:
    head = (
        f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: {content_type}\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
