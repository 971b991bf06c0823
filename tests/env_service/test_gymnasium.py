"""Gymnasium environments behind the contract, and how the command line recognises factories."""

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple

from murmur.env_service.adapters.actions import ActionLayout
from murmur.env_service.adapters.factory import AdapterConfig
from murmur.env_service.adapters.kinds import recognise
from murmur.env_service.adapters.observations import ObservationLayout, state_layout
from murmur.env_service.adapters.seeds import fold_seed
from murmur.env_service.checks import assert_environment, check_environment
from murmur.env_service.environment import RandomPolicy, VectorEnvironment, make_environment
from murmur.env_service.envs.spread import Config as SpreadConfig
from murmur.env_service.envs.spread import Spread
from murmur.env_service.watchdog.faults import CopiesFailed, FaultCount, GuardedEnvironment
from murmur.runs.settings import environment_factory
from murmur.shared.config import PluginConfig
from murmur.shared.process.errors import ConfigError, EnvironmentFault
from murmur.shared.wire import spec as contract
from murmur.shared.wire.spec import ACTION_MASK
from murmur.shared.wire.timestep import StepType

CONFIG = AdapterConfig(factory="some:factory")


def plugin(factory: str = "gymnasium:make", **options: Any) -> PluginConfig:
    return PluginConfig.model_validate({"name": "gymnasium", "factory": factory, **options})


def made(id_: str, **options: Any) -> PluginConfig:
    return plugin(arguments={"id": id_}, **options)


REAL: dict[str, dict[str, Any]] = {
    "CartPole-v1": {},
    "Pendulum-v1": {"max_episode_steps": 9},
    "Taxi-v4": {"max_episode_steps": 9, "metrics": ["prob"]},  # Discrete, masks in infos
    "Blackjack-v1": {},  # Tuple of Discrete
}


@pytest.mark.parametrize("id_", REAL)
def test_real_environments_keep_the_contract(id_: str) -> None:
    assert_environment(lambda n: make_environment(made(id_, **REAL[id_]), n), max_rows=50)


@pytest.mark.parametrize("id_", ["CartPole-v1", "Pendulum-v1"])
def test_rows_equal_stepping_the_environment_itself(id_: str) -> None:
    environment, raw = make_environment(made(id_), 1), gymnasium.make(id_)
    policy = RandomPolicy(environment)
    seed = np.array([2**35 + 3], np.uint64)
    row = environment.reset(seed)
    observed, _ = raw.reset(seed=fold_seed(int(seed[0])))
    terminated = truncated = False
    while not (terminated or truncated):
        assert row.step_type[0] != StepType.LAST
        np.testing.assert_array_equal(row.observation["observation"][0, 0], observed)
        action = policy.act(row)
        row = environment.step(action, np.zeros(1, np.bool_), seed)
        # Pendulum's torque is in [-2, 2]
        own: Any = int(action[0, 0]) if id_ == "CartPole-v1" else action[0, 0] * 2
        observed, reward, terminated, truncated, _ = raw.step(own)
        assert row.reward[0, 0] == np.float32(reward)
    assert row.step_type[0] == StepType.LAST
    assert row.discount[0] == (0 if terminated else 1)
    np.testing.assert_array_equal(row.observation["observation"][0, 0], observed)


def test_the_spec_says_what_the_environment_says() -> None:
    spec = make_environment(made("CartPole-v1"), 1).spec
    assert (spec.name, spec.num_agents, spec.max_episode_steps) == ("CartPole-v1", 1, 500)
    assert spec.action == contract.Discrete(2)
    assert (
        make_environment(made("CartPole-v1", max_episode_steps=20), 1).spec.max_episode_steps == 20
    )
    longer = make_environment(made("CartPole-v1", max_episode_steps=900), 1).spec
    assert longer.max_episode_steps == 500
    spec = make_environment(made("Pendulum-v1"), 1).spec
    assert spec.action == contract.Continuous(1)
    taxi = make_environment(made("Taxi-v4"), 1)
    assert taxi.reset(np.zeros(1, np.uint64)).observation[ACTION_MASK].shape == (1, 1, 6)


class Camera(gymnasium.Env[Any, Any]):
    """An image of some shape and kind; actions are two wheels of different strength."""

    action_space = Box(np.array([-2.0, 0.0]), np.array([2.0, 10.0]), dtype=np.float64)

    def __init__(self, shape: list[int], floats: bool = False) -> None:
        dtype: Any = np.float32 if floats else np.uint8
        self.observation_space = Box(0, 1 if floats else 255, tuple(shape), dtype)
        self.taken: list[Any] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._picture = np.zeros(self.observation_space.shape, self.observation_space.dtype)
        self._picture.reshape(-1)[1] = 1
        return self._picture, {}

    def step(self, action: Any) -> Any:
        self.taken.append(action)
        return self._picture, 0.0, False, len(self.taken) % 5 == 0, {}


