"""Symmetries in specs: what is refused, what grids do, and through protobuf and back."""

from typing import Any

import numpy as np
import pytest

from murmur.shared.config.symmetry import ArrayChange, Symmetry, grid_change
from murmur.shared.process.errors import SpecError
from murmur.shared.rpc import rollout_pb2 as pb
from murmur.shared.wire.spec import (
    ACTION_MASK,
    ArraySpec,
    Continuous,
    Discrete,
    EnvSpec,
    first_difference,
    spec_from_proto,
    spec_to_proto,
)

OBSERVATIONS = (
    ArraySpec("maps", "float32", (2, 3, 4)),
    ArraySpec("view", "float32", (3,)),
    ArraySpec("number", "float32", ()),
    ArraySpec(ACTION_MASK, "uint8", (3,)),
)


THREE = Discrete(3)


def spec(*symmetries: Symmetry, action: Any = THREE) -> EnvSpec:
    observations = OBSERVATIONS if isinstance(action, Discrete) else OBSERVATIONS[:3]
    return EnvSpec("e", 2, observations, action, symmetries=symmetries)


def of(*changes: ArrayChange, **more: Any) -> Symmetry:
    return Symmetry("s", changes, **more)


WHOLE = of(
    ArrayChange("maps", flip=True, turns=2),
    ArrayChange("view", order=(2, 1, 0), signs=(1.0, -1.0, 1.0), offsets=(0.0, 4.0, 0.0)),
    ArrayChange("number", signs=(-1.0,)),
    action=(1, 0, 2),
)


def test_symmetries_survive_protobuf() -> None:
    ours = spec(WHOLE, of(ArrayChange("maps", flip=True)))
    assert spec_from_proto(pb.EnvSpec.FromString(spec_to_proto(ours).SerializeToString())) == ours
    smooth = spec(of(action=(1, 0), action_signs=(1.0, -1.0)), action=Continuous(2))
    assert spec_from_proto(spec_to_proto(smooth)) == smooth


@pytest.mark.parametrize(
    ("symmetry", "action", "says"),
    [
        (of(action=(0, 1)), Discrete(3), "no permutation of 0 to 2"),
        (of(action=(0, 0, 1)), Discrete(3), "no permutation of 0 to 2"),
        (of(action_signs=(1.0, 1.0, 1.0)), Discrete(3), "gives discrete actions signs"),
        (of(action_signs=(1.0,)), Continuous(2), "must be 2 finite numbers"),
        (of(ArrayChange("maps", turns=1)), Discrete(3), "equal ones for quarter turns"),
        (of(ArrayChange("maps", turns=4)), Discrete(3), "cannot be mirrored or turned 4 times"),
        (of(ArrayChange("maps", flip=True, signs=(1.0,) * 4)), Discrete(3), "and no order"),
        (of(ArrayChange("view", flip=True)), Discrete(3), "needs two dimensions"),
        (of(ArrayChange("view", order=(0, 1))), Discrete(3), "no permutation of 0 to 2"),
        (of(ArrayChange("view", signs=(1.0, float("nan"), 1.0))), Discrete(3), "3 finite numbers"),
        (of(ArrayChange("view", offsets=(1.0,))), Discrete(3), "3 finite numbers"),
        (of(ArrayChange("nothing", flip=True)), Discrete(3), "there is none of that name"),
        (of(ArrayChange(ACTION_MASK, order=(1, 0, 2))), Discrete(3), "none of that name that"),
    ],
)
def test_symmetries_that_do_not_fit_are_refused(symmetry: Symmetry, action: Any, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        spec(symmetry, action=action)


def test_too_many_symmetries_are_refused() -> None:
    with pytest.raises(SpecError, match="65 symmetries; at most 64"):
        spec(*[of(action=(1, 0, 2))] * 65)


def test_checkpoint_without_symmetries_fits_one_with_some() -> None:
    assert first_difference(spec(), spec(WHOLE)) is None
    assert first_difference(spec(WHOLE), spec()) is None
    difference = first_difference(spec(WHOLE), spec(of(action=(1, 0, 2))))
    assert difference is not None
    assert difference == "symmetries: 's' here is another one there"
    assert first_difference(spec(WHOLE), spec(WHOLE, WHOLE)) == "symmetries: 1 here, 2 there"


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("turns", range(4))
def test_places_move_as_numpys_flips_and_turns_move_them(flip: bool, turns: int) -> None:
    places = np.arange(12).reshape(3, 4)
    moved = np.rot90(places[:, ::-1] if flip else places, turns)
    grid = grid_change(3, 4, flip=flip, turns=turns)
    for row in range(3):
        for column in range(4):
            assert moved[grid.place((row, column))] == places[row, column]
            step = np.subtract(grid.place((row + 1, column - 1)), grid.place((row, column)))
            assert grid.direction((1, -1)) == tuple(step)
