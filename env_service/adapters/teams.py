"""Teams of an environment's agents, and the return of each team in an episode."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from murmur.shared.process.errors import ConfigError

Teams = Literal["auto", "none", "agents"] | dict[str, tuple[str, ...]]
TEAMS = (
    "metrics return/<team>, the sum over a team's agents: auto: agents whose names differ only in "
    "the number at their end are a team, where there are several, in games of turns each agent by "
    "itself; agents: each by itself; none; "
    "or agents by team, such as {hunters: [adversary_0, adversary_1], prey: [agent_0]}"
)
RETURN = "return/"


def teams_of(agents: Sequence[str], wanted: Teams, factory: str) -> dict[str, list[int]]:
    """Return the rows of each team's agents, by the team's name; empty if there are no teams.

    Args:
        agents: names of the agents, in the order of their rows.
        wanted: value of the option `teams`.
        factory: name of the factory for errors.

    Raises:
        ConfigError: for an agent that does not exist, or that is in two teams.
    """
    if wanted == "none" or len(agents) == 1:
        return {}
    teams: dict[str, list[int]] = {}
    if isinstance(wanted, str):
        for row, agent in enumerate(agents):
            name = re.sub(r"[_\-. ]?\d+$", "", agent) if wanted == "auto" else agent
            teams.setdefault(name or agent, []).append(row)
        return teams if len(teams) > 1 else {}
    owner: dict[str, str] = {}
    for team, members in wanted.items():
        for agent in members:
            if agent not in agents:
                raise ConfigError(
                    f"environment.teams.{team}: '{factory}' has no agent '{agent}'; it has "
                    + ", ".join(f"'{name}'" for name in agents)
                )
            if agent in owner:
                raise ConfigError(
                    f"environment.teams: '{agent}' is in '{owner[agent]}' and in '{team}'; name "
                    "it once"
                )
            owner[agent] = team
        teams[team] = [agents.index(agent) for agent in members]
    return teams


class TeamReturns:
    """The return of each team in the running episode of each copy.

    Attributes:
        names: names of the metrics, return/<team>.
    """

    def __init__(self, teams: Mapping[str, Sequence[int]], num_envs: int, num_agents: int) -> None:
        """Begin at zero.

        Args:
            teams: rows of each team's agents, by the team's name.
            num_envs: number of copies N.
            num_agents: number of agents A.
        """
        self.names = tuple(f"{RETURN}{team}" for team in teams)
        self._belongs = np.zeros((num_agents, len(teams)))  # [A, T]: 1 where agent a is in team t
        for t, rows in enumerate(teams.values()):
            self._belongs[list(rows), t] = 1
        self._earned = np.zeros((num_envs, len(teams)))  # [N, T]

    def add(
        self,
        reward: NDArray[Any],
        first: NDArray[np.bool_],
        metrics: Mapping[str, NDArray[np.float32]],
    ) -> None:
        """Add a step's rewards and write the sums into the metrics.

        Args:
            reward: [N, A] each agent's own reward.
            first: [N] bool, true for copies that begin an episode.
            metrics: name -> [N], with all of `names`.
        """
        self._earned[first] = 0
        self._earned += reward @ self._belongs
        for t, name in enumerate(self.names):
            metrics[name][:] = self._earned[:, t]
