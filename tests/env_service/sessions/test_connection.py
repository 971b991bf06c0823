"""Which channel a stream gets, before and after the credentials change."""

import asyncio
from contextlib import aclosing
from pathlib import Path

import pytest
from grpc import ChannelConnectivity

from murmur.env_service.sessions.connection import Connection
from murmur.kit.certs import make_certificates
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.config.section import validate
from murmur.shared.process.errors import ConfigError


def experiment(learner: str, folder: Path | None = None) -> ExperimentConfig:
    sections = {"environment": {"name": "spread"}, "env_server": {"learner": learner}}
    security = {"security": {"folder": str(folder)}} if folder else {}
    return validate(ExperimentConfig, sections | security)


def test_streams_share_a_channel_until_the_credentials_change(tmp_path: Path) -> None:
    make_certificates(tmp_path, ["localhost"], 30)

    async def main() -> None:
        config = experiment("127.0.0.1:1", tmp_path / "environment")
        async with aclosing(Connection(config, "environment")) as connection:
            async with connection.channel() as first:
                async with connection.channel() as same:
                    assert same is first
                make_certificates(tmp_path, ["localhost"], 30, renew=True)
                async with connection.channel() as second:
                    assert second is not first
                    # Its stream is still open, so it is too.
                    assert first.get_state() == ChannelConnectivity.IDLE
            assert first.get_state() == ChannelConnectivity.SHUTDOWN
            assert second.get_state() == ChannelConnectivity.IDLE
            make_certificates(tmp_path, ["localhost"], 30, renew=True)
            async with connection.channel() as third:
                assert third is not second
                assert second.get_state() == ChannelConnectivity.SHUTDOWN  # it is unused
        assert third.get_state() == ChannelConnectivity.SHUTDOWN

    asyncio.run(main())


def test_a_folder_of_another_role_is_refused(tmp_path: Path) -> None:
    make_certificates(tmp_path, ["localhost"], 30)
    config = experiment("127.0.0.1:1", tmp_path / "evaluator")

    async def main() -> None:
        Connection(config, "environment")

    with pytest.raises(ConfigError, match="no token for the role environment"):
        asyncio.run(main())


def test_no_plain_text_to_another_machine() -> None:
    with pytest.raises(ConfigError, match=r"env_server\.learner=learner:50051 reaches beyond"):
        Connection(experiment("learner:50051"), "environment")
