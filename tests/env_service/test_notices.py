"""What murmur changes, ignores or guesses of what an environment gives is said once, no more."""

from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete
from gymnasium.spaces import Tuple as TupleSpace
from pettingzoo import ParallelEnv

from murmur.env_service.checks import check_environment
from murmur.env_service.environment import RandomPolicy, VectorEnvironment, make_environment
from murmur.shared.config import PluginConfig
from murmur.shared.process.errors import EnvironmentFault
from murmur.shared.wire.timestep import StepType, TimeStep


def plugin(name: str, factory: str, **options: Any) -> PluginConfig:
    path = factory if ":" in factory else f"{__name__}:{factory}"
    return PluginConfig.model_validate({"name": name, "factory": path, **options})


def play(environment: VectorEnvironment, steps: int = 60) -> list[TimeStep]:
    """Rows of copy 0, copied."""
    seeds = np.arange(environment.num_envs, dtype=np.uint64)
    policy, row, rows = RandomPolicy(environment), environment.reset(seeds), []
    for _ in range(steps):
        rows.append(
            TimeStep(
                row.step_type.copy(),
                row.reward.copy(),
                row.discount.copy(),
                {name: array.copy() for name, array in row.observation.items()},
                {},
            )
        )
        row = environment.step(policy.act(row), row.step_type == StepType.LAST, seeds)
    return rows


def said(name: str, factory: str, steps: int = 60, **options: Any) -> dict[str, str]:
    """The notices of a play by kind; the environment keeps the contract."""
    chosen = plugin(name, factory, **options)
    assert check_environment(lambda n: make_environment(chosen, n), 60) == []
    environment = make_environment(chosen, 2)
    play(environment, steps)
    return {notice.kind: notice.text for notice in environment.notices.all}


class Solo(gymnasium.Env[Any, Any]):
    """One agent whose observation, reward, ends and infos are given as functions of the step."""

    def __init__(self, what: str = "plain") -> None:
        self.what = what
        self.observation_space = SPACES.get(what, Box(-1e38, 1e38, (2,), np.float32))
        self.action_space = ACTIONS.get(what, Discrete(4))
        if what == "method":
            self.action_masks = lambda: np.ones(4, bool)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return self.seen(), self.info()

    def seen(self) -> Any:
        t, make = self.t, OBSERVATIONS.get(self.what)
        return np.zeros(self.observation_space.shape or (), np.float32) if make is None else make(t)

    def info(self) -> Any:
        return INFOS.get(self.what, lambda t: {})(self.t)

    def step(self, action: Any) -> Any:
        self.t += 1
        reward = {"large reward": 2**24 + 1, "round reward": 2**24 + 2}.get(self.what, 0.0)
        over = self.t >= 10
        return self.seen(), reward, over, False, self.info()


