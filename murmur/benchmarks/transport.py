"""Transport: what a lock-step round trip costs each side, bare and through murmur's own path.

Each variant is a server process and a client process on a loopback socket. All variants of one
payload exist at once and run in turns, so that a busy machine disturbs them alike; what counts is
CPU time over messages, by the kernel's books, and of several turns the median.

The bare variants answer every observation with a constant action and check nothing but lengths.
Everything runs as murmur's processes do, on uvloop and without preempting wake-ups; `untuned` is
without either.

`production` is learner_service.serving.server with the batcher and its metrics, answered by a
thread that takes batches and has no network, against sessions of env_service.sessions.worker on an
environment that does nothing. It answers at once, so nearly every message pays for waking a thread
and the event loop; `production 0.5 ms` takes that long for each batch, without the interpreter's
lock, as a small network does, and messages share the wake-ups.
"""

import asyncio
import contextlib
import ctypes
import multiprocessing as mp
import os
import queue
import statistics
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import grpc
import numpy as np
import psutil
import uvloop
from grpc import aio
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry

from env_service.environment import VectorEnvironment
from env_service.metrics import WorkerMetrics
from env_service.sessions.connection import Connection
from env_service.sessions.worker import Dialling, Session, run_until
from env_service.watchdog.faults import FaultCount, GuardedEnvironment
from shared.channel import CHANNEL_OPTIONS, SERVER_OPTIONS
from shared.codec import ActionCodec, ObservationCodec, action_array_layout, timestep_layout
from shared.config import (
    BatcherConfig,
    EnvServerConfig,
    ExperimentConfig,
    LearnerConfig,
    PluginConfig,
)
from shared.process import wake_without_preempting
from shared.rpc import METHOD
from shared.rpc import rollout_pb2 as pb
from shared.spec import ArraySpec, Discrete, EnvSpec
from shared.timestep import Array, StepType, TimeStep

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
_BATCH_S = 0.5e-3
_WARM_UP_S = 0.2


def run(quick: bool = False) -> dict[str, Any]:
    """CPU µs per message: payload, streams -> variant -> client, server."""
    rounds, seconds = (3, 0.4) if quick else (7, 1.0)
    os.environ["OMP_NUM_THREADS"] = "1"  # as workers have it; the processes started here inherit
    result: dict[str, Any] = {}
    for payload, (num_envs, width) in PAYLOADS.items():
        for streams in (1, 8):
            with contextlib.ExitStack() as stack:
                pairs = {
                    variant: stack.enter_context(Pair(variant, num_envs, width, streams))
                    for variant in VARIANTS
                }
                turns: dict[str, list[Turn]] = {variant: [] for variant in VARIANTS}
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


class Gate:
    """Shared with a client process: lets it play or rest, and counts its messages."""

    def __init__(self, context: Any, streams: int) -> None:  # noqa: ANN401
        self._open = context.RawValue(ctypes.c_bool, False)  # quicker to read than the event
        self._opened = context.Event()
        self.counts = context.RawArray(ctypes.c_uint64, streams)

    def step(self, stream: int) -> None:
        """Called by the client before each message; the pause blocks all its streams."""
        if not self._open.value:
            self._opened.wait()  # asleep: those at rest must not disturb the one that plays
        self.counts[stream] += 1

    def set(self, is_open: bool) -> None:
        """Called by the benchmark: let the client play, or have it rest."""
        self._open.value = is_open
        (self._opened.set if is_open else self._opened.clear)()