@pytest.mark.parametrize(
    ("options", "name", "shape", "one"),
    [
        ({"arguments": {"shape": [8, 9, 3]}}, "image", (3, 8, 9), (1, 0, 0)),
        ({"arguments": {"shape": [3, 8, 9]}}, "image", (3, 8, 9), (0, 0, 1)),
        (
            {"arguments": {"shape": [8, 9, 3]}, "channels_last": False},
            "image",
            (8, 9, 3),
            (0, 0, 1),
        ),
        ({"arguments": {"shape": [8, 9]}}, "image", (1, 8, 9), (0, 0, 1)),
        ({"arguments": {"shape": [8, 9, 3]}, "images": "none"}, "observation", (216,), (1,)),
        ({"arguments": {"shape": [8, 9, 3], "floats": True}}, "observation", (216,), (1,)),
        (
            {"arguments": {"shape": [8, 9], "floats": True}, "images": "all"},
            "observation",
            (72,),
            (1,),
        ),
        (
            {"arguments": {"shape": [8, 9, 3], "floats": True}, "images": "all"},
            "image",
            (3, 8, 9),
            (1, 0, 0),
        ),
    ],
)
def test_images(
    options: dict[str, Any], name: str, shape: tuple[int, ...], one: tuple[int, ...]
) -> None:
    environment = make_environment(plugin(f"{__name__}:Camera", **options), 1)
    (observed,) = environment.spec.observations
    is_bytes = name == "image" and not options["arguments"].get("floats")
    wanted = (name, shape, "uint8" if is_bytes else "float32")
    assert (observed.name, observed.shape, observed.dtype) == wanted
    row = environment.reset(np.zeros(1, np.uint64)).observation[name][0, 0]
    assert row[one] == 1
    assert row.sum() == 1


def test_two_images_of_one_name_are_refused() -> None:
    picture = Box(0, 255, (4, 4, 3), np.uint8)
    space = Dict({"observation": Dict({"left": picture}), "left": picture})
    with pytest.raises(ConfigError, match=r"'agent' observes 2 images .* named 'image\.left'; "):
        ObservationLayout({"agent": space}, CONFIG)


def test_agents_that_see_images_of_different_size() -> None:
    spaces = {name: Box(0, 255, (size, 9, 3), np.uint8) for name, size in (("a", 8), ("b", 7))}
    with pytest.raises(
        ConfigError, match=r"'b' sees 'image' as uint8 \[3, 7, 9\], .*set environment\.resize"
    ):
        ObservationLayout(spaces, CONFIG)


def test_a_picture_as_state() -> None:
    spec, write, view, _ = state_layout(Box(0, 255, (4, 5, 3), np.uint8), CONFIG)
    assert (spec.dtype, spec.shape, spec.per_agent) == ("uint8", (3, 4, 5), False)
    place, picture = np.zeros(spec.shape, np.uint8), np.arange(60, dtype=np.uint8)
    write(view(place), picture.reshape(4, 5, 3))
    assert place[1, 2, 3] == 2 * 15 + 3 * 3 + 1


def test_named_parts_stay_arrays() -> None:
    space = Dict(
        {
            "adjacency": MultiBinary(2),
            "foes": Box(-1, 1, (3, 2)),
            "foes_mask": Box(0, 1, (3,), np.int8),
            "own": Box(-1, 1, (2,)),
            "sensors": Dict({"rays": Box(0, 1, (4, 1))}),
        }
    )
    names = ("adjacency", "foes", "foes_mask", "sensors.rays")
    config = CONFIG.model_copy(update={"arrays": names})
    layout = ObservationLayout({"a": space, "b": space}, config)
    assert {o.name: (o.shape, o.dtype) for o in layout.arrays} == {
        "observation": ((2,), "float32"),
        "adjacency": ((2,), "uint8"),
        "foes": ((3, 2), "float32"),
        "foes_mask": ((3,), "uint8"),
        "sensors.rays": ((4, 1), "float32"),
    }
    arrays = {o.name: np.zeros((1, 2, *o.shape), o.dtype) for o in layout.arrays}
    given = space.sample()
    for path, write, place in layout.parts(arrays, 0, 1):
        value = given
        for key in path:
            value = value[key]
        write(place, value)
        if path[0] in ("adjacency", "foes_mask"):
            with pytest.raises(ValueError, match="holds 2, where 0 or 1 must be"):
                write(place, np.full(value.shape, 2))
    np.testing.assert_array_equal(arrays["foes"][0, 1], given["foes"])
    np.testing.assert_array_equal(arrays["adjacency"][0, 1], given["adjacency"])
    assert not arrays["foes"][0, 0].any()


