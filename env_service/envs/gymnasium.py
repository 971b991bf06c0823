"""Any Gymnasium environment, by "package.module:factory"; one agent."""

from collections.abc import Mapping
from typing import Any

from env_service.adapters import (
    MID,
    TERMINATED,
    TRUNCATED,
    AdapterConfig,
    OneByOne,
    RandomPolicy,
    create,
    first_reset,
    require_kind,
)
from env_service.environment import BaselineFactory
from shared.errors import ConfigError
from shared.spec import ACTION_MASK

_AGENT = "agent"
_STEP_RETURNS = "(observation, reward, terminated, truncated, info)"


class Config(AdapterConfig):
    """Options of `gymnasium`."""


class Gymnasium(OneByOne):
    """See the module and OneByOne."""

    def __init__(self, config: Config, environments: list[Any]) -> None:
        """Look at the first copy's spaces; play none of its steps.

        Raises:
            ConfigError: if the environment is none that murmur can step, naming the fix.
        """
        from env_service.spaces import ActionLayout, ObservationLayout, split_mask

        first = environments[0]
        seen, self._mask_seen = split_mask(first.observation_space)
        actions = ActionLayout({_AGENT: first.action_space})
        _, info = first_reset(first, config.factory, "(observation, info)")
        if not isinstance(info, Mapping):
            raise ConfigError(
                f"'{config.factory}': reset() must return (observation, info); its info is a "
                f"{type(info).__name__}, not a dictionary"
            )
        self._masks_given = actions.maskable and (self._mask_seen or ACTION_MASK in info)
        about = first.spec
        super().__init__(
            about.id if about else config.factory,
            [_AGENT],
            environments,
            ObservationLayout({_AGENT: seen}, config.images, config.channels_last),
            actions,
            config,
            masked=self._masks_given,
            max_episode_steps=(about and about.max_episode_steps) or 0,
        )

    def _begin(self, i: int, environment: Any, seed: int) -> None:  # noqa: ANN401
        observation, info = environment.reset(seed=seed)
        self._see(i, observation, info)

    def _advance(self, i: int, environment: Any, actions: Any) -> int:  # noqa: ANN401
        result = environment.step(self._convert[0](actions[0]))
        if len(result) != 5:
            raise self._fault(i, f"returned {len(result)} things from step(), not {_STEP_RETURNS}")
        observation, reward, terminated, truncated, info = result
        self._own_rows[i][0] = reward
        self._infos[i] = info
        self._see(i, observation, info)
        return TERMINATED if terminated else TRUNCATED if truncated else MID

    def _see(self, i: int, observation: Any, info: Mapping[str, Any]) -> None:  # noqa: ANN401
        self._observe(i, 0, observation)
        if self._masks_given:
            given = observation if self._mask_seen else info
            self._mask(i, 0, given.get(ACTION_MASK))

    def _info(self, i: int, name: str) -> float | None:
        value = self._infos[i].get(name)
        return None if value is None else float(value)


def make(config: Config, num_envs: int) -> Gymnasium:
    """N copies of the environment.

    Raises:
        ConfigError: if the factory cannot be called or makes something else.
    """
    first = create(config)
    require_kind(first, "gymnasium", config.factory)
    return Gymnasium(config, [first, *(create(config) for _ in range(num_envs - 1))])


BASELINES: dict[str, BaselineFactory] = {"random": RandomPolicy}
