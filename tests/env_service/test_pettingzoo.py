"""PettingZoo behind the contract: real environments from mpe2, and tiny ones that misbehave."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Text, Tuple
from gymnasium.spaces import Space as GymSpace
from mpe2 import simple_spread_v3
from pettingzoo import ParallelEnv

from murmur.env_service.adapters.seeds import fold_seed
from murmur.env_service.adapters.sequential import SequentialVectorEnv
from murmur.env_service.checks import assert_environment
from murmur.env_service.environment import make_environment
from murmur.env_service.sessions.evaluate import run_baseline
from murmur.env_service.watchdog.faults import CopiesFailed
from murmur.shared.config import PluginConfig
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.process.errors import ConfigError, EnvironmentFault
from murmur.shared.wire import spec as contract
from murmur.shared.wire.spec import ACTION_MASK, AGENT_MASK, STATE
from murmur.shared.wire.timestep import StepType, TimeStep

FIRST, MID, LAST = StepType.FIRST, StepType.MID, StepType.LAST


def plugin(factory: str, **options: Any) -> PluginConfig:
    path = factory if ":" in factory else f"{__name__}:{factory}"
    return PluginConfig.model_validate({"name": "pettingzoo", "factory": path, **options})


def build(factory: str, num_envs: int = 1, **options: Any) -> SequentialVectorEnv:
    environment = make_environment(plugin(factory, **options), num_envs)
    assert isinstance(environment, SequentialVectorEnv)
    return environment


def variant(flaw: str, num_envs: int = 1, **options: Any) -> SequentialVectorEnv:
    return build("flawed", num_envs, arguments={"flaw": flaw}, **options)


def keeps_the_contract(flaw: str, **options: Any) -> None:
    factory = plugin("flawed", arguments={"flaw": flaw}, **options)
    assert_environment(lambda n: make_environment(factory, n))


def start(environment: SequentialVectorEnv, seed: int = 1) -> TimeStep:
    return environment.reset(np.full(environment.num_envs, seed, np.uint64))


def advance(environment: SequentialVectorEnv, action: Any) -> TimeStep:
    n = environment.num_envs
    _, shape = contract.action_layout(environment.spec.action)
    action = np.asarray(action, np.int32).reshape(n, -1, *shape)
    return environment.step(action, np.zeros(n, np.bool_), np.zeros(n, np.uint64))


MPE: dict[str, tuple[str, dict[str, Any]]] = {
    "spread": ("mpe2.simple_spread_v3:parallel_env", {"arguments": {"max_cycles": 7}}),
    "spread, continuous, state": (
        "mpe2.simple_spread_v3:parallel_env",
        {"arguments": {"max_cycles": 7, "continuous_actions": True}, "state": True},
    ),
    "speaker listener": (
        "mpe2.simple_speaker_listener_v4:parallel_env",
        {"max_episode_steps": 7},
    ),
    "speaker listener, continuous": (
        "mpe2.simple_speaker_listener_v4:parallel_env",
        {"arguments": {"continuous_actions": True}, "max_episode_steps": 7},
    ),
    "tag": ("mpe2.simple_tag_v3:parallel_env", {"max_episode_steps": 7, "reward_sharing": "mean"}),
}


@pytest.mark.parametrize("case", MPE)
def test_mpe_keeps_the_contract(case: str) -> None:
    factory, options = MPE[case]
    assert_environment(lambda n: make_environment(plugin(factory, **options), n), max_rows=60)


@pytest.mark.parametrize("continuous", [False, True])
def test_rows_equal_stepping_the_environment_itself(continuous: bool) -> None:
    arguments = {"N": 2, "max_cycles": 6, "continuous_actions": continuous}
    environment = build("mpe2.simple_spread_v3:parallel_env", 2, arguments=arguments, state=True)
    raw = [simple_spread_v3.parallel_env(**arguments) for _ in range(2)]
    agents = raw[0].possible_agents
    random = np.random.default_rng(0)
    seeds = np.array([5, 2**40 + 7], np.uint64)
    timestep = environment.reset(seeds)
    observed = [e.reset(seed=fold_seed(int(s)))[0] for e, s in zip(raw, seeds, strict=True)]
    for step in range(7):
        for i, e in enumerate(raw):
            wanted = np.stack([observed[i][agent] for agent in agents])
            np.testing.assert_array_equal(timestep.observation["observation"][i], wanted)
            np.testing.assert_array_equal(timestep.observation[STATE][i], e.state())
        if step == 6:
            break
        action: Any = random.integers(5, size=(2, 2), dtype=np.int32)
        own: Any = action.tolist()
        if continuous:
            action = random.uniform(-1, 1, (2, 2, 5)).astype(np.float32)
            own = action / 2 + np.float32(0.5)  # from [-1, 1] to the Box's [0, 1]
        timestep = environment.step(action, np.zeros(2, np.bool_), seeds)
        for i, e in enumerate(raw):
            actions = {agent: own[i][a] for a, agent in enumerate(agents)}
            observed[i], reward, _, _, _ = e.step(actions)
            wanted = np.array([reward[agent] for agent in agents], np.float32)
            np.testing.assert_array_equal(timestep.reward[i], wanted)
    assert timestep.step_type.tolist() == [LAST, LAST]
    assert timestep.discount.tolist() == [1, 1]  # time was up
    assert timestep.metrics["length"].tolist() == [6, 6]
    assert environment.spec.max_episode_steps == 6


def test_a_random_policy_earns_what_it_should() -> None:
    environment = plugin("mpe2.simple_spread_v3:parallel_env")
    result = run_baseline(ExperimentConfig(environment=environment), "random", 192, 1)
    # 300 episodes of mpe2 itself, summed over agents: -79.5; standard error here about 1.8
    assert result.metrics["return"].mean() == pytest.approx(-79.5, abs=6)


def test_unequal_agents_are_padded_and_masked() -> None:
    environment = build("mpe2.simple_speaker_listener_v4:parallel_env")
    assert environment.agents == ["speaker_0", "listener_0"]
    assert environment.spec.action == contract.Discrete(5)
    timestep = start(environment)
    observed = timestep.observation["observation"][0]
    assert observed.shape == (2, 11)
    assert observed[0].any()
    assert not observed[0, 3:].any()  # the speaker sees 3 numbers
    assert timestep.observation[ACTION_MASK][0].tolist() == [[1, 1, 1, 0, 0], [1] * 5]
    with pytest.raises(EnvironmentFault, match=r"'speaker_0' has 3 actions and was told .* 4"):
        advance(environment, [4, 0])


class Toy(ParallelEnv):
    """Three agents see their number and the step; they end at steps 2, 3 and 4."""

    metadata: dict[str, Any] = {"name": "toy"}  # noqa: RUF012
    observation: GymSpace[Any] = Box(0, 9, (2,), np.float64)
    action: GymSpace[Any] = Discrete(2)
    last_is_truncated = True

    def __init__(self, agents: int = 3) -> None:
        self.possible_agents = ["a", "b", "c"][:agents]

    def observation_space(self, agent: str) -> GymSpace[Any]:
        return self.observation

    def action_space(self, agent: str) -> GymSpace[Any]:
        return self.action

    def see(self, agent: str) -> Any:
        return np.array([self.possible_agents.index(agent) + 1, self.time])

    def info(self, agent: str) -> dict[str, Any]:
        return {}

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents, self.time = list(self.possible_agents), 0
        self.random = np.random.default_rng(seed)
        return {a: self.see(a) for a in self.agents}, {a: self.info(a) for a in self.agents}

    def step(self, actions: dict[str, Any]) -> Any:
        assert actions.keys() == set(self.agents)
        self.time += 1
        before = self.agents
        ends = {a: self.time >= self.possible_agents.index(a) + 2 for a in before}
        self.agents = [a for a in before if not ends[a]]
        cut = self.last_is_truncated and not self.agents
        return (
            {a: self.see(a) for a in before},
            dict.fromkeys(before, 1.0),
            {a: ends[a] and not cut for a in before},
            {a: ends[a] and cut for a in before},
            {a: self.info(a) for a in before},
        )


def test_agents_that_die() -> None:
    assert_environment(lambda n: make_environment(plugin("Toy"), n))
    environment = build("Toy")
    rows = [start(environment)]
    seen = []
    for _ in range(5):
        row = rows[-1]
        observed = row.observation["observation"][0].tolist()
        mask = row.observation[AGENT_MASK][0].tolist()
        seen.append((int(row.step_type[0]), row.reward[0].tolist(), mask, observed))
        if row.step_type[0] == LAST:
            break
        rows.append(advance(environment, [1, 1, 1]))
    assert seen == [
        (FIRST, [0, 0, 0], [1, 1, 1], [[1, 0], [2, 0], [3, 0]]),
        (MID, [1, 1, 1], [1, 1, 1], [[1, 1], [2, 1], [3, 1]]),
        (MID, [1, 1, 1], [0, 1, 1], [[0, 0], [2, 2], [3, 2]]),  # its last reward, then nothing
        (MID, [0, 1, 1], [0, 0, 1], [[0, 0], [0, 0], [3, 3]]),
        (LAST, [0, 0, 1], [0, 0, 1], [[0, 0], [0, 0], [3, 4]]),  # the last one sees the end
    ]
    assert rows[-1].discount[0] == 1
    assert start(environment).observation[AGENT_MASK].all()


def test_who_terminates_needs_no_last_observation() -> None:
    keeps_the_contract("unseen death")
    environment = variant("unseen death")
    start(environment)
    row = [advance(environment, [0, 0, 0]) for _ in range(4)][-1]
    assert (row.step_type[0], row.discount[0]) == (LAST, 0)
    assert not row.observation["observation"].any()


def test_discount_is_zero_when_the_last_agents_terminate() -> None:
    environment = variant("terminates", num_envs=2)
    start(environment)
    for discount in (1, 1, 1, 0):
        assert advance(environment, np.zeros((2, 3))).discount.tolist() == [discount] * 2


def test_who_terminates_as_time_is_up_has_no_future() -> None:
    environment = variant("terminated and truncated")
    start(environment)
    row = advance(environment, [0, 0, 0])
    assert (row.step_type[0], row.discount[0]) == (LAST, 0)
    assert row.observation[AGENT_MASK].all()


class Apart(Toy):
    """All end at step 1: the first agent terminates, the others are truncated."""

    def step(self, actions: dict[str, Any]) -> Any:
        observations, rewards, *_, infos = super().step(actions)
        self.agents, terminates = [], {a: a == "a" for a in actions}
        return observations, rewards, terminates, {a: a != "a" for a in actions}, infos


def test_who_terminates_where_others_are_truncated_has_no_future() -> None:
    assert_environment(lambda n: make_environment(plugin("Apart"), n))
    environment = build("Apart")
    start(environment)
    row = advance(environment, [1, 1, 1])
    assert (row.step_type[0], row.discount[0], row.reward[0].tolist()) == (LAST, 1, [1, 1, 1])
    assert row.observation[AGENT_MASK][0].tolist() == [0, 1, 1]
    assert row.observation["observation"][0].tolist() == [[0, 0], [2, 1], [3, 1]]
    assert start(environment).observation[AGENT_MASK].all()
    told_of_nobody = build("Apart", agents_can_die=False)
    start(told_of_nobody)
    with pytest.raises(EnvironmentFault, match=r"without agent 'a'; set environment\.agents_can_d"):
        advance(told_of_nobody, [1, 1, 1])


def test_a_step_limit_truncates() -> None:
    environment = variant("terminates", max_episode_steps=3)
    start(environment)
    rows = [advance(environment, [0, 0, 0]) for _ in range(2)]
    assert rows[-1].step_type[0] == MID
    row = advance(environment, [0, 0, 0])
    assert (row.step_type[0], row.discount[0]) == (LAST, 1)
    ends_by_itself = variant("terminates", max_episode_steps=4)
    start(ends_by_itself)
    row = [advance(ends_by_itself, [0, 0, 0]) for _ in range(4)][-1]
    assert (row.step_type[0], row.discount[0]) == (LAST, 0)


def test_agents_that_must_not_die() -> None:
    environment = build("Toy", agents_can_die=False)
    assert environment.spec.observation(AGENT_MASK) is None
    assert build("Toy", arguments={"agents": 1}).spec.observation(AGENT_MASK) is None
    start(environment)
    advance(environment, [0, 0, 0])
    with pytest.raises(EnvironmentFault, match=r"without agent 'a'; set environment\.agents_can_d"):
        advance(environment, [0, 0, 0])


@pytest.mark.parametrize(
    ("sharing", "wanted"), [("none", [0, 1, 1]), ("mean", [2 / 3] * 3), ("sum", [2] * 3)]
)
def test_rewards_are_shared(sharing: str, wanted: list[float]) -> None:
    environment = build("Toy", reward_sharing=sharing)
    start(environment)
    row = [advance(environment, [0, 0, 0]) for _ in range(3)][-1]
    np.testing.assert_allclose(row.reward[0], wanted, rtol=1e-6)


class Coming(Toy):
    """The third agent comes at step 1."""

    comes = 1

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        observations, infos = super().reset(seed)
        self.agents.remove("c")
        return {a: observations[a] for a in self.agents}, {a: infos[a] for a in self.agents}

    def step(self, actions: dict[str, Any]) -> Any:
        result = super().step(actions)
        if self.time == self.comes:
            self.agents.append("c")
            result[0]["c"] = self.see("c")
        return result


def test_agents_that_come() -> None:
    assert_environment(lambda n: make_environment(plugin("Coming"), n))
    environment = build("Coming")
    assert start(environment).observation[AGENT_MASK][0].tolist() == [1, 1, 0]
    row = advance(environment, [0, 0, 0])
    assert row.observation[AGENT_MASK][0].tolist() == [1, 1, 1]
    assert row.observation["observation"][0, 2].tolist() == [3, 1]


class Lingering(Toy):
    """Who is done leaves `agents` at the start of the next step, or never."""

    never = False

    def step(self, actions: dict[str, Any]) -> Any:
        before = self.agents if self.never else list(actions)
        self.agents = list(actions)
        result = super().step(actions)
        self.agents = before
        return result


def test_agents_that_leave_late_are_done_all_the_same() -> None:
    assert_environment(lambda n: make_environment(plugin("Lingering"), n))
    late, punctual = build("Lingering"), build("Toy")
    start(late), start(punctual)
    for _ in range(4):
        row, wanted = advance(late, [0, 0, 0]), advance(punctual, [0, 0, 0])
        assert row.step_type[0] == wanted.step_type[0]
        assert row.reward.tolist() == wanted.reward.tolist()
        for name in row.observation:
            np.testing.assert_array_equal(row.observation[name], wanted.observation[name])


class Returning(Toy):
    """The first agent is terminated at step 2, not there in the next row and back at step 4."""

    away: tuple[int, ...] = (2, 3)

    def step(self, actions: dict[str, Any]) -> Any:
        self.time += 1
        self.agents = self.possible_agents[self.time in self.away :]
        everyone = {*actions, *self.agents}
        return (
            {a: self.see(a) for a in everyone},
            dict.fromkeys(actions, 1.0),
            {a: a == "a" and self.time == 2 for a in everyone},
            dict.fromkeys(everyone, False),
            {a: {} for a in everyone},
        )


@pytest.mark.parametrize("away", [(2, 3), (3,)])
def test_agents_that_were_away_may_come_back(
    away: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Returning, "away", away)
    environment = build("Returning")
    start(environment)
    alive = [advance(environment, [0] * 3).observation[AGENT_MASK][0].tolist() for _ in range(5)]
    assert alive == [[1, 1, 1], [0, 1, 1], [0, 1, 1], [1, 1, 1], [1, 1, 1]]


class Masked(Toy):
    """Dict observations as PettingZoo's classics have them, with an image and integers."""

    observation = Dict(
        {
            "observation": Dict(
                {
                    "camera": Box(0, 255, (4, 5, 3), np.uint8),
                    "place": Discrete(3, start=1),
                    "parts": Tuple((MultiDiscrete([2, 3]), MultiBinary(2), Box(-1, 1, (1, 2)))),
                }
            ),
            ACTION_MASK: Box(0, 1, (3,), np.int8),
        }
    )
    action = Discrete(3)

    def see(self, agent: str) -> Any:
        camera = np.arange(60, dtype=np.uint8).reshape(4, 5, 3)
        parts = (np.array([1, 2]), np.array([1, 0], np.int8), np.array([[0.5, -0.5]], np.float32))
        mask = np.array([0, 1, agent == "a"], np.int8) if self.time < 4 else np.zeros(3, np.int8)
        seen = {"camera": camera, "place": np.int64(2), "parts": parts}
        return {"observation": seen, ACTION_MASK: mask}


