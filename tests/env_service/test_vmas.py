"""VMAS behind the contract: real scenarios beside VMAS itself, and what users may get wrong."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from vmas import make_env
from vmas.simulator.core import Agent, World
from vmas.simulator.scenario import BaseScenario

from murmur.env_service.adapters.seeds import fold_seed
from murmur.env_service.checks import assert_environment
from murmur.env_service.environment import make_environment
from murmur.env_service.envs.vmas import Vmas
from murmur.env_service.sessions.evaluate import run_baseline
from murmur.shared.config import PluginConfig
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.process.errors import ConfigError
from murmur.shared.wire.spec import Continuous, Discrete
from murmur.shared.wire.timestep import StepType

FIRST, MID, LAST = StepType.FIRST, StepType.MID, StepType.LAST


def build(num_envs: int, **options: Any) -> Vmas:
    plugin = PluginConfig.model_validate({"name": "vmas", **options})
    environment = make_environment(plugin, num_envs)
    assert isinstance(environment, Vmas)
    return environment


SCENARIOS: dict[str, dict[str, Any]] = {
    "balance": {"arguments": {"n_agents": 4}, "metrics": ["pos_rew"]},
    "navigation": {"arguments": {"n_agents": 3}, "continuous": False},
    "simple_speaker_listener": {"continuous": False},
    "transport": {"arguments": {"n_agents": 2}},
    "wheel": {},  # its rewards are [N, 1]
}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_scenarios_keep_the_contract(scenario: str) -> None:
    options = SCENARIOS[scenario]
    assert_environment(
        lambda n: build(n, scenario=scenario, max_episode_steps=8, **options), max_rows=25
    )


@pytest.mark.parametrize("continuous", [True, False])
@pytest.mark.parametrize("scenario", ["balance", "navigation"])
def test_rows_equal_vmas_itself(scenario: str, continuous: bool) -> None:
    arguments, n, a = {"n_agents": 3}, 4, 3
    environment = build(
        n, scenario=scenario, arguments=arguments, continuous=continuous, max_episode_steps=30
    )
    raw = make_env(scenario, n, continuous_actions=continuous, **arguments)
    seeds = np.array([5, 2**40 + 7, 9, 11], np.uint64)
    for i, seed in enumerate(seeds.tolist()):
        raw.seed(fold_seed(seed))
        raw.reset_at(i)
    seen = raw.get_from_scenario(True, False, False, False)[0]
    timestep = environment.reset(seeds)
    random = np.random.default_rng(0)
    for step in range(31):
        np.testing.assert_array_equal(
            timestep.observation["observation"], torch.stack(seen, 1).numpy()
        )
        if step == 30:
            break
        if continuous:
            action: Any = random.uniform(-1, 1, (n, a, 2)).astype(np.float32)
        else:
            action = random.integers(9, size=(n, a), dtype=np.int32)
        seen, rewards, done, _ = raw.step([torch.from_numpy(action[:, i]) for i in range(a)])
        timestep = environment.step(action, np.zeros(n, np.bool_), seeds)
        np.testing.assert_array_equal(timestep.reward, torch.stack(rewards, 1).numpy())
        np.testing.assert_array_equal(timestep.discount, 1 - done.numpy().astype(np.float32))
        ended = np.array(timestep.step_type) == LAST
        np.testing.assert_array_equal(ended, done.numpy() | (step == 29))
    assert timestep.metrics["length"].tolist() == [30] * n


def test_the_spec() -> None:
    spec = build(2, scenario="balance", arguments={"n_agents": 4}).spec
    assert (spec.name, spec.num_agents, spec.max_episode_steps) == ("vmas-balance", 4, 100)
    assert spec.agents == ("agent_0", "agent_1", "agent_2", "agent_3")
    assert spec.action == Continuous(2)
    assert spec.observations[0].shape == (16,)
    assert build(2, scenario="navigation", continuous=False).spec.action == Discrete(9)


def test_metrics_are_means_over_agents() -> None:
    environment = build(2, scenario="balance", metrics=["pos_rew"], max_episode_steps=3)
    timestep = environment.reset(np.array([1, 2], np.uint64))
    for _ in range(3):
        shape = (2, environment.spec.num_agents, 2)
        timestep = environment.step(
            np.ones(shape, np.float32), np.zeros(2, np.bool_), np.zeros(2, np.uint64)
        )
    # Every agent of balance is paid the same: the shaping, and -10 where it lies on the ground.
    paid = timestep.reward[:, 0] - timestep.metrics["pos_rew"]
    assert all(abs(x) < 1e-5 or abs(x + 10) < 1e-5 for x in paid.tolist())


class Ranged(BaseScenario):  # type: ignore[misc]
    """One agent with a range of 2 in x and 0.5 in y; it is paid what VMAS was told to do."""

    def make_world(self, batch_dim: int, device: Any, **kwargs: Any) -> World:
        world = World(batch_dim, device)
        world.add_agent(Agent(name="agent", u_range=[2.0, 0.5]))
        return world

    def reset_world_at(self, env_index: int | None = None) -> None:
        pass

    def observation(self, agent: Agent) -> Any:
        return {"pos": agent.state.pos, "vel": agent.state.vel}

    def reward(self, agent: Agent) -> Any:
        return agent.action.u[:, 0] + 10 * agent.action.u[:, 1]


def test_actions_are_clipped_and_scenarios_may_be_plug_ins() -> None:
    environment = build(3, scenario=f"{__name__}:Ranged")
    assert environment.spec.observations[0].shape == (4,)  # pos, vel
    environment.reset(np.zeros(3, np.uint64))
    action = np.array([[[0.5, 1.0]], [[-7.0, -0.2]], [[0.0, 0.0]]], np.float32)
    timestep = environment.step(action, np.zeros(3, np.bool_), np.zeros(3, np.uint64))
    # 0.5 * 2 + 10 * 1 * 0.5; -1 (clipped) * 2 + 10 * -0.2 * 0.5
    np.testing.assert_allclose(timestep.reward[:, 0], [6.0, -3.0, 0.0], rtol=1e-6)


class Done(Ranged):
    """Copy 1 is done from the start."""

    def done(self) -> Any:
        return torch.arange(self.world.batch_dim) == 1


def test_done_ends_the_episode_or_not() -> None:
    for until_done, kinds, discounts in ((True, [MID, LAST], [1, 0]), (False, [MID, MID], [1, 1])):
        environment = build(2, scenario=f"{__name__}:Done", until_done=until_done)
        environment.reset(np.zeros(2, np.uint64))
        timestep = environment.step(
            np.zeros((2, 1, 2), np.float32), np.zeros(2, np.bool_), np.zeros(2, np.uint64)
        )
        assert timestep.step_type.tolist() == kinds
        assert timestep.discount.tolist() == discounts


def test_a_random_policy_earns_what_it_should() -> None:
    config = PluginConfig.model_validate(
        {"name": "vmas", "scenario": "navigation", "arguments": {"n_agents": 3}}
    )
    result = run_baseline(ExperimentConfig(environment=config), "random", 64, 1)
    # 300 episodes of VMAS itself: -0.60, mean over agents.
    assert result.metrics["return"].mean() / 3 == pytest.approx(-0.6, abs=0.25)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scenario": "balanse"}, "VMAS has no scenario 'balanse'; did you mean 'balance'?"),
        ({"arguments": {"n_agent": 3}}, r"environment.arguments \{'n_agent': 3\} raised"),
        ({"metrics": ["poss"]}, "reports no 'poss'; environment.metrics may name: ground_rew, po"),
        ({"metrics": ["length"]}, "'length' is always reported; leave it out"),
        ({"scenario": "nowhere:Scenario"}, "there is no package 'nowhere'"),
    ],
)
def test_mistakes_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(2, **options)


def test_the_plugin_itself_loads_no_torch() -> None:
    program = "import sys, murmur.env_service.envs.vmas; print('torch' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "False"