@pytest.mark.parametrize(
    ("spaces", "names", "words"),
    [
        ({"a": Dict({"x": Box(0, 1, (2, 1))})}, ("y",), "names 'y', which no agent .* has 'x'"),
        ({"a": Box(0, 1, (2, 1))}, ("observation",), "there is no Dict here"),
        ({"a": Dict({"x": Discrete(3)})}, ("x",), "names 'x', a Discrete space"),
        ({"a": Dict({"x": Box(0, 255, (4, 4, 3), np.uint8)})}, ("x",), "names 'x', an image, wh"),
        (
            {"a": Dict({"x": Box(0, 1, (2, 1))}), "b": Dict({"x": Box(0, 1, (3, 1))})},
            ("x",),
            r"'b' sees 'x' as float32 \[3, 1\], .*give them one shape, with absent",
        ),
    ],
)
def test_named_parts_that_cannot_be_arrays(
    spaces: dict[str, Any], names: tuple[str, ...], words: str
) -> None:
    config = CONFIG.model_copy(update={"arrays": names})
    with pytest.raises(ConfigError, match=words):
        ObservationLayout(spaces, config)


def test_2d_bytes_are_a_picture_only_with_bound_255() -> None:
    (board,) = ObservationLayout({"agent": Box(0, 4, (8, 9), np.uint8)}, CONFIG).arrays
    assert (board.name, board.shape, board.dtype) == ("observation", (72,), "float32")


def test_floats_are_not_cut_to_bytes() -> None:
    layout = ObservationLayout({"agent": Box(0, 255, (4, 4, 3), np.uint8)}, CONFIG)
    ((_, write, place),) = layout.parts({"image": np.zeros((1, 1, 3, 4, 4), np.uint8)}, 0, 0)
    with pytest.raises(ValueError, match="has dtype float64, its space says uint8"):
        write(place, np.full((4, 4, 3), 0.5))


def test_a_part_of_size_zero_beside_a_picture() -> None:
    space = Dict({"camera": Box(0, 255, (4, 4, 3), np.uint8), "nothing": Box(-1, 1, (0,))})
    layout = ObservationLayout({"agent": space}, CONFIG)
    (picture,) = layout.arrays
    parts = layout.parts({picture.name: np.zeros((1, 1, *picture.shape), np.uint8)}, 0, 0)
    assert [path for path, _, _ in parts] == [("camera",)]


def test_actions_are_scaled_to_the_bounds_and_not_shared() -> None:
    environment = make_environment(plugin(f"{__name__}:Camera", arguments={"shape": [3]}), 1)
    environment.reset(np.zeros(1, np.uint64))
    for wheels in ([-1, -1], [1, 1], [0, 0.5], [9, -9]):
        action = np.array([[wheels]], np.float32)
        environment.step(action, np.zeros(1, np.bool_), np.zeros(1, np.uint64))
    taken = environment._environments[0].taken  # type: ignore[attr-defined]
    assert [x.tolist() for x in taken] == [[-2, 0], [2, 10], [0, 7.5], [2, 0]]
    assert taken[0].dtype == np.float64


def test_whole_numbers_are_the_nearest() -> None:
    layout = ActionLayout({"agent": Box(0, 3, (1,), np.int64)})
    # -1 .. 1 is 0 .. 3: -0.5 is 0.75, 0.5 is 2.25.
    scaled = layout.prepare(np.array([[[-0.5]], [[0.5]]], np.float32))
    assert [layout.convert[0](row[0]).tolist() for row in scaled] == [[1], [2]]


def test_environment_cannot_change_a_combination_for_later() -> None:
    layout = ActionLayout({"agent": MultiBinary(2)}, joint=True)
    with pytest.raises(ValueError, match="read-only"):
        layout.convert[0](3)[0] = 0


@pytest.mark.parametrize(("low", "high"), [(-np.inf, 0.0), (0.0, np.inf)])
def test_actions_with_one_bound_keep_it(low: float, high: float) -> None:
    layout = ActionLayout({"agent": Box(low, high, (1,))})
    assert layout.spec == contract.Composite((), (low,), (high,))
    given = np.array([[[-70.0]], [[70.0]]], np.float32)
    taken = [layout.convert[0](row[0]).tolist() for row in layout.prepare(given)]
    assert taken == [[max(-70.0, low)], [min(70.0, high)]]


def test_too_many_combinations_of_actions_are_refused() -> None:
    assert ActionLayout({"agent": MultiBinary(12)}, joint=True).spec == contract.Discrete(4096)
    with pytest.raises(
        ConfigError, match="8192 combinations, more than 4096; use mappo, happo, ippo or"
    ):
        ActionLayout({"agent": MultiBinary(13)}, joint=True)
    assert ActionLayout({"agent": MultiBinary(13)}).spec == contract.Composite((2,) * 13)


