"""Transport: cost of a lock-step round trip for each side, bare and through murmur's own path.

Each variant is a server process and a client process on a loopback socket. All variants of one
payload exist at once and run in turns, so that a busy machine disturbs them alike; what counts is
CPU time over messages, by the kernel's books, and of several turns the median.

The bare variants answer every observation with a constant action and check nothing but lengths.
Everything runs as murmur's processes do, on uvloop and without preempting wake-ups; `untuned` is
without either.

`production` is murmur.learner_service.serving.server with the batcher and its metrics, answered by
a thread that takes batches and has no network, against sessions of
murmur.env_service.sessions.worker on an environment that does nothing. It answers at once, so
nearly every message pays for waking a thread and the event loop; `production 0.5 ms` takes that
long for each batch, without the interpreter's lock, as a small network does, and messages share the
wake-ups.
"""

import contextlib
import multiprocessing as mp
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil

from murmur.benchmarks import _no_op
from murmur.benchmarks._bare_transport import play_aio, play_sync, serve_aio, serve_sync
from murmur.benchmarks._no_op import Gate, no_op_spec
from murmur.benchmarks._processes import cpu_s
from murmur.benchmarks._production_transport import play_production, serve_production
from murmur.benchmarks.effort import Effort
from murmur.shared.process.process import new_event_loop, wake_without_preempting

DESCRIPTION = (
    "CPU µs per message and side over loopback gRPC: asyncio or threads, identity or protobuf "
    "serialisers, and murmur's production path (target ≤ 130 at 27 KB and 8 streams)"
)

PAYLOADS = {"216 B": (1, 18), "27 KB": (128, 18), "1 MB": (128, 683)}
"""Name -> (environments of a message, floats observed by each of 3 agents)."""

VARIANTS = (
    "aio identity",
    "aio identity untuned",
    "aio protobuf",
    "sync identity",
    "sync protobuf",
    "production",
    "production untuned",
    "production 0.5 ms",
)
_SMOKE = ("aio identity", "aio protobuf", "sync identity", "production")  # each process once
_WARM_UP_S = 0.2
_SERVERS = {"aio": serve_aio, "sync": serve_sync, "production": serve_production}
_CLIENTS = {"aio": play_aio, "sync": play_sync, "production": play_production}


def run(effort: Effort = Effort.FULL) -> dict[str, Any]:
    """Measure CPU µs per message: payload, streams -> variant -> client, server."""
    rounds, seconds = effort.choose((1, 0.05), (3, 0.4), (7, 1.0))
    small = effort is Effort.SMOKE
    variants = _SMOKE if small else VARIANTS
    os.environ["OMP_NUM_THREADS"] = "1"  # as workers have it; the processes started here inherit
    result: dict[str, Any] = {}
    for payload, (num_envs, width) in list(PAYLOADS.items())[: 1 if small else None]:
        for streams in (2,) if small else (1, 8):
            with contextlib.ExitStack() as stack:
                pairs = {
                    variant: stack.enter_context(Pair(variant, num_envs, width, streams))
                    for variant in variants
                }
                turns: dict[str, list[Turn]] = {variant: [] for variant in variants}
                for _ in range(rounds):
                    for variant, pair in pairs.items():
                        turns[variant].append(pair.measure(seconds))
            result[f"{payload}, {streams} stream{'s' * (streams > 1)}"] = {
                variant: {
                    "client_us": statistics.median(t.client_us for t in done),
                    "server_us": statistics.median(t.server_us for t in done),
                    "messages_per_s": statistics.median(t.rate for t in done),
                }
                for variant, done in turns.items()
            }
    result["load_average"] = psutil.getloadavg()[0]
    return result


@dataclass
class Turn:
    """CPU µs per message of each side, and messages a second."""

    client_us: float
    server_us: float
    rate: float


class Pair:
    """A server and a client process of one variant, at rest between turns."""

    def __init__(self, variant: str, num_envs: int, width: int, streams: int) -> None:
        context = mp.get_context("spawn")
        self._gate = Gate(context, streams)
        ours, theirs = context.Pipe()
        style, tuned = variant.split()[0], not variant.endswith("untuned")
        spec = no_op_spec(width)
        # The bare variants' choice of serializers; the production path's slow inference.
        option = variant.endswith(("protobuf", "ms"))
        self._server = context.Process(
            target=_begin,
            args=(tuned, _SERVERS[style], theirs, spec, num_envs, option),
            daemon=True,
        )
        self._server.start()
        if not ours.poll(60):
            raise RuntimeError(f"the server of '{variant}' did not start")
        port = ours.recv()
        self._client = context.Process(
            target=_begin,
            args=(tuned, _CLIENTS[style], port, spec, num_envs, option, streams, self._gate),
            daemon=True,
        )
        self._client.start()

    def __enter__(self) -> "Pair":
        """Play until messages flow."""
        self._gate.set(True)
        deadline = time.monotonic() + 60
        while min(self._gate.counts) < 20:
            time.sleep(0.01)
            if time.monotonic() > deadline or not self._client.is_alive():
                raise RuntimeError("the client sends no messages")
        self._gate.set(False)
        return self

    def __exit__(self, *_: object) -> None:
        """End both processes."""
        for process in (self._client, self._server):
            process.kill()
            process.join()

    def measure(self, seconds: float) -> Turn:
        """Measure one turn."""
        client, server = psutil.Process(self._client.pid), psutil.Process(self._server.pid)

        def snapshot() -> tuple[float, float, int, float]:
            count = sum(self._gate.counts)
            return cpu_s(client), cpu_s(server), count, time.monotonic()

        self._gate.set(True)
        time.sleep(_WARM_UP_S)
        before = snapshot()
        time.sleep(seconds)
        after = snapshot()
        self._gate.set(False)
        client_s, server_s, messages, wall_s = (b - a for a, b in zip(before, after, strict=True))
        return Turn(client_s / messages * 1e6, server_s / messages * 1e6, messages / wall_s)


def _begin(tuned: bool, side: Callable[..., None], *arguments: Any) -> None:  # noqa: ANN401
    """Run one side in a spawned process."""
    if tuned:
        wake_without_preempting()
        _no_op.loop_factory = new_event_loop
    side(*arguments)
