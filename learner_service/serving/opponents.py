"""Opponents of a league, and their assignment to the environments of a session."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from murmur.learner_service.learning.base import Policy

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


@dataclass(eq=False)
class Pairing:
    """Opponents and scores of the episodes under way in a session's environments.

    Attributes:
        opponents: [n] opponents that play the other team; None: the learner's own policy as it is
            now.
        lead: [n] the learning team's rewards so far less those of the other.
        memory: [n] opponents' recurrent states [A, H] on the device; None: of zeros, or none.
    """

    opponents: list[Opponent | None]
    lead: NDArray[np.float64]
    memory: list[Tensor | None]

    @classmethod
    def of(cls, num_envs: int) -> "Pairing":
        """Return a pairing without opponents."""
        return cls([None] * num_envs, np.zeros(num_envs), [None] * num_envs)