@pytest.mark.parametrize(
    ("space", "seen", "wanted"),
    [
        (Discrete(3, start=-1), np.int64(1), [0, 0, 1]),
        (MultiDiscrete([3], start=[1]), np.array([2]), [0, 1, 0]),
        (MultiDiscrete([[2], [3]]), np.array([[1], [0]]), [0, 1, 1, 0, 0]),
    ],
)
def test_integers_become_one_hot(space: Any, seen: Any, wanted: list[int]) -> None:
    layout = ObservationLayout({"agent": space}, CONFIG)
    (vector,) = layout.arrays
    arrays = {vector.name: np.zeros((1, 1, *vector.shape), np.float32)}
    ((_, write, place),) = layout.parts(arrays, 0, 0)
    write(place, seen)
    assert arrays[vector.name][0, 0].tolist() == wanted
    with pytest.raises(ValueError, match="not"):
        write(place, seen + 5)


@pytest.mark.parametrize(
    ("low", "high", "dtype"),
    [
        (-0.1, 0.1, np.float64),
        (-0.1, 0.3, np.float16),
        (0, 2**31 - 1, np.int32),
        (-(2**63), 2**63 - 1, np.int64),
        (-(2**54) - 1, 2**54 + 3, np.int64),
        (0, 2**64 - 1, np.uint64),
        (0, 3, np.uint8),
    ],
)
def test_actions_stay_within_the_bounds(low: float, high: float, dtype: Any) -> None:
    space = Box(low, high, (1,), dtype)
    wide = Box(-0.1, 0.1, (2,), np.float32)
    for agents in ({"agent": space}, {"agent": space, "wide": wide}):
        layout = ActionLayout(agents)
        ends = np.array([-1.0, 1.0], np.float32)
        action = np.broadcast_to(ends[:, None, None], (2, len(agents), layout.spec.size))  # type: ignore[union-attr]
        least, most = layout.prepare(action)
        assert all(space.contains(layout.convert[0](x[0])) for x in (least, most))
        assert float(layout.convert[0](least[0])[0]) == pytest.approx(low, rel=1e-3)
        assert float(layout.convert[0](most[0])[0]) == pytest.approx(high, rel=1e-3)
        if len(agents) == 2:
            assert all(wide.contains(layout.convert[1](x[1])) for x in (least, most))


class Strict(Camera):
    """Fails if a wheel is at the end of its bounds."""

    def step(self, action: Any) -> Any:
        if action[0] == -2 or action[1] == 10:
            raise ValueError("the end")
        return super().step(action)


def test_the_check_plays_the_ends_of_continuous_actions() -> None:
    strict = plugin(f"{__name__}:Strict", arguments={"shape": [3]})
    (problem,) = check_environment(lambda n: make_environment(strict, n), 20)
    assert "raised ValueError: the end" in problem


class SignedSeed(Camera):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.taken.clear()
        return super().reset(seed=int(np.int32(seed or 0)))


def test_the_check_plays_seeds_of_32_bits() -> None:
    signed = plugin(f"{__name__}:SignedSeed", arguments={"shape": [3]})
    (problem,) = check_environment(lambda n: make_environment(signed, n), 20)
    assert "raised OverflowError" in problem
    assert "seed 2147483655 (reset(seed=2147483655))" in problem


class Clock(Camera):
    """Depends on what happened before its reset."""

    action_space = Discrete(2)  # type: ignore[assignment]
    age = 0

    def __init__(self) -> None:
        super().__init__([3], floats=True)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.age += 1
        picture, info = super().reset(seed=seed)
        picture[0] = self.age % 7
        return picture, info


def test_hidden_state_is_found() -> None:
    problems = check_environment(lambda n: make_environment(plugin(f"{__name__}:Clock"), n), 20)
    assert any("gave another episode" in problem for problem in problems)


def test_recreated_environments_keep_no_state() -> None:
    renewed = plugin(f"{__name__}:Clock", renew=True)
    assert not check_environment(lambda n: make_environment(renewed, n), 20)


class Unclosable(Clock):
    def close(self) -> None:
        raise RuntimeError("the door is stuck")


def test_what_cannot_be_closed_is_replaced_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    renewed = plugin(f"{__name__}:Unclosable", renew=True)
    counted: list[tuple[str, int]] = []
    faults = FaultCount(100, lambda reason, episodes: counted.append((reason, episodes)))
    environment = GuardedEnvironment(lambda: make_environment(renewed, 2), faults)
    environment.seeds[:] = 7, 8
    for episode in range(1, 4):
        row = environment.reset()
        assert row.step_type.tolist() == [StepType.FIRST] * 2
        assert row.observation["observation"][:, 0, 0].tolist() == [1, 1]  # first of a new object's
        assert counted == [("raised", 0)] * 2 * episode
        row = environment.step(np.zeros((2, 1), np.int32), np.zeros(2, np.bool_))
        assert row.step_type.tolist() == [StepType.MID] * 2
    assert (
        "raised RuntimeError: the door is stuck when it was closed, in the episode with seed 8"
        in (caplog.text)
    )
    assert recognise(f"{__name__}:Unclosable", {}) == "gymnasium"


