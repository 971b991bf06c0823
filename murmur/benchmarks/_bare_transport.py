"""Bare gRPC: servers and clients that answer at once and check only what the codecs check."""

import asyncio
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
from grpc import aio

from murmur.benchmarks._no_op import Gate, no_op_timestep, run_loop
from murmur.shared.rpc import METHOD
from murmur.shared.rpc import rollout_pb2 as pb
from murmur.shared.wire.channel import SERVER_OPTIONS, channel_options, stream_handler
from murmur.shared.wire.codec import (
    ActionCodec,
    ObservationCodec,
    action_array_layout,
    timestep_layout,
)
from murmur.shared.wire.spec import EnvSpec
from murmur.shared.wire.timestep import Array, TimeStep


class _Protobuf:
    """Codec that carries the same arrays in protobuf's own messages, for comparison."""

    def __init__(self, spec: EnvSpec, num_envs: int) -> None:
        self.observations = timestep_layout(spec, num_envs)
        self.actions = action_array_layout(spec, num_envs)
        self._observation = bytearray(self.observations.num_bytes)
        names = (name for name, _, _ in self.observations.fields)
        self._rows = dict(zip(names, self.observations.views(self._observation), strict=True))
        self._action = bytearray(self.actions.num_bytes)

    def pack(self, sequence: int, timestep: TimeStep) -> pb.WorkerMessage:
        """Pack rows as ObservationCodec.messages does."""
        np.copyto(self._rows["step_type"], timestep.step_type)
        np.copyto(self._rows["reward"], timestep.reward)
        np.copyto(self._rows["discount"], timestep.discount)
        for name, array in timestep.observation.items():
            np.copyto(self._rows["observation/" + name], array)
        arrays = bytes(self._observation)
        return pb.WorkerMessage(observation=pb.Observation(sequence=sequence, arrays=arrays))

    def unpack_action(self, message: pb.LearnerMessage) -> Array:
        """Unpack actions as ActionCodec.unpack does."""
        return self.actions.views(message.action.arrays)[0]

    def answer(self, message: pb.WorkerMessage) -> pb.LearnerMessage:
        """Return a constant action."""
        self.observations.views(message.observation.arrays)
        action = pb.Action(
            sequence=message.observation.sequence, policy_version=1, arrays=bytes(self._action)
        )
        return pb.LearnerMessage(action=action)


def _answerer(spec: EnvSpec, num_envs: int, protobuf: bool) -> Callable[[Any], Any]:
    """Return the function with which a bare server answers a message."""
    if protobuf:
        return _Protobuf(spec, num_envs).answer
    observations, actions = ObservationCodec(spec, num_envs), ActionCodec(spec, num_envs)
    action = np.zeros((num_envs, 3), np.int32)

    def answer(message: bytes) -> bytes:
        received = observations.receive(message)
        assert received is not None, "rows of a benchmark fit one message"
        return actions.pack(received[0], 1, action)

    return answer


def _asker(
    spec: EnvSpec, num_envs: int, protobuf: bool
) -> tuple[Callable[[int, TimeStep], Any], Callable[[Any], Any]]:
    """Return a bare client's functions that pack rows and unpack answers."""
    if protobuf:
        codec = _Protobuf(spec, num_envs)
        return codec.pack, codec.unpack_action
    observations = ObservationCodec(spec, num_envs)

    def pack(sequence: int, timestep: TimeStep) -> bytes:
        (message,) = observations.messages(sequence, timestep)
        return message

    return pack, ActionCodec(spec, num_envs).unpack


def _handlers(play: Any, protobuf: bool) -> "tuple[grpc.GenericRpcHandler[Any, Any]]":  # noqa: ANN401
    if protobuf:
        read, write = pb.WorkerMessage.FromString, pb.LearnerMessage.SerializeToString
        return (stream_handler(play, read, write),)
    return (stream_handler(play),)


def _open_call(channel: Any, protobuf: bool) -> Any:  # noqa: ANN401
    if protobuf:
        return channel.stream_stream(
            METHOD, pb.WorkerMessage.SerializeToString, pb.LearnerMessage.FromString
        )
    return channel.stream_stream(METHOD)


def serve_aio(pipe: Any, spec: EnvSpec, num_envs: int, protobuf: bool) -> None:  # noqa: ANN401
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

    run_loop(serve())


def play_aio(
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
        async with aio.insecure_channel(
            (address := f"127.0.0.1:{port}"), channel_options(address)
        ) as channel:
            await asyncio.gather(*(one(channel, i) for i in range(streams)))

    run_loop(play())


def serve_sync(pipe: Any, spec: EnvSpec, num_envs: int, protobuf: bool) -> None:  # noqa: ANN401
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


def play_sync(
    port: int, spec: EnvSpec, num_envs: int, protobuf: bool, streams: int, gate: Gate
) -> None:
    channel = grpc.insecure_channel((address := f"127.0.0.1:{port}"), channel_options(address))

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
