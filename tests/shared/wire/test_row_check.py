"""What rows may hold: the quick look agrees with the close one, number by number."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from murmur.shared.wire.codec import RowCheck
from murmur.shared.wire.spec import (
    ACTION_MASK,
    ADJACENCY,
    AGENT_CELL,
    AGENT_MASK,
    EXPERT_ACTION,
    STATE,
    ArraySpec,
    Discrete,
    EnvSpec,
)
from murmur.shared.wire.timestep import Array, StepType, TimeStep

SPEC = EnvSpec(
    "toy",
    2,
    (
        ArraySpec("maps", "float32", (1, 3, 4)),
        ArraySpec("half", "float16", (2,)),
        ArraySpec(ACTION_MASK, "uint8", (3,)),
        ArraySpec(AGENT_MASK, "uint8", ()),
        ArraySpec(AGENT_CELL, "int32", (2,)),
        ArraySpec(EXPERT_ACTION, "int32", ()),
        ArraySpec(ADJACENCY, "uint8", (2,)),
    ),
    Discrete(3),
    ("score",),
    9,
)
FIRST, MID, LAST, ABORTED = (int(s) for s in StepType)


def rows(*kinds: int) -> TimeStep:
    n = len(kinds)
    observation: dict[str, Array] = {
        o.name: np.ones((n, 2, *o.shape), o.dtype) for o in SPEC.observations
    }
    zeros = np.zeros((n, 2), np.float32)
    step_type = np.array(kinds, np.uint8)
    ones = np.ones(n, np.float32)
    return TimeStep(step_type, zeros, ones, observation, {"score": zeros[:, 0].copy()})


# Array, index, value, and the beginning of what is said of environment 1; "" is no breach.
CASES = [
    ("reward", (1, 0), 1e6, ""),
    ("reward", (1, 0), -1e6, ""),
    ("reward", (1, 1), 1e-45, ""),
    ("reward", (1, 1), 1.1e6, "a reward of 1.1e+06 for agent 1, beyond ±1e+06"),
    ("reward", (1, 1), -1e30, "a reward of -1e+30 for agent 1, beyond"),
    ("reward", (1, 1), np.inf, "inf in reward of agent 1"),
    ("reward", (1, 1), np.nan, "nan in reward of agent 1"),
    ("discount", 1, 0.5, ""),
    ("discount", 1, 0, ""),
    ("discount", 1, 5, "a discount of 5, which"),
    ("discount", 1, -1, "a discount of -1, which"),
    ("discount", 1, np.nan, "a discount of nan, which"),
    ("maps", (1, 0, 0, 2, 3), 9.9e17, ""),
    (
        "maps",
        (1, 0, 0, 2, 3),
        3e38,
        "3e+38 in observation 'maps' of agent 0 at index [0, 2, 3], be",
    ),
    ("half", (1, 0, 1), 6e4, ""),
    ("maps", (1, 0, 0, 2, 3), -np.inf, "-inf in observation 'maps' of agent 0 at index [0, 2, 3]"),
    ("half", (1, 0, 1), np.inf, "inf in observation 'half' of agent 0 at index [1]"),
    (ACTION_MASK, (1, 0, 1), 0, ""),
    (ACTION_MASK, (1, 0, 1), 2, "2 in action_mask of agent 0"),
    (ACTION_MASK, (1, 0), 0, "an action_mask that allows no action to agent 0"),
    (AGENT_MASK, (1, 0), 0, ""),
    (AGENT_MASK, (1, 0), 255, "255 in agent_mask of agent 0"),
    (AGENT_CELL, (1, 0), [2, 3], ""),
    (AGENT_CELL, (1, 0), [3, 0], "[3, 0] as agent_cell of agent 0, outside the maps of (3, 4)"),
    (AGENT_CELL, (1, 0), [-1, 0], "[-1, 0] as agent_cell of agent 0"),
    (EXPERT_ACTION, (1, 0), -1, ""),
    (EXPERT_ACTION, (1, 1), 3, "3 as expert_action of agent 1, which has 3 actions"),
    (EXPERT_ACTION, (1, 0), -2, "-2 as expert_action of agent 0"),
    (ADJACENCY, (1, 0, 1), 0, ""),  # one may hear without being heard
    (ADJACENCY, (1, 0, 1), 2, "2 in adjacency of agent 0"),
    ("score", 1, np.nan, ""),
]


@pytest.mark.parametrize("kinds", [(MID, MID), (FIRST, MID), (LAST, MID)])
@pytest.mark.parametrize(("name", "index", "value", "words"), CASES)
def test_a_breach_is_named(
    name: str, index: object, value: object, words: str, kinds: tuple[int, int]
) -> None:
    check, timestep = RowCheck(SPEC, 2, 1e6), rows(*kinds)
    assert check.passes(timestep)
    assert check.broken(timestep) == {}
    arrays = {"reward": timestep.reward, "discount": timestep.discount, **timestep.metrics}
    ({**arrays, **timestep.observation})[name][index] = value  # type: ignore[index]
    broken = check.broken(timestep)
    assert set(broken) == ({1} if words else set())
    assert broken.get(1, "").startswith(words)
    assert check.passes(timestep) <= (not broken)  # the quick look never overlooks one


def test_rules_for_first_and_last_alone() -> None:
    check, timestep = RowCheck(SPEC, 3, 1e6), rows(FIRST, LAST, ABORTED)
    timestep.reward[0, 1] = 0.5
    timestep.metrics["score"][:] = np.inf
    assert not check.passes(timestep)
    assert check.broken(timestep) == {
        0: "a reward of 0.5 for agent 1 on FIRST, where no action has been taken yet",
        1: "inf in metric 'score' on LAST",
    }


def test_cells_are_on_the_maps_of_agents_and_not_of_their_states() -> None:
    state = ArraySpec(STATE, "float32", (1, 9, 9))
    spec = replace(SPEC, observations=(state, *SPEC.observations))
    given = rows(MID)
    given.observation[STATE] = np.zeros((1, 2, 1, 9, 9), np.float32)
    given.observation[AGENT_CELL][0, 1] = 5
    check = RowCheck(spec, 1, 1e6)
    assert not check.passes(given)
    assert "agent_cell" in check.broken(given)[0]


def test_without_a_bound_any_finite_reward_will_do() -> None:
    timestep = rows(MID)
    timestep.reward[0, 0] = 3e38
    assert RowCheck(SPEC, 1).broken(timestep) == {}
    assert RowCheck(SPEC, 1, 1e300).broken(timestep) == {}
    timestep.reward[0, 0] = np.inf
    assert RowCheck(SPEC, 1).broken(timestep) == {0: "inf in reward of agent 0"}


@pytest.mark.parametrize("received", [True, False])
@pytest.mark.parametrize("kind", [FIRST, MID, LAST, ABORTED, 7])
@pytest.mark.parametrize("begins", [True, False, None])
def test_step_types_are_in_order(kind: int, begins: bool | None, received: bool) -> None:
    check = RowCheck(SPEC, 2, 1e6, received=received)
    timestep = rows(MID if begins is None or not begins else FIRST, kind)
    restart = None if begins is None else np.full(2, begins)
    possible = {FIRST, MID, LAST} if begins is None else {FIRST} if begins else {MID, LAST}
    good = kind in possible or (received and kind == ABORTED)
    assert check.passes(timestep, restart) == good
    assert set(check.broken(timestep, restart)) == (set() if good else {1})


@pytest.mark.parametrize("array", ["reward", "maps", "score", "step_type"])
def test_arrays_of_another_shape_or_dtype_never_pass(array: str) -> None:
    check, good = RowCheck(SPEC, 2, received=False), rows(MID, MID)
    assert check.passes(good)
    arrays: dict[str, Any] = {"reward": good.reward, "step_type": good.step_type}
    arrays |= {**good.observation, **good.metrics}
    for changed in (None, arrays[array].tolist(), arrays[array][:1], arrays[array].astype("f8")):
        new: dict[str, Any] = {**arrays, array: changed}
        bad = TimeStep(
            new["step_type"],
            new["reward"],
            good.discount,
            {name: new[name] for name in good.observation if new[name] is not None},
            {"score": new["score"]} if new["score"] is not None else {},
        )
        assert not check.passes(bad)