def test_dict_observations_images_and_masks() -> None:
    assert_environment(lambda n: make_environment(plugin("Masked"), n))
    environment = build("Masked")
    row = start(environment)
    vector = environment.spec.observation("observation")
    assert vector is not None
    assert vector.shape == (3 + 5 + 2 + 2,)
    images = row.observation["image.camera"]
    assert (images.shape, images.dtype) == ((1, 3, 3, 4, 5), np.uint8)  # [N, A, C, H, W]
    assert images[0, 0, 1, 2, 3] == 2 * 15 + 3 * 3 + 1
    parts = {tuple(x) for x in row.observation["observation"][0].tolist()}
    place, tuples = [0, 1, 0], [0, 1, 0, 0, 1, 1, 0, 0.5, -0.5]
    assert parts in ({(*place, *tuples)}, {(*tuples, *place)})  # gymnasium may sort a Dict
    assert row.observation[ACTION_MASK][0].tolist() == [[0, 1, 1], [0, 1, 0], [0, 1, 0]]
    rows = [advance(environment, [2, 1, 1]) for _ in range(2)]
    assert rows[-1].observation[ACTION_MASK][0].tolist() == [[1, 0, 0], [0, 1, 0], [0, 1, 0]]


class MasksInInfos(Toy):
    def info(self, agent: str) -> dict[str, Any]:
        return {ACTION_MASK: np.array([1, agent == "c"], np.int8), "score": self.time * 2}


