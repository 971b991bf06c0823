"""Action spaces of several parts behind the contract, and on the wire."""

import math
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Text, Tuple
from gymnasium.vector.utils import batch_space

from murmur.env_service.adapters.actions import ActionLayout
from murmur.env_service.checks import assert_environment
from murmur.env_service.environment import blank_timestep, make_environment, random_action
from murmur.shared.config import PluginConfig
from murmur.shared.process.errors import ConfigError, SpecError, WireError
from murmur.shared.wire import spec as contract
from murmur.shared.wire.codec import ActionCodec, RowCheck
from murmur.shared.wire.spec import ACTION_MASK, ArraySpec, Composite, EnvSpec

INF = math.inf
SEEN = (ArraySpec("observation", "float32", (1,)),)
SPACES: dict[str, tuple[dict[str, Any], contract.ActionSpec]] = {
    "choices": ({"a": MultiDiscrete([3, 4], start=[1, 0])}, Composite((3, 4))),
    "grid of flags": ({"a": MultiBinary((2, 3))}, Composite((2,) * 6)),
    "one choice": ({"a": MultiDiscrete([5], start=[2])}, contract.Discrete(5)),
    "tuple": (
        {"a": Tuple((Discrete(3, start=2), Box(0, 5, (2,)), Box(-INF, INF, (1,)), MultiBinary(2)))},
        Composite((3, 2, 2), (-1.0, -1.0, -INF), (1.0, 1.0, INF)),
    ),
    "nested": (
        {
            "a": Dict(
                {"z": Box(0, INF, ()), "c": Tuple((Discrete(4), Box(-1, 1, (2,), np.float64)))}
            )
        },
        Composite((4,), (-1.0, -1.0, 0.0), (1.0, 1.0, INF)),
    ),
    "whole numbers": (
        {"a": Tuple((Box(0, 9, (2,), np.int64), Discrete(2)))},
        Composite((2,), (-1.0, -1.0), (1.0, 1.0)),
    ),
    "no bounds": (
        {"a": Box(-INF, INF, (3,)), "b": Box(-INF, INF, (2,), np.float16)},
        contract.Continuous(3, -INF, INF),
    ),
    "Boxes alone": (
        {"a": Dict({"x": Box(0, 1, (2,)), "y": Box(-5, 5, (1,))})},
        contract.Continuous(3),
    ),
    "agents of three kinds": (
        {
            "a": Discrete(3),
            "b": Box(-2, 2, (2,)),
            "c": Tuple((Discrete(2), MultiDiscrete([4, 4]), Box(0, 1, (1,)))),
        },
        Composite(
            (3, 4, 4), (-1.0, -1.0), (1.0, 1.0), ((True, True), (False, False), (False, True))
        ),
    ),
}


@pytest.mark.parametrize("case", SPACES)
def test_actions_lie_in_their_spaces(case: str) -> None:
    agents, action = SPACES[case]
    layout = ActionLayout(agents)
    assert layout.spec == action
    spec, n = EnvSpec("some", len(agents), SEEN, action), 40
    mask = np.tile(layout.legal, (n, 1, 1)) if layout.masked else None
    chosen = random_action(spec, np.arange(n, dtype=np.uint64), mask)
    prepared = layout.prepare(chosen)
    for i in range(n):
        for a, space in enumerate(agents.values()):
            taken = layout.convert[a](prepared[i][a])
            assert space.contains(taken), taken
    if len(agents) == 1:
        (space,) = agents.values()
        assert batch_space(space, n).contains(layout.batched(n)(chosen))
    ActionCodec(spec, n).unpack(ActionCodec(spec, n).pack(1, 1, chosen))
    assert contract.spec_from_proto(contract.spec_to_proto(spec)) == spec


def test_parts_are_in_the_order_of_the_space() -> None:
    layout = ActionLayout({"a": SPACES["tuple"][0]["a"]})
    (row,) = layout.prepare(np.array([[[1, 0, 1, -1.0, 0.5, 70.0]]], np.float32))
    first, box, free, flags = layout.convert[0](row[0])
    assert first == 3
    assert box.tolist() == [0, 3.75]
    assert free.tolist() == [70]
    assert flags.tolist() == [0, 1]


def test_a_choice_that_an_agent_lacks_is_refused() -> None:
    layout = ActionLayout({"a": MultiDiscrete([2, 3]), "b": MultiBinary(2)})
    assert layout.legal.tolist() == [[1] * 5, [1, 1, 1, 1, 0]]
    with pytest.raises(ValueError, match=r"'b' has choices among \[2, 2\] .* take \[1, 2\]"):
        layout.convert[1](np.array([1, 2], np.int32))


def test_spaces_that_stay_refused_are_named() -> None:
    with pytest.raises(ConfigError, match=r"acts in a Text space at 'say\.1'; murmur takes Discr"):
        ActionLayout({"a": Dict({"say": Tuple((Discrete(2), Text(3)))})})
    with pytest.raises(
        ConfigError, match="choices and numbers at once; only mappo, happo, ippo and ppo"
    ):
        ActionLayout(SPACES["tuple"][0], joint=True)


