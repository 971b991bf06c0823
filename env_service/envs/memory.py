"""Recall: the smallest task that only an agent with memory can solve.

Every agent is shown a cue of its own as the episode begins, then nothing, and must name the cue
when it is asked, `delay` steps later. What it sees when asked does not depend on the cue: without
memory no agent does better than chance, 1 / num_cues.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from typing_extensions import override

from murmur.env_service.environment import BaselineFactory, RandomPolicy, VectorEnvironment
from murmur.shared.config import Section
from murmur.shared.wire.seeding import uniform
from murmur.shared.wire.spec import ArraySpec, Discrete, EnvSpec
from murmur.shared.wire.timestep import Array, StepType, TimeStep


class Config(Section):
    """Options of `memory`."""

    num_agents: int = Field(2, ge=1, description="agents, each with a cue of its own")
    num_cues: int = Field(3, ge=2, description="cues, and as many actions")
    delay: int = Field(6, ge=1, description="steps from the cue to the question")


class Memory(VectorEnvironment):
    """N copies of the recall task.

    Observation of an agent, float32: the cue, one-hot, on the first row, zeros later (num_cues);
    1 on the row that asks, else 0. Reward of an agent: 1 for the right answer to that row; other
    actions have no effect. An episode has delay + 1 decisions and ends by termination.

    Metrics:
        correct: share of the agents that answered right.
    """

    def __init__(self, config: Config, num_envs: int) -> None:
        """Allocate N copies; each starts with the first `step` that restarts it."""
        n, a, k = num_envs, config.num_agents, config.num_cues
        self._config, self.num_envs = config, n
        self.spec = EnvSpec(
            name="memory",
            num_agents=a,
            observations=(ArraySpec("observation", "float32", (k + 1,)),),
            action=Discrete(k),
            metrics=("correct",),
            max_episode_steps=config.delay + 1,
        )
        self._age = np.zeros(n, np.int64)
        self._cue = np.zeros((n, a), np.int64)

    @override
    def step(
        self, action: Array, restart: NDArray[np.bool_], seeds: NDArray[np.uint64]
    ) -> TimeStep:
        c = self._config
        self._age = np.where(restart, 0, self._age + 1)
        last = self._age == c.delay + 1
        reward = ((action == self._cue) & last[:, None]).astype(np.float32)
        drawn = (uniform(seeds, c.num_agents).T * c.num_cues).astype(np.int64)
        self._cue = np.where(restart[:, None], drawn, self._cue)
        observation = np.zeros((self.num_envs, c.num_agents, c.num_cues + 1), np.float32)
        shown = np.arange(c.num_cues) == self._cue[:, :, None]
        observation[..., :-1] = shown & restart[:, None, None]
        observation[..., -1] = (self._age == c.delay)[:, None]
        step_type = np.where(last, StepType.LAST, StepType.MID)
        return TimeStep(
            step_type=np.where(restart, StepType.FIRST, step_type).astype(np.uint8),
            reward=reward,
            discount=np.where(last, 0, 1).astype(np.float32),
            observation={"observation": observation},
            metrics={"correct": reward.mean(1)},
        )


class RecallPolicy:
    """A policy that remembers the cue, and so is always right."""

    def __init__(self, environment: VectorEnvironment) -> None:
        """Begin without cues."""
        self._cue = np.zeros((environment.num_envs, environment.spec.num_agents), np.int32)

    def act(self, timestep: TimeStep) -> Array:
        """Return the remembered cues, [N, A] int32."""
        cue = timestep.observation["observation"][..., :-1]
        self._cue = np.where(cue.any(-1), cue.argmax(-1), self._cue).astype(np.int32)
        return self._cue


make = Memory


BASELINES: Mapping[str, BaselineFactory] = {"random": RandomPolicy, "recall": RecallPolicy}
