"""The HTTP server of the live page: GET alone, on 127.0.0.1 alone."""

import contextlib
import json
import socket
import socketserver
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import ClassVar
from urllib.parse import parse_qs, urlsplit

from murmur.live_page import PORT
from murmur.live_page.view import RunView
from murmur.runs.run_folder import RunFolder
from shared.process.errors import MurmurError, ResourceError
from shared.process.process import logger

HOST = "127.0.0.1"
CLOSE_S = 0.25  # the longest that closing takes; the idle thread looks as often
_TIMEOUT_S = 5.0  # for a request to arrive, and for the answer to be taken
_MOST_CONNECTIONS = 16
_HAND_OVER_S = 1.0  # for the thread of a connection that makes place to end
_NAMES = ("127.0.0.1", "localhost")  # a tunnel may lead to the page from another port
_FILES = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
    "/charts.js": ("charts.js", "text/javascript"),
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class LivePage:
    """Server of a run's live page until it is closed.

    Attributes:
        port: the port it listens on.
        moved: True if the port asked for was in use, and this is another one.
    """

    def __init__(self, run: RunFolder, port: int = PORT) -> None:
        """Listen on `port`, or on any free one if it is in use.

        Raises:
            ConfigError: if the run's configuration cannot be read.
            ResourceError: if no port is free.
        """
        view = RunView(run)
        self._server = _bind(view, port)
        self.port: int = self._server.server_address[1]
        self.moved = port not in (0, self.port)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(CLOSE_S,), name="live page", daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        """Address of the page."""
        return f"http://{HOST}:{self.port}"

    @property
    def text(self) -> str:
        """Text with the address, and with the reason if another port was asked for."""
        return f"{self.url} (the port asked for is in use)" if self.moved else self.url

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextlib.contextmanager
def served(run: RunFolder, port: int, say: Callable[[str], None]) -> Iterator[None]:
    """Serve the live page of a training while the block lasts; without one the training continues.

    Args:
        run: the training's folder.
        port: port to listen on, unless it is in use.
        say: function called with a line with the address, or with the reason if there is none.
    """
    try:
        page = LivePage(run, port)
    except MurmurError as error:
        say(f"no live page: {error}")
        yield
        return
    say(f"live page: {page.text}")
    try:
        yield
    finally:
        page.close()


class _Server(ThreadingHTTPServer):
    """HTTP server with one thread and one request per connection; at most _MOST_CONNECTIONS.

    One more ends the oldest whose request has not arrived: clients that send it byte by byte do not
    keep a browser out.
    """

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = sys.platform != "win32"

    def __init__(self, port: int, view: RunView) -> None:
        self.view = view
        self._places = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        self._reading: dict[socket.socket, None] = {}  # in order of arrival
        self._reading_lock = threading.Lock()
        super().__init__((HOST, port), _Handler)

    def server_bind(self) -> None:
        """Bind; HTTPServer would also look up the machine's name, which may take seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = HOST, self.server_address[1]

    def process_request(self, request, client_address) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
        """Serve a connection if there is a place, else close it: a browser asks again."""
        if not self._places.acquire(blocking=False) and not self._take_place():
            self.shutdown_request(request)
            return
        with self._reading_lock:
            self._reading[request] = None
        super().process_request(request, client_address)

    def _take_place(self) -> bool:
        """End the oldest connection whose request has not arrived; return whether there was one."""
        with self._reading_lock:
            oldest = next(iter(self._reading), None)
            if oldest is None:
                return False
            del self._reading[oldest]
            with contextlib.suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)  # its thread, which waits for it, ends
        return self._places.acquire(timeout=_HAND_OVER_S)

    def arrived(self, request: socket.socket) -> None:
        """Note that a connection's request has arrived, or that it is over."""
        with self._reading_lock:
            self._reading.pop(request, None)

    def process_request_thread(self, request, client_address) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
        """Serve a connection, on its thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.arrived(request)
            self._places.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """Log the error of a request; a browser that went away is none."""
        if not isinstance(sys.exception(), OSError):
            logger.exception("the live page cannot answer")


def _bind(view: RunView, port: int) -> _Server:
    for asked in dict.fromkeys((port, 0)):
        try:
            return _Server(asked, view)
        except OSError as error:
            reason = error.strerror
    raise ResourceError(
        f"the live page cannot listen on {HOST}: {reason}; murmur train --no-page does without it"
    )


class _Handler(BaseHTTPRequestHandler):
    """Handler of one request."""

    server: _Server
    timeout = _TIMEOUT_S
    server_version, sys_version = "murmur", ""
    resources: ClassVar = files("murmur.live_page")

    def do_GET(self) -> None:
        """Answer from a fixed list of paths; no path is one of the file system."""
        self.server.arrived(self.connection)
        if self.headers.get("Host", "").rsplit(":", 1)[0] not in _NAMES:
            # Another site's name that was made to mean this machine (DNS rebinding).
            self._answer(403, "text/plain", b"ask for 127.0.0.1 or localhost\n")
            return
        url = urlsplit(self.path)
        query = parse_qs(url.query)
        if url.path in _FILES:
            name, kind = _FILES[url.path]
            self._answer(200, f"{kind}; charset=utf-8", (self.resources / name).read_bytes())
        elif self.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
            self._answer(403, "text/plain", b"only for the live page\n")
        elif url.path == "/state.json":
            state = self.server.view.state(query.get("since", [""])[0])
            body = json.dumps(state, allow_nan=False, separators=(",", ":")).encode()
            self._answer(200, "application/json", body)
        elif url.path == "/episode.png":
            self._answer_episode(newest="newest" in query)
        else:
            self._answer(404, "text/plain", b"there is only the page: /\n")

    def _refuse(self) -> None:
        self._answer(405, "text/plain", b"only GET\n", {"Allow": "GET"})

    do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_TRACE = do_CONNECT = _refuse  # noqa: N815

    def _answer_episode(self, *, newest: bool) -> None:
        sheet = self.server.view.episode.sheet(newest=newest)
        if sheet is None:
            self._answer(404, "text/plain", b"no episode is drawn\n")
            return
        about = {
            "X-Version": sheet.version,
            "X-Frames": sheet.frames,
            "X-Columns": sheet.columns,
            "X-Rate": sheet.rate,
        }
        self._answer(200, "image/png", sheet.png, {k: str(v) for k, v in about.items()})

    def _answer(
        self, status: int, kind: str, body: bytes, headers: dict[str, str] | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {**_HEADERS, **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Omit requests from the log."""
