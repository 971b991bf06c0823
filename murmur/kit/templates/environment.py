"""skeleton.py: two agents meet at a crossing; the one with the larger number must go first."""

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from murmur.env_service.environment import BaselineFactory, RandomPolicy, VectorEnvironment
from murmur.shared.config import Section
from murmur.shared.wire.seeding import uniform
from murmur.shared.wire.spec import ArraySpec, Discrete, EnvSpec
from murmur.shared.wire.timestep import Array, StepType, TimeStep


class Skeleton(VectorEnvironment):
    """Two agents at a crossing. Each sees both numbers; both are paid if the right one goes alone.

    Metrics:
        crossed: steps in which the right one went alone.
    """

    class Config(Section):
        """Options that a configuration sets beside the environment's name."""

        episode_steps: int = Field(10, ge=1, description="decisions in an episode")

    BASELINES: ClassVar[Mapping[str, BaselineFactory]] = {"random": RandomPolicy}

    def __init__(self, config: Config, num_envs: int) -> None:
        """Make `num_envs` copies, to be stepped by one call."""
        self.num_envs, self._limit = num_envs, config.episode_steps
        self.spec = EnvSpec(
            name="skeleton",
            num_agents=2,
            observations=(ArraySpec("numbers", "float32", (2,)),),
            action=Discrete(2),  # wait, go
            metrics=("crossed",),
            max_episode_steps=config.episode_steps,
        )
        self._numbers = np.zeros((num_envs, 2, 2), np.float32)  # [N, A, own and other]
        self._crossed = np.zeros(num_envs, np.float32)
        self._steps = np.zeros(num_envs, np.int32)

    def step(
        self, action: Array, restart: NDArray[np.bool_], seeds: NDArray[np.uint64]
    ) -> TimeStep:
        """Start an episode where `restart`, else advance by one action: see VectorEnvironment."""
        goes_first = self._numbers[..., 0] > self._numbers[..., 1]  # [N, A]
        right = (action == goes_first).all(1) & ~restart
        self._steps = np.where(restart, 0, self._steps + 1)
        self._crossed = np.where(restart, 0, self._crossed + right).astype(np.float32)
        drawn = uniform(seeds[restart], 2).T  # [restarted, A]
        self._numbers[restart] = np.stack([drawn, drawn[:, ::-1]], -1)
        step_type = np.where(self._steps == self._limit, StepType.LAST, StepType.MID)
        step_type[restart] = StepType.FIRST
        return TimeStep(
            step_type=step_type.astype(np.uint8),
            reward=np.repeat(right[:, None], 2, axis=1).astype(np.float32),
            discount=np.ones(self.num_envs, np.float32),  # 0 where an episode terminates
            observation={"numbers": self._numbers},
            metrics={"crossed": self._crossed},
        )