def test_masks_in_infos_and_metrics() -> None:
    factory = plugin("MasksInInfos", metrics=["score"])
    assert_environment(lambda n: make_environment(factory, n))
    environment = build("MasksInInfos", metrics=["score"])
    assert start(environment).observation[ACTION_MASK][0].tolist() == [[1, 0], [1, 0], [1, 1]]
    row = [advance(environment, [0, 0, 1]) for _ in range(4)][-1]
    assert row.metrics["score"][0] == 8
    assert row.metrics["length"][0] == 4
    environment = build("MasksInInfos", metrics=["goals"])
    start(environment)
    with pytest.raises(EnvironmentFault, match=r"no 'goals' among the infos.*environment\.metrics"):
        _ = [advance(environment, [0, 0, 1]) for _ in range(4)]


def test_a_metric_is_the_mean_over_those_who_report_it() -> None:
    environment = variant("scores apart", metrics=["score"])
    start(environment)
    assert advance(environment, [0, 0, 0]).metrics["score"][0] == 2.5


def test_none_as_info_of_an_agent_is_no_info() -> None:
    keeps_the_contract("none as info", metrics=["score"])
    environment = variant("none as info", metrics=["score"])
    assert start(environment).observation[ACTION_MASK][0].tolist() == [[1, 0], [1, 1], [1, 1]]
    assert [advance(environment, [0, 0, 1]) for _ in range(4)][-1].metrics["score"][0] == 8


