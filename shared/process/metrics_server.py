"""The metrics port: GET /metrics and GET /healthz."""

import errno
import socket
import time
from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from murmur.shared.process.addresses import host_and_port, own_addresses
from murmur.shared.process.errors import ResourceError
from murmur.shared.process.get_server import Answer, GetServer

_RENDER_SHARE = 0.3  # of a core; who asks for more gets the last text again
_RENDER_BURST_S = 0.5


class MetricsServer(GetServer):
    """HTTP server of /metrics (Prometheus text) and /healthz (200, or 503).

    Attributes:
        port: TCP port that the server listens on.
    """

    def __init__(
        self,
        host: str,
        port: int,
        registry: CollectorRegistry,
        trouble: Callable[[], str],
        *,
        section: str = "",
        or_any: bool = False,
    ) -> None:
        """Bind the sockets and start the thread.

        Args:
            host: addresses to listen on, as in `own_addresses`.
            port: TCP port; 0: any free port.
            registry: metrics that /metrics shows.
            trouble: function that returns the reason why the process is not healthy, or "".
            section: prefix of its options in the configuration, for messages: "learner.".
            or_any: flag to take any free port if `port` is in use.

        Raises:
            ResourceError: if the port is not available.
            ConfigError: if `host` is no address of this machine.
        """
        self._registry, self._section = registry, section
        self._trouble = trouble
        self._rendered: tuple[str, str, bytes] | None = None  # accept, content type, text
        self._render_s, self._render_at = _RENDER_BURST_S, time.monotonic()  # left, and when
        addresses = own_addresses(host, f"{section}metrics_host")
        sockets = self._bind(addresses, port, or_any)
        self.port: int = sockets[0].getsockname()[1]
        super().__init__(sockets, "metrics")

    def _bind(self, addresses: list[str], port: int, or_any: bool) -> list[socket.socket]:
        """Make sockets that listen on each address at one port."""
        sockets: list[socket.socket] = []
        for address in addresses:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            try:
                sockets.append(socket.create_server((address, port), family=family, backlog=128))
            except OSError as error:
                for other in sockets:
                    other.close()
                if or_any and error.errno == errno.EADDRINUSE:
                    return self._bind(addresses, 0, or_any=False)
                reason = str(error.strerror or error).partition(" (while")[0]  # Python's addition
                raise ResourceError(
                    f"cannot bind metrics port {host_and_port(address, port)}: {reason}; "
                    f"set {self._section}metrics_port to a free one, or to 0 for any"
                ) from None
            port = sockets[0].getsockname()[1]
        return sockets

    async def answer(self, path: str, query: str, headers: Mapping[str, str]) -> Answer:
        """Answer a request."""
        if path == "/healthz":
            why = self._trouble()
            return Answer(503 if why else 200, "text/plain", f"{why or 'ok'}\n".encode())
        if path != "/metrics":
            return Answer(404, "text/plain", b"try /metrics or /healthz\n")
        return Answer(200, *self._render(headers.get("accept", "")))

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