WIDE = Box(-1e38, 1e38, (2,), np.float64)
SPACES: dict[str, Any] = {
    "dim": Box(0, 1, (8, 8, 3), np.uint8),
    "hidden mask": Dict(x=Dict(action_mask=Box(0, 1, (4,), np.int8), y=Box(-1, 1, (1,)))),
    "int64": Box(0, 2**62, (2,), np.int64),
    "uint64": Box(0, 2**63, (2,), np.uint64),
    "int32": Box(0, 2**31 - 1, (2,), np.int32),
    "even int32": Box(0, 2**31 - 1, (2,), np.int32),
    "extra": Dict(x=Box(-1, 1, (2,), np.float32)),
    "frames": Box(0, 255, (2, 16, 16, 3), np.uint8),
    "floats": Box(0, 1, (16, 16, 3), np.float32),
    "small floats": Box(0, 1, (6, 7, 2), np.float32),
    "observed mask": Dict(x=Box(-1, 1, (2,), np.float32), avail_actions=Box(0, 1, (4,), np.int8)),
}
ACTIONS: dict[str, Any] = {
    "whole": Box(0, 10, (2,), np.int64),
    "unbounded": Box(-3e38, 3e38, (2,), np.float32),
}
X = np.zeros(2, np.float32)
OBSERVATIONS: dict[str, Any] = {
    "int64": lambda t: np.array([5, 1_700_000_000 + t]),
    "uint64": lambda t: np.array([5, 2**59 - 1 + 2 * t], np.uint64),
    "int32": lambda t: np.array([2**24 + t, 0], np.int32),
    "even int32": lambda t: np.array([2**30, -4 * t], np.int32),
    "seconds": lambda t: np.array([0.5, 1.7e9 + 0.1 * t]),
    "float64": lambda t: np.array([0.1 * t, 1 / 3]),
    "far": lambda t: np.array([1000 + 0.5 * t, 1.25 + 2e-4 * t]),
    "metres": lambda t: np.array([4e6 + 0.3 * t, 0]),  # a place on a map in metres
    "list": lambda t: [0.0, 1.7e9 + 0.1 * t],
    "dim": lambda t: np.zeros((8, 8, 3), np.uint8),
    "hidden mask": lambda t: {"x": {"action_mask": np.ones(4, np.int8), "y": X[:1]}},
    "extra": lambda t: {"x": X, "goal": X},
    "frames": lambda t: np.zeros((2, 16, 16, 3), np.uint8),
    "small floats": lambda t: np.zeros((6, 7, 2), np.float32),
    "floats": lambda t: np.zeros((16, 16, 3), np.float32),
    "observed mask": lambda t: {"x": X, "avail_actions": np.ones(4, np.int8)},
}
LEGAL = np.array([1, 1, 1, 0], np.int8)
INFOS: dict[str, Any] = {
    "gaps": lambda t: {"action_mask": LEGAL} if t % 2 == 0 else {},
    "all but the end": lambda t: {"action_mask": LEGAL} if t < 10 else {},
    "bools": lambda t: {"action_mask": LEGAL.astype(bool)},
    "int64 masks": lambda t: {"action_mask": LEGAL.astype(np.int64)},
    "float masks": lambda t: {"action_mask": LEGAL.astype(np.float32)},
    "list masks": lambda t: {"action_mask": [1, 1, 1, 0]},
    "other name": lambda t: {"action_masks": LEGAL},
    "old truncation": lambda t: {"TimeLimit.truncated": t >= 10},
    "large info": lambda t: {"score": 2**24 + 1},
}


@pytest.mark.parametrize(
    ("what", "kind", "words"),
    [
        ("int64", "cast", "'observation'[1] is 1700000001 (int64) and arrives as 1700000000"),
        (
            "uint64",
            "cast",
            "'observation'[1] is 576460752303423487 (uint64) and arrives as 5764607",
        ),
        ("int32", "cast", "'observation'[0] is 16777217 (int32) and arrives as 16777216"),
        ("seconds", "cast", "changes by 1 in an episode"),
        ("metres", "cast", "and all of it changes by 3 in an episode"),
        ("list", "cast", "changes by 1 in an episode"),
        ("large reward", "cast", "reward of 'agent' is 16777217 and arrives as 16777216.0"),
        ("extra", "observation_ignored", "'goal'"),
        ("frames", "axes_guessed", "[2, 16, 16, 3] is flattened into 1536 numbers"),
        ("floats", "axes_guessed", "environment.images: all makes it an image"),
        ("dim", "axes_guessed", "its bytes are at most 1, and networks divide images by 255"),
        ("hidden mask", "mask_unused", "observation 'action_mask' is not used"),
        ("gaps", "mask_missing", "have no 'action_mask' at step 1"),
        ("method", "mask_unused", "Solo.action_masks() is not used"),
        ("other name", "mask_unused", "info 'action_masks' is not used"),
        ("observed mask", "mask_unused", "observation 'avail_actions' is not used"),
        ("old truncation", "truncation_ignored", "return truncated = True instead"),
        ("whole", "action_range", "are rounded"),
        ("unbounded", "action_range", "narrow it"),
        ("small floats", "axes_guessed", "is flattened into 84 numbers"),
    ],
)
def test_what_does_not_survive_is_said(what: str, kind: str, words: str) -> None:
    found = said("gymnasium", "Solo", arguments={"what": what})
    assert list(found) == [kind]
    assert words in found[kind]