@pytest.mark.parametrize(
    ("action", "words"),
    [
        ([1, 2, 0.0, 0.0], ""),
        ([1.5, 0, 0.0, 0.0], "action 1.5 at index 0 .* accepts 0 to 1"),
        ([0, 3, 0.0, 0.0], "action 3.0 at index 1 .* accepts 0 to 2"),
        ([0, 0, 1.5, 0.0], "index 2 .* accepts -1 to 1"),
        ([0, 0, 0.0, 1e30], ""),
        ([0, 0, 0.0, INF], "action inf at index 3"),
        ([0, 0, math.nan, 0.0], "action nan at index 2"),
    ],
)
def test_actions_outside_the_spec_are_no_actions(action: list[float], words: str) -> None:
    spec = EnvSpec("some", 1, SEEN, Composite((2, 3), (-1.0, -INF), (1.0, INF)))
    codec = ActionCodec(spec, 1)
    message = codec.pack(1, 1, np.array([[action]], np.float32))
    if not words:
        assert codec.unpack(message)[2].tolist() == [[action]] or action[-1] == 1e30
        return
    with pytest.raises(WireError, match=words):
        codec.unpack(message)


def test_each_choice_needs_a_legal_alternative() -> None:
    spec = EnvSpec("some", 1, (*SEEN, ArraySpec(ACTION_MASK, "uint8", (5,))), Composite((2, 3)))
    timestep, check = blank_timestep(spec, 1), RowCheck(spec, 1)
    timestep.observation[ACTION_MASK][0, 0] = [1, 0, 0, 0, 1]
    assert check.passes(timestep)
    timestep.observation[ACTION_MASK][0, 0] = [1, 1, 0, 0, 0]
    assert not check.passes(timestep)
    assert check.broken(timestep)[0] == (
        f"an {ACTION_MASK} that allows no action to agent 0 in choice 1"
    )


@pytest.mark.parametrize(
    ("action", "words"),
    [
        (Composite((1, 1)), "nothing to learn"),
        (Composite((2, 0)), "each needs 1 or more"),
        (Composite((60_000,) + (2,) * 9), "counted as if all choices had as many"),
        (Composite((2,), (1.0,), (0.0,)), r"in \[1, 0\]"),
        (Composite((2,), (0.0,), ()), "1 lower and 0 upper bounds"),
        (Composite((2,), (0.0,), (1.0,), ((True,),)), "idle numbers of 1 agents"),
    ],
)
def test_impossible_actions_are_refused(action: Composite, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        EnvSpec("some", 2, SEEN, action)


class Masked(gymnasium.Env):  # type: ignore[misc]
    """Tells an action mask in its infos."""

    def __init__(self, space: Any, mask: Any) -> None:
        self.observation_space, self.action_space = Box(0, 1, (1,)), space
        self.mask = mask

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {"action_mask": self.mask}


_A, _B = np.array([0, 1, 1], np.int8), np.array([1, 0], np.int8)


@pytest.mark.parametrize(
    ("space", "mask", "read"),
    [
        (Discrete(3), (0, 1, 1), [0, 1, 1]),
        (Discrete(3), [0, 1, 1], [0, 1, 1]),
        (MultiDiscrete([3, 2]), (_A, _B), [0, 1, 1, 1, 0]),
        (MultiDiscrete([3, 2]), [_A, _B], [0, 1, 1, 1, 0]),
        (Tuple((Discrete(3), Box(0, 1), Discrete(2))), (_A, None, _B), [0, 1, 1, 1, 0]),
        (Dict({"z": Discrete(3), "b": Discrete(2)}), {"z": _A, "b": _B}, [1, 0, 0, 1, 1]),
        (
            Tuple((Discrete(3), Dict({"x": Discrete(2), "y": Box(0, 1)}))),
            (_A, {"x": _B, "y": None}),
            [0, 1, 1, 1, 0],
        ),
    ],
)
def test_masks_are_told_as_sample_takes_them(space: Any, mask: Any, read: list[int]) -> None:
    factory = f"{__name__}:Masked"
    plugin = PluginConfig(
        name="gymnasium", factory=factory, arguments={"space": space, "mask": mask}
    )
    timestep = make_environment(plugin, 1).reset(np.zeros(1, np.uint64))
    assert timestep.observation[ACTION_MASK][0, 0].tolist() == read


@pytest.mark.parametrize(
    ("algorithm", "actions"),
    [
        ("mappo", Composite((3, 2))),
        ("", Composite((3, 2))),
        ("qmix", contract.Discrete(6)),
        ("mine:Algorithm", contract.Discrete(6)),
    ],
)
def test_algorithms_of_your_own_get_combinations(
    algorithm: str, actions: contract.ActionSpec
) -> None:
    arguments = {"space": MultiDiscrete([3, 2]), "mask": (_A, _B)}
    plugin = PluginConfig(name="gymnasium", factory=f"{__name__}:Masked", arguments=arguments)
    assert make_environment(plugin, 1, algorithm).spec.action == actions


@pytest.mark.parametrize("task", ["Hybrid", "Factors", "Unbounded", "Pair"])
def test_environments_with_such_actions_keep_the_contract(task: str) -> None:
    name = "pettingzoo" if task == "Pair" else "gymnasium"
    plugin = PluginConfig(name=name, factory=f"benchmarks.actions:{task}")
    assert_environment(lambda n: make_environment(plugin, n), max_rows=12)
