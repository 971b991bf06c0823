"""Opponents of a league, and their assignment to the environments of a session."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from murmur.learner_service.learning.base import Policy
from murmur.learner_service.learning.team_specs import View

EPISODES = 50.0  # against an opponent that its score is made of, roughly
_LEAST = 0.05  # weight of an opponent that is always beaten


@dataclass
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


@dataclass(eq=False)
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
