"""A game of pixels for tests.same_weights, by PettingZoo's interface alone.

It is copied beside the run and imported as a module of its own, so that any checkout can play it.
"""

from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete
from pettingzoo import ParallelEnv

SIZE, STEPS = 12, 5


class Dots(ParallelEnv):  # type: ignore[misc]
    """Each of two agents sees a colored dot that drifts, and is paid for saying which way."""

    metadata = {"name": "dots"}  # noqa: RUF012 - as PettingZoo declares it
    possible_agents = ["left", "right"]  # noqa: RUF012

    def observation_space(self, agent: str) -> Box:
        """Return the space of images [H, W, 3]."""
        return Box(0, 255, (SIZE, SIZE, 3), np.uint8)

    def action_space(self, agent: str) -> Discrete:
        """Return the space of directions."""
        return Discrete(2)

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin an episode that follows from the seed."""
        self._random = np.random.default_rng(seed)
        self.agents, self._age = [*self.possible_agents], 0
        self._at = {agent: int(self._random.integers(SIZE)) for agent in self.agents}
        self._to = {agent: int(self._random.integers(2)) for agent in self.agents}
        return self._seen(), {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        """Pay each agent that names the direction of its dot."""
        agents = self.agents
        reward = {agent: float(actions[agent] == self._to[agent]) for agent in agents}
        for agent in agents:
            self._at[agent] = (self._at[agent] + 2 * self._to[agent] - 1) % SIZE
        self._age += 1
        over = self._age == STEPS
        seen, ended = self._seen(), dict.fromkeys(agents, over)
        self.agents = [] if over else agents
        return seen, reward, ended, dict.fromkeys(agents, False), {agent: {} for agent in agents}

    def _seen(self) -> dict[str, Any]:
        images = {}
        for agent in self.possible_agents:
            images[agent] = np.zeros((SIZE, SIZE, 3), np.uint8)
            images[agent][self._at[agent], :, self._age % 3] = 255
        return images
