"""Environments and baselines named as module:Name."""

import re
from typing import Any

import numpy as np
import pytest
from gymnasium import Env
from numpy.typing import NDArray

from murmur.env_service.checks import check_environment
from murmur.env_service.environment import (
    RandomPolicy,
    VectorEnvironment,
    baselines,
    find_baseline,
    make_environment,
)
from murmur.env_service.envs.spread import Config as SpreadConfig
from murmur.env_service.envs.spread import Spread
from murmur.env_service.sessions.evaluate import run_baseline
from murmur.runs.settings import environment_factory
from murmur.shared.config import PluginConfig
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.process.errors import ConfigError
from murmur.shared.wire.spec import EnvSpec
from murmur.shared.wire.timestep import Array, TimeStep


class Short(Spread):
    """Spread with episodes of 5 steps by default."""

    class Config(SpreadConfig):
        episode_steps: int = 5

    def __init__(self, config: SpreadConfig, num_envs: int) -> None:
        super().__init__(config, num_envs)


def short(num_envs: int, steps: int = 5) -> VectorEnvironment:
    return Spread(SpreadConfig(episode_steps=steps), num_envs)


class Foreign(Env[Any, Any]):
    """Another library's."""


def foreign(num_envs: int) -> Foreign:
    return Foreign()


class Raises(VectorEnvironment):
    """Cannot be made."""

    def __init__(self, num_envs: int) -> None:
        raise KeyError("lost")

    def step(
        self, action: Array, restart: NDArray[np.bool_], seeds: NDArray[np.uint64]
    ) -> TimeStep:
        raise NotImplementedError


class Bare(Raises):
    """Says nothing of itself."""

    def __init__(self, num_envs: int) -> None: ...


class Fewer(Raises):
    """Has other copies than it should."""

    def __init__(self, num_envs: int) -> None:
        self.spec, self.num_envs = make_environment(PluginConfig(name="spread"), 1).spec, 1


class Lazy:
    """Never moves."""

    def __init__(self, environment: VectorEnvironment, action: int = 0) -> None:
        self._shape = environment.num_envs, environment.spec.num_agents
        self._action = action

    def act(self, timestep: TimeStep) -> Array:
        return np.full(self._shape, self._action, np.int32)


def blind(environment: VectorEnvironment) -> object:
    return object()


def named(name: str, **options: Any) -> PluginConfig:
    return PluginConfig(name=f"{__name__}:{name}", **options)


@pytest.mark.parametrize(
    ("plugin", "steps"),
    [
        (named("Short"), 5),
        (named("Short", episode_steps=7), 7),
        (named("short"), 5),
        (named("short", steps=7), 7),
    ],
)
def test_a_named_environment_has_its_options(plugin: PluginConfig, steps: int) -> None:
    environment = make_environment(plugin, 3)
    assert isinstance(environment.spec, EnvSpec)
    assert (environment.num_envs, environment.spec.max_episode_steps) == (3, steps)
    assert baselines(plugin) == {"random": RandomPolicy}


def test_check_env_takes_options_of_a_named_environment() -> None:
    make = environment_factory(f"{__name__}:Short", ["episode_steps=4"])
    assert make(1).spec.max_episode_steps == 4
    assert check_environment(make, 20) == []


@pytest.mark.parametrize(
    ("plugin", "words"),
    [
        (named("Short", episode_stepz=1), "unknown key 'environment.episode_stepz'; did you mean"),
        (named("Foreign"), "is no VectorEnvironment; one of PettingZoo or Gymnasium is configured"),
        (named("foreign"), "gave a Foreign, no VectorEnvironment; one of PettingZoo or Gymnasium"),
        (named("Raises"), "Raises' failed: KeyError: 'lost' (" + __file__),
        (named("Bare"), "has no spec: set self.spec to an EnvSpec"),
        (named("Fewer"), "has no num_envs of 3: set self.num_envs"),
    ],
)
def test_what_is_no_environment_is_refused_by_name(plugin: PluginConfig, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        make_environment(plugin, 3)
    assert plugin.name in str(caught.value) or "episode_stepz" in words


def test_a_baseline_may_be_named() -> None:
    config = ExperimentConfig(environment=named("Short"))
    result = run_baseline(config, f"{__name__}:Lazy", 2, 1)
    assert len(result.metrics["return"]) == 2
    assert result.curves["occupied"].shape[1] == 6
    for name, words in (("blind", "without act"), ("Raises", "failed: KeyError: 'lost'")):
        with pytest.raises(ConfigError, match=words):
            find_baseline(config.environment, f"{__name__}:{name}")(
                make_environment(named("short"), 1)
            )