FORAGING = {"id": "lbforaging:Foraging-5x5-2p-1f-coop-v3", "disable_env_checker": True}


def foraging(renew: bool = True) -> PluginConfig:
    return plugin(arguments=FORAGING, team=True, renew=renew, max_episode_steps=50)


def test_level_based_foraging_keeps_the_contract_if_renewed() -> None:
    assert_environment(lambda n: make_environment(foraging(), n), max_rows=70)
    # Its players are placed where those of the episode before did not stand.
    problems = check_environment(lambda n: make_environment(foraging(renew=False), n), 70)
    assert any("gave another episode: observation 'observation'" in p for p in problems)


def test_a_team_equals_stepping_the_environment_itself() -> None:
    environment, raw = make_environment(foraging(), 1), gymnasium.make(**FORAGING)
    assert environment.spec.num_agents == 2
    assert environment.spec.action == contract.Discrete(6)
    policy, seed = RandomPolicy(environment), np.array([2**35 + 3], np.uint64)
    row = environment.reset(seed)
    observed, _ = raw.reset(seed=fold_seed(int(seed[0])))
    for step in range(50):
        np.testing.assert_array_equal(row.observation["observation"][0], np.stack(observed))
        action = policy.act(row)
        row = environment.step(action, np.zeros(1, np.bool_), seed)
        observed, rewards, done, _, _ = raw.step(action[0].tolist())
        np.testing.assert_array_equal(row.reward[0], np.array(rewards, np.float32))
        assert (row.step_type[0] == StepType.LAST) == done == (step == 49)


class Pair(gymnasium.Env[Any, Any]):
    """Two agents with different spaces: the second may do less and sees less."""

    observation_space = Tuple([Box(0, 9, (2,)), Box(0, 9, (1,))])
    action_space = Tuple([Discrete(3), Discrete(2)])

    def __init__(self, observed: int = 2, over: Any = False) -> None:
        self.observed, self.over = observed, over

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self._see(), {}

    def step(self, action: Any) -> Any:
        return self._see(), [float(a) for a in action], self.over, False, {}

    def _see(self) -> tuple[Any, ...]:
        return (np.array([1, 2], np.float32), np.array([3], np.float32))[: self.observed]


def test_teams_may_differ_from_agent_to_agent() -> None:
    environment = make_environment(plugin(f"{__name__}:Pair", team=True), 1)
    row = environment.reset(np.zeros(1, np.uint64))
    assert row.observation["observation"][0].tolist() == [[1, 2], [3, 0]]
    assert row.observation[ACTION_MASK][0].tolist() == [[1, 1, 1], [1, 1, 0]]
    row = environment.step(
        np.array([[2, 1]], np.int32), np.zeros(1, np.bool_), np.zeros(1, np.uint64)
    )
    assert row.reward[0].tolist() == [2, 1]


