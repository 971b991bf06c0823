"""Opponents of a league, and which of them plays in each environment of a session."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from learner_service.algorithms.base import Policy

EPISODES = 50.0  # against an opponent that its score is made of, roughly
_LEAST = 0.05  # weight of an opponent that is always beaten


@dataclass
class Opponent:
    """A policy to play against.

    Attributes:
        file: the checkpoint it came from; a name within the run's checkpoints, or a whole path.
        policy: acts.
        points: the learning team's mean result against it, 1 a win, 0.5 a draw, 0 a loss; recent
            episodes count more.
        episodes: that this rank has played against it since the ranks last shared their points.
    """

    file: str
    policy: Policy
    points: float = 0.5
    episodes: int = 0

    @property
    def weight(self) -> float:
        """How much it is wanted: the square of its share of points."""
        return max((1.0 - self.points) ** 2, _LEAST)

    def record_result(self, points: float, memory: float = EPISODES) -> None:
        """Note the result of an episode; `memory`: episodes that the score is made of."""
        self.points += (points - self.points) / memory
        self.episodes += 1


@dataclass(eq=False)
class Pairing:
    """Who plays the other team in each of a session's environments, and how the episode stands.

    Attributes:
        opponents: [n]; None: the learner's own policy as it is now.
        lead: [n] the learning team's rewards so far less those of the other.
        memory: of each [A, H], what the opponent remembers, on the device; None: nothing (yet).
    """

    opponents: list[Opponent | None]
    lead: NDArray[np.float64]
    memory: list[Tensor | None]

    @classmethod
    def of(cls, num_envs: int) -> "Pairing":
        """No opponent is drawn yet."""
        return cls([None] * num_envs, np.zeros(num_envs), [None] * num_envs)
