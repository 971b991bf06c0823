"""Observations that take several messages."""

import tracemalloc

import numpy as np
import pytest

from murmur.shared.process.errors import WireError
from murmur.shared.rpc import PART_BYTES
from murmur.shared.rpc import rollout_pb2 as pb
from murmur.shared.wire.codec import ObservationCodec, timestep_layout
from murmur.shared.wire.spec import ArraySpec, Discrete, EnvSpec
from tests.shared.wire.test_codec import payload, timestep

SPEC = EnvSpec("e", 4, (ArraySpec("image", "uint8", (3, 128, 128)),), Discrete(7), ("m",))
N = 14  # 2.6 MiB


def arrays(message: bytes) -> pb.Observation:
    return pb.WorkerMessage.FromString(message).observation


def test_parts_are_what_protobuf_writes() -> None:
    sent = timestep(SPEC, N)
    messages = ObservationCodec(SPEC, N).messages(300, sent)
    whole = payload(SPEC, sent)
    assert len(messages) == 3
    for part, message in enumerate(messages):
        held = whole[part * PART_BYTES : (part + 1) * PART_BYTES]
        observation = pb.Observation(sequence=300, arrays=held, part=part)
        assert message == pb.WorkerMessage(observation=observation).SerializeToString()


@pytest.mark.parametrize("other_encoding", [False, True])
def test_parts_come_together_again(other_encoding: bool) -> None:
    sender, receiver = ObservationCodec(SPEC, N), ObservationCodec(SPEC, N)
    for sequence in (1, 2):
        sent = timestep(SPEC, N, seed=sequence)
        *first, last = sender.messages(sequence, sent)
        if other_encoding:  # an unknown field behind
            first, last = [m + b"\x7a\x00" for m in first], last + b"\x7a\x00"
        assert [receiver.receive(m) for m in first] == [None, None]
        received = receiver.receive(last)
        assert received is not None
        assert received[0] == sequence
        assert payload(SPEC, received[1]) == payload(SPEC, sent)
        assert not received[1].reward.flags.writeable


def test_a_part_out_of_place_is_named() -> None:
    one, two, three = ObservationCodec(SPEC, N).messages(5, timestep(SPEC, N))
    other = ObservationCodec(SPEC, N).messages(6, timestep(SPEC, N))
    observation = arrays(two)
    short = pb.WorkerMessage(
        observation=pb.Observation(sequence=5, arrays=observation.arrays[:-1], part=1)
    ).SerializeToString()
    whole = pb.WorkerMessage(observation=pb.Observation(sequence=5)).SerializeToString()
    for wrong, words in (
        ([two], "part 1 of an observation came, expected part 0 of 3"),
        ([one, one], "part 0 of an observation came, expected part 1 of 3"),
        ([one, three], "part 2 of an observation came, expected part 1 of 3"),
        ([one, other[1]], "part 1 of an observation has sequence number 6, the parts before it 5"),
        ([one, short], "part 1 of an observation holds 1048575 bytes, expected 1048576"),
        ([whole], "part 0 of an observation holds 0 bytes"),
        ([one, two + bytes(100)], "a message of 1048"),
    ):
        receiver = ObservationCodec(SPEC, N)
        for message in wrong[:-1]:
            receiver.receive(message)
        with pytest.raises(WireError, match=words):
            receiver.receive(wrong[-1])


def test_a_part_of_a_small_observation_is_refused() -> None:
    codec = ObservationCodec(SPEC, 1)
    observation = arrays(*codec.messages(1, timestep(SPEC, 1)))
    observation.part = 1
    with pytest.raises(WireError, match="part 1 of an observation came, expected part 0 of 1"):
        codec.receive(pb.WorkerMessage(observation=observation).SerializeToString())


def test_an_observation_of_exactly_one_part_is_one_message() -> None:
    spec = EnvSpec("e", 1, (ArraySpec("x", "uint8", (PART_BYTES - 9,)),), Discrete(2))
    assert timestep_layout(spec, 1).num_bytes == PART_BYTES
    assert ObservationCodec(spec, 1).num_parts == 1
    bigger = EnvSpec("e", 1, (ArraySpec("x", "uint8", (PART_BYTES - 8,)),), Discrete(2))
    assert ObservationCodec(bigger, 1).num_parts == 2


def test_memory_is_touched_only_as_parts_arrive() -> None:
    spec = EnvSpec("e", 1, (ArraySpec("x", "uint8", (1024, 1024)),), Discrete(2))
    tracemalloc.start()
    try:
        codecs = [ObservationCodec(spec, 60) for _ in range(20)]
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
    assert codecs[0].num_parts == 61
    assert np.prod(timestep_layout(spec, 60).fields[2][2]) == 60 * 1024 * 1024
