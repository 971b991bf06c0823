"""Teams of a run: agents that are trained apart from the others, with options of their own."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from murmur.learner_service.layers.building import ImageShape, resolved_name
from murmur.learner_service.learning.options import TeamsConfig
from murmur.learner_service.storage.rollout import Rollout
from murmur.shared.config import PluginConfig
from murmur.shared.config.plugins import load_plugin
from murmur.shared.config.section import validate, with_new_names
from murmur.shared.process.errors import ConfigError
from murmur.shared.wire.dataset import OBSERVATION
from murmur.shared.wire.spec import (
    ADJACENCY,
    NO_INPUTS,
    STATE,
    ArraySpec,
    Composite,
    EnvSpec,
    agent_numbers,
    shown_agents,
)

OTHERS = "others/"  # prefix of what a centralized critic is shown of the other teams
_OPTION = "algorithm.teams"


@dataclass(frozen=True)
class View:
    """The part of an environment that some of its agents see: the others belong to the world.

    Attributes:
        name: name of the team.
        agents: numbers of its agents, in ascending order.
        spec: spec of the environment as the team has it.
        others: numbers of the agents that its critic sees beside the team's; empty: none.
    """

    name: str
    agents: tuple[int, ...]
    spec: EnvSpec
    others: tuple[int, ...] = ()

    @classmethod
    def of(cls, name: str, agents: tuple[int, ...], spec: EnvSpec, *, centralized: bool) -> Self:
        """Return a team's view of an environment.

        Args:
            name: name of the team.
            agents: numbers of its agents.
            spec: spec of the environment.
            centralized: whether its critic sees what all agents observe.
        """
        action, shown, others = spec.action, list(spec.observations), tuple[int, ...]()
        if isinstance(action, Composite) and action.idle:
            action = replace(action, idle=tuple(action.idle[a] for a in agents))
        if centralized and not spec.observation(STATE):
            others = tuple(a for a in range(spec.num_agents) if a not in agents)
        if spec.gives_adjacency:  # among the team's own agents
            shown = [replace(o, shape=(len(agents),)) if o.name == ADJACENCY else o for o in shown]
        for o in spec.observations if others else ():
            if o.per_agent and len(o.shape) != 3 and o.name not in NO_INPUTS:
                size = len(others) * math.prod(o.shape)
                shown.append(ArraySpec(OTHERS + o.name, o.dtype, (size,), per_agent=False))
        names = tuple(spec.agents[a] for a in agents) if spec.agents else ()
        own = replace(
            spec,
            num_agents=len(agents),
            agents=names,
            action=action,
            observations=tuple(shown),
        )
        return cls(name, agents, own, others)

    def rows(self, x: Tensor, axis: int, agents: tuple[int, ...] = ()) -> Tensor:
        """Return the rows of the team's agents, or of others, along an axis."""
        rows = rows_of(agents or self.agents)
        if isinstance(rows, slice):
            return x.narrow(axis, rows.start, rows.stop - rows.start)
        # Not by an index: its copy to the device could be in no CUDA graph.
        return torch.stack([x.select(axis, agent) for agent in rows], axis)

    def observation(self, observation: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the team's part of observations [B, A, ...] or [B, ...], to act on."""
        per_agent = {o.name: o.per_agent for o in self.spec.observations}
        found = {
            name: self.rows(x, 1) if per_agent.get(name, False) else x
            for name, x in observation.items()
        }
        if self.spec.gives_adjacency:
            found[ADJACENCY] = self.rows(found[ADJACENCY], 2)
        return found

    def batch(self, batch: Rollout, memory_size: int) -> Rollout:
        """Return the team's part of a rollout.

        Args:
            batch: rollout of all agents.
            memory_size: numbers of the memory that are the team's policy's, Z; 0: it has none.
        """
        per_agent = {OBSERVATION + o.name: o.per_agent for o in self.spec.observations}
        arrays = {}
        for name, x in batch.arrays.items():
            shared = name in ("step_type", "discount") or not per_agent.get(name, True)
            if name != "memory":
                arrays[name] = x if shared else self.rows(x, 2).contiguous()
            elif memory_size:
                arrays[name] = self.rows(x, 2)[..., :memory_size].contiguous()
        if self.spec.gives_adjacency:
            name = OBSERVATION + ADJACENCY
            arrays[name] = self.rows(arrays[name], 3).contiguous()
        for name in per_agent:
            if self.others and name.startswith(OBSERVATION + OTHERS):
                x = batch.arrays[OBSERVATION + name.removeprefix(OBSERVATION + OTHERS)]
                arrays[name] = self.rows(x, 2, self.others).flatten(2)
        return replace(batch, arrays=arrays)


def rows_of(agents: Sequence[int]) -> slice | list[int]:
    """Return an index of agents' rows, a slice where they are side by side: that copies nothing."""
    start, stop = agents[0], agents[-1] + 1
    return slice(start, stop) if len(agents) == stop - start else list(agents)


def rows_by_agent(views: Iterable[View]) -> list[int] | None:
    """Return the row of each agent where the rows of views follow one another; None: in order."""
    rows = [agent for view in views for agent in view.agents]
    return None if rows == sorted(rows) else [rows.index(a) for a in range(len(rows))]


def agents_of_teams(options: TeamsConfig, spec: EnvSpec) -> dict[str, tuple[int, ...]]:
    """Return the numbers of each team's agents, in ascending order.

    Raises:
        ConfigError: if an agent is unknown, or in no team or several.
    """
    found, team_of = dict[str, tuple[int, ...]](), dict[int, str]()
    for team in options.teams:
        where, given = f"{_OPTION}.{team}", options.of_team(team).agents
        found[team] = agent_numbers((team,) if given is None else given, spec, f"{where}.agents")
        for agent in found[team]:
            other = team_of.setdefault(agent, team)
            if other != team:
                raise ConfigError(
                    f"{where}: {spec.agent_label(agent)} is in team '{other}' already; each agent "
                    "belongs to one team"
                )
    names = spec.agent_names
    if missing := tuple(names[a] for a in range(spec.num_agents) if a not in team_of):
        raise ConfigError(
            f"{_OPTION}: no team has {shown_agents(missing)} of '{spec.name}'; add one that does"
        )
    return found


def shared_within(slices: Iterable[int], agents: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Return share_parameters of each team, of a list for all agents.

    Args:
        slices: number of each agent's networks.
        agents: numbers of each team's agents.

    Raises:
        ConfigError: if agents of two teams share networks.
    """
    known, team_of = tuple(slices), dict[int, str]()
    for team, members in agents.items():
        for number in {known[a] for a in members}:
            other = team_of.setdefault(number, team)
            if other != team:
                raise ConfigError(
                    f"algorithm.share_parameters = {list(known)}: teams '{other}' and '{team}' "
                    f"share networks {number}, and {_OPTION} trains each team's apart; give each "
                    "team numbers of its own, or true: the agents of a team share"
                )
    numbers: dict[str, dict[int, int]] = {team: {} for team in agents}
    return {
        team: tuple(numbers[team].setdefault(known[a], len(numbers[team])) for a in members)
        for team, members in agents.items()
    }


def network_of_team(
    network: PluginConfig, changes: Mapping[str, Any], image: ImageShape, where: str
) -> PluginConfig:
    """Return a team's network: the run's with changes, or one of another name.

    Args:
        network: network of the run.
        changes: options that differ; with `name` those of another network.
        image: shape of the images that the policy sees.
        where: dotted key of the changes, for messages.

    Raises:
        ConfigError: for an unknown network or option, or a wrong value.
    """
    if not changes:
        return network
    name = str(changes.get("name", network.name))
    try:
        kind = load_plugin("network", resolved_name(PluginConfig(name=name), image)).Config
    except ConfigError as error:
        raise ConfigError(f"'{where}.name' = {name}: {error}") from None
    own = with_new_names(kind, {k: x for k, x in changes.items() if k != "name"}, where)
    options = {**(network.options if name == network.name else {}), **own}
    validate(kind, options, where)
    return PluginConfig(**{**options, "name": name})
