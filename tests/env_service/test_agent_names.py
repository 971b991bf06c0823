"""Agents by name: whatever order an environment gives them in, each has a row of its own."""

from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from pettingzoo import ParallelEnv

from murmur.env_service.checks import describe_environment
from murmur.env_service.environment import VectorEnvironment, make_environment
from murmur.shared.config import PluginConfig
from murmur.shared.process.errors import ConfigError, SpecError
from murmur.shared.wire.codec import RowCheck
from murmur.shared.wire.timestep import StepType

RESTART = np.ones(1, np.bool_)
SEEDS = np.zeros(1, np.uint64)


class Numbers(ParallelEnv[Any, Any, Any]):
    """Each agent observes its number and is paid its action."""

    metadata = {"name": "numbers"}  # noqa: RUF012 - as PettingZoo has it
    made = 0

    def __init__(
        self, names: Any = ("a", "b", "c"), kind: str = "", state: tuple[int, ...] = ()
    ) -> None:
        Numbers.made += 1
        self.names, self.kind = list(names), kind
        self.possible_agents = list(names)
        if kind == "other copies" and Numbers.made % 2 == 0:
            self.possible_agents.reverse()
        if state:
            self.state_space = Box(-9, 9, state, np.float32)

    def observation_space(self, agent: Any) -> Any:
        return Box(-9, 9, (1,), np.float32)

    def action_space(self, agent: Any) -> Any:
        return Discrete(5)

    def state(self) -> Any:
        return np.array([self.possible_agents.index(agent) for agent in self.names], np.float32)

    def _number(self, agents: list[Any]) -> dict[Any, Any]:
        seen = {a: np.full(1, self.names.index(a), np.float32) for a in reversed(agents)}
        return dict(reversed(seen.items())) if self.kind == "dictionaries" else seen

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents = list(self.possible_agents)
        if self.kind == "agents":
            self.agents.reverse()
        if self.kind == "late":
            self.agents = self.agents[-1:]
        return self._number(self.agents), {agent: {} for agent in self.agents}

    def step(self, actions: Any) -> Any:
        before, self.agents = self.agents, list(reversed(self.possible_agents))
        rewards = {agent: float(actions.get(agent, 0)) for agent in reversed(self.agents)}
        no = dict.fromkeys(before + self.agents, False)
        return self._number(self.agents), rewards, no, no, {agent: {} for agent in no}


def build(num_envs: int = 1, sees_state: bool = False, **arguments: Any) -> VectorEnvironment:
    Numbers.made = 0
    options = {"factory": f"{__name__}:Numbers", "arguments": arguments, "state": sees_state}
    config = PluginConfig.model_validate({"name": "pettingzoo", "max_episode_steps": 5, **options})
    return make_environment(config, num_envs)


@pytest.mark.parametrize("kind", ["", "agents", "dictionaries", "late", "other copies"])
def test_rows_follow_possible_agents_of_the_first_copy(kind: str) -> None:
    environment = build(2, kind=kind)
    assert environment.spec.agents == ("a", "b", "c")
    environment.reset(np.zeros(2, np.uint64))
    row = environment.step(
        np.array([[1, 2, 3]] * 2, np.int32), np.zeros(2, np.bool_), np.zeros(2, np.uint64)
    )
    assert row.observation["observation"][..., 0].tolist() == [[0, 1, 2]] * 2
    paid = [0, 0, 3] if kind == "late" else [1, 2, 3]
    assert row.reward.tolist()[0] == paid


def test_state_of_copies_with_other_orders_is_refused() -> None:
    assert build(2, True, state=[3]).spec.observation("state") is not None
    with pytest.raises(ConfigError, match=r"as a, b, c in one copy and as c, b, a in another"):
        build(2, True, state=[3], kind="other copies")


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["a", "b\n"], r"agent 'b\\n' has a name of 2 characters"),
        (["a", ""], "agent '' has a name of 0 characters"),
        (["a", "b" * 257], "has a name of 257 characters"),
    ],
)
def test_names_that_cannot_travel_are_refused(names: list[str], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        build(names=names)


def test_names_need_not_be_text_and_may_be_many() -> None:
    environment = build(names=list(range(64)))
    assert environment.spec.agents == tuple(map(str, range(64)))
    row = environment.reset(SEEDS)
    assert row.observation["observation"][0, :, 0].tolist() == list(range(64))
    lines = describe_environment(lambda n: build(n, names=list(range(64))), rows=3)
    assert lines[0] == "64 agents: 0, 1, 2, 3, 4, 5, 6, 7, ..."


def test_messages_name_the_agent() -> None:
    environment = build(names=["left", "right"])
    row = environment.reset(SEEDS)
    row.step_type[:] = StepType.MID
    row.reward[0, 1] = 5
    (text,) = RowCheck(environment.spec, 1, max_abs_reward=2).broken(row).values()
    assert text.startswith("a reward of 5 for agent 'right', beyond")
    row.reward[0, 1] = np.nan
    (text,) = RowCheck(environment.spec, 1).broken(row).values()
    assert text == "nan in reward of agent 'right'"
    row.reward[0, 1] = 0
    row.observation["observation"][0, 0] = np.inf
    (text,) = RowCheck(environment.spec, 1).broken(row).values()
    assert text == "inf in observation 'observation' of agent 'left' at index [0]"


@pytest.mark.parametrize(
    ("name", "agents"),
    [
        ("formation", ("leader", "follower_1", "follower_2")),
        ("terrain", ("uav_0", "uav_1", "uav_2", "uav_3")),
        ("snakes", ("snake_0", "snake_1", "snake_2")),
        ("spread", ()),
    ],
)
def test_own_environments_name_their_agents(name: str, agents: tuple[str, ...]) -> None:
    assert make_environment(PluginConfig(name=name), 1).spec.agents == agents
