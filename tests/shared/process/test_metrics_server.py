"""The metrics port, and peers that misuse it."""

import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from prometheus_client import CollectorRegistry, Counter

from murmur.shared.process import get_server as module
from murmur.shared.process.errors import ResourceError
from murmur.shared.process.get_server import MAX_CONNECTIONS
from murmur.shared.process.metrics_server import MetricsServer
from tests.waiting import wait_until


@pytest.fixture
def metrics_server() -> Iterator[tuple[MetricsServer, list[bool]]]:
    registry, healthy = CollectorRegistry(), [True]
    Counter("murmur_test_total", "a count", registry=registry).inc(3)
    server = MetricsServer(
        "127.0.0.1", 0, registry, lambda: "" if healthy[0] else "not ready: it starts"
    )
    yield server, healthy
    server.close()


def _get(server: MetricsServer, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=30) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_metrics_and_health(metrics_server: tuple[MetricsServer, list[bool]]) -> None:
    server, healthy = metrics_server
    status, text = _get(server, "/metrics")
    assert status == 200
    assert "murmur_test_total 3.0" in text
    assert _get(server, "/healthz") == (200, "ok\n")
    healthy[0] = False
    assert _get(server, "/healthz") == (503, "not ready: it starts\n")
    assert _get(server, "/other")[0] == _get(server, "/metricsX")[0] == 404
    assert _get(server, "/metrics?name=x")[0] == 200


def test_a_taken_port_says_what_to_set(metrics_server: tuple[MetricsServer, list[bool]]) -> None:
    with pytest.raises(ResourceError, match=r"cannot bind .* set metrics_port"):
        MetricsServer("127.0.0.1", metrics_server[0].port, CollectorRegistry(), lambda: "")


def connect(server: MetricsServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=5)


def exchange(server: MetricsServer, request: bytes) -> bytes:
    """All that comes back until the server ends the connection; empty if it resets it."""
    with connect(server) as peer:
        try:
            peer.sendall(request)
            answer = b""
            while data := peer.recv(65_536):
                answer += data
        except OSError:
            return b""
    return answer


def test_half_sent_requests_take_no_threads_and_keep_nobody_out(
    metrics_server: tuple[MetricsServer, list[bool]],
) -> None:
    server, _ = metrics_server
    before = threading.active_count()
    with ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(connect(server)).sendall(b"GET /metr")
        for _ in range(5):
            assert _get(server, "/healthz") == (200, "ok\n")
            assert _get(server, "/metrics")[0] == 200
        assert threading.active_count() == before
        assert len(server._open) <= MAX_CONNECTIONS


def test_a_slow_request_is_ended(
    metrics_server: tuple[MetricsServer, list[bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, _ = metrics_server
    monkeypatch.setattr(module, "TIMEOUT_S", 0.2)
    with connect(server) as peer:
        peer.sendall(b"GET /metrics HTTP/1.1\r\n")
        assert peer.recv(1) == b""


def test_a_reader_who_does_not_read_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TIMEOUT_S", 0.3)
    registry = CollectorRegistry()
    counter = Counter("murmur_test_total", "x" * 1000, ["label"], registry=registry)
    for i in range(40_000):
        counter.labels("y" * 200 + str(i)).inc()
    server = MetricsServer("127.0.0.1", 0, registry, lambda: "")
    try:
        with connect(server) as peer:
            peer.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            wait_until(lambda: bool(server._open))
            wait_until(lambda: not server._open)
        assert _get(server, "/healthz") == (200, "ok\n")
    finally:
        server.close()


@pytest.mark.parametrize(
    ("request_", "begins"),
    [
        (b"POST /metrics HTTP/1.1\r\n\r\n", b"HTTP/1.1 405"),
        (b"\x16\x03\x01\x02\x00\r\n\r\n", b"HTTP/1.1 400"),
        (b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\n\r\n", b""),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 5000 + b"\r\n", b""),
    ],
)
def test_garbage_is_refused(
    metrics_server: tuple[MetricsServer, list[bool]], request_: bytes, begins: bytes
) -> None:
    server, _ = metrics_server
    answer = exchange(server, request_)
    assert answer.startswith(begins)
    assert bool(answer) == bool(begins)
    assert _get(server, "/healthz") == (200, "ok\n")


def test_a_pipeline_of_requests_is_answered_once(
    metrics_server: tuple[MetricsServer, list[bool]],
) -> None:
    server, _ = metrics_server
    assert exchange(server, b"GET /healthz HTTP/1.1\r\n\r\n" * 50).count(b"HTTP/1.1") <= 1


def test_many_scrapes_take_a_share_of_a_core_at_most() -> None:
    class Slow:
        busy_s = 0.0

        def collect(self) -> Iterator[object]:
            started = time.thread_time()
            while time.thread_time() < started + 0.1:
                pass
            Slow.busy_s += 0.1
            return iter(())

    registry = CollectorRegistry()
    registry.register(Slow())  # type: ignore[arg-type]
    server = MetricsServer("127.0.0.1", 0, registry, lambda: "")
    try:
        Slow.busy_s, began = 0.0, time.monotonic()
        for _ in range(50):
            assert _get(server, "/metrics")[0] == 200
        assert Slow.busy_s <= 0.7 + 0.3 * (time.monotonic() - began)
    finally:
        server.close()


def test_a_collector_that_fails_is_an_error_of_one_request() -> None:
    class Broken:
        fails = False

        def collect(self) -> Iterator[object]:
            if Broken.fails:
                raise RuntimeError("no")
            return iter(())

    registry = CollectorRegistry()
    registry.register(Broken())  # type: ignore[arg-type]
    Broken.fails = True
    server = MetricsServer("127.0.0.1", 0, registry, lambda: "")
    try:
        assert _get(server, "/metrics")[0] == 500
        assert _get(server, "/healthz")[0] == 200
    finally:
        server.close()
