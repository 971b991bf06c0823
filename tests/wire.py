"""The worker's side of the wire for tests: a Hello, and a stream that keeps the protocol or not.

The learner's side is murmur.kit.conformance.peer.
"""

import queue
from types import TracebackType
from typing import Any

import grpc

from murmur.shared.rpc import METHOD, PROTOCOL_VERSION
from murmur.shared.rpc import rollout_pb2 as pb
from murmur.shared.wire.channel import CHANNEL_OPTIONS
from murmur.shared.wire.codec import ActionCodec, ObservationCodec
from murmur.shared.wire.spec import EnvSpec, spec_to_proto
from murmur.shared.wire.timestep import Array, TimeStep


def hello(spec: EnvSpec, num_envs: int, /, **changes: Any) -> pb.Hello:
    """A Hello that a learner takes, but for `changes`."""
    fields: dict[str, Any] = {
        "protocol_version": PROTOCOL_VERSION,
        "worker_id": "raw",
        "mode": pb.MODE_TRAIN,
        "num_envs": num_envs,
        "spec": spec_to_proto(spec),
    }
    return pb.Hello(**{**fields, **changes})


def hello_message(spec: EnvSpec, num_envs: int, /, **changes: Any) -> bytes:
    """The same as it travels."""
    return pb.WorkerMessage(hello=hello(spec, num_envs, **changes)).SerializeToString()


class Refused(Exception):  # noqa: N818
    """The stream's status."""

    def __init__(self, error: grpc.RpcError) -> None:
        self.code, self.details = error.code(), error.details()
        super().__init__(f"{self.code}: {self.details}")


class Client:
    """One stream. `hello` and `exchange` keep the protocol, `send` and `read` obey."""

    def __init__(
        self,
        port: int,
        spec: EnvSpec,
        num_envs: int,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self.spec, self.num_envs = spec, num_envs
        self._out: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        address = f"127.0.0.1:{port}"
        self._channel = (
            grpc.secure_channel(address, credentials, options=CHANNEL_OPTIONS)
            if credentials
            else grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        )
        self._call = self._channel.stream_stream(METHOD)(iter(self._out.get, None))
        self._observations = ObservationCodec(spec, num_envs)
        self._actions = ActionCodec(spec, num_envs)
        self._sequence = 0
        self.policy_version = -1

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.drop()

    def send(self, message: bytes) -> None:
        self._out.put(message)

    def read(self) -> bytes:
        try:
            message: bytes = next(self._call)
        except grpc.RpcError as error:
            raise Refused(error) from None
        return message

    def half_close(self) -> None:
        self._out.put(None)

    def drop(self) -> None:
        """Vanish, as a killed process does."""
        self._out.put(None)
        self._call.cancel()
        self._channel.close()

    def hello(self, **changes: Any) -> pb.Welcome:
        self.send(hello_message(self.spec, self.num_envs, **changes))
        message = pb.LearnerMessage.FromString(self.read())
        assert message.WhichOneof("message") == "welcome"
        return message.welcome

    def put(self, timestep: TimeStep, sequence: int | None = None) -> None:
        self._sequence = self._sequence + 1 if sequence is None else sequence
        for message in self._observations.messages(self._sequence, timestep):
            self.send(message)

    def get(self) -> Array:
        sequence, self.policy_version, action = self._actions.unpack(self.read())
        assert sequence == self._sequence
        return action

    def exchange(self, timestep: TimeStep) -> Array:
        self.put(timestep)
        return self.get()
