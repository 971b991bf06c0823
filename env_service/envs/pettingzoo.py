"""Any PettingZoo environment, parallel or AEC, by "package.module:factory"."""

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from pydantic import Field

from murmur.env_service.adapters.casts import WHOLE, require_numbers, write_box
from murmur.env_service.adapters.factory import AdapterConfig, attempt, first_reset, read_info
from murmur.env_service.adapters.kinds import create_copies, unread_masks
from murmur.env_service.adapters.sequential import (
    GUESSED,
    MID,
    TERMINATED,
    TRUNCATED,
    Interface,
    SequentialVectorEnv,
    hint_of,
    shown,
)
from murmur.env_service.adapters.turns import TurnByTurn
from murmur.shared.process.errors import ConfigError
from murmur.shared.wire.spec import ACTION_MASK, AGENT_MASK, STATE

ByAgent = Mapping[Any, Any]  # observations, rewards or infos by the agents' names
Agents = list[tuple[int, Any]]  # rows and names of some agents

_STEP_RETURNS = "(observations, rewards, terminations, truncations, infos)"


class Config(AdapterConfig):
    """Options of `pettingzoo`."""

    reward_sharing: Literal["none", "mean", "sum"] = Field(
        "none", description="give every agent its own reward, or the mean or sum of all agents'"
    )
    state: bool = Field(False, description="also give state(), for centralized critics")
    agents_can_die: bool = Field(
        True,
        description="agents may leave or join before the episode ends, and agent_mask tells who is "
        "alive; false: that is an error",
    )


