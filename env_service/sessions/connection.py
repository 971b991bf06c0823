"""The connection to the learner: a channel, and another one once the credentials have changed."""

import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self

from grpc import aio

from shared.channel import CHANNEL_OPTIONS
from shared.config import ExperimentConfig
from shared.credentials import Credentials, Role, channel_credentials, credentials_for


class Connection:
    """What the streams of one process share. Used by one event loop.

    gRPC fixes a channel's credentials when the channel is made. So a stream that is opened after
    the files have changed gets a new channel; the old one is closed when its last stream has ended.
    """

    def __init__(self, config: ExperimentConfig, *roles: Role) -> None:
        """Prepare to dial env_server.learner with the token of the first of `roles` that has one.

        Raises:
            ConfigError: if the learner is on another machine and nothing says how to protect the
                connection, or the credentials cannot be used.
        """
        self._config, self._roles = config.env_server, roles
        self._folder = credentials_for(
            config.security, config.env_server.learner, "env_server.learner"
        )
        self._credentials = self._folder.current() if self._folder else None
        self._streams: Counter[aio.Channel] = Counter()
        self._channel = self._dial(self._credentials)

    async def __aenter__(self) -> Self:
        """Nothing is dialled before the first stream."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close what is open."""
        for channel in {self._channel, *self._streams}:
            await channel.close(None)

    @contextlib.asynccontextmanager
    async def channel(self) -> AsyncIterator[aio.Channel]:
        """The channel for one stream, by the credentials of this moment.

        Raises:
            ConfigError: if the new files hold no token for this role.
        """
        now = self._folder.current() if self._folder else None
        if now is not self._credentials:
            old, self._channel, self._credentials = self._channel, self._dial(now), now
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

    def _dial(self, credentials: Credentials | None) -> aio.Channel:
        """A channel that pauses between attempts to connect as the sessions do."""
        config = self._config
        options = [
            *CHANNEL_OPTIONS,
            ("grpc.initial_reconnect_backoff_ms", int(1000 * config.reconnect_min_s)),
            ("grpc.min_reconnect_backoff_ms", int(1000 * config.reconnect_min_s)),
            ("grpc.max_reconnect_backoff_ms", int(1000 * config.reconnect_max_s)),
        ]
        if credentials is None:
            return aio.insecure_channel(config.learner, options)
        secure = channel_credentials(credentials, *self._roles)
        return aio.secure_channel(config.learner, secure, options)
