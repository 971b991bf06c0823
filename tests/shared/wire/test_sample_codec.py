"""Messages of SUPPLY sessions: there and back, in parts, broken samples, and what is refused."""

import hashlib

import numpy as np
import pytest

from murmur.shared.process.errors import WireError
from murmur.shared.rpc import ENCODING_BYTES, PART_BYTES
from murmur.shared.rpc import rollout_pb2 as pb
from murmur.shared.wire.sample_codec import (
    Grant,
    SampleCodec,
    broken_sample,
    pack_grant,
    unpack_grant,
)
from murmur.shared.wire.samples import SampleSpec
from murmur.shared.wire.spec import ArraySpec
from murmur.shared.wire.timestep import Array


def spec(side: int) -> SampleSpec:
    return SampleSpec(
        name="s",
        arrays=(
            ArraySpec("image", "uint8", (3, side, side), per_agent=False),
            ArraySpec("mask", "uint8", (side, side), per_agent=False),
        ),
        sizes=(10, 2),
        digest=hashlib.sha256(b"").hexdigest(),
        classes=("a", "b"),
    )


def sample(side: int, value: int) -> dict[str, Array]:
    return {
        "image": np.full((3, side, side), value, np.uint8),
        "mask": np.full((side, side), value % 2, np.uint8),
    }


def test_a_grant_there_and_back() -> None:
    grant = Grant(3, 7, 1, (1, 0))
    assert unpack_grant(spec(4), pack_grant(grant)) == grant


@pytest.mark.parametrize(
    ("split", "indices", "words"),
    [
        (1, (2,), "need 1 to 64 indices below 2"),
        (0, (), "need 1 to 64 indices below 10"),
        (0, (-1,), "need 1 to 64"),
        (2, (0,), "names split 2"),
    ],
)
def test_a_grant_of_what_there_is_not_is_refused(
    split: int, indices: tuple[int, ...], words: str
) -> None:
    with pytest.raises(WireError, match=words):
        unpack_grant(spec(4), pack_grant(Grant(1, 0, split, indices)))


@pytest.mark.parametrize("side", [4, 700])  # one message; two samples of 1.9 MiB: four parts
@pytest.mark.parametrize("broken", [False, True])
def test_samples_there_and_back(side: int, broken: bool) -> None:
    sender, receiver = SampleCodec(spec(side)), SampleCodec(spec(side))
    grant = Grant(5, 0, 0, (8, 3, 1) if broken else (8, 1))
    lost = [broken_sample(3, "unreadable", "x.png\n")] if broken else []
    messages = sender.messages(grant, [sample(side, 8), sample(side, 1)], lost)
    assert len(messages) == (4 if side == 700 else 1) + broken
    assert max(map(len, messages)) <= PART_BYTES + ENCODING_BYTES
    answers = [receiver.receive(message, grant) for message in messages]
    assert answers[:-1] == [None] * (len(messages) - 1)
    assert answers[-1] is not None
    arrays, named = answers[-1]
    assert named == [broken_sample(b.index, b.reason, "x.png?") for b in lost]
    assert arrays["image"].shape == (2, 3, side, side)
    assert arrays["image"][:, 0, 0, 0].tolist() == [8, 1]
    assert arrays["mask"][:, -1, -1].tolist() == [0, 1]


def test_frames_are_what_protobuf_writes() -> None:
    sender = SampleCodec(spec(4))
    (message,) = sender.messages(Grant(5, 0, 0, (1,)), [sample(4, 1)], [])
    arrays = b"\x01" * 64
    wanted = pb.WorkerMessage(samples=pb.Samples(sequence=5, arrays=arrays))
    assert message == wanted.SerializeToString()


def test_a_grant_of_broken_samples_has_no_arrays() -> None:
    codec, grant = SampleCodec(spec(4)), Grant(1, 0, 0, (2,))
    (message,) = codec.messages(grant, [], [broken_sample(2, "unreadable", "x")])
    assert codec.receive(message, grant) == ({}, [broken_sample(2, "unreadable", "x")])
    (good,) = codec.messages(Grant(2, 0, 0, (1,)), [sample(4, 1)], [])
    assert codec.receive(good, Grant(2, 0, 0, (1,))) is not None


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        (pb.Samples(sequence=2, arrays=bytes(128)), "grant 2 came, expected 1"),
        (pb.Samples(sequence=1, arrays=bytes(127)), "127 bytes of samples came, expected part 0"),
        (pb.Samples(sequence=1, arrays=bytes(128), part=1), "expected part 0 with 128 bytes"),
        (
            pb.Samples(sequence=1, broken=[pb.BrokenSample(index=9, reason="x")]),
            r"asked for \[1, 2\]",
        ),
        (
            pb.Samples(sequence=1, broken=[pb.BrokenSample(index=1, reason="No!")]),
            "for the reason 'No!'",
        ),
        (
            pb.Samples(sequence=1, arrays=b"x", broken=[pb.BrokenSample(index=1, reason="x")]),
            "come first, in a message of their own",
        ),
    ],
)
def test_answers_that_were_not_asked_for_are_refused(samples: pb.Samples, words: str) -> None:
    message = pb.WorkerMessage(samples=samples).SerializeToString()
    with pytest.raises(WireError, match=words):
        SampleCodec(spec(4)).receive(message, Grant(1, 0, 0, (1, 2)))