class PettingZoo(SequentialVectorEnv):
    """N copies of a PettingZoo parallel environment behind the contract.

    An agent that is not among the environment's `agents` observes zeros, gets no reward, has
    action 0 as its only legal one and 0 in `agent_mask`. The episode ends when no agent is left;
    on that row the agents that stayed until the end keep their last observation and 1 in
    `agent_mask`. Discount is 0 there unless one of them was truncated; then only the truncated
    keep 1, so that no value is bootstrapped for those that terminated.
    An agent whose info is None has none.
    """

    def __init__(self, config: Config, environments: list[Any]) -> None:
        """Read the first copy's agents and spaces; none of its steps is played.

        Raises:
            ConfigError: if murmur cannot step the environment, naming the fix.
        """
        from murmur.env_service.adapters.actions import ActionLayout
        from murmur.env_service.adapters.observations import ObservationLayout

        first = environments[0]
        agents = _agents(first, config.factory)
        observed = _spaces(first, config.factory, "observation_space", agents)
        actions = ActionLayout(
            _spaces(first, config.factory, "action_space", agents), joint=bool(config.joint_actions)
        )
        told, infos = _tells_masks(first, config.factory)
        state, self._write_state, view, doubt = _state(first, config, agents)
        if state is not None:
            _require_one_order(environments, agents, config.factory)
        seen = ObservationLayout(observed, config)
        doubts = [(GUESSED, STATE, f"'{STATE}': {doubt}")] if doubt else []
        if not told and not any(seen.masks_seen):
            doubts += unread_masks(first, infos, list(observed.values()))
        turns = isinstance(first, TurnByTurn)
        cycles = hint_of(getattr(getattr(first, "unwrapped", first), "max_cycles", 0))
        interface = Interface(
            str((getattr(first, "metadata", None) or {}).get("name") or config.factory),
            [str(agent) for agent in agents],
            seen,
            actions,
            masks_told=told,
            agents_can_die=config.agents_can_die and len(agents) > 1,
            takes_turns=turns,
            state=state,
            max_episode_steps=hint_of(cycles * len(agents) if turns else cycles),
            hint="its attribute max_cycles" + " for each agent" * turns,
            doubts=tuple(doubts),
            sharing=config.reward_sharing,
        )
        super().__init__(interface, environments, config)
        self._shares = config.reward_sharing != "none"
        self._all = list(enumerate(agents))
        self._index = {agent: a for a, agent in self._all}
        self._alive_agents = [self._all] * len(environments)  # of each copy: (row, agent)
        self._names = [set(agents)] * len(environments)  # of each copy: the agents that are alive
        # Of each copy: who was done in the step before and still in `agents`, and how it ended.
        self._done: list[dict[Any, str]] = [{} for _ in environments]
        if view is not None:
            self._state_places = [view(row) for row in self._arrays[STATE]]

    def _begin(self, i: int, environment: Any, seed: int) -> None:
        observations, infos = self._reset(i, environment, seed)
        infos = self._read_infos(i, infos)
        alive = self._present(i, environment)
        if not alive:
            raise self._fault(i, "starts an episode without agents")
        try:
            for a, agent in alive:
                self._see(i, a, agent, observations[agent], infos)
        except KeyError as error:
            raise self._fault(i, f"left agent {error} out of what reset() returned") from error
        self._set_alive(i, alive)
        self._done[i] = {}
        if self._write_state is not None:
            self._see_state(i, environment.state())

    def _advance(self, i: int, environment: Any, actions: Any) -> int:
        alive, own = self._alive_agents[i], self._own_rows[i]
        result = environment.step(self._moves(i, environment, actions))
        observations, rewards, terminations, truncations, infos = self._unpack(
            i, result, _STEP_RETURNS
        )
        self._infos[i] = infos
        infos = self._read_infos(i, infos)
        if len(alive) < len(own):
            own.fill(0)
        ended: dict[Any, str] = {}
        truncated = []
        try:
            for a, agent in alive:
                own[a] = reward = rewards[agent]
                if reward is None:
                    raise TypeError("None")  # NumPy takes it for NaN
                if not -WHOLE <= reward <= WHOLE:
                    self._say_reward(a, reward, own)
                if terminations[agent]:
                    ended[agent] = "terminated"
                elif truncations[agent]:
                    ended[agent] = "truncated"
                    truncated.append((a, agent))
                elif terminations[agent] is None or truncations[agent] is None:
                    raise TypeError("None")  # a flag that was forgotten is not false
                else:
                    self._see(i, a, agent, observations[agent], infos)
        except KeyError as error:
            raise self._fault(i, f"left agent {error} out of what step() returned") from error
        except (TypeError, ValueError) as error:
            message = _not_a_dictionary(result) or _not_of_an_agent(result, alive)
            if not message:
                raise
            raise self._fault(i, message) from error
        if len(rewards) > len(alive):
            self._look_at_absent(i, rewards)
        outcome = MID
        if ended or self._done[i] or set(environment.agents) != self._names[i]:
            present = self._present(i, environment)
            self._take_leave(i, present, ended)
            still = [x for x in present if x[1] not in ended]
            if still:
                for _, agent in truncated:
                    self.notices.say(
                        "truncated_alone",
                        "truncations",
                        f"agent '{agent}' was truncated at step {self._ages[i]} while others "
                        "continue: its last transition is not bootstrapped, as if it had "
                        "terminated; truncate all agents in one step if that is wrong",
                    )
                self._change(i, alive, still, observations, infos)
            else:
                outcome = TRUNCATED if truncated else TERMINATED
                self._end(i, ended, observations, infos)
                if 0 < len(truncated) < len(alive):
                    self._set_alive(i, truncated)
        if self._write_state is not None:
            self._see_state(i, environment.state())
        return outcome

    def _moves(self, i: int, environment: Any, actions: Any) -> dict[Any, Any]:
        """Return the environment's action of each agent that acts."""
        convert = self._convert
        return {agent: convert[a](actions[a]) for a, agent in self._alive_agents[i]}

    def _look_at_absent(self, i: int, rewards: Mapping[Any, Any]) -> None:
        """Give a notice of a reward for an absent agent; only reward sharing counts it."""
        for agent, reward in rewards.items():
            if agent in self._names[i] or reward is None or not reward:
                continue
            known = self._index.get(agent)
            shared = self._shares and known is not None
            if shared:
                self._own_rows[i][known] = reward
            if self.notices.said("reward_of_absent", "rewards"):
                continue
            self.notices.say(
                "reward_of_absent",
                "rewards",
                f"agent '{agent}' was given {reward!r} as reward at step {self._ages[i]}, when it "
                "was not among the agents: "
                + (
                    f"reward_sharing: {self._sharing} counts it"
                    if shared
                    else "that is dropped; reward_sharing: sum or mean would count it"
                    if known is not None
                    else "that is dropped, for it is none of possible_agents"
                ),
            )

    def _present(self, i: int, environment: Any) -> Agents:
        """Return the agents that the environment lists, as (row, agent)."""
        there = set(environment.agents)
        strangers = there - self._index.keys()
        if strangers:
            raise self._fault(
                i, f"has agent '{sorted(map(str, strangers))[0]}', not one of its possible_agents"
            )
        return [x for x in self._all if x[1] in there]

    def _take_leave(self, i: int, present: Agents, ended: Mapping[Any, str]) -> None:
        """Check that agents leave if and only if they are done, at the latest in the next step."""
        there = {agent for _, agent in present}
        for agent, how in self._done[i].items():
            if agent in there:
                raise self._fault(
                    i,
                    f"keeps agent '{agent}', {how} at step {self._ages[i] - 1}, in agents; remove "
                    "it there",
                )
        for _, agent in self._alive_agents[i]:
            if agent not in there and agent not in ended:
                raise self._fault(
                    i, f"takes agent '{agent}' out of agents, neither terminated nor truncated"
                )
        self._done[i] = {agent: how for agent, how in ended.items() if agent in there}

    def _see(
        self, i: int, a: int, agent: Any, observation: Any, infos: ByAgent, *, over: bool = False
    ) -> None:
        """Write one agent's observation and action mask."""
        self._observe(i, a, observation)
        self._read_mask(i, a, observation, infos.get(agent) or {}, over=over)

    def _see_state(self, i: int, state: Any) -> None:
        """Write the global state."""
        watched = i == 0 and self._write_state is write_box and self._watch.on
        if watched:
            require_numbers(state)
        self._write_state(self._state_places[i], state)
        if watched:
            self._watch.look(-1, STATE, state, self._state_places[i])

    def _set_alive(self, i: int, alive: Agents) -> None:
        """Set the alive agents, and blank all others."""
        self._alive_agents[i], self._names[i] = alive, {agent for _, agent in alive}
        gone = [a for a, agent in self._all if agent not in self._names[i]]
        if gone and AGENT_MASK not in self._arrays:
            name = self.agents[gone[0]]
            raise self._fault(
                i, f"continues without agent '{name}'; set environment.agents_can_die: true"
            )
        self._alive[i] = 1
        for a in gone:
            self._alive[i, a] = 0
            self._blank(i, a)

    def _change(
        self, i: int, before: Agents, now: Agents, observations: ByAgent, infos: ByAgent
    ) -> None:
        """Update the alive agents after some left or came, in an episode that continues."""
        self._set_alive(i, now)
        try:
            for a, agent in now:
                if (a, agent) not in before:
                    self._unmask(i, a)
                    self._see(i, a, agent, observations[agent], infos)
        except KeyError as error:
            raise self._fault(i, f"left agent {error} out of what step() returned") from error

    def _end(self, i: int, ended: Mapping[Any, str], observations: ByAgent, infos: ByAgent) -> None:
        """Write the last agents' final observations; truncated agents must have one."""
        for agent, how in ended.items():
            a = self._index[agent]
            if observations.get(agent) is not None:
                self._see(i, a, agent, observations[agent], infos, over=True)
            elif how == "terminated":
                self._blank(i, a)
            else:
                raise self._fault(i, f"truncated agent '{agent}' without a last observation")

    def _info(self, i: int, name: str) -> float | None:
        """Return an info's mean over the agents that report it."""
        given = [read_info(info, name) for info in self._infos[i].values() if info]
        found = [value for value in given if value is not None]
        return sum(map(float, found)) / len(found) if found else None


