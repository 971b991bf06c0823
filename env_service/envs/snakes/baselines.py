"""Policies that need no learner: random and greedy, for the agents' side of the games."""

from typing import cast

import numpy as np
from numpy.typing import NDArray

from env_service.compiled import compiled
from env_service.environment import (
    BaselineFactory,
    RandomPolicy,
    ScriptedPolicy,
    VectorEnvironment,
)
from env_service.envs.snakes import opponents
from env_service.envs.snakes.egocentric import turn_of
from env_service.envs.snakes.environment import Snakes
from env_service.envs.snakes.game import NUM_SNAKES, TEAM, Games
from env_service.envs.snakes.observation import seen
from shared.wire.timestep import TimeStep


def random(environment: VectorEnvironment) -> ScriptedPolicy:
    """Make a policy that is uniform over the four directions, legal or not."""
    return RandomPolicy(environment, legal=False)


class GreedyPolicy:
    """A policy in which every agent goes for a bean: see opponents.greedy."""

    def __init__(self, environment: VectorEnvironment) -> None:
        """Keep the games of the environment, which must be `snakes`."""
        snakes = cast(Snakes, environment)
        self._games, self._turns = snakes.games, snakes.config.observation == "egocentric"
        self._action = np.zeros((environment.num_envs, environment.spec.num_agents), np.int32)

    def act(self, timestep: TimeStep) -> NDArray[np.int32]:
        """Return [N, A] int32 directions, or turns."""
        _act_greedily(self._games, self._turns, self._action)
        return self._action


@compiled()
def _act_greedily(games: Games, turns: bool, action: NDArray[np.int32]) -> None:
    """Fill action [N, A] for the agents of every game; with `turns`, in their own frame."""
    move = np.empty(NUM_SNAKES, np.int32)
    for n in range(len(action)):
        opponents.greedy(games, n, 0, move)
        opponents.greedy(games, n, TEAM, move)
        for agent in range(action.shape[1]):
            player = seen(agent, games.side[n])
            action[n, agent] = move[player]
            if turns:
                action[n, agent] = turn_of(games.heading[n, player], move[player])


BASELINES: dict[str, BaselineFactory] = {"random": random, "greedy": GreedyPolicy}
