"""The connection to one learner, a channel replaced when the credentials change; its streams."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator

from grpc import aio

from murmur.env_service.metrics import WorkerMetrics
from murmur.env_service.sessions.reconnect import Disconnected
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.process.addresses import is_loopback, learner_addresses
from murmur.shared.process.errors import WireError
from murmur.shared.rpc import MAX_MESSAGE_BYTES, METHOD
from murmur.shared.rpc import rollout_pb2 as pb
from murmur.shared.wire.channel import channel_options
from murmur.shared.wire.codec import parse
from murmur.shared.wire.credentials import (
    CredentialFolder,
    Credentials,
    Role,
    channel_credentials,
    credentials_for,
)
from murmur.shared.wire.notices import Notices, pack_notices

_CLOSE_S = 1.0  # how long a stopping worker waits for the learner to end a stream


def learner_credentials(config: ExperimentConfig) -> CredentialFolder | None:
    """Return the credentials for env_server.learner; None if it uses plain text.

    Raises:
        ConfigError: if a learner is on another machine and neither a folder nor `insecure` is set,
            or if the addresses or the folder are invalid.
    """
    addresses = learner_addresses(config.env_server.learner)
    far = [address for address in addresses if not is_loopback(address)]
    return credentials_for(config.security, (far or addresses)[0], "env_server.learner")


class Connection:
    """The connection that the streams of one process share. Used by one event loop.

    gRPC fixes a channel's credentials when the channel is made. So a stream that is opened after
    the files have changed gets a new channel; the old one is closed when its last stream has ended.
    """

    def __init__(
        self, config: ExperimentConfig, *roles: Role, address: str = "", name: str = ""
    ) -> None:
        """Prepare to connect to a learner with the token of the first of `roles` that has one.

        Args:
            config: configuration of the experiment.
            roles: roles of the token, the preferred one first.
            address: host:port; empty: env_server.learner.
            name: name that the learner's certificate must have; empty: the address's host.

        Raises:
            ConfigError: if the learner is on another machine and neither a folder nor `insecure`
                is set, or the credentials cannot be used.
        """
        self._config, self._roles = config.env_server, roles
        self._address, self._name = address or config.env_server.learner, name
        self._folder = learner_credentials(config)
        self._credentials = self._folder.current() if self._folder else None
        self._streams: Counter[aio.Channel] = Counter()
        self._channel = self._open_channel(self._credentials)

    async def aclose(self) -> None:
        """Close all channels."""
        for channel in {self._channel, *self._streams}:
            await channel.close(None)

    @contextlib.asynccontextmanager
    async def channel(self) -> AsyncIterator[aio.Channel]:
        """Provide the channel for one stream, with the current credentials.

        Raises:
            ConfigError: if the new files hold no token for this role.
        """
        now = self._folder.current() if self._folder else None
        if now is not self._credentials:
            old, self._channel, self._credentials = self._channel, self._open_channel(now), now
            if not self._streams[old]:
                await old.close(None)
        channel = self._channel
        self._streams[channel] += 1
        try:
            yield channel
        finally:
            self._streams[channel] -= 1
            if not self._streams[channel]:
                del self._streams[channel]
                if channel is not self._channel:
                    await channel.close(None)

    def _open_channel(self, credentials: Credentials | None) -> aio.Channel:
        """Open a channel that pauses between attempts to connect as the sessions do."""
        config = self._config
        options: list[tuple[str, int | str]] = [
            *channel_options(self._address),
            ("grpc.initial_reconnect_backoff_ms", int(1000 * config.reconnect_min_s)),
            ("grpc.min_reconnect_backoff_ms", int(1000 * config.reconnect_min_s)),
            ("grpc.max_reconnect_backoff_ms", int(1000 * config.reconnect_max_s)),
        ]
        if credentials is None:
            return aio.insecure_channel(self._address, options)
        if self._name:
            options.append(("grpc.ssl_target_name_override", self._name))
        secure = channel_credentials(credentials, *self._roles)
        return aio.secure_channel(self._address, secure, options)


class Call:
    """A stream to the learner, of any messages; its end raises Disconnected.

    Used by one asyncio task; any may cancel it.

    Attributes:
        written: number of messages sent.
    """

    def __init__(self, channel: aio.Channel, metrics: WorkerMetrics) -> None:
        """Open the stream; nothing travels before `greet`."""
        self._metrics, self.written = metrics, 0
        # No (de)serialisers: the codecs read and write the bytes of the messages themselves.
        open_call = channel.stream_stream(METHOD)  # type: ignore[call-arg]
        self._call: aio.StreamStreamCall[bytes, bytes] = open_call()  # type: ignore[call-arg]

    async def greet(self, hello: pb.Hello) -> pb.Welcome:
        """Send Hello and wait for Welcome, without a timeout.

        The channel's keepalive notices a learner that dies meanwhile.

        Raises:
            Disconnected: if the learner is not reachable, refuses or disconnects.
            WireError: if the answer is no Welcome.
        """
        await self.write(pb.WorkerMessage(hello=hello).SerializeToString())
        reply = await self.read()
        try:
            welcome: pb.Welcome = parse(pb.LearnerMessage, reply, "welcome", MAX_MESSAGE_BYTES)
        except WireError as error:
            raise WireError(f"the learner's answer to Hello: {error}") from None
        return welcome

    async def write(self, message: bytes) -> None:
        """Send a message.

        Raises:
            Disconnected: if the stream is over.
        """
        try:
            await self._call.write(message)
        except (aio.AioRpcError, asyncio.InvalidStateError):
            raise await self._over() from None
        except asyncio.CancelledError:
            # grpc.aio raises this also when the *peer* ends the stream with CANCELLED.
            if _told_to_end():
                raise
            raise await self._over() from None
        self.written += 1
        self._metrics.counts["messages/sent"] += 1
        self._metrics.counts["bytes/sent"] += len(message)

    async def tell(self, notices: Notices) -> None:
        """Send the notices that are pending.

        Raises:
            Disconnected: if the stream is over.
        """
        await self.write(pack_notices(notices.take()))

    async def read(self) -> bytes:
        """Return the next message.

        Raises:
            Disconnected: if the stream is over.
        """
        message = None
        try:
            message = await self._call.read()
        except (aio.AioRpcError, asyncio.InvalidStateError):
            pass  # the stream is over; its status says why
        except asyncio.CancelledError:
            if _told_to_end():
                raise
        if not isinstance(message, bytes):  # None or grpc.aio.EOF
            raise await self._over()
        self._metrics.counts["messages/received"] += 1
        self._metrics.counts["bytes/received"] += len(message)
        return message

    async def close(self) -> None:
        """Half-close the stream and wait for the learner to end it."""
        with contextlib.suppress(asyncio.InvalidStateError, aio.AioRpcError, TimeoutError):
            await self._call.done_writing()
            await asyncio.wait_for(self._call.code(), _CLOSE_S)

    def cancel(self) -> None:
        """End the stream at once."""
        self._call.cancel()

    async def _over(self) -> Disconnected:
        return Disconnected(await self._call.code(), await self._call.details() or "")


def _told_to_end() -> bool:
    """Return whether the current task is being cancelled.

    A function: a task in a local variable of a frame that its own exception passes through is a
    cycle, which keeps the call and its connection open until the garbage collector runs.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