class TurnGame(PettingZoo):
    """N copies of a PettingZoo AEC environment behind the contract: a step is one agent's move.

    The agent to act has 1 in `turn_mask`, sees its observation, and is rewarded for all that came
    since its last move. Others have action 0 as their only legal one, which is ignored, and still
    observe what they saw last; zeros before their first turn. All see their last observation on
    LAST.
    """

    def _begin(self, i: int, environment: Any, seed: int) -> None:
        for a, _ in self._all:
            self._blank(i, a)
        super()._begin(i, environment, seed)

    def _moves(self, i: int, environment: Any, actions: Any) -> dict[Any, Any]:
        agent = environment.acting
        a = self._index[agent]
        return {agent: self._convert[a](actions[a])}

    def _cut(self, i: int, environment: Any) -> None:
        for a, agent in self._alive_agents[i]:
            if agent != environment.acting:
                observation, self._own_rows[i][a] = environment.unpaid(agent)
                self._observe(i, a, observation)
        self._turns[i] = 0

    def _see(
        self, i: int, a: int, agent: Any, observation: Any, infos: ByAgent, *, over: bool = False
    ) -> None:
        """Write the observation of the agent to act; another one has to wait."""
        acts = agent == self._environments[i].acting
        self._turns[i, a] = acts
        if acts or over:
            self._unmask(i, a)
            super()._see(i, a, agent, observation, infos, over=over)
        if not acts and self._masks is not None:
            self._masks[i, a] = self._noop


def _agents(environment: Any, factory: str) -> list[Any]:
    """Return the environment's possible_agents.

    Raises:
        ConfigError: if the environment has none, or gives two agents one name.
    """
    agents: list[Any] = attempt(
        factory,
        "reading possible_agents",
        lambda: list(environment.possible_agents),
        "set self.possible_agents to the list of all agents in its __init__",
    )
    if not agents:
        raise ConfigError(f"'{factory}' has no possible_agents")
    names = [str(agent) for agent in agents]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"'{factory}' names '{name}' {names.count(name)} times in possible_agents; each "
                "agent needs a name of its own"
            )
    return agents


