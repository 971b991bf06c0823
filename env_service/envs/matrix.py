"""Repeated two-agent matrix games: the smallest tasks with a known best team play.

Both agents pick one of three actions and both get the payoff of the pair. `climbing` and `penalty`
(Claus and Boutilier 1998, "The Dynamics of Reinforcement Learning in Cooperative Multiagent
Systems") punish agents that try the best pair alone, so learners settle on safer pairs: over 25
steps climbing's optimum is 275, its best safe equilibrium 175; penalty's optimum is 250, and 50 is
safe whatever the penalty. `qtran` is the game of Son et al. 2019, "QTRAN" (arXiv:1905.05408), with
which QPLEX was published: an optimum of 8 a step, where each agent's action fails with the other's
two. Mixers that rise with each agent's value cannot tell it and end on 0.
"""

from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from murmur.env_service.environment import VectorEnvironment
from murmur.shared.config import Section
from murmur.shared.wire.spec import ArraySpec, Discrete, EnvSpec
from murmur.shared.wire.timestep import Array, StepType, TimeStep

_CLIMBING = ((11, -30, 0), (-30, 7, 0), (0, 6, 5))
_QTRAN = ((8, -12, -12), (-12, 0, 0), (-12, 0, 0))


class Config(Section):
    """Options of `matrix`."""

    game: Literal["climbing", "penalty", "qtran"] = Field("climbing", description="which payoffs")
    penalty: float = Field(
        -100.0, le=0, description="penalty: payoff of both agents' best actions met by chance"
    )
    episode_steps: int = Field(25, ge=1, description="decisions in an episode")


class MatrixGame(VectorEnvironment):
    """N repeated matrix games. Each agent observes [1], always 1, and gets the pair's payoff.

    An episode ends by truncation. Metrics: payoff, the sum of payoffs of the episode, counted
    once (`return` is the sum over both agents, so twice that).
    """

    def __init__(self, config: Config, num_envs: int) -> None:
        """Allocate N copies; each starts with the first `step` that restarts it."""
        self.num_envs, self._steps = num_envs, np.zeros(num_envs, np.int64)
        self._length = config.episode_steps
        k = config.penalty
        penalty = (k, 0, 10), (0, 2, 0), (10, 0, k)
        games = {"climbing": _CLIMBING, "penalty": penalty, "qtran": _QTRAN}
        self.payoffs = np.array(games[config.game], np.float32)
        self.spec = EnvSpec(
            name="matrix",
            num_agents=2,
            observations=(ArraySpec("observation", "float32", (1,)),),
            action=Discrete(3),
            metrics=("payoff",),
            max_episode_steps=config.episode_steps,
        )
        self._payoff = np.zeros(num_envs, np.float32)

    def step(
        self, action: Array, restart: NDArray[np.bool_], seeds: NDArray[np.uint64]
    ) -> TimeStep:
        """Advance or restart every copy; the seeds are not used, as nothing is random."""
        self._steps = np.where(restart, 0, self._steps + 1)
        gained = np.where(restart, 0, self.payoffs[action[:, 0], action[:, 1]])
        self._payoff = np.where(restart, 0, self._payoff + gained)
        step_type = np.where(self._steps == self._length, StepType.LAST, StepType.MID)
        return TimeStep(
            step_type=np.where(restart, StepType.FIRST, step_type).astype(np.uint8),
            reward=np.repeat(gained[:, None], 2, 1).astype(np.float32),
            discount=np.ones(self.num_envs, np.float32),
            observation={"observation": np.ones((self.num_envs, 2, 1), np.float32)},
            metrics={"payoff": self._payoff.astype(np.float32)},
        )


make = MatrixGame