class Pair:
    """A server and a client process of one variant, at rest between turns."""

    def __init__(self, variant: str, num_envs: int, width: int, streams: int) -> None:
        context = mp.get_context("spawn")
        self._gate = Gate(context, streams)
        ours, theirs = context.Pipe()
        style, tuned = variant.split()[0], not variant.endswith("untuned")
        spec = no_op_spec(width)
        # The bare variants' choice of serialisers; the production path's slow inference.
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
        """End both."""
        for process in (self._client, self._server):
            process.kill()
            process.join()

    def measure(self, seconds: float) -> Turn:
        """One turn."""
        client, server = psutil.Process(self._client.pid), psutil.Process(self._server.pid)

        def snapshot() -> tuple[float, float, int, float]:
            count = sum(self._gate.counts)
            return _cpu_s(client), _cpu_s(server), count, time.monotonic()

        self._gate.set(True)
        time.sleep(_WARM_UP_S)
        before = snapshot()
        time.sleep(seconds)
        after = snapshot()
        self._gate.set(False)
        client_s, server_s, messages, wall_s = (b - a for a, b in zip(before, after, strict=True))
        return Turn(client_s / messages * 1e6, server_s / messages * 1e6, messages / wall_s)


_loop_factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop


def _begin(tuned: bool, side: Callable[..., None], *arguments: Any) -> None:  # noqa: ANN401
    """A spawned process's outermost function."""
    global _loop_factory
    if tuned:
        wake_without_preempting()
        _loop_factory = uvloop.new_event_loop
    side(*arguments)


def _run(main: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=_loop_factory) as runner:
        runner.run(main)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def no_op_spec(width: int) -> EnvSpec:
    """Three agents that observe `width` floats each."""
    return EnvSpec("no-op", 3, (ArraySpec("observation", "float32", (width,)),), Discrete(5))


def no_op_timestep(spec: EnvSpec, num_envs: int) -> TimeStep:
    """Rows that never end."""
    width = spec.observations[0].shape[0]
    return TimeStep(
        step_type=np.full(num_envs, StepType.MID, np.uint8),
        reward=np.zeros((num_envs, 3), np.float32),
        discount=np.ones(num_envs, np.float32),
        observation={
            "observation": np.random.default_rng(0).random((num_envs, 3, width), np.float32)
        },
    )


class NoOp(VectorEnvironment):
    """Does nothing, but waits for its turn."""

    def __init__(self, spec: EnvSpec, num_envs: int, gate: Gate, stream: int) -> None:
        """Step through `gate`."""
        self.spec, self.num_envs = spec, num_envs
        self._gate, self._stream = gate, stream
        self._timestep = no_op_timestep(spec, num_envs)
        self._first = replace(self._timestep, step_type=np.full(num_envs, StepType.FIRST, np.uint8))

    def step(
        self, action: Array, restart: NDArray[np.bool_], seeds: NDArray[np.uint64]
    ) -> TimeStep:
        """FIRST, then the same rows for ever."""
        self._gate.step(self._stream)
        return self._first if restart[0] else self._timestep


class _Protobuf:
    """The same arrays through protobuf's own messages: what the codec stands in for."""

    def __init__(self, spec: EnvSpec, num_envs: int) -> None:
        self.observations = timestep_layout(spec, num_envs)
        self.actions = action_array_layout(spec, num_envs)
        self._observation = bytearray(self.observations.num_bytes)
        self._rows = self.observations.views(self._observation)
        self._action = bytearray(self.actions.num_bytes)

    def pack(self, sequence: int, timestep: TimeStep) -> pb.WorkerMessage:
        """As ObservationCodec.pack."""
        np.copyto(self._rows["step_type"], timestep.step_type)
        np.copyto(self._rows["reward"], timestep.reward)
        np.copyto(self._rows["discount"], timestep.discount)
        for name, array in timestep.observation.items():
            np.copyto(self._rows["observation/" + name], array)
        arrays = bytes(self._observation)
        return pb.WorkerMessage(observation=pb.Observation(sequence=sequence, arrays=arrays))

    def unpack_action(self, message: pb.LearnerMessage) -> Array:
        """As ActionCodec.unpack."""
        return self.actions.views(message.action.arrays)["action"]

    def answer(self, message: pb.WorkerMessage) -> pb.LearnerMessage:
        """A constant action."""
        self.observations.views(message.observation.arrays)
        action = pb.Action(
            sequence=message.observation.sequence, policy_version=1, arrays=bytes(self._action)
        )
        return pb.LearnerMessage(action=action)


