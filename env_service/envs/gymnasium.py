"""Any Gymnasium environment, by "package.module:factory"; one agent, or a team in tuples.

Some suites of team tasks (level-based foraging, the warehouse, matrix games) are Gymnasium
environments whose observations, actions and rewards are tuples with one entry for each agent:
`team: true`. Their episode ends when all agents are done; its discount is 1 if any was truncated.
"""

from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from murmur.env_service.adapters.casts import WHOLE
from murmur.env_service.adapters.factory import AdapterConfig, first_reset, read_info, read_spaces
from murmur.env_service.adapters.kinds import create_copies, unread_masks
from murmur.env_service.adapters.sequential import (
    MID,
    TERMINATED,
    TRUNCATED,
    Interface,
    SequentialVectorEnv,
    hint_of,
    shown,
)
from murmur.shared.config.section import known_names
from murmur.shared.process.errors import ConfigError
from murmur.shared.wire.spec import ACTION_MASK

_AGENT = "agent"
_FLAG = bool | np.bool_
_OLD_TRUNCATION = "TimeLimit.truncated"  # of the old gym package
_STEP_RETURNS = "(observation, reward, terminated, truncated, info)"


class Config(AdapterConfig):
    """Options of `gymnasium`."""

    team: bool = Field(
        False,
        description="observations, actions and rewards are tuples with one entry for each agent",
    )

    @model_validator(mode="after")
    def _is_registered(self) -> Self:
        """Refuse an id that Gymnasium does not know, before anything is started."""
        name = self.arguments.get("id")
        if self.factory != "gymnasium:make" or not isinstance(name, str) or ":" in name:
            return self
        try:
            import gymnasium
        except ImportError:
            return self  # where the environment is made, a message says so
        try:
            gymnasium.spec(name)
        except gymnasium.error.Error:
            known = known_names(name, gymnasium.registry)
            raise ValueError(f"Gymnasium has no environment '{name}'; {known}") from None
        return self


