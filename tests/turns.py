"""Tiny AEC games whose turns and rewards are written down, for tests."""

from typing import Any, ClassVar

import numpy as np
from gymnasium.spaces import Box, Dict, Discrete
from pettingzoo import AECEnv

# Of each move: who makes it, rewards that it brings, who is terminated or truncated by it.
Move = tuple[str, dict[str, float], dict[str, str]]
SCRIPTS: dict[str, list[Move]] = {
    # a moves twice; b is paid before its first turn; the end comes at b's move and pays a, too.
    "twice": [
        ("a", {"a": 1, "b": 10}, {}),
        ("a", {"b": 20}, {}),
        ("b", {"a": 2}, {}),
        ("a", {}, {}),
        ("b", {"a": 5, "b": 7}, {"a": "terminated", "b": "terminated"}),
    ],
    # b loses by a's move, and leaves; a and c continue.
    "leaves": [
        ("a", {}, {}),
        ("b", {"b": 1}, {}),
        ("c", {}, {}),
        ("a", {"a": 3, "b": -4}, {"b": "terminated"}),
        ("c", {"c": 2}, {}),
        ("a", {"a": 6, "c": 8}, {"a": "terminated", "c": "terminated"}),
    ],
    "truncated": [
        ("a", {"a": 1}, {}),
        ("b", {"a": 2, "b": 3}, {"a": "truncated", "b": "truncated"}),
    ],
}


class Scripted(AECEnv):  # type: ignore[misc]
    """Plays a script. Each agent observes the number of moves made, and 100 times its own number.

    Args:
        script: key of SCRIPTS.
        masks: true if observations hold an action mask; then action 0 is never legal, and nothing
            is for an agent that waits, as in PettingZoo's classic games.
        continuous: true if actions are continuous.
    """

    metadata: ClassVar = {"name": "scripted", "is_parallelizable": False}

    def __init__(self, script: str = "twice", masks: bool = True, continuous: bool = False) -> None:
        super().__init__()
        self._moves, self._masks = SCRIPTS[script], masks
        self.possible_agents = sorted({agent for agent, _, _ in self._moves})
        self._action = Box(-1, 1, (1,)) if continuous else Discrete(3)
        self.taken: list[tuple[str, Any]] = []
        self.options: Any = None

    def observation_space(self, agent: str) -> Any:
        seen = Box(0, 1000, (1,), np.float32)
        return (
            Dict({"seen": seen, "action_mask": Box(0, 1, (3,), np.int8)}) if self._masks else seen
        )

    def action_space(self, agent: str) -> Any:
        return self._action

    def observe(self, agent: str) -> Any:
        seen = np.array([self._made + 100 * self.possible_agents.index(agent)], np.float32)
        if not self._masks:
            return seen
        mask = np.array([0, 1, 1], np.int8) * (agent == self.agent_selection)
        return {"seen": seen, "action_mask": mask}

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        self.agents = list(self.possible_agents)
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos: dict[str, dict[str, Any]] = {agent: {} for agent in self.agents}
        self._made, self.taken = 0, []
        self.options = options
        self.agent_selection = self._moves[0][0]

    def step(self, action: Any) -> None:
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            self._was_dead_step(action)
            return
        self._cumulative_rewards[agent] = 0
        self._clear_rewards()
        self.taken.append((agent, action))
        _, rewards, done = self._moves[self._made]
        self._made += 1
        self.rewards.update(rewards)
        for other, how in done.items():
            (self.terminations if how == "terminated" else self.truncations)[other] = True
        if self._made < len(self._moves):
            self.agent_selection = self._moves[self._made][0]
        self._accumulate_rewards()
        self._deads_step_first()
