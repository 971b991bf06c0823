"""The transport benchmark's own server and clients still speak the product's protocol."""

import pytest

from murmur.benchmarks.transport import Pair


@pytest.mark.system
@pytest.mark.parametrize("variant", ["aio identity", "aio protobuf", "sync identity", "production"])
def test_messages_flow(variant: str) -> None:
    with Pair(variant, num_envs=2, width=18, streams=2) as pair:  # waits for 20 of each stream
        assert pair.measure(0.2).rate > 0