def test_infos_that_nobody_reads_may_be_none() -> None:
    keeps_the_contract("no infos")


class Combined(Toy):
    """Agents with MultiDiscrete and MultiBinary actions."""

    def action_space(self, agent: str) -> GymSpace[Any]:
        return MultiDiscrete([2, 3], start=[0, 1]) if agent == "a" else MultiBinary(2)

    def step(self, actions: dict[str, Any]) -> Any:
        self.taken = {a: np.array(x).tolist() for a, x in actions.items()}
        return super().step(actions)


def test_combinations_become_discrete_actions() -> None:
    environment = build("Combined", joint_actions=True)
    assert environment.spec.action == contract.Discrete(6)
    mask = start(environment).observation[ACTION_MASK][0].tolist()
    assert mask == [[1] * 6, [1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 0, 0]]
    advance(environment, [5, 2, 0])
    assert environment._environments[0].taken == {"a": [1, 3], "b": [1, 0], "c": [0, 0]}
    row = advance(environment, [0, 0, 0])  # "a" is gone
    assert row.observation[ACTION_MASK][0].tolist() == [[1] + [0] * 5, mask[1], mask[2]]
    assert start(environment).observation[ACTION_MASK][0].tolist() == mask


def test_choices_keep_their_masks() -> None:
    environment = build("Combined")
    assert environment.spec.action == contract.Composite((2, 3))
    mask = start(environment).observation[ACTION_MASK][0].tolist()
    assert mask == [[1] * 5, [1, 1, 1, 1, 0], [1, 1, 1, 1, 0]]
    advance(environment, [[1, 2], [1, 0], [0, 0]])
    assert environment._environments[0].taken == {"a": [1, 3], "b": [1, 0], "c": [0, 0]}
    row = advance(environment, [[0, 0]] * 3)  # "a" is gone
    assert row.observation[ACTION_MASK][0].tolist() == [[1, 0, 1, 0, 0], mask[1], mask[2]]


