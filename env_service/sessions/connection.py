"""The connection to one learner: a channel, replaced when the credentials change."""

import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from typing import Self

from grpc import aio

from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.process.addresses import is_loopback, learner_addresses
from murmur.shared.wire.channel import channel_options
from murmur.shared.wire.credentials import (
    CredentialFolder,
    Credentials,
    Role,
    channel_credentials,
    credentials_for,
)


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

    async def __aenter__(self) -> Self:
        """Return the connection; the first stream connects."""
        return self

    async def __aexit__(self, *_: object) -> None:
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
