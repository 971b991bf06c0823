"""Environments that observe the options of their episode: one for each way to be given them."""

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from numpy.typing import NDArray
from typing_extensions import override

from murmur.env_service.environment import VectorEnvironment
from murmur.shared.config.episode_options import Value
from murmur.shared.wire.spec import ArraySpec, Discrete, EnvSpec
from murmur.shared.wire.timestep import Array, StepType, TimeStep

OPTIONS = ("wind", "mass")


class Windy(gymnasium.Env[NDArray[np.float32], np.int64]):
    """Five steps; observed are the episode's wind and mass, and a random walk from its seed."""

    def __init__(self, steps: int = 5) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.action_space = spaces.Discrete(2)
        self._steps = steps

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        super().reset(seed=seed)
        options = options or {}
        self._own = [float(options.get(name, -1.0)) for name in OPTIONS]
        if unknown := options.keys() - set(OPTIONS):
            raise ValueError(f"no option {sorted(unknown)}")
        self._age, self._at = 0, 0.0
        return self._see(), {}

    def step(
        self, action: np.int64
    ) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        self._age += 1
        self._at += float(self.np_random.normal()) + self._own[0] * float(action)
        over = self._age == self._steps
        calm = float(abs(self._at) < self._own[0])
        return self._see(), -abs(self._at) / self._own[1], over, False, {"calm": calm}

    def _see(self) -> NDArray[np.float32]:
        return np.array([*self._own, self._at], np.float32)


class Deaf(Windy):
    """Takes no options."""

    def reset(  # type: ignore[override]
        self, *, seed: int | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        return super().reset(seed=seed)


class Idle(Windy):
    """Takes options and does nothing with them."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        return super().reset(seed=seed, options={"wind": 1.0, "mass": 1.0})


class WindyTeam:
    """The same for two agents of PettingZoo."""

    possible_agents = ("a", "b")
    metadata: Mapping[str, Any] = {"name": "windy"}

    def __init__(self) -> None:
        self._inner = Windy()
        self.agents: list[str] = []

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return self._inner.observation_space

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return self._inner.action_space

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        self.agents = list(self.possible_agents)
        seen, _ = self._inner.reset(seed=seed, options=options)
        return dict.fromkeys(self.agents, seen), {agent: {} for agent in self.agents}

    def step(self, actions: Mapping[str, np.int64]) -> tuple[dict[str, Any], ...]:
        seen, reward, over, cut, info = self._inner.step(actions["a"])
        result = tuple(dict.fromkeys(self.agents, x) for x in (seen, reward, over, cut, info))
        self.agents = [] if over else self.agents
        return result

    def close(self) -> None:
        pass


def windy_vector(num_envs: int, mode: str = "Disabled") -> SyncVectorEnv:
    """Return the same as a vectorised environment of Gymnasium."""
    return SyncVectorEnv([Windy] * num_envs, autoreset_mode=AutoresetMode(mode))


class WindyCopies(VectorEnvironment):
    """The same as a class of one's own."""

    episode_options = OPTIONS

    def __init__(self, num_envs: int, mass: float = 1.0) -> None:
        self.num_envs = num_envs
        self._copies = [Windy() for _ in range(num_envs)]
        self._options: list[dict[str, Any]] = [{"mass": mass}] * num_envs
        self.spec = EnvSpec(
            name="windy",
            num_agents=1,
            observations=(ArraySpec("observation", "float32", (3,)),),
            action=Discrete(2),
            metrics=(),
            max_episode_steps=5,
        )

    @override
    def set_options(self, index: int, options: Mapping[str, Value]) -> None:
        self._options[index] = dict(options)

    @override
    def step(
        self, action: Array, restart: NDArray[np.bool_], seeds: NDArray[np.uint64]
    ) -> TimeStep:
        rows = []
        for i, copy in enumerate(self._copies):
            if restart[i]:
                seen = copy.reset(seed=int(seeds[i]) & 0xFFFFFFFF, options=self._options[i])[0]
                rows.append((StepType.FIRST, 0.0, 1.0, seen))
                continue
            seen, reward, over, *_ = copy.step(action[i, 0])
            rows.append((StepType.LAST if over else StepType.MID, reward, 1.0 - over, seen))
        kinds, rewards, discounts, seen_by_all = zip(*rows, strict=True)
        return TimeStep(
            np.array(kinds, np.uint8),
            np.array(rewards, np.float32)[:, None],
            np.array(discounts, np.float32),
            {"observation": np.stack(seen_by_all)[:, None]},
            {},
        )