class LateCombined(Combined, Coming):
    """The third agent comes at step 1, or at step 2, in which the first one leaves."""


@pytest.mark.parametrize(("comes", "there"), [(1, True), (2, False)])
def test_who_comes_may_do_what_its_space_holds(
    monkeypatch: pytest.MonkeyPatch, comes: int, there: bool
) -> None:
    monkeypatch.setattr(LateCombined, "comes", comes)
    environment = build("LateCombined", joint_actions=True)
    assert start(environment).observation[ACTION_MASK][0, 2].tolist() == [1, 0, 0, 0, 0, 0]
    row = [advance(environment, [0, 0, 0]) for _ in range(comes)][-1]
    assert row.observation[AGENT_MASK][0].tolist() == [there, 1, 1]
    assert row.observation[ACTION_MASK][0, 2].tolist() == [1, 1, 1, 1, 0, 0]


def test_discrete_actions_begin_where_their_space_says() -> None:
    environment = variant("starts at 5")
    start(environment)
    advance(environment, [0, 2, 1])
    assert environment._environments[0].taken == {"a": 5, "b": 7, "c": 6}


class NoInfos(Toy):
    """Has no infos at the end if its seed is odd, or something else."""

    instead: Any = None

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.odd = seed is not None and seed % 2 == 1
        return super().reset(seed)

    def info(self, agent: str) -> dict[str, Any]:
        return {"goals": 3}

    def step(self, actions: dict[str, Any]) -> Any:
        *rest, infos = super().step(actions)
        return *rest, self.instead if self.odd and not self.agents else infos


class Lost:
    def __float__(self) -> float:
        raise RuntimeError("the score is lost")


# What one method of a toy does instead; `own` is its own method.


def flawed(flaw: str) -> "Toy":
    """A toy of which one thing is another."""
    of, changes = {**{name: fault[:2] for name, fault in FAULTS.items()}, **VARIANTS}[flaw]
    toy: Toy = of()
    for name, new in changes.items():
        instead = partial(new, toy, getattr(toy, name)) if callable(new) else new
        setattr(toy, name, instead)
    return toy


def sees(time: int, agents: str, change: Callable[[Any], Any]) -> Any:
    """In this step these agents see something else."""

    def see(toy: Toy, own: Any, agent: str) -> Any:
        seen = own(agent)
        return change(seen) if toy.time == time and agent in agents else seen

    return see


def returns(change: Callable[..., Any]) -> Any:
    """A step returns what `change` makes of the toy and the five parts of its result."""
    return lambda toy, own, actions: change(toy, *own(actions))


def puts(part: int, agent: str, value: Any) -> Any:
    """One part of what a step returns says something else of an agent."""

    def change(toy: Toy, *result: Any) -> Any:
        result[part][agent] = value
        return result

    return returns(change)


def leaves(change: Callable[[list[str]], list[str]]) -> Any:
    """Agents leave or come without a flag."""

    def step(toy: Toy, own: Any, actions: Any) -> Any:
        result = own(actions)
        toy.agents = change(toy.agents)
        return result

    return step


def fails(seen: Any) -> Any:
    raise RuntimeError("the motor is hot")


def ends_both_ways(toy: Toy, own: Any, actions: Any) -> Any:
    """All end at step 1, terminated and truncated at once."""
    observations, rewards, *_, infos = own(actions)
    toy.agents, yes = [], dict.fromkeys(actions, True)
    return observations, rewards, yes, yes, infos


def deserted(toy: Toy, own: Any, seed: int | None = None, options: Any = None) -> Any:
    """No agent is present if the seed is odd."""
    result = own(seed)
    if seed is not None and seed % 2 == 1:
        toy.agents = []
    return result


_REWARD, _TERMINATED, _TRUNCATED = 1, 2, 3  # of what a step returns

