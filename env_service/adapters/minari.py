"""Episodes of a Minari dataset, played again by the environment plug-in `gymnasium`.

A dataset's spaces and values go through the same adapters as those of an environment, so that they
become the arrays that the environment itself would send. Needs minari; one agent.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from murmur.env_service.adapters.actions import ActionLayout
from murmur.env_service.adapters.sequential import SequentialVectorEnv
from murmur.env_service.environment import VectorEnvironment
from murmur.shared.config import Section
from murmur.shared.config.episode_options import EnvironmentConfig
from murmur.shared.config.experiment import EvaluationConfig, ExperimentConfig
from murmur.shared.process.errors import ConfigError
from murmur.shared.wire.spec import Discrete, action_layout
from murmur.shared.wire.timestep import Array, TimeStep

# Options of the plug-in that say how spaces become arrays.
_OF_SPACES = "images", "channels_last", "resize", "gray", "joint_actions", "arrays"
_COPIES = 4  # each holds an episode
REPLAY = f"{__name__}:Replay"
POLICY = f"{__name__}:Recorded"


def open_dataset(name: str) -> Any:
    """Open a dataset that is on this machine.

    Args:
        name: id of the dataset, or its folder.

    Raises:
        ConfigError: if there is none that minari reads.
        ModuleNotFoundError: if minari is not installed.
    """
    import minari

    folder = Path(name)
    try:
        if folder.is_dir():
            data = folder / "data"
            return minari.MinariDataset(data if data.is_dir() else folder)
        return minari.load_dataset(name)
    except Exception as error:
        raise ConfigError(
            f"--minari {name}: {' '.join(str(error).split())[:300]}; give the folder of a dataset, "
            f"or download it with `minari download {name}`"
        ) from None


class Replay(gymnasium.Env[Any, Any]):
    """An environment that gives what an episode of a dataset holds, whatever the actions.

    The episode with seed i is that of index i.

    Attributes:
        action: action that was taken in the present step; None at the end of an episode.
    """

    def __init__(self, dataset: str) -> None:
        """Open the dataset."""
        self._dataset, self._name = open_dataset(dataset), dataset
        self.observation_space = self._dataset.observation_space
        self.action_space = self._dataset.action_space
        self.spec = self._dataset.env_spec
        self.action: Any = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Begin the episode of index `seed`.

        Raises:
            ConfigError: if it is not one whole episode.
        """
        index = seed or 0
        self._episode = self._dataset[index]
        self._age, self._steps = 0, len(self._episode.rewards)
        ends = self._episode.terminations | self._episode.truncations
        lengths = {len(x) for x in _leaves(self._episode.observations)}
        if not self._steps or ends[:-1].any() or lengths != {self._steps + 1}:
            raise ConfigError(
                f"--minari {self._name}: episode {index} has {self._steps} rewards, "
                f"{'/'.join(map(str, sorted(lengths)))} observations and {int(ends.sum())} ends; a "
                "whole one has an observation more than rewards, and ends with its last step"
            )
        return self._seen(), {}

    def step(self, action: Any) -> Any:
        """Take the recorded step; an episode that was cut off counts as truncated."""
        age, self._age = self._age, self._age + 1
        reward, terminated = self._episode.rewards[age], bool(self._episode.terminations[age])
        truncated = self._age == self._steps and not terminated
        return self._seen(), float(reward), terminated, truncated, {}

    def _seen(self) -> Any:
        over = self._age == self._steps
        self.action = None if over else _at(self._episode.actions, self._age)
        return _at(self._episode.observations, self._age)


class Recorded:
    """A policy that takes the recorded actions of `Replay`, encoded as they are sent."""

    class Config(Section):
        """No options."""

    def __init__(self, config: Config, environment: VectorEnvironment) -> None:
        """Keep the environment.

        Args:
            config: no options.
            environment: copies of Replay behind the plug-in `gymnasium`.
        """
        assert isinstance(environment, SequentialVectorEnv)
        self._copies: list[Replay] = environment._environments
        action = environment.spec.action
        spaces = dict.fromkeys(environment.agents, self._copies[0].action_space)
        self._layout = ActionLayout(spaces, joint=isinstance(action, Discrete))
        dtype, shape = action_layout(action)
        self._blank = np.zeros(shape, dtype)

    def act(self, timestep: TimeStep) -> Array:
        """Return the recorded actions [N, 1, ...]; 0 where an episode has ended."""
        actions = [
            self._blank if copy.action is None else self._layout.encode(copy.action)
            for copy in self._copies
        ]
        return np.stack(actions)[:, None]


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the arrays in dictionaries and tuples."""
    if isinstance(value, Mapping | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _leaves(part)
    else:
        yield value


def _at(value: Any, index: int) -> Any:
    """Return one entry of arrays in dictionaries and tuples."""
    if isinstance(value, Mapping):
        return {key: _at(part, index) for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(_at(part, index) for part in value)
    return value[index]


def replaying(config: ExperimentConfig, name: str) -> tuple[ExperimentConfig, int]:
    """Return a configuration whose environment plays a dataset again, and its number of episodes.

    Args:
        config: configuration of the environment that the dataset is of.
        name: id of the dataset, or its folder.

    Raises:
        ConfigError: if the environment is not of one agent and Gymnasium's.
    """
    plugin = config.for_evaluation().environment
    if plugin.name != "gymnasium" or plugin.options.get("team"):
        raise ConfigError(
            f"--minari {name}: datasets of Minari are of one agent of Gymnasium, environment.name="
            f"{plugin.name} is not; give a configuration of its environment"
        )
    options = {key: value for key, value in plugin.options.items() if key in _OF_SPACES}
    replay = {"name": plugin.name, "factory": REPLAY, "arguments": {"dataset": name}, **options}
    server = config.env_server.model_copy(
        update={"envs_per_worker": _COPIES, "max_faults_per_minute": 0}  # none is left out
    )
    sections = {
        "environment": EnvironmentConfig.model_validate(replay),
        "evaluation": EvaluationConfig(),
        "env_server": server,
    }
    return config.model_copy(update=sections), int(open_dataset(name).total_episodes)