def _answerer(spec: EnvSpec, num_envs: int, protobuf: bool) -> Callable[[Any], Any]:
    """What a bare server does with a message."""
    if protobuf:
        return _Protobuf(spec, num_envs).answer
    observations, actions = ObservationCodec(spec, num_envs), ActionCodec(spec, num_envs)
    action = np.zeros((num_envs, 3), np.int32)

    def answer(message: bytes) -> bytes:
        sequence, _ = observations.unpack(message)
        return actions.pack(sequence, 1, action)

    return answer


def _asker(
    spec: EnvSpec, num_envs: int, protobuf: bool
) -> tuple[Callable[[int, TimeStep], Any], Callable[[Any], Any]]:
    """How a bare client packs rows, and reads what is answered."""
    if protobuf:
        codec = _Protobuf(spec, num_envs)
        return codec.pack, codec.unpack_action
    return ObservationCodec(spec, num_envs).pack, ActionCodec(spec, num_envs).unpack


def _handlers(play: Any, protobuf: bool) -> tuple[grpc.GenericRpcHandler[Any, Any], ...]:  # noqa: ANN401
    handler = grpc.stream_stream_rpc_method_handler(
        play,
        pb.WorkerMessage.FromString if protobuf else None,
        pb.LearnerMessage.SerializeToString if protobuf else None,
    )
    _, service, method = METHOD.split("/")
    return (grpc.method_handlers_generic_handler(service, {method: handler}),)


def _open_call(channel: Any, protobuf: bool) -> Any:  # noqa: ANN401
    if protobuf:
        return channel.stream_stream(
            METHOD, pb.WorkerMessage.SerializeToString, pb.LearnerMessage.FromString
        )
    return channel.stream_stream(METHOD)


def _serve_aio(pipe: Any, spec: EnvSpec, num_envs: int, protobuf: bool) -> None:  # noqa: ANN401
    async def play(_: object, context: aio.ServicerContext[Any, Any]) -> None:
        answer = _answerer(spec, num_envs, protobuf)
        while (message := await context.read()) is not aio.EOF:  # type: ignore[attr-defined]
            await context.write(answer(message))

    async def serve() -> None:
        server = aio.server(options=SERVER_OPTIONS)
        server.add_generic_rpc_handlers(_handlers(play, protobuf))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        pipe.send(port)
        await server.wait_for_termination()

    _run(serve())


def _play_aio(
    port: int, spec: EnvSpec, num_envs: int, protobuf: bool, streams: int, gate: Gate
) -> None:
    async def one(channel: aio.Channel, stream: int) -> None:
        pack, unpack = _asker(spec, num_envs, protobuf)
        timestep = no_op_timestep(spec, num_envs)
        call = _open_call(channel, protobuf)()
        sequence = 0
        while True:
            gate.step(stream)
            sequence += 1
            await call.write(pack(sequence, timestep))
            unpack(await call.read())

    async def play() -> None:
        async with aio.insecure_channel(f"127.0.0.1:{port}", CHANNEL_OPTIONS) as channel:
            await asyncio.gather(*(one(channel, i) for i in range(streams)))

    _run(play())


def _serve_sync(pipe: Any, spec: EnvSpec, num_envs: int, protobuf: bool) -> None:  # noqa: ANN401
    def play(messages: Iterator[Any], _: grpc.ServicerContext) -> Iterator[Any]:
        answer = _answerer(spec, num_envs, protobuf)
        for message in messages:
            yield answer(message)

    server = grpc.server(ThreadPoolExecutor(max_workers=16), options=SERVER_OPTIONS)
    server.add_generic_rpc_handlers(_handlers(play, protobuf))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    pipe.send(port)
    server.wait_for_termination()


