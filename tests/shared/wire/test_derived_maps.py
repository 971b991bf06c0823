"""Derived maps in specs: what is refused, and through protobuf and back."""

import pytest

from murmur.shared.process.errors import SpecError
from murmur.shared.rpc import rollout_pb2 as pb
from murmur.shared.wire.derived_maps import Channel, DerivedMap
from murmur.shared.wire.spec import (
    AGENT_MASK,
    STATE,
    ArraySpec,
    Discrete,
    EnvSpec,
    spec_from_proto,
    spec_to_proto,
)

DRAWN = ArraySpec("drawn", "float32", (2, 3, 4))
LEFT = ArraySpec("left", "float32", (1,))
TEAM = ArraySpec("team", "float32", (1, 3, 4), per_agent=False)
BYTES = ArraySpec("bytes", "uint8", (1, 3, 4))
LARGE = ArraySpec("large", "float32", (1, 5, 5))
COPY = Channel("copy", "drawn", 1)


def spec(*derived: DerivedMap) -> EnvSpec:
    return EnvSpec("e", 2, (DRAWN, LEFT, TEAM, BYTES, LARGE), Discrete(3), derived=derived)


def test_derived_maps_survive_protobuf() -> None:
    maps = DerivedMap(
        "maps",
        (
            COPY,
            Channel("fill", "left"),
            Channel("constant", values=(0.5, 1.0)),
            Channel("entropy", "drawn", 0, (1e-4, 0.499, 0.501)),
        ),
    )
    state = DerivedMap(STATE, (Channel("copy", "team"),))
    ours = spec(maps, state)
    assert spec_from_proto(pb.EnvSpec.FromString(spec_to_proto(ours).SerializeToString())) == ours
    assert ours.derived_array(maps) == ArraySpec("maps", "float32", (4, 3, 4))
    assert ours.derived_array(state) == ArraySpec(STATE, "float32", (1, 3, 4), per_agent=False)


ENTROPY = ("entropy", "drawn", 0)


@pytest.mark.parametrize(
    ("channels", "message"),
    [
        ((), "has 0 channels; it may have 1 to 4096"),
        ((Channel("blur", "drawn"),), "is of kind 'blur'; use one of"),  # type: ignore[arg-type]
        ((Channel("copy", "lost"),), "computed from 'lost', which does not travel"),
        ((Channel("copy", "drawn", 2),), r"needs entry 2 of 'drawn', a float32 array with 3"),
        ((Channel("copy", "left"),), r"a float32 array with 3 dimensions; it is float32 \(1,\)"),
        ((Channel("copy", "bytes"),), r"it is uint8 \(1, 3, 4\)"),
        ((Channel("fill", "drawn"), COPY), "a float32 array with 1 dimension; it is"),
        ((COPY, Channel("copy", "large")), r"needs sources of one height and width"),
        ((COPY, Channel("copy", "team")), r"all shared; its maps are"),
        ((Channel("fill", "left"),), "needs sources of one height"),
        ((COPY, Channel("constant", values=(1.0, 2.0, 3.0))), "takes 1 or 2 finite numbers"),
        ((COPY, Channel("constant", values=(1.0, float("nan")))), "finite numbers"),
        ((Channel(*ENTROPY),), r"\(entropy\) has values \(\); it takes 3 finite numbers"),
        ((Channel(*ENTROPY, (0.5, 0.4, 0.6)),), r"clamps probabilities at 0.5; use a number in"),
    ],
)
def test_impossible_derived_maps_are_refused(channels: tuple[Channel, ...], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        spec(DerivedMap("maps", channels))


def test_a_derived_map_needs_a_name_of_its_own() -> None:
    with pytest.raises(SpecError, match="declares observation 'drawn' twice"):
        spec(DerivedMap("drawn", (COPY,)))
    with pytest.raises(SpecError, match="declares 'agent_mask' as float32"):
        spec(DerivedMap(AGENT_MASK, (COPY,)))
