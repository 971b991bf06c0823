"""What several tests of the command line use."""

import http.server
import threading
from collections.abc import Callable, Iterator

import pytest


@pytest.fixture
def serve() -> Iterator[Callable[[Callable[[str], str]], str]]:
    """An HTTP server that answers with what a function of the path returns; its address."""
    servers = []

    def start(answer: Callable[[str], str]) -> str:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = answer(self.path).encode()
                self.send_response(200)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()