# What keeps the contract in another way, or is refused before it begins.
VARIANTS: dict[str, tuple[type[Toy], dict[str, Any]]] = {
    "terminates": (Toy, {"last_is_truncated": False}),
    "unseen death": (
        Toy,
        {
            "last_is_truncated": False,
            "step": returns(lambda toy, seen, *rest: ({a: seen[a] for a in toy.agents}, *rest)),
        },
    ),
    "terminated and truncated": (Toy, {"step": ends_both_ways}),
    "none as info": (
        MasksInInfos,
        {"info": lambda toy, own, agent: None if agent == "b" else own(agent)},
    ),
    "scores apart": (
        Apart,
        {"info": lambda toy, own, agent: {"a": {"score": 1}, "b": {}, "c": {"score": 4}}[agent]},
    ),
    "no infos": (Toy, {"step": returns(lambda toy, *result: (*result[:4], None))}),
    "deserted": (Toy, {"reset": deserted}),
    "no infos at the end": (NoInfos, {}),
    "lost infos": (NoInfos, {"instead": {"c": {"goals": Lost()}}}),
    "state": (
        Toy,
        {
            "state_space": Box(-np.inf, np.inf, (3, 2)),
            "state": lambda toy, own: np.array([[0, 1], [2, 3], [4, np.inf if toy.time else 5]]),
        },
    ),
    "word as score": (
        Toy,
        {"last_is_truncated": False, "info": lambda toy, own, agent: {"goals": "many"}},
    ),
    "number as first info": (Toy, {"info": lambda toy, own, agent: 7 if agent == "b" else {}}),
    "starts at 5": (Combined, {"action_space": lambda toy, own, agent: Discrete(3, start=5)}),
    "mixed": (
        Toy,
        {"action_space": lambda toy, own, agent: Box(-1, 1, (2,)) if agent == "b" else Discrete(2)},
    ),
    "masked numbers": (MasksInInfos, {"action": Box(-1, 1, (2,))}),
    "seen mask of numbers": (Masked, {"action": Box(-1, 1, (2,))}),
    "text": (Toy, {"observation": Text(5)}),
    "blind": (
        Toy,
        {"observation": Dict({"nothing": Box(-1, 1, (0,)), ACTION_MASK: Box(0, 1, (2,), np.int8)})},
    ),
    "no spaces": (  # as ParallelEnv itself does
        Toy,
        {"observation_space": lambda toy, own, agent: toy.observation_spaces[agent]},
    ),
    "space is no method": (Toy, {"action_space": Discrete(2)}),
    "twins": (Toy, {"possible_agents": ["a", "b", "a"]}),
}

