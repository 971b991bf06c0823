"""Any Gymnasium environment, by "package.module:factory"; one agent, or a team in tuples.

Some suites of team tasks (level-based foraging, the warehouse, matrix games) are Gymnasium
environments whose observations, actions and rewards are tuples with one entry for each agent:
`team: true`. They end for all agents at once.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from pydantic import Field

from env_service.adapters.factory import AdapterConfig, create, first_reset, read, read_info
from env_service.adapters.interface import Interface
from env_service.adapters.kinds import require_kind
from env_service.adapters.returned import shown
from env_service.adapters.sequential import MID, TERMINATED, TRUNCATED, SequentialVectorEnv
from env_service.environment import BaselineFactory, RandomPolicy
from shared.errors import ConfigError
from shared.spec import ACTION_MASK

_AGENT = "agent"
_STEP_RETURNS = "(observation, reward, terminated, truncated, info)"


class Config(AdapterConfig):
    """Options of `gymnasium`."""

    team: bool = Field(
        False,
        description="observations, actions and rewards are tuples with one entry for each agent",
    )


class Gymnasium(SequentialVectorEnv):
    """See the module and SequentialVectorEnv."""

    def __init__(self, config: Config, environments: list[Any]) -> None:
        """Look at the first copy's spaces; play none of its steps.

        Raises:
            ConfigError: if the environment is none that murmur can step, naming the fix.
        """
        from env_service.adapters.actions import ActionLayout
        from env_service.adapters.observations import ObservationLayout, split_mask

        first = environments[0]
        self._team = config.team
        seen, acting = self._spaces(first, config.factory)
        split = [split_mask(space) for space in seen.values()]
        actions = ActionLayout(acting)
        _, info = first_reset(first, config.factory, "(observation, info)")
        if not isinstance(info, Mapping):
            raise ConfigError(
                f"'{config.factory}': reset() must return (observation, info); its info is a "
                f"{type(info).__name__}, not a dictionary"
            )
        about = first.spec
        interface = Interface(
            about.id if about else config.factory,
            list(seen),
            ObservationLayout(
                {agent: space for agent, (space, _) in zip(seen, split, strict=True)},
                config.images,
                config.channels_last,
                config.reduction,
            ),
            actions,
            masks_seen=[has_mask for _, has_mask in split],
            masks_told=ACTION_MASK in info,
            max_episode_steps=(about and about.max_episode_steps) or 0,
        )
        super().__init__(interface, environments, config)

    def _spaces(
        self,
        environment: Any,  # noqa: ANN401
        factory: str,
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The agents' observation spaces and action spaces.

        Raises:
            ConfigError: if there are none, or a team's spaces are no tuples of one length.
        """
        seen, acting = (
            read(
                factory,
                name,
                partial(getattr, environment, name),
                f"set self.{name} to one of gymnasium.spaces in its __init__",
            )
            for name in ("observation_space", "action_space")
        )
        if not self._team:
            return {_AGENT: seen}, {_AGENT: acting}
        own, own_actions = getattr(seen, "spaces", None), getattr(acting, "spaces", None)
        if not (
            isinstance(own, tuple)
            and isinstance(own_actions, tuple)
            and len(own) == len(own_actions)
        ):
            raise ConfigError(
                f"environment.team: true wants Tuple spaces with one entry for each agent; this "
                f"environment observes {seen} and acts by {acting}"
            )
        agents = [f"{_AGENT}_{a}" for a in range(len(own))]
        return dict(zip(agents, own, strict=True)), dict(zip(agents, own_actions, strict=True))

    def _begin(self, i: int, environment: Any, seed: int) -> None:  # noqa: ANN401
        observation, info = environment.reset(seed=seed)
        self._see(i, observation, info)

    def _advance(self, i: int, environment: Any, actions: Any) -> int:  # noqa: ANN401
        own = [convert(action) for convert, action in zip(self._convert, actions, strict=True)]
        result = environment.step(tuple(own) if self._team else own[0])
        observation, reward, terminated, truncated, info = self._unpack(i, result, _STEP_RETURNS)
        several = isinstance(reward, tuple | list)
        try:
            if reward is None or (several and any(one is None for one in reward)):
                raise TypeError("None")  # NumPy takes it for NaN
            self._own_rows[i][:] = reward
        except (TypeError, ValueError) as error:
            wanted = f"{len(self.agents)} numbers" if self._team else "a number"
            raise self._fault(
                i, f"returned {shown(reward)} as reward from step(), not {wanted}"
            ) from error
        self._infos[i] = info
        self._see(i, observation, info)
        over = self._flag(i, "terminated", terminated), self._flag(i, "truncated", truncated)
        return TERMINATED if over[0] else TRUNCATED if over[1] else MID

    def _flag(self, i: int, name: str, value: Any) -> bool:  # noqa: ANN401
        """A flag of the episode; where a team gives one for each agent: of all of them."""
        if isinstance(value, bool | np.bool_):
            return bool(value)
        flags = np.asarray(value)
        whole = flags.size == 1 or (self._team and flags.shape == (len(self.agents),))
        if not whole or flags.dtype.kind not in "biuf":  # None is an object, and would be False
            raise self._fault(i, f"returned {name} = {value!r} from step(), not true or false")
        return bool(flags.all())

    def _see(self, i: int, observation: Any, info: Any) -> None:  # noqa: ANN401
        info = self._read_infos(i, info)
        if self._team and len(observation) != len(self.agents):
            raise self._fault(i, f"observed for {len(observation)} agents, not {len(self.agents)}")
        for a, seen in enumerate(observation if self._team else (observation,)):
            self._observe(i, a, seen)
            self._read_mask(i, a, seen, info)

    def _info(self, i: int, name: str) -> float | None:
        value = read_info(self._infos[i], name)
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
