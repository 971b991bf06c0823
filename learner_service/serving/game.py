"""Games of a league: agents that learn, their opponents, and which policies may be opponents."""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from murmur.learner_service.checkpoint.contents import saved_spec
from murmur.learner_service.learning.base import Policy
from murmur.learner_service.learning.team_specs import View, rows_by_agent, rows_of
from murmur.shared.config.experiment import LeagueConfig
from murmur.shared.process.errors import CheckpointError, SpecError
from murmur.shared.wire.spec import (
    EnvSpec,
    agent_numbers,
    first_difference,
    shown_agents,
    without_expert,
)

EPISODES = 50.0  # against an opponent that its score is made of, roughly
_LEAST = 0.05  # weight of an opponent that is always beaten


@dataclasses.dataclass(eq=False)
class Opponent:
    """A policy to play against.

    Attributes:
        file: the opponent's checkpoint; a name within the run's checkpoints, or a whole path.
        policy: policy that acts.
        points: the learning team's mean result against it, 1 a win, 0.5 a draw, 0 a loss; recent
            episodes count more.
        episodes: number of episodes that this rank has played against it since the ranks last
            shared their points.
    """

    file: str
    policy: Policy
    points: float = 0.5
    episodes: int = 0

    @property
    def weight(self) -> float:
        """Weight of the opponent when one is drawn: the square of its share of points."""
        return max((1.0 - self.points) ** 2, _LEAST)

    def record_result(self, points: float, memory: float = EPISODES) -> None:
        """Update the score with the result of an episode.

        Args:
            points: result of the learning team, 0 to 1.
            memory: number of episodes that the score is made of, roughly.
        """
        self.points += (points - self.points) / memory
        self.episodes += 1


class AssignedPolicy(Policy):
    """A policy that plays some agents of a game and is shown the rows of all of them.

    Its memory has a row for each agent of the game, zero where it sees none.
    """

    def __init__(self, policy: Policy, view: View, plays: tuple[int, ...]) -> None:
        """Assign a policy to its agents.

        Args:
            policy: policy for the agents of the view.
            view: agents whose rows the policy takes; it includes the agents of `plays`.
            plays: numbers of the agents that it plays.
        """
        self._policy, self._view = policy, view
        self._rows = [view.agents.index(agent) for agent in plays]
        self.memory_size = policy.memory_size

    @torch.inference_mode()
    @override
    def act(
        self,
        observation: Mapping[str, Tensor],
        generator: torch.Generator | None,
        memory: Tensor | None = None,
    ) -> dict[str, Tensor]:
        view = self._view
        own = None if memory is None else view.rows(memory, 1)
        acted = self._policy.act(view.observation(observation), generator, own)
        found = {"action": acted["action"][:, self._rows]}
        if memory is not None:
            found["memory"] = torch.zeros_like(memory)
            found["memory"][:, list(view.agents)] = acted["memory"]
        return found


@dataclasses.dataclass(eq=False)
class Pairing:
    """Opponents and scores of the episodes under way in a session's environments.

    Attributes:
        opponents: [n] opponents that play the other team; None: the learner's own policy as it is
            now.
        lead: [n] the learning team's rewards so far less those of the other.
        memory: [n] opponents' recurrent states [A, Z] on the device; None: of zeros, or none.
    """

    opponents: list[Opponent | None]
    lead: NDArray[np.float64]
    memory: list[Tensor | None]

    @classmethod
    def of(cls, num_envs: int) -> "Pairing":
        """Return a pairing without opponents."""
        return cls([None] * num_envs, np.zeros(num_envs), [None] * num_envs)


def require_no_turns(spec: EnvSpec) -> None:
    """Check that all agents act in every step.

    Raises:
        SpecError: if they take turns.
    """
    if spec.takes_turns:
        raise SpecError(
            f"a league gives opponents to one part of the agents, and in '{spec.name}' agents take "
            "turns: one policy learns for all of them; set league.size=0 and league.checkpoints=[]"
        )


def team_spec(spec: EnvSpec) -> EnvSpec:
    """Return the spec of one of two equal teams: half of the agents, all else alike.

    Raises:
        SpecError: if the agents are no two equal teams.
    """
    require_no_turns(spec)
    if spec.num_agents % 2:
        raise SpecError(
            f"a league plays two equal teams, environment '{spec.name}' has {spec.num_agents} "
            "agents: let the learner act for both (in snakes: environment.control=both), name the "
            "agents that learn by league.agents, or set league.size=0 and league.checkpoints=[]"
        )
    half = spec.num_agents // 2
    return dataclasses.replace(spec, num_agents=half, agents=spec.agents[:half])