class Stumbles(Pair):
    """Raises in the first step of episodes whose seed is odd."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.odd = seed is not None and seed % 2 == 1
        return super().reset(seed=seed)

    def step(self, action: Any) -> Any:
        if self.odd:
            raise RuntimeError("a stone")
        return super().step(action)


def test_a_team_that_failed_may_act_again() -> None:
    environment = make_environment(plugin(f"{__name__}:Stumbles", team=True), 1)
    environment.reset(np.ones(1, np.uint64))
    with pytest.raises(CopiesFailed, match="a stone"):
        environment.step(np.zeros((1, 2), np.int32), np.zeros(1, np.bool_), np.zeros(1, np.uint64))
    row = environment.reset(np.zeros(1, np.uint64))
    assert row.observation[ACTION_MASK][0].tolist() == [[1, 1, 1], [1, 1, 0]]


class MaskedSecond(Pair):
    """The second agent alone observes a mask."""

    observation_space = Tuple(
        [Box(0, 9, (2,)), Dict({"place": Box(0, 9, (1,)), ACTION_MASK: MultiBinary(2)})]
    )

    def _see(self) -> tuple[Any, ...]:
        first, second = super()._see()
        return first, {"place": second, ACTION_MASK: np.array([0, 1], np.int8)}


def test_each_member_of_a_team_may_observe_a_mask() -> None:
    environment = make_environment(plugin(f"{__name__}:MaskedSecond", team=True), 1)
    row = environment.reset(np.zeros(1, np.uint64))
    assert row.observation["observation"][0].tolist() == [[1, 2], [3, 0]]
    assert row.observation[ACTION_MASK][0].tolist() == [[1, 1, 1], [0, 1, 0]]


class MaskInInfo(Pair):
    """From its first step on it says in its info that only the first action is legal."""

    observation_space = Tuple([Box(0, 9, (2,))])
    action_space = Tuple([Discrete(3)])

    def __init__(self, combined: bool = False, from_reset: bool = False) -> None:
        super().__init__(observed=1)
        self.from_reset = from_reset
        if combined:
            self.action_space = Tuple([MultiDiscrete([2, 3])])

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        seen, _ = super().reset(seed=seed)
        return seen, self._info() if self.from_reset else {}

    def step(self, action: Any) -> Any:
        return self._see(), 0.0, False, False, self._info()

    def _info(self) -> dict[str, Any]:
        return {ACTION_MASK: np.array([1, 0, 0], np.int8)}


def test_a_mask_in_the_info_is_given_from_reset_on() -> None:
    def build(**arguments: bool) -> VectorEnvironment:
        factory = f"{__name__}:MaskInInfo"
        environment = make_environment(plugin(factory, team=True, arguments=arguments), 1)
        environment.reset(np.zeros(1, np.uint64))
        return environment

    nothing = np.zeros((1, 1), np.int32), np.zeros(1, np.bool_), np.zeros(1, np.uint64)
    row = build(from_reset=True).step(*nothing)
    assert row.observation[ACTION_MASK][0].tolist() == [[1, 0, 0]]
    late = build()
    with pytest.raises(
        EnvironmentFault, match=r"infos, but none in its first reset\(\); give it in b"
    ):
        late.step(*nothing)
    with pytest.raises(CopiesFailed, match=r"has shape \(3,\), its actions are 5"):
        build(from_reset=True, combined=True)


class MaskAtFirst(MaskInInfo):
    """Its info holds a mask in reset; afterwards none, or one of another length."""

    def __init__(self, length: int = 0) -> None:
        super().__init__(from_reset=True)
        self.length = length

    def step(self, action: Any) -> Any:
        info = {ACTION_MASK: np.ones(self.length, np.int8)} if self.length else {}
        return self._see(), 0.0, False, False, info


def test_without_a_mask_in_the_info_all_is_legal_again() -> None:
    factory, nothing = (
        f"{__name__}:MaskAtFirst",
        (np.zeros((1, 1), np.int32), np.zeros(1, np.bool_)),
    )
    environment = make_environment(plugin(factory, team=True), 1)
    seed = np.zeros(1, np.uint64)
    assert environment.reset(seed).observation[ACTION_MASK][0].tolist() == [[1, 0, 0]]
    assert environment.step(*nothing, seed).observation[ACTION_MASK][0].tolist() == [[1, 1, 1]]
    environment = make_environment(plugin(factory, team=True, arguments={"length": 1}), 1)
    environment.reset(seed)
    with pytest.raises(EnvironmentFault, match=r"has shape \(1,\), its actions are 3"):
        environment.step(*nothing, seed)


class MaskedCombinations(Camera):
    action_space = MultiDiscrete([2, 3])  # type: ignore[assignment]
    observation_space = Dict({"place": Box(0, 9, (1,)), ACTION_MASK: MultiBinary(5)})

    def __init__(self) -> None:
        pass

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self.observation_space.sample(), {}


def test_a_mask_has_an_entry_for_each_alternative() -> None:
    named = plugin(f"{__name__}:MaskedCombinations")
    assert make_environment(named, 1).spec.action == contract.Composite((2, 3))
    assert make_environment(named, 1, "mappo").spec.action == contract.Composite((2, 3))
    joint = make_environment(named, 1, "qmix")  # which makes one choice
    assert joint.spec.action == contract.Discrete(6)
    masks = joint._mask_places[0]  # type: ignore[attr-defined]
    # The second action of the first choice is illegal, and the last of the second.
    assert masks.legal(np.array([1, 0, 1, 1, 0])).tolist() == [1, 1, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("over", "kind"),
    [
        ([False, False], StepType.MID),
        ((True, False), StepType.MID),
        (np.array([True, True]), StepType.LAST),
        (np.bool_(True), StepType.LAST),
        (np.array([True]), StepType.LAST),
    ],
)
def test_a_teams_episode_is_over_when_it_is_for_all(over: Any, kind: StepType) -> None:
    environment = make_environment(
        plugin(f"{__name__}:Pair", team=True, arguments={"over": over}), 1
    )
    environment.reset(np.zeros(1, np.uint64))
    action, seed = np.zeros((1, 2), np.int32), np.zeros(1, np.uint64)
    row = environment.step(action, np.zeros(1, np.bool_), seed)
    assert row.step_type[0] == kind


def test_flags_for_more_agents_than_there_are() -> None:
    environment = make_environment(
        plugin(f"{__name__}:Pair", team=True, arguments={"over": [False] * 3}), 1
    )
    environment.reset(np.zeros(1, np.uint64))
    action, seed = np.zeros((1, 2), np.int32), np.zeros(1, np.uint64)
    with pytest.raises(EnvironmentFault, match=r"terminated = \[False, False, False\]"):
        environment.step(action, np.zeros(1, np.bool_), seed)


def test_what_is_no_team_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"Tuple spaces of 2 entries; set environment\.team: true "
    ):
        make_environment(plugin(f"{__name__}:Pair"), 1)
    with pytest.raises(ConfigError, match=r"team: true wants Tuple spaces .* acts by Discrete"):
        make_environment(made("CartPole-v1", team=True), 1)
    short = make_environment(plugin(f"{__name__}:Pair", team=True, arguments={"observed": 1}), 1)
    with pytest.raises(EnvironmentFault, match="observed for 1 agents, not 2"):
        short.reset(np.zeros(1, np.uint64))


def test_wrong_types_are_refused_with_the_fix() -> None:
    with pytest.raises(ConfigError, match=r"set environment\.name: gymnasium_vector"):
        make_environment(plugin("gymnasium:make_vec", arguments={"id": "CartPole-v1"}), 1)
    with pytest.raises(ConfigError, match=r"set environment\.name: pettingzoo"):
        make_environment(plugin("mpe2.simple_spread_v3:parallel_env"), 1)
    with pytest.raises(ConfigError, match="CartPole-v9"):
        make_environment(made("CartPole-v9"), 1)
    with pytest.raises(ConfigError, match=r"key 'environment\.factory' is missing"):
        make_environment(PluginConfig(name="gymnasium"), 1)


def spread_of(num_envs: int) -> VectorEnvironment:
    return Spread(SpreadConfig(), num_envs)


def wants_more(length: int, width: int) -> None:
    """No factory of anything."""


class Sized(Pair):
    """Looks like a murmur factory, which takes the number of copies."""

    def __init__(self, size: int) -> None:
        super().__init__()


@pytest.mark.filterwarnings("ignore:The old environment creation API:DeprecationWarning")
def test_factories_are_recognised() -> None:
    assert recognise(f"{__name__}:spread_of", {}) == "murmur"
    assert recognise("mpe2.simple_spread_v3:parallel_env", {}) == "pettingzoo"
    assert recognise("gymnasium:make", {"id": "CartPole-v1"}) == "gymnasium"
    assert recognise("pettingzoo.classic.connect_four_v3:env", {}) == "pettingzoo"
    with pytest.raises(ConfigError, match=r"wants_more\(\) raised TypeError"):
        recognise(f"{__name__}:wants_more", {})


def test_check_env_takes_any_factory() -> None:
    options = ["arguments.id=Pendulum-v1", "max_episode_steps=5"]
    factory = environment_factory("gymnasium:make", options)
    assert factory(2).spec.max_episode_steps == 5
    as_in_train = [f"environment.{option}" for option in options]
    assert environment_factory("gymnasium:make", as_in_train)(2).spec.max_episode_steps == 5
    assert check_environment(environment_factory(f"{__name__}:spread_of", []), 10) == []
    with pytest.raises(ConfigError, match=r"--set arguments\.KEY=VALUE"):
        environment_factory("gymnasium:make", [])(1)
    with pytest.raises(
        ConfigError, match=r"is no VectorEnvironment; .* --set arguments\.KEY=VALUE"
    ):
        environment_factory(f"{__name__}:Sized", [])(1)
    with pytest.raises(ConfigError, match=r"unknown key 'environment\.size'"):
        environment_factory(f"{__name__}:spread_of", ["size=5", "arguments.num_envs=2"])(1)
    with pytest.raises(ConfigError, match=r"'environment\.mode'; .* is arguments\.mode$"):
        environment_factory("gymnasium:make", [options[0], "mode=5"])(1)
    with pytest.raises(ConfigError, match=r"metrics' = 'score': it is a list, \[score\]"):
        environment_factory("gymnasium:make", [options[0], "metrics=score"])(1)
    with pytest.raises(ConfigError, match=r"did you mean 'max_episode_steps'"):
        environment_factory("gymnasium:make", [options[0], "max_episode_step=5"])(1)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("meet_here.py:Meet", r"'meet_here\.py' is a file; write meet_here:Meet"),
        ("./inner/meet.py:Meet", r"is a file; write inner\.meet:Meet"),
        ("meet_here.Meet:make", "'meet_here' is no package; write meet_here:NAME"),
        (
            "lbfx_env:Meet",
            r"'lbfx_env' needs 'lbfx', which is not installed; install what",
        ),
    ],
)
def test_a_module_that_cannot_be_imported(
    path: str, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "meet_here.py").touch()
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "meet.py").touch()
    (tmp_path / "lbfx_env.py").write_text("import lbfx\n")
    with pytest.raises(ConfigError, match=words):
        recognise(path, {})


class Answers(Camera):
    """Its reset and its step return something of some kind."""

    start: Any = None
    answer: Any = None

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        seen = super().reset(seed=seed)
        return self.start(seen[0]) if self.start else seen

    def step(self, action: Any) -> Any:
        return self.answer


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (None, r"returned None from step\(\), not \(observation, reward, terminated"),
        (
            (np.zeros(3), None, False, False, {}),
            r"returned None as reward from step\(\), not a num",
        ),
        ((np.zeros(3), np.ones(3), False, False, {}), r"shape \(3,\) as reward .*, not a number"),
        ((np.zeros(3), "much", False, False, {}), r"returned 'much' as reward .*, not a number"),
        ((np.zeros(3), 0.0, None, False, {}), r"returned terminated = None .*, not true or false"),
        ((np.zeros(3), 0.0, False, "no", {}), r"returned truncated = 'no' .*, not true or false"),
    ],
)
def test_what_a_step_returns_wrongly_is_named(
    monkeypatch: pytest.MonkeyPatch, answer: Any, words: str
) -> None:
    monkeypatch.setattr(Answers, "answer", answer)
    environment = make_environment(plugin(f"{__name__}:Answers", arguments={"shape": [3]}), 1)
    environment.reset(np.zeros(1, np.uint64))
    with pytest.raises(CopiesFailed, match=words) as caught:
        environment.step(np.zeros((1, 1, 2), np.float32), np.zeros(1, np.bool_), np.zeros(1, "u8"))
    assert [fault.reason for fault in caught.value.faults] == ["contents"]


@pytest.mark.parametrize("truncated", [False, True])
def test_what_terminates_has_no_future(monkeypatch: pytest.MonkeyPatch, truncated: bool) -> None:
    monkeypatch.setattr(Answers, "answer", (np.zeros(3), 1.0, True, truncated, {}))
    environment = make_environment(plugin(f"{__name__}:Answers", arguments={"shape": [3]}), 1)
    environment.reset(np.zeros(1, np.uint64))
    action, seed = np.zeros((1, 1, 2), np.float32), np.zeros(1, np.uint64)
    row = environment.step(action, np.zeros(1, np.bool_), seed)
    assert (row.step_type[0], row.discount[0]) == (StepType.LAST, 0)


class NoInfoAtTheEnd(Camera):
    def step(self, action: Any) -> Any:
        *rest, over, _ = super().step(action)
        return *rest, over, None if over else {}


def test_an_info_that_is_none_at_the_end() -> None:
    arguments = {"shape": [3]}
    environment = make_environment(
        plugin(f"{__name__}:NoInfoAtTheEnd", arguments=arguments, metrics=["score"]), 2
    )
    environment.reset(np.array([5, 6], np.uint64))
    environment._environments[1].taken.append(None)  # type: ignore[attr-defined]
    action, none = np.zeros((2, 1, 2), np.float32), np.zeros(2, np.bool_)
    _ = [environment.step(action, none, np.zeros(2, np.uint64)) for _ in range(3)]
    words = r"returned a NoneType as infos, not a dictionary, .*seed 6 .* step 4"
    with pytest.raises(CopiesFailed, match=words) as caught:
        environment.step(action, none, np.zeros(2, np.uint64))
    assert [fault.copies for fault in caught.value.faults] == [(1,)]
    assert caught.value.timestep.step_type.tolist() == [StepType.MID, StepType.ABORTED]


def test_a_metric_that_is_not_there_at_the_end() -> None:
    arguments = {"shape": [3]}
    environment = make_environment(
        plugin(f"{__name__}:Camera", arguments=arguments, metrics=["score"]), 1
    )
    seed = np.zeros(1, np.uint64)
    environment.reset(seed)
    step = np.zeros((1, 1, 2), np.float32), np.zeros(1, np.bool_), seed
    _ = [environment.step(*step) for _ in range(4)]
    with pytest.raises(EnvironmentFault, match="has no 'score' among the infos of the episode's l"):
        environment.step(*step)


def without(space: str) -> gymnasium.Env[Any, Any]:
    """An environment that lacks one of its spaces."""
    environment: gymnasium.Env[Any, Any] = gymnasium.Env()
    for name in {"observation_space", "action_space"} - {space}:
        setattr(environment, name, Discrete(2))
    return environment


@pytest.mark.parametrize("space", ["observation_space", "action_space"])
def test_an_environment_without_a_space(space: str) -> None:
    words = rf"without': reading {space} raised AttributeError: .*; set self\.{space} to one of"
    with pytest.raises(ConfigError, match=words):
        make_environment(plugin(f"{__name__}:without", arguments={"space": space}), 1)


@pytest.mark.parametrize(
    ("start", "words"),
    [
        (lambda seen: seen, r"reset\(\) must return \(observation, info\); it returned a ndarray"),
        (lambda seen: (seen, None), "its info is a NoneType, not a dictionary"),
    ],
)
def test_a_reset_that_returns_something_else(
    monkeypatch: pytest.MonkeyPatch, start: Any, words: str
) -> None:
    monkeypatch.setattr(Answers, "start", staticmethod(start))
    with pytest.raises(ConfigError, match=words):
        make_environment(plugin(f"{__name__}:Answers", arguments={"shape": [3]}), 1)