def _require_one_order(environments: list[Any], agents: list[Any], factory: str) -> None:
    """Check that the copies list their agents in one order, which their state may follow.

    Raises:
        ConfigError: if the orders differ.
    """
    for environment in environments[1:]:
        other = _agents(environment, factory)
        if other != agents:
            raise ConfigError(
                f"'{factory}' lists possible_agents as {', '.join(map(str, agents))} in one copy "
                f"and as {', '.join(map(str, other))} in another: its state may list them "
                "differently, too; set self.possible_agents to one sorted list, or "
                "environment.state: false"
            )


def _tells_masks(environment: Any, factory: str) -> tuple[bool, list[Any]]:
    """Reset once; return whether the infos hold action masks, and those infos.

    Raises:
        ConfigError: if reset raises or does not return two dictionaries by agent.
    """
    observations, infos = first_reset(environment, factory, "(observations, infos)")
    if not isinstance(observations, Mapping):
        raise ConfigError(
            f"'{factory}': reset() must return (observations, infos), two dictionaries by agent; "
            f"its observations are a {type(observations).__name__}"
        )
    for agent, info in infos.items():
        if not isinstance(info, Mapping | None):
            raise ConfigError(
                f"'{factory}': reset() must return a dictionary as infos of each agent; "
                f"those of agent '{agent}' are a {type(info).__name__}"
            )
    given = [info for info in infos.values() if info]
    return any(ACTION_MASK in info for info in given), given


def _state(environment: Any, config: Config, agents: list[Any]) -> tuple[Any, Any, Any, str]:
    """Return the state's spec, writer, view and guess; None if it is not configured.

    Raises:
        ConfigError: if the environment has none.
    """
    if not config.state:
        return None, None, None, ""
    from gymnasium import spaces

    from murmur.env_service.adapters.observations import state_layout

    inner = getattr(environment, "unwrapped", environment)
    space = getattr(environment, "state_space", None) or getattr(inner, "state_space", None)
    if space is None:
        try:
            example = environment.state()
            example = example.astype(example.dtype)
        except Exception as error:
            raise ConfigError(
                f"'{config.factory}' has no state() that gives an array ({type(error).__name__}: "
                f"{error}); set environment.state: false"
            ) from error
        space = spaces.Box(-float("inf"), float("inf"), example.shape, example.dtype.type)
    return state_layout(space, config, agents)


def _spaces(environment: Any, factory: str, name: str, agents: list[Any]) -> dict[str, Any]:
    """Return each agent's observation or action space.

    Raises:
        ConfigError: if the environment has no method that returns them.
    """
    return {
        str(agent): attempt(
            factory,
            f"reading {name}({agent!r})",
            lambda agent=agent: getattr(environment, name)(agent),  # type: ignore[misc]
            f"give it a method {name}(self, agent) that returns one of gymnasium.spaces",
        )
        for agent in agents
    }


def _not_a_dictionary(result: Any) -> str:
    """Return the message about step() if one of its five values is no dictionary; else ""."""
    names = _STEP_RETURNS.strip("()").split(", ")
    for name, value in zip(names, result, strict=True):
        if not isinstance(value, Mapping):
            kind = type(value).__name__
            return f"returned a {kind} as {name} from step(), not a dictionary by agent"
    return ""


def _not_of_an_agent(result: Any, alive: Agents) -> str:
    """Return the message about the first invalid reward or flag of an agent; "" if none."""
    _, rewards, terminations, truncations, _ = result
    for name, values, use, wanted in (
        ("reward", rewards, float, "a number"),
        ("termination", terminations, bool, "true or false"),
        ("truncation", truncations, bool, "true or false"),
    ):
        for _, agent in alive:
            value = values.get(agent, False)
            try:
                if value is None or (np.ndim(value) and use is float):
                    raise TypeError
                use(value)
            except (TypeError, ValueError):
                whose = f"{name} of agent '{agent}'"
                return f"returned {shown(value)} as {whose} from step(), not {wanted}"
    return ""


def make(config: Config, num_envs: int) -> PettingZoo:
    """Make N copies of the environment.

    Raises:
        ConfigError: if the factory cannot be called or makes another kind of object.
    """
    copies = create_copies(config, "pettingzoo", num_envs)
    return (TurnGame if isinstance(copies[0], TurnByTurn) else PettingZoo)(config, copies)