@dataclasses.dataclass(frozen=True)
class Game:
    """Both sides of a league's games.

    Attributes:
        spec: spec of the environment, with all agents.
        team: agents that learn.
        others: agents that opponents play.
        shows_all: whether opponents are shown the rows of all agents; else those of `others`.
    """

    spec: EnvSpec
    team: View
    others: View
    shows_all: bool

    @classmethod
    def of(cls, spec: EnvSpec, config: LeagueConfig) -> Self:
        """Return the game of a league in an environment.

        Args:
            spec: spec of the environment, with all agents.
            config: section league.

        Raises:
            SpecError: if the agents cannot be divided so, or the policy cannot play itself.
            ConfigError: if there is no such agent.
        """
        shows_all = bool(config.agents)
        if shows_all:
            require_no_turns(spec)
            own = agent_numbers(config.agents, spec, "league.agents")
        else:
            own = tuple(range(team_spec(spec).num_agents))
        rest = tuple(a for a in range(spec.num_agents) if a not in own)
        if not rest:
            raise SpecError(
                f"league.agents={list(config.agents)} are all agents of '{spec.name}': none is "
                "left for opponents to play; leave some out, or set league.checkpoints=[]"
            )
        if len(own) != len(rest) and (config.latest or config.size):
            raise SpecError(
                f"league.latest={config.latest:g} and league.size={config.size}: this run's policy "
                f"acts for {len(own)} agents of '{spec.name}' and cannot play the other "
                f"{len(rest)}; set both to 0 and league.checkpoints to policies that do"
            )
        team, others = (View.of("", side, spec, centralized=False) for side in (own, rest))
        return cls(spec, team, others, shows_all)

    @functools.cached_property
    def own_rows(self) -> slice | list[int]:
        """Rows of the team's agents in a time step."""
        return rows_of(self.team.agents)

    @functools.cached_property
    def other_rows(self) -> slice | list[int]:
        """Rows of the other agents in a time step."""
        return rows_of(self.others.agents)

    @functools.cached_property
    def order(self) -> list[int] | None:
        """Row of each agent where those of the team come first; None: they do already."""
        return rows_by_agent((self.team, self.others))

    def assign(self, policy: Policy, view: View | None = None) -> Policy:
        """Return a policy that plays the others, as this game shows them to it.

        Args:
            policy: policy for the agents of the view.
            view: agents that the policy acts for, the others among them; None: the others alone.
        """
        if not self.shows_all:
            return policy
        return AssignedPolicy(policy, view or self.others, self.others.agents)


def opponent_view(path: Path, state: Mapping[str, Any], game: Game, *, plays_itself: bool) -> View:
    """Return the agents that an opponent's policy acts for, of a league with `league.agents`.

    Args:
        path: file of the opponent.
        state: its contents.
        game: game that it plays.
        plays_itself: whether policies of the learning team may play the others.

    Raises:
        CheckpointError: if it was trained on other agents, or saw them otherwise.
    """
    whole = View.of("", tuple(range(game.spec.num_agents)), game.spec, centralized=False)
    saved = without_expert(saved_spec(state))
    for view in (game.others, whole, *([game.team] if plays_itself else [])):
        if not first_difference(without_expert(view.spec), saved):
            return game.others if view is game.team else view
    near = game.others if saved.num_agents == game.others.spec.num_agents else whole
    raise CheckpointError(
        f"opponent {path} was trained on something else than what league.agents leaves to "
        f"opponents: {first_difference(without_expert(near.spec), saved)}; name a checkpoint of a "
        f"run that acts for {shown_agents(game.others.spec.agent_names)}, or for all agents, or "
        "take it out of league.checkpoints"
    )


def check_opponent(path: Path, state: Mapping[str, Any], spec: EnvSpec) -> None:
    """Refuse an opponent that never saw this game, or saw it otherwise.

    Raises:
        CheckpointError: naming the first difference.
    """
    difference = first_difference(without_expert(spec), without_expert(saved_spec(state)))
    if difference:
        raise CheckpointError(
            f"opponent {path} was trained on something else than this run's team: {difference}; "
            "name a checkpoint of the same environment with the same observations, or take it out "
            "of league.checkpoints"
        )
