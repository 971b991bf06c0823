"""Observations above 1 MiB, played with a real learner."""

from pathlib import Path

import grpc
import pytest

from murmur.shared.wire.codec import ObservationCodec
from murmur.shared.wire.spec import ArraySpec, Discrete, EnvSpec
from tests.learner_service.running import experiment, running_learner
from tests.learner_service.toys import FIRST, MID, row
from tests.wire import Client, Refused

SPEC = EnvSpec("e", 1, (ArraySpec("x", "float32", (100_000,)),), Discrete(2))
N = 4


def test_a_large_observation_is_answered_and_torn_ones_refused(tmp_path: Path) -> None:
    with running_learner(tmp_path, experiment()) as learner:
        with Client(learner.port, SPEC, N) as client:
            client.hello()
            for t in range(3):
                assert client.exchange(row(SPEC, N, MID if t else FIRST)).shape == (N, 1)
            assert learner.metric("in_flight_bytes") > 4 * N * 100_000
        messages = ObservationCodec(SPEC, N).messages(1, row(SPEC, N, FIRST))
        assert len(messages) == 2
        for torn in (messages[::-1], [messages[0], messages[0]]):
            with Client(learner.port, SPEC, N) as client:
                client.hello()
                for message in torn:
                    client.send(message)
                with pytest.raises(Refused, match="observation") as caught:
                    client.read()
            assert caught.value.code == grpc.StatusCode.INVALID_ARGUMENT