@pytest.mark.parametrize(
    "what",
    [
        *("plain", "even int32", "float64", "far", "round reward"),
        *("all but the end", "bools", "int64 masks", "float masks", "list masks"),
    ],
)
def test_what_survives_is_not_said(what: str) -> None:
    assert said("gymnasium", "Solo", arguments={"what": what}) == {}


def test_what_the_user_chose_is_not_said() -> None:
    flat = {"arguments": {"what": "frames"}, "images": "none"}
    assert said("gymnasium", "Solo", **flat) == {}
    assert said("gymnasium", "Solo", arguments={"what": "floats"}, images="all") == {}


def test_a_large_info_is_said() -> None:
    found = said("gymnasium", "Solo", arguments={"what": "large info"}, metrics=["score"])
    assert found == {
        "cast": "info 'score' is 16777217.0 and arrives as 16777216.0 (float32); scale it in a "
        "factory of your own"
    }


@pytest.mark.parametrize(
    ("mask", "held"),
    [
        (np.array([0, 0, 0, -np.inf], np.float32), "-inf"),
        (np.array([1, 1, 1, np.nan]), "nan"),
        (np.array([1, 1, 1, 0.5]), "0.5"),
        (np.array([1, 1, 1, -1], np.int8), "-1"),
        (np.array([1, 1, 1, 255], np.uint8), "255"),
        ([1, 1, 1, 2], "2"),
        (np.array([1, 1, 1, -1]), "-1"),
        (np.array(["1", "1", "1", "0"]), "1"),
    ],
)
def test_masks_of_other_numbers_are_refused(
    mask: Any, held: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(INFOS, "wrong", lambda t: {"action_mask": mask})
    environment = make_environment(plugin("gymnasium", "Solo", arguments={"what": "wrong"}), 1)
    with pytest.raises(EnvironmentFault, match=f"an 'action_mask' that holds {held}; 1 is legal"):
        play(environment, 1)


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (np.array([1 + 2j, 0]), "has dtype complex128; murmur takes real numbers"),
        (np.array(["1.5", "2"]), "has dtype <U3; murmur takes real numbers"),
        (np.ma.masked_array([1.0, 2.0], [False, True]), "is a masked array"),
    ],
)
def test_observations_that_are_no_numbers_are_refused(
    seen: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(OBSERVATIONS, "wrong", lambda t: seen)
    environment = make_environment(plugin("gymnasium", "Solo", arguments={"what": "wrong"}), 1)
    with pytest.raises(EnvironmentFault, match=words):
        play(environment, 1)


class Board(gymnasium.Env[Any, Any]):
    """An image of some shape."""

    action_space = Discrete(2)

    def __init__(self, shape: list[int]) -> None:
        self.observation_space = Box(0, 255, tuple(shape), np.uint8)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(self.observation_space.shape, np.uint8), {}


@pytest.mark.parametrize(
    ("shape", "image", "guess"),
    [
        ([5, 5, 12], (12, 5, 5), False),  # two equal sides are height and width
        ([12, 5, 5], (12, 5, 5), False),
        ([8, 8, 111], (111, 8, 8), False),
        ([84, 84, 4], (4, 84, 84), False),
        ([3, 84, 84], (3, 84, 84), False),
        ([64, 48, 3], (3, 64, 48), False),
        ([3, 64, 48], (3, 64, 48), False),
        ([4, 4, 4], (4, 4, 4), True),
        ([5, 7, 12], (5, 7, 12), True),
        ([6, 7, 2], (2, 6, 7), True),
        ([60, 40, 12], (12, 60, 40), True),
    ],
)
def test_guessed_axes_are_said(shape: list[int], image: tuple[int, ...], guess: bool) -> None:
    environment = make_environment(plugin("gymnasium", "Board", arguments={"shape": shape}), 1)
    assert environment.spec.observations[0].shape == image
    found = [notice.text for notice in environment.notices.all]
    assert bool(found) == guess
    assert all("environment.channels_last: true or false says it" in text for text in found)
    for last in (True, False):
        options = {"arguments": {"shape": shape}, "channels_last": last}
        environment = make_environment(plugin("gymnasium", "Board", **options), 1)
        wanted = (shape[2], *shape[:2]) if last else tuple(shape)
        assert environment.spec.observations[0].shape == wanted
        assert not environment.notices.all


class Pair(gymnasium.Env[Any, Any]):
    """A team of two; `ends` gives (terminated, truncated) of each at step 5, and after it."""

    observation_space = TupleSpace((Box(-1, 1, (2,)), Box(-1, 1, (2,))))
    action_space = TupleSpace((Discrete(3), Discrete(3)))

    def __init__(
        self, ends: Any = ([True, True], [False, False]), reward: Any = (1.0, 2.0), mask: Any = None
    ) -> None:
        self.ends, self.reward = ends, reward
        self.info = {} if mask is None else {"action_mask": np.array(mask)}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return (X, X), self.info

    def step(self, action: Any) -> Any:
        self.t += 1
        assert self.t <= 5, "stepped after its end"
        now = self.t == 5
        terminated, truncated = ([now and flag for flag in flags] for flags in self.ends)
        return (X, X), self.reward, terminated, truncated, self.info


@pytest.mark.parametrize(
    ("terminated", "truncated", "discount", "mixed"),
    [
        ([True, True], [False, False], 0, False),
        ([False, False], [True, True], 1, False),
        ([True, False], [False, True], 1, True),
        ([False, True], [True, False], 1, True),
        ([True, True], [True, False], 0, False),
        ([True, False], [True, True], 1, True),
    ],
)
def test_a_team_ends_when_each_agent_is_done(
    terminated: list[bool], truncated: list[bool], discount: float, mixed: bool
) -> None:
    options = {"arguments": {"ends": [terminated, truncated]}, "team": True}
    environment = make_environment(plugin("gymnasium", "Pair", **options), 1)
    rows = play(environment, 8)
    assert [int(row.step_type[0]) for row in rows] == [0, 1, 1, 1, 1, 2, 0, 1]
    assert rows[5].discount[0] == discount
    assert [notice.kind for notice in environment.notices.all] == ["ends_mixed"] * mixed


@pytest.mark.parametrize(
    ("options", "kinds", "rewards"),
    [
        ({"reward": np.array([1.0, 2.0])}, [], [1, 2]),
        ({"reward": [2**24 + 1, 2]}, ["cast"], [2**24, 2]),
        ({"reward": 3.0}, ["reward_repeated"], [3, 3]),
        ({"reward": np.array([3.0])}, ["reward_repeated"], [3, 3]),
        ({"mask": [1, 1, 0]}, ["mask_repeated"], [1, 2]),
    ],
)
def test_one_value_for_a_whole_team_is_said(
    options: dict[str, Any], kinds: list[str], rewards: list[float]
) -> None:
    chosen = plugin("gymnasium", "Pair", arguments=options, team=True)
    environment = make_environment(chosen, 1)
    assert play(environment, 8)[1].reward[0].tolist() == rewards
    assert [notice.kind for notice in environment.notices.all] == kinds


def test_clipped_actions_are_said() -> None:
    environment = make_environment(plugin("gymnasium", "Solo", arguments={"what": "whole"}), 1)
    seeds, restart = np.zeros(1, np.uint64), np.zeros(1, np.bool_)
    environment.reset(seeds)
    environment.notices.take()
    environment.step(np.full((1, 1, 2), 1.5, np.float32), restart, seeds)
    (notice,) = environment.notices.take()
    assert notice.text == "action 1.5 of a policy or baseline is outside [-1, 1] and is clipped"


class Rounds(ParallelEnv[Any, Any, Any]):
    """Two agents; `what` says who leaves when and what is paid."""

    metadata: ClassVar[dict[str, Any]] = {"name": "rounds"}
    max_cycles: Any = 4

    def __init__(self, what: str) -> None:
        self.what = what
        self.possible_agents = ["a_0", "a_1"]
        self.length = 5 if what in ("paid", "alone") else 8
        if what == "huge":
            self.max_cycles = 10**9
        if what == "stateful":
            self.max_cycles = 8
        if what == "true":
            self.max_cycles = True

    def observation_space(self, agent: str) -> Any:
        return Box(-1, 1, (2,), np.float32)

    def state(self) -> Any:
        return np.array([0, 1_700_000_000 + self.t])

    def action_space(self, agent: str) -> Any:
        return Discrete(3)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents, self.t = list(self.possible_agents), 0
        return dict.fromkeys(self.agents, X), {a: {} for a in self.agents}

    def step(self, actions: Any) -> Any:
        self.t += 1
        over, both = self.t >= self.length, self.possible_agents
        early = self.what in ("paid", "alone") and self.t >= 2
        done = {"a_0": over or early, "a_1": over}
        alone = {"a_0": self.what == "alone" and not over, "a_1": False}
        rewards = dict.fromkeys(both, 10.0 if over else 0.0)
        ends = {a: done[a] and not alone[a] for a in both}
        cuts = {a: done[a] and alone[a] for a in both}
        self.agents = [a for a in both if not done[a]]
        return dict.fromkeys(both, X), rewards, ends, cuts, {a: {} for a in both}


@pytest.mark.parametrize(("what", "planned"), [("long", 4), ("huge", 0), ("true", 0)])
def test_max_cycles_ends_no_episode(what: str, planned: int) -> None:
    found = said("pettingzoo", "Rounds", arguments={"what": what})
    environment = make_environment(plugin("pettingzoo", "Rounds", arguments={"what": what}), 1)
    assert environment.spec.max_episode_steps == planned
    rows = play(environment, 20)
    assert [t for t, row in enumerate(rows) if row.step_type[0] == StepType.LAST] == [8, 17]
    assert rows[8].reward[0].tolist() == [10, 10]
    assert rows[8].discount[0] == 0
    assert list(found) == (["longer_episode"] if planned else [])


def test_the_users_limit_ends_episodes() -> None:
    options = {"arguments": {"what": "long"}, "max_episode_steps": 6}
    environment = make_environment(plugin("pettingzoo", "Rounds", **options), 1)
    rows = play(environment, 10)
    assert [t for t, row in enumerate(rows) if row.step_type[0] == StepType.LAST] == [6]
    assert rows[6].discount[0] == 1
    assert said("pettingzoo", "Rounds", **options, steps=3) == {}


@pytest.mark.parametrize(
    ("sharing", "last", "words"),
    [
        (
            "none",
            [0, 10],
            "a_0' was given 10.0 as reward at step 5, when it was not among the agents",
        ),
        ("sum", [20, 20], "reward_sharing: sum counts it"),
        ("mean", [10, 10], "reward_sharing: mean counts it"),
    ],
)
def test_rewards_after_death_are_said(sharing: str, last: list[float], words: str) -> None:
    options = {"arguments": {"what": "paid"}, "reward_sharing": sharing}
    found = said("pettingzoo", "Rounds", **options)
    assert list(found) == ["longer_episode", "reward_of_absent"]
    assert words in found["reward_of_absent"]
    rows = play(make_environment(plugin("pettingzoo", "Rounds", **options), 1), 7)
    assert rows[5].step_type[0] == StepType.LAST
    assert rows[5].reward[0].tolist() == last
    assert rows[6].reward[0].tolist() == [0, 0]


def test_a_state_that_collapses_is_said() -> None:
    found = said("pettingzoo", "Rounds", arguments={"what": "stateful"}, state=True)
    assert list(found) == ["cast"]
    assert found["cast"].startswith(
        "observation 'state'[1] is 1700000001 (int64) and arrives as 17"
    )


def test_an_agent_that_is_truncated_alone_is_said() -> None:
    found = said("pettingzoo", "Rounds", arguments={"what": "alone"})
    words = "agent 'a_0' was truncated at step 2 while others continue: its last transition is no"
    assert words in found["truncated_alone"]
