"""The HTTP server of the live page: GET alone, on 127.0.0.1 alone."""

import asyncio
import base64
import contextlib
import hashlib
import json
import socket
from collections.abc import Callable, Iterator, Mapping
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs

from murmur.live_page import PORT
from murmur.live_page.view import READ_S, RunView
from murmur.runs.run_folder import RunFolder
from murmur.shared.process.addresses import in_use
from murmur.shared.process.errors import MurmurError, ResourceError
from murmur.shared.process.get_server import Answer, GetServer

HOST = "127.0.0.1"
_NAMES = ("127.0.0.1", "localhost")  # a tunnel may lead to the page from another port
_FILES = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
    "/charts.js": ("charts.js", "text/javascript"),
    "/ledger.js": ("ledger.js", "text/javascript"),
    "/scales.js": ("scales.js", "text/javascript"),
}
_RESOURCES = files("murmur.live_page")
_POLICY = "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    f"connect-src 'self'; img-src data:; {_POLICY}",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}

# The report is one file: its style, its pictures and the script of this version are within it.
_SCRIPT = (files("murmur") / "report.js").read_bytes()
_SCRIPT_HASH = base64.b64encode(hashlib.sha256(_SCRIPT).digest()).decode()
_REPORT_HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; script-src 'sha256-{_SCRIPT_HASH}'; "
    f"style-src 'unsafe-inline'; img-src data:; {_POLICY}",
}


class LivePage(GetServer):
    """Server of a run's live page until it is closed.

    Attributes:
        port: the port it listens on.
    """

    def __init__(self, run: RunFolder, port: int = PORT) -> None:
        """Listen on `port`, or on any free one if it is in use.

        Raises:
            ResourceError: if no port is free.
        """
        self._view = RunView(run)
        own = _bind(port)
        self.port: int = own.getsockname()[1]
        self._asked = port
        super().__init__([own], "live page")

    @property
    def url(self) -> str:
        """Address of the page."""
        return f"http://{HOST}:{self.port}"

    @property
    def text(self) -> str:
        """Text with the address, and with the reason if another port was asked for."""
        return f"{self.url}{in_use(self._asked, self.port)}"

    async def answer(self, path: str, query: str, headers: Mapping[str, str]) -> Answer:
        """Answer a request on another thread, since drawing an episode takes a second."""
        answer = await asyncio.to_thread(self._answer, path, parse_qs(query, True), headers)
        return Answer(answer.status, answer.kind, answer.body, {**_HEADERS, **answer.headers})

    def _answer(
        self, path: str, query: Mapping[str, list[str]], headers: Mapping[str, str]
    ) -> Answer:
        """Answer from a fixed list of paths; no path is one of the file system."""
        if headers.get("host", "").rsplit(":", 1)[0] not in _NAMES:
            # Another site's name that was made to mean this machine (DNS rebinding).
            return Answer(403, "text/plain", b"ask for 127.0.0.1 or localhost\n")
        if path in _FILES:
            name, kind = _FILES[path]
            return Answer(200, f"{kind}; charset=utf-8", (_RESOURCES / name).read_bytes())
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return Answer(403, "text/plain", b"only for the live page\n")
        asked = {name: values[0] for name, values in query.items()}
        if path == "/state.json":
            return _json(self._view.state(asked.get("since", "")))
        if path == "/curves.json":
            curves = self._view.others.curves(asked.get("run", ""), asked.get("since", ""), READ_S)
            return Answer(404, "text/plain", b"no such run\n") if curves is None else _json(curves)
        if path == "/episode.png":
            return self._episode(newest="newest" in query)
        if path == "/configuration":
            return _text(self._view.configuration())
        if path == "/log":
            text = self._view.log(asked.get("name", ""))
            return Answer(404, "text/plain", b"no such log\n") if text is None else _text(text)
        if path == "/report" and (page := self._view.report()) is not None:
            return Answer(200, "text/html; charset=utf-8", page, _REPORT_HEADERS)
        return Answer(404, "text/plain", b"there is only the page: /\n")

    def _episode(self, *, newest: bool) -> Answer:
        sheet = self._view.sheet(newest=newest)
        if sheet is None:
            return Answer(404, "text/plain", b"no episode is drawn\n")
        about = {
            "X-Version": sheet.version,
            "X-Frames": sheet.frames,
            "X-Columns": sheet.columns,
            "X-Rate": sheet.rate,
        }
        return Answer(200, "image/png", sheet.png, {k: str(v) for k, v in about.items()})


def _json(data: Mapping[str, Any]) -> Answer:
    body = json.dumps(data, allow_nan=False, separators=(",", ":")).encode()
    return Answer(200, "application/json", body)


def _text(text: str) -> Answer:
    return Answer(200, "text/plain; charset=utf-8", text.encode(errors="replace"))


def _bind(port: int) -> socket.socket:
    for asked in dict.fromkeys((port, 0)):
        try:
            return socket.create_server((HOST, asked))
        except OSError as error:
            reason = error.strerror
    raise ResourceError(
        f"the live page cannot listen on {HOST}: {reason}; murmur train --no-page does without it"
    )


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
    with contextlib.closing(page):
        yield