class Gymnasium(SequentialVectorEnv):
    """N copies of a Gymnasium environment behind the contract."""

    def __init__(self, config: Config, environments: list[Any]) -> None:
        """Read the first copy's spaces; none of its steps is played.

        Raises:
            ConfigError: if murmur cannot step the environment, naming the fix.
        """
        from murmur.env_service.adapters.actions import ActionLayout
        from murmur.env_service.adapters.observations import ObservationLayout

        first = environments[0]
        self._team = config.team
        seen, acting = self._spaces(first, config)
        actions = ActionLayout(acting, joint=bool(config.joint_actions))
        _, info = first_reset(first, config.factory, "(observation, info)")
        doubts: tuple[tuple[str, str, str], ...] = ()
        if ACTION_MASK not in info:
            masked = any(ACTION_MASK in getattr(space, "spaces", ()) for space in seen.values())
            doubts = () if masked else unread_masks(first, [info], list(seen.values()))
        elif len(seen) > 1:
            text = f"info '{ACTION_MASK}' is taken as the mask of each of the {len(seen)} agents"
            doubts = (("mask_repeated", ACTION_MASK, text),)
        about = first.spec
        interface = Interface(
            about.id if about else config.factory,
            list(seen),
            ObservationLayout(seen, config),
            actions,
            masks_told=ACTION_MASK in info,
            max_episode_steps=hint_of(about and about.max_episode_steps),
            hint="spec.max_episode_steps of the registration",
            doubts=doubts,
        )
        super().__init__(interface, environments, config)

    def _spaces(self, environment: Any, config: Config) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the agents' observation spaces and action spaces.

        Raises:
            ConfigError: if there are none, a team's spaces are no tuples of one length, or it is
                not said whether such tuples are a team's.
        """
        seen, acting = read_spaces(environment, config.factory)
        own: Any = getattr(seen, "spaces", None)
        own_actions: Any = getattr(acting, "spaces", None)
        entries = (
            isinstance(own, tuple)
            and isinstance(own_actions, tuple)
            and len(own) == len(own_actions)
        )
        if not self._team:
            if entries and "team" not in config.model_fields_set:
                raise ConfigError(
                    f"'{config.factory}' observes and acts in Tuple spaces of {len(own)} entries; "
                    "set environment.team: true if there is one entry for each agent of a team, "
                    "false if one agent takes all of them"
                )
            return {_AGENT: seen}, {_AGENT: acting}
        if not entries:
            raise ConfigError(
                f"environment.team: true wants Tuple spaces with one entry for each agent; this "
                f"environment observes {seen} and acts by {acting}"
            )
        agents = [f"{_AGENT}_{a}" for a in range(len(own))]
        return dict(zip(agents, own, strict=True)), dict(zip(agents, own_actions, strict=True))

    def _begin(self, i: int, environment: Any, seed: int) -> None:
        observation, info = self._reset(i, environment, seed)
        self._see(i, observation, info)

    def _advance(self, i: int, environment: Any, actions: Any) -> int:
        own = [convert(action) for convert, action in zip(self._convert, actions, strict=True)]
        result = environment.step(tuple(own) if self._team else own[0])
        observation, reward, terminated, truncated, info = self._unpack(i, result, _STEP_RETURNS)
        several, own_rewards = isinstance(reward, tuple | list), self._own_rows[i]
        try:
            if reward is None or (several and any(one is None for one in reward)):
                raise TypeError("None")  # NumPy takes it for NaN
            own_rewards[:] = reward
            if several or isinstance(reward, np.ndarray):
                for a, one in enumerate(reward if several else reward.flat):
                    if not -WHOLE <= one <= WHOLE:
                        self._say_reward(a, one, own_rewards)
            elif not -WHOLE <= reward <= WHOLE:
                self._say_reward(0, reward, own_rewards)
            if (
                self._team
                and np.size(reward) < len(own_rewards)
                and not self.notices.said("reward_repeated", "reward")
            ):
                self.notices.say(
                    "reward_repeated",
                    "reward",
                    f"step() returned one reward, {shown(reward)}, for {len(own_rewards)} agents: "
                    "each is given all of it; return one for each agent",
                )
        except (TypeError, ValueError) as error:
            wanted = f"{len(self.agents)} numbers" if self._team else "a number"
            if several and not self._team:
                wanted += (
                    "; if its tuples have one entry for each agent, set environment.team: true"
                )
            raise self._fault(
                i, f"returned {shown(reward)} as reward from step(), not {wanted}"
            ) from error
        self._infos[i] = info
        if isinstance(terminated, _FLAG) and isinstance(truncated, _FLAG):
            outcome = TERMINATED if terminated else TRUNCATED if truncated else MID
        else:
            ended = self._flags(i, "terminated", terminated)
            outcome = self._outcome_of(i, ended, self._flags(i, "truncated", truncated))
        self._see(i, observation, info, over=outcome != MID)
        if outcome == TERMINATED and info and info.get(_OLD_TRUNCATION):
            self.notices.say(
                "truncation_ignored",
                _OLD_TRUNCATION,
                f"info '{_OLD_TRUNCATION}' is true in a step that returned terminated = True: "
                "nothing is expected after it; return truncated = True instead",
            )
        return outcome

    def _flags(self, i: int, name: str, value: Any) -> NDArray[np.bool_]:
        """Return each agent's flag, [A] bool."""
        flags = np.asarray(value)
        whole = flags.size == 1 or (self._team and flags.shape == (len(self.agents),))
        # None is an object, and would be False.
        if not whole or flags.dtype.kind not in "biuf" or ((flags != 0) & (flags != 1)).any():
            raise self._fault(i, f"returned {name} = {value!r} from step(), not true or false")
        return np.broadcast_to(flags.reshape(-1) != 0, len(self.agents))

    def _outcome_of(
        self, i: int, terminated: NDArray[np.bool_], truncated: NDArray[np.bool_]
    ) -> int:
        """Return the episode's outcome from the agents' flags: it ends when all are done."""
        done, cut = terminated | truncated, truncated & ~terminated
        if not done.all():
            if done.any() and not self.notices.said("agent_kept", "terminated"):
                self.notices.say(
                    "agent_kept",
                    "terminated",
                    f"agent '{self.agents[int(done.argmax())]}' is done at step {self._ages[i]} "
                    "while others continue: with team: true all agents act until all are done",
                )
            return MID
        if not cut.any():
            return TERMINATED
        if not cut.all():
            self.notices.say(
                "ends_mixed",
                "terminated",
                f"agent '{self.agents[int(terminated.argmax())]}' terminated at step "
                f"{self._ages[i]} where agent '{self.agents[int(cut.argmax())]}' was truncated: "
                "the episode counts as truncated for all, with discount 1",
            )
        return TRUNCATED

    def _see(self, i: int, observation: Any, info: Any, *, over: bool = False) -> None:
        info = self._read_infos(i, info)
        if self._team and len(observation) != len(self.agents):
            raise self._fault(i, f"observed for {len(observation)} agents, not {len(self.agents)}")
        for a, seen in enumerate(observation if self._team else (observation,)):
            self._observe(i, a, seen)
            self._read_mask(i, a, seen, info, over=over)

    def _info(self, i: int, name: str) -> float | None:
        value = read_info(self._infos[i], name)
        return None if value is None else float(value)


def make(config: Config, num_envs: int) -> Gymnasium:
    """Make N copies of the environment.

    Raises:
        ConfigError: if the factory cannot be called or makes another kind of object.
    """
    return Gymnasium(config, create_copies(config, "gymnasium", num_envs))