FAULTS: dict[str, tuple[type[Toy], dict[str, Any], str]] = {
    "raises": (
        Toy,
        {"see": sees(2, "abc", fails)},
        r"'toy' raised RuntimeError: the motor is hot, in .* seed 77 .* at step 2",
    ),
    "nan": (
        Toy,
        {"see": sees(1, "b", lambda _: np.array([0, np.nan]))},
        r"nan in observation 'observation' of agent 'b' at index \[1\].*77.*step 1",
    ),
    "nan reward": (
        Toy,
        {"step": puts(_REWARD, "c", np.nan)},
        r"returned nan in reward of agent 'c', in .*77.*step 1",
    ),
    "shape": (
        Toy,
        {"see": sees(1, "c", lambda _: np.zeros(1))},
        r"of agent 'c' has shape \(1,\), its space says \(2,\).*77.*step 1",
    ),
    "unpaid": (
        Toy,
        {"step": puts(_REWARD, "b", None)},
        r"returned None as reward of agent 'b' from step\(\), not.*77.*step 1",
    ),
    "reward is array": (
        Toy,
        {"step": puts(_REWARD, "b", np.ones(1))},
        r"returned an array of shape \(1,\) as reward of agent 'b' from step\(\), not a number",
    ),
    "reward is word": (
        Toy,
        {"step": puts(_REWARD, "b", "much")},
        r"returned 'much' as reward of agent 'b' from step\(\), not",
    ),
    "flag is none": (
        Toy,
        {"step": puts(_TERMINATED, "b", None)},
        r"returned None as termination of agent 'b' from step\(\), not true or false, .*77.*step 1",
    ),
    "cut is none": (
        Toy,
        {"step": puts(_TRUNCATED, "b", None)},
        r"returned None as truncation of agent 'b' from step\(\), not true",
    ),
    "flag is array": (
        Toy,
        {"step": puts(_TRUNCATED, "b", np.zeros(2, np.bool_))},
        r"an array of shape \(2,\) as truncation of agent 'b' from",
    ),
    "nothing": (
        Toy,
        {"step": returns(lambda *_: None)},
        r"returned None from step\(\), not \(observations, rewards, term",
    ),
    "other key": (
        Masked,
        {"see": sees(1, "abc", lambda seen: {"obs": seen["observation"]})},
        r"that of agent 'a' has no 'observation', which its space has; it has 'obs', .*77.*step 1",
    ),
    "no dict": (
        Masked,
        {"see": sees(1, "abc", lambda _: np.zeros(2, np.float32))},
        r"that of agent 'a' is a ndarray; its space has a 'observation' there, .*77.*step 1",
    ),
    "leaves out": (
        Toy,
        {"step": returns(lambda toy, seen, *rest: ({a: seen[a] for a in "ac"}, *rest))},
        r"left agent 'b' out of what step\(\) returned.*77.*step 1",
    ),
    "lingers": (
        Lingering,
        {"never": True},
        r"keeps agent 'a', terminated at step 2, in agents; remove it there, .*77.*step 3",
    ),
    "vanishes": (
        Toy,
        {"step": leaves(lambda agents: agents[1:])},
        r"takes agent 'a' out of agents, neither terminated nor truncated, .*77.*step 1",
    ),
    "stranger": (
        Toy,
        {"step": leaves(lambda agents: [*agents, "d"])},
        r"has agent 'd', not one of its possible_agents, .*77.*step 1",
    ),
    "all vanish": (
        Toy,
        {"step": leaves(lambda agents: [])},
        r"takes agent 'a' out of agents, neither term.*77.*step 1",
    ),
    "swapped": (
        Coming,
        {"step": leaves(lambda agents: agents[1:])},
        r"takes agent 'a' out of agents, neither term.*77.*step 1",
    ),
    "unseen end": (
        Apart,
        {"step": returns(lambda toy, seen, *rest: ({"a": None, "c": seen["c"]}, *rest))},
        r"truncated agent 'b' without a last observation, .*77.*step 1",
    ),
    "masks from step on": (
        MasksInInfos,
        {"info": lambda toy, own, agent: own(agent) if toy.time else {}},
        r"gives agent 'a' an 'action_mask' among its infos, but none in its first reset\(\); give "
        r"it in both, .*77.*step 1",
    ),
    "masks without infos": (
        MasksInInfos,
        {"step": returns(lambda toy, *result: (*result[:4], None))},
        r"a NoneType as infos, not a dictionary, .*step 1",
    ),
    "mask left out": (
        Masked,
        {"see": sees(1, "b", lambda seen: {"observation": seen["observation"]})},
        r"that of agent 'b' lacks 'action_mask', .*77.*step 1",
    ),
    "number as info": (
        Toy,
        {"info": lambda toy, own, agent: toy.time if agent == "b" and toy.time else {}},
        r"int as infos of agent 'b', not a dictionary, .*step 1",
    ),
    "old": (
        Toy,
        {"step": returns(lambda toy, *result: result[:4])},
        r"returned 4 things from step\(\), not \(observations, rewards, term",
    ),
    "stuck": (
        MasksInInfos,
        {"info": lambda toy, own, agent: {ACTION_MASK: np.array([toy.time < 1, 0])}},
        r"leaves agent 'a' no legal action.*77.*step 1",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_name_environment_agent_seed_and_step(fault: str) -> None:
    environment = variant(fault)
    start(environment, 77)
    with pytest.raises(CopiesFailed, match=FAULTS[fault][2]) as caught:
        _ = [advance(environment, [0, 0, 0]) for _ in range(3)]
    (found,) = caught.value.faults
    assert found.copies == (0,)
    assert found.reason == ("raised" if fault == "raises" else "contents")


def test_an_episode_without_agents() -> None:
    environment = variant("deserted")
    with pytest.raises(CopiesFailed, match=r"starts an episode without agents, .* seed 77"):
        start(environment, 77)


def test_a_state_that_is_no_number() -> None:
    environment = variant("state", state=True)
    assert start(environment).observation[STATE].tolist() == [[0, 1, 2, 3, 4, 5]]
    with pytest.raises(
        CopiesFailed, match=r"returned inf in observation 'state' at index .*, in .* at step 1"
    ):
        advance(environment, [0, 0, 0])


def test_an_info_that_is_no_number() -> None:
    environment = variant("word as score", metrics=["goals"])
    start(environment)
    with pytest.raises(CopiesFailed, match="has no number as info 'goals': could not convert"):
        _ = [advance(environment, [0, 0, 0]) for _ in range(4)]


@pytest.mark.parametrize(
    ("flaw", "words"),
    [
        ("no infos at the end", r"returned a NoneType as infos, not a dictionary, .*seed 7 .*4"),
        ("lost infos", r"no number as info 'goals': RuntimeError: the score.*seed 7 .* step 4"),
    ],
)
def test_bad_infos_cost_the_episode_of_their_own_copy_only(flaw: str, words: str) -> None:
    environment = variant(flaw, num_envs=3, metrics=["goals"])
    environment.reset(np.array([2, 7, 4], np.uint64))
    _ = [advance(environment, np.zeros((3, 3))) for _ in range(3)]
    with pytest.raises(CopiesFailed, match=words) as caught:
        advance(environment, np.zeros((3, 3)))
    (found,) = caught.value.faults
    assert (found.copies, found.reason) == ((1,), "contents")
    row = caught.value.timestep
    assert row.step_type.tolist() == [LAST, StepType.ABORTED, LAST]
    assert row.metrics["goals"][[0, 2]].tolist() == [3, 3]


class Unlucky(Toy):
    """Breaks, for ever, in its second step if its seed is odd."""

    made = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).made += 1
        self.broken = False

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        assert not self.broken
        self.unlucky = seed is not None and seed % 2 == 1
        return super().reset(seed)

    def step(self, actions: dict[str, Any]) -> Any:
        if self.unlucky and self.time == 1:
            self.broken = True
        if self.broken:
            raise RuntimeError("the motor is hot")
        return super().step(actions)


def test_failed_copy_is_recreated_and_others_are_not_affected() -> None:
    environment, alone = build("Unlucky", num_envs=3), build("Unlucky", num_envs=1)
    seeds, none = np.array([2, 7, 4], np.uint64), np.zeros(3, np.bool_)
    at = np.zeros(2, np.int64)
    environment.watch(at)
    alone.reset(seeds[:1])
    environment.reset(seeds)
    assert at[0] == 2
    made = Unlucky.made
    action = np.zeros((3, 3), np.int32)
    rows = [(advance(alone, [0, 0, 0]), environment.step(action, none, seeds))]
    with pytest.raises(CopiesFailed, match=r"'toy' raised Runtime.* seed 7 .* at step 2") as caught:
        environment.step(action, none, seeds)
    rows.append((advance(alone, [0, 0, 0]), caught.value.timestep))
    assert rows[1][1].step_type.tolist() == [MID, StepType.ABORTED, MID]
    assert Unlucky.made == made
    restart, seeds = np.array([False, True, False]), np.array([0, 8, 0], np.uint64)
    rows.append((advance(alone, [0, 0, 0]), environment.step(action, restart, seeds)))
    assert Unlucky.made == made + 1
    assert rows[2][1].step_type.tolist() == [MID, FIRST, MID]
    for wanted, row in rows[2:]:  # buffers are used again: only the last rows can be compared
        for name in row.observation:
            np.testing.assert_array_equal(row.observation[name][0], wanted.observation[name][0])
        np.testing.assert_array_equal(row.reward[0], wanted.reward[0])
    row = environment.step(action, none, seeds)
    assert row.step_type.tolist() == [LAST, MID, LAST]
    assert row.metrics["length"].tolist() == [4, 1, 4]
    environment.reset(np.array([2, 8, 4], np.uint64))
    assert Unlucky.made == made + 1


class NoList(Toy):
    possible_agents = property(lambda self: len(None))  # type: ignore

    def __init__(self) -> None:
        pass


NOT_AN_ENVIRONMENT = 3


def makes_nothing() -> None:
    pass


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "no colon": ("mpe2.simple_spread_v3.", {}, "package.module:factory"),
    "no package": (
        "no_such_package.x:y",
        {},
        "no package 'no_such_package'; install what provides it",
    ),
    "no module": ("mpe2.simple_spread_v9:parallel_env", {}, r"mean 'mpe2\.simple_spread_v3'"),
    "moved": ("pettingzoo.mpe.simple_spread_v3:parallel_env", {}, r"write mpe2\.simple_spread_v3"),
    "no factory": ("mpe2.simple_spread_v3:paralel_env", {}, "did you mean 'parallel_env'"),
    "not callable": (f"{__name__}:NOT_AN_ENVIRONMENT", {}, "is a int; name a function or class"),
    "turns alone": (
        "pettingzoo.classic.connect_four_v3:parallel_env",
        {},
        r"'parallel_env': its agents take turns: write pettingzoo\.classic\.connect_four_v3:env",
    ),
    "nothing": (f"{__name__}:makes_nothing", {}, "NoneType, neither a PettingZoo parallel"),
    "gymnasium": (
        "gymnasium:make",
        {"arguments": {"id": "CartPole-v1"}},
        r"set environment\.name: gymnasium",
    ),
    "arguments": (
        "mpe2.simple_spread_v3:parallel_env",
        {"arguments": {"n": 3}},
        r"parallel_env\(n=3\) raised TypeError.*environment\.arguments",
    ),
    "mixed": (
        f"{__name__}:flawed",
        {"arguments": {"flaw": "mixed"}, "joint_actions": True},
        "agents 'b' have continuous actions, 'a', 'c' discrete ones; only mappo, happo",
    ),
    "text": (
        f"{__name__}:flawed",
        {"arguments": {"flaw": "text"}},
        "'a' observes a Text space; murmur takes Box",
    ),
    "blind": (
        f"{__name__}:flawed",
        {"arguments": {"flaw": "blind"}},
        "no agent observes anything: .* has size zero",
    ),
    "no spaces": (
        f"{__name__}:flawed",
        {"arguments": {"flaw": "no spaces"}},
        r"reading observation_space\('a'\) raised AttributeError: .*; "
        r"give it a method observation_space\(self, agent\)",
    ),
    "space is no method": (
        f"{__name__}:flawed",
        {"arguments": {"flaw": "space is no method"}},
        r"reading action_space\('a'\) raised TypeError: .*; give it a method action_space",
    ),
    "twins": (
        f"{__name__}:flawed",
        {"arguments": {"flaw": "twins"}},
        "names 'a' 2 times in possible_agents; each agent needs",
    ),
    "agents cannot be read": (
        f"{__name__}:NoList",
        {},
        r"reading possible_agents raised TypeError: .*; set self\.possible_agents",
    ),
    "masked numbers": (
        f"{__name__}:flawed",
        {"arguments": {"flaw": "masked numbers"}},
        "gives an 'action_mask', but its actions are numbers, of which none can be illegal",
    ),
    "seen mask of numbers": (
        f"{__name__}:flawed",
        {"arguments": {"flaw": "seen mask of numbers"}},
        "gives an 'action_mask', but its actions are numbers, of which none can be illegal",
    ),
    "info": (
        f"{__name__}:flawed",
        {"arguments": {"flaw": "number as first info"}},
        "infos of each agent; those of agent 'b' are a int",
    ),
    "state": (f"{__name__}:Toy", {"state": True}, r"no state\(\).*environment\.state: false"),
    "metric": (f"{__name__}:Toy", {"metrics": ["return"]}, "always reported"),
}


@pytest.mark.filterwarnings("ignore:The old environment creation API:DeprecationWarning")
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_used_is_refused_with_the_fix(case: str) -> None:
    factory, options, words = REFUSED[case]
    data = {"name": "pettingzoo", "factory": factory, **options}
    with pytest.raises(ConfigError, match=words):
        make_environment(PluginConfig.model_validate(data), 1)


def test_seeds_fold_into_32_bits() -> None:
    assert fold_seed(7) == 7
    assert fold_seed(2**32 + 7) == 6
    assert 0 <= fold_seed(2**63 - 1) < 2**32