def _play_sync(
    port: int, spec: EnvSpec, num_envs: int, protobuf: bool, streams: int, gate: Gate
) -> None:
    channel = grpc.insecure_channel(f"127.0.0.1:{port}", CHANNEL_OPTIONS)

    def one(stream: int) -> None:
        pack, unpack = _asker(spec, num_envs, protobuf)
        timestep = no_op_timestep(spec, num_envs)
        outgoing: queue.SimpleQueue[Any] = queue.SimpleQueue()
        replies = _open_call(channel, protobuf)(iter(outgoing.get, None))
        sequence = 0
        while True:
            gate.step(stream)
            sequence += 1
            outgoing.put(pack(sequence, timestep))
            unpack(next(replies))

    threads = [threading.Thread(target=one, args=(i,), daemon=True) for i in range(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class _Host:
    """A run without a network: sessions get slots, and a thread answers with constant actions."""

    run_seed, policy_version = 1, 1

    def __init__(self, spec: EnvSpec, num_envs: int, slow: bool) -> None:
        from learner_service.serving.batcher import DynamicBatcher
        from learner_service.serving.evaluation import EvaluationGate

        self.batcher = DynamicBatcher(BatcherConfig())
        self.gate = EvaluationGate(lambda _: None)
        self.spec: EnvSpec | None = spec
        self._codec = ActionCodec(spec, num_envs)
        self._action = np.zeros((num_envs, spec.num_agents), np.int32)
        self._sessions, self._slow = 0, slow

    def open(self, spec: EnvSpec) -> None:
        """Never needed: the spec is known."""

    def team(self, spec: EnvSpec, training: bool) -> EnvSpec:
        """All agents."""
        return spec

    def pair(self, session: object) -> None:
        """There are no opponents."""

    def admit(self, hello: pb.Hello, spec: EnvSpec) -> tuple[Any, list[pb.SlotStart]]:
        """The next free slots."""
        from learner_service.serving.session import Session as LearnerSession

        n = hello.num_envs
        first = self._sessions * n
        self._sessions += 1
        session = LearnerSession(hello.worker_id, spec, n, first, np.zeros(n, np.int64))
        return session, [pb.SlotStart() for _ in range(n)]

    def end(self, session: object) -> None:
        """Nothing is kept of a session."""

    def answer(self) -> None:
        """The inference thread."""
        from learner_service.serving.inference import _deliver

        while (requests := self.batcher.next_batch(0.2)) is not None:
            if requests:
                if self._slow:
                    time.sleep(_BATCH_S)
                _deliver([(r, self._codec.pack(r.sequence, 1, self._action)) for r in requests])


def _serve_production(
    pipe: Any,  # noqa: ANN401
    spec: EnvSpec,
    num_envs: int,
    slow: bool,
) -> None:
    from learner_service.serving.server import RolloutServer
    from learner_service.telemetry.metrics import LearnerMetrics

    sys.setswitchinterval(5e-4)  # as the learner does
    host = _Host(spec, num_envs, slow)
    threading.Thread(target=host.answer, daemon=True).start()

    async def serve() -> None:
        server = RolloutServer(host, LearnerConfig(port=0), LearnerMetrics())
        await server.start()
        pipe.send(server.port)
        await asyncio.Event().wait()

    _run(serve())


def _play_production(
    port: int, spec: EnvSpec, num_envs: int, _: bool, streams: int, gate: Gate
) -> None:
    config = ExperimentConfig(
        environment=PluginConfig(name="no-op"),
        env_server=EnvServerConfig(learner=f"127.0.0.1:{port}"),
    )

    async def play() -> None:
        stop = asyncio.Event()
        metrics = WorkerMetrics("train", CollectorRegistry())
        dialling = Dialling(config.env_server, metrics)
        async with Connection(config, "environment") as connection:
            faults = FaultCount(0, lambda *_: None)
            environments = [
                GuardedEnvironment(partial(NoOp, spec, num_envs, gate, i), faults)
                for i in range(streams)
            ]
            sessions = [
                Session(environment, f"no-op/{i}", i * num_envs, stop)
                for i, environment in enumerate(environments)
            ]
            plays = [session.run(connection, dialling, metrics) for session in sessions]
            await run_until(stop, metrics, plays)

    _run(play())


_SERVERS = {"aio": _serve_aio, "sync": _serve_sync, "production": _serve_production}
_CLIENTS = {"aio": _play_aio, "sync": _play_sync, "production": _play_production}
