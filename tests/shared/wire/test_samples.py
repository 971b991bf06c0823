"""Sample specs: checks, protobuf and back, and the first difference."""

from dataclasses import replace

import pytest

from murmur.shared.process.errors import SpecError
from murmur.shared.rpc import rollout_pb2 as pb
from murmur.shared.wire.samples import (
    SampleSpec,
    sample_difference,
    samples_from_proto,
    samples_to_proto,
)
from murmur.shared.wire.spec import ArraySpec

SPEC = SampleSpec(
    name="faces",
    arrays=(
        ArraySpec("image", "uint8", (3, 8, 6), per_agent=False),
        ArraySpec("mask", "uint8", (8, 6), per_agent=False),
    ),
    sizes=(64, 10),
    digest="0f" * 32,
    classes=("background", "left eye", "right eye"),
    flip_pairs=((1, 2),),
)


def test_through_protobuf_and_back() -> None:
    wire = samples_to_proto(SPEC).SerializeToString()
    assert samples_from_proto(pb.SampleSpec.FromString(wire)) == SPEC


def test_bytes_of_a_sample() -> None:
    assert SPEC.sample_bytes == 3 * 8 * 6 + 8 * 6


def test_equal_specs_have_no_difference() -> None:
    assert sample_difference(SPEC, replace(SPEC)) is None


def test_another_digest_is_named_and_explained() -> None:
    words = sample_difference(SPEC, replace(SPEC, digest="1e" * 32))
    assert words is not None
    assert words.startswith("digest: 0f0f0f0f0f0f… here, 1e1e1e1e1e1e… there: the files or options")


def test_another_size_is_named() -> None:
    words = sample_difference(SPEC, replace(SPEC, sizes=(64, 9)))
    assert words == "sizes: (64, 10) here, (64, 9) there"


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"arrays": ()}, "declares 0 arrays"),
        ({"arrays": SPEC.arrays[:1] * 2}, "'image' twice"),
        ({"arrays": (ArraySpec("image", "uint8", (3, 8, 6)),)}, "per_agent=False"),
        (
            {"arrays": (ArraySpec("image", "uint8", (3, 9000, 9000), per_agent=False),)},
            "make its images smaller",
        ),
        ({"sizes": (64, 1 << 25)}, "split 'valid' of source 'faces' has 33554432 samples"),
        ({"digest": "abc"}, "64 hexadecimal digits"),
        ({"classes": ("one",)}, "has 1 classes"),
        ({"ignore_index": 256}, "ignore_index 256"),
        ({"flip_pairs": ((1, 3),)}, r"flip pair \(1, 3\)"),
        ({"flip_pairs": ((1, 2), (0, 2))}, "class 2 in two flip pairs"),
    ],
)
def test_impossible_specs_are_refused(change: dict[str, object], wanted: str) -> None:
    with pytest.raises(SpecError, match=wanted):
        replace(SPEC, **change)


@pytest.mark.parametrize("change", [{"sizes": [3]}, {"flip_pairs": [1]}])
def test_incomplete_messages_are_refused(change: dict[str, list[int]]) -> None:
    message = samples_to_proto(SPEC)
    for name, value in change.items():
        message.ClearField(name)
        getattr(message, name).extend(value)
    with pytest.raises(SpecError, match="need 2, and two for each pair"):
        samples_from_proto(message)
