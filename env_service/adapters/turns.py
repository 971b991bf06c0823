"""PettingZoo's AEC environments, in which agents take turns, with the steps of a parallel one."""

from collections.abc import Mapping
from typing import Any


class TurnByTurn:
    """An AEC environment with the interface of a parallel one: a step is the move of one agent.

    When its turn comes an agent gets what `last()` returns: its observation, the rewards since
    its last move, whether it is done, and its info. The other agents are given None as observation,
    0 as reward and no info. An agent that is done is reported once its last turn, in which it can
    only leave, has come; then it is no longer among `agents`.

    Attributes:
        env: the AEC environment.
        possible_agents: all agents.
        agents: agents that have not left.
        acting: agent with the turn; None once all have left.
    """

    def __init__(self, env: Any) -> None:
        """Keep the environment."""
        self.env = env
        self.possible_agents = env.possible_agents
        self.agents: list[Any] = []
        self.acting: Any = None
        self.metadata: Mapping[str, Any] = getattr(env, "metadata", None) or {}
        self.observation_space, self.action_space = env.observation_space, env.action_space

    @property
    def unwrapped(self) -> Any:
        """Return the environment inside all wrappers."""
        return getattr(self.env, "unwrapped", self.env)

    def reset(
        self, seed: int | None = None, **more: Mapping[str, Any]
    ) -> tuple[dict[Any, Any], dict[Any, Any]]:
        """Start an episode, perhaps with options=…; return observations and infos."""
        self.env.reset(seed=seed, **more)
        self.agents = list(self.env.agents)
        observations, _, _, _, infos = self._next_turn()
        return observations, infos

    def step(self, actions: Mapping[Any, Any]) -> tuple[dict[Any, Any], ...]:
        """Make the move of the agent with the turn, and pass the turn to the next one.

        Args:
            actions: action of that agent, by its name.

        Returns:
            observations, rewards, terminations, truncations and infos of all agents that were
            present.
        """
        self.env.step(actions[self.acting])
        return self._next_turn()

    def _next_turn(self) -> tuple[dict[Any, Any], ...]:
        """Let agents that are done leave, until one has a move to make.

        Raises:
            ValueError: if an agent that has left has another turn.
        """
        env, present = self.env, self.agents
        observations: dict[Any, Any] = dict.fromkeys(present)
        rewards: dict[Any, Any] = dict.fromkeys(present, 0.0)
        terminations: dict[Any, Any] = dict.fromkeys(present, False)
        truncations: dict[Any, Any] = dict.fromkeys(present, False)
        infos: dict[Any, Any] = {agent: {} for agent in present}
        self.acting = None
        while env.agents:
            agent = env.agent_selection
            if terminations.get(agent) or truncations.get(agent):
                raise ValueError(f"agent '{agent}' is done, and step(None) left it in agents")
            result = env.last()
            observations[agent], rewards[agent], terminations[agent] = result[:3]
            truncations[agent], infos[agent] = result[3:]
            if not (terminations[agent] or truncations[agent]):
                self.acting = agent
                break
            env.step(None)
        self.agents = list(env.agents)
        for agent in self.agents:  # also those that have joined
            observations.setdefault(agent, None)
        return observations, rewards, terminations, truncations, infos

    def unpaid(self, agent: Any) -> tuple[Any, float]:
        """Return the observation of an agent that waits, and its rewards since its last move."""
        return self.env.observe(agent), self.env._cumulative_rewards[agent]

    def state(self) -> Any:
        """Return the global state."""
        return self.env.state()

    def render(self) -> Any:
        """Return the environment's picture."""
        return self.env.render()

    def close(self) -> None:
        """Close the environment."""
        self.env.close()
