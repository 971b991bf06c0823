"""Specs of an environment's observations, actions and metrics; the handshake compares them."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
from google.protobuf.message import Message

from murmur.shared.config.section import known_names
from murmur.shared.config.symmetry import MAX_SYMMETRIES, ArrayChange, Symmetry, check_symmetry
from murmur.shared.process.errors import ConfigError, SpecError
from murmur.shared.rpc import rollout_pb2 as pb
from murmur.shared.wire.derived_maps import MAX_CHANNELS, Channel, DerivedMap, check_channel

Spec = TypeVar("Spec")
WIRE_DTYPES = ("uint8", "int32", "float16", "float32")

# Far above what any environment has: a spec that is wrong or meant to harm is refused before memory
# is set aside for it. The product of all sizes is limited by the message: codec.check_size.
MAX_ENVS = 65_536  # of one session
MAX_AGENTS = 4_096
MAX_ARRAYS = 256  # observations, and metrics
MAX_DIMENSIONS = 8
MAX_ACTIONS = 65_536
MOST_JOINT_ACTIONS = 4096  # combinations of an agent's choices: environment.joint_actions
MAX_NAME_CHARACTERS = 256
MAX_AGENT_NAME_BYTES = 262_144  # of all agents together, in UTF-8: they travel in one Hello
MAX_EPISODE_STEPS = 10_000_000

# Names with a fixed meaning; every other observation name is the environment's own.
STATE = "state"  # [N, ...] global, or [N, A, ...] each agent's, for centralized critics only
ACTION_MASK = "action_mask"  # [N, A, K] uint8, 1 = legal
AGENT_MASK = "agent_mask"  # [N, A] uint8, 1 = this agent is alive
AGENT_CELL = "agent_cell"  # [N, A, 2] int32, the (row, column) of each agent on its [C, H, W] maps
TURN_MASK = "turn_mask"  # [N, A] uint8, 1 = it is this agent's turn; one agent on FIRST and MID
# [N, A, A] uint8, 1 = the row's agent hears the column's. With another dtype or shape an array of
# this name is an ordinary observation.
ADJACENCY = "adjacency"
EXPERT_ACTION = "expert_action"  # as an action; what an expert would do here; -1: not told
# What no network is fed as it is.
NO_INPUTS = (ACTION_MASK, AGENT_CELL, AGENT_MASK, EXPERT_ACTION, TURN_MASK)
# By symmetries, or as they change actions.
_UNCHANGED = (ACTION_MASK, AGENT_MASK, EXPERT_ACTION, TURN_MASK)
# Of agents' names in a message, which gRPC may blow up twelvefold and limits to 8 KiB.
_SHOWN_AGENTS, _SHOWN_CHARACTERS, _SHOWN_TOGETHER = 8, 40, 160
_NUMBER = re.compile(r"[_\-. ]?\d+$")  # at the end of an agent's name, as in environment.teams
_COMPARED_FIRST = ("name", "num_agents", "agents")
_SAME_ORDER = (
    "list the agents in one order in every process, such as "
    "possible_agents = sorted(...), for the order of a set differs between processes"
)


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """One observation array.

    Attributes:
        name: key of the array in TimeStep.observation.
        dtype: one of WIRE_DTYPES.
        shape: shape without the leading [N, A] (or [N] if not per_agent).
        per_agent: true if every agent has its own.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    per_agent: bool = True

    def __post_init__(self) -> None:
        """Check the dtype and the shape.

        Raises:
            SpecError: for a dtype that does not travel, an impossible shape or name.
        """
        check_name("observation", self.name)
        if len(self.shape) > MAX_DIMENSIONS:
            raise SpecError(
                f"observation '{self.name}' has {len(self.shape)} dimensions; "
                f"at most {MAX_DIMENSIONS} travel"
            )
        if self.dtype not in WIRE_DTYPES:
            raise SpecError(
                f"observation '{self.name}' has dtype {self.dtype[:40]!r}; use one of {WIRE_DTYPES}"
            )
        if any(size < 1 for size in self.shape):
            raise SpecError(
                f"observation '{self.name}' has an empty shape {self.shape}: it holds no number; "
                "leave it out, or give it a constant"
            )


@dataclass(frozen=True, slots=True)
class Discrete:
    """A choice of one of num_actions for each agent; actions travel as int32 [N, A]."""

    num_actions: int


@dataclass(frozen=True, slots=True)
class Continuous:
    """A vector in [low, high]^size for each agent; actions travel as float32 [N, A, U]."""

    size: int
    low: float = -1.0
    high: float = 1.0


@dataclass(frozen=True, slots=True)
class Composite:
    """F choices and U numbers of each agent, taken together.

    Actions travel as int32 [N, A, F], or as float32 [N, A, F + U], choices first, if U > 0. The
    action mask of an agent holds its choices' masks one after the other.

    Attributes:
        factors: [F] number of alternatives of each choice, 1 or more.
        low: [U] lower bound of each number; -inf: none.
        high: [U] upper bound of each number; inf: none.
        idle: [A][U] flags, true if the environment ignores the agent's number; empty: it ignores
            none.
    """

    factors: tuple[int, ...] = ()
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    idle: tuple[tuple[bool, ...], ...] = ()

    @property
    def size(self) -> int:
        """Return U, the number of numbers."""
        return len(self.low)

    @property
    def num_alternatives(self) -> int:
        """Return K, the number of alternatives of all choices together."""
        return sum(self.factors)


ActionSpec = Discrete | Continuous | Composite


def action_layout(action: ActionSpec) -> tuple[np.dtype[np.generic], tuple[int, ...]]:
    """Return the dtype and per-agent shape of an action: see the classes of ActionSpec."""
    if isinstance(action, Discrete):
        return np.dtype(np.int32), ()
    if isinstance(action, Continuous):
        return np.dtype(np.float32), (action.size,)
    dtype = np.dtype(np.float32) if action.size else np.dtype(np.int32)
    return dtype, (len(action.factors) + action.size,)


def action_factors(action: ActionSpec) -> tuple[int, ...]:
    """Return the number of alternatives of each choice: (K,) if discrete, () if continuous."""
    if isinstance(action, Discrete):
        return (action.num_actions,)
    return action.factors if isinstance(action, Composite) else ()


def factor_starts(factors: tuple[int, ...]) -> list[int]:
    """Return the first entry of each choice in an action mask."""
    return list(accumulate(factors, initial=0))[:-1]


def action_bounds(action: ActionSpec) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the lowest and highest value of each entry of an action, as it travels."""
    factors = action_factors(action)
    highest = tuple(float(count - 1) for count in factors)
    if isinstance(action, Discrete):
        return (0.0,), highest
    if isinstance(action, Continuous):
        return (action.low,) * action.size, (action.high,) * action.size
    return (0.0,) * len(factors) + action.low, highest + action.high


@dataclass(frozen=True, slots=True)
class EnvSpec:
    """Everything the learner must know of an environment; fixed by the first Hello of a run.

    Attributes:
        name: the environment's name.
        num_agents: number of agents A.
        observations: observation arrays, in wire order.
        action: action space of each agent.
        metrics: names of the environment's own results, reported on LAST.
        max_episode_steps: number of steps of the longest episode, for planning unrolls; 0 if
            unknown. If the environment only hints at it, an episode may exceed it, with a notice.
        derived: maps that the learner computes from the observations.
        symmetries: changes of the world that preserve its rules.
        agents: [A] names of the agents, in the order of their rows; empty: the environment gives
            none.
    """

    name: str
    num_agents: int
    observations: tuple[ArraySpec, ...]
    action: ActionSpec
    metrics: tuple[str, ...] = ()
    max_episode_steps: int = 0
    derived: tuple[DerivedMap, ...] = ()
    symmetries: tuple[Symmetry, ...] = ()
    agents: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check that the spec is possible.

        Raises:
            SpecError: for no agents, no observation, no action, impossible bounds, a name used
                twice, or more of one of these than the limit.
        """
        check_name("environment", self.name)
        _check_agents(self)
        for metric in self.metrics:
            check_name("metric", metric)
        if self.num_agents < 1:
            raise SpecError(f"environment '{self.name}' has {self.num_agents} agents; need >= 1")
        if isinstance(self.action, Composite):
            _check_composite(self, self.action)
        actions = sum(action_factors(self.action))
        actions += 0 if isinstance(self.action, Discrete) else self.action.size
        for what, count, limit in (
            ("agents", self.num_agents, MAX_AGENTS),
            ("observations", len(self.observations), MAX_ARRAYS),
            ("metrics", len(self.metrics), MAX_ARRAYS),
            ("derived maps", len(self.derived), MAX_ARRAYS),
            ("symmetries", len(self.symmetries), MAX_SYMMETRIES),
            ("actions", actions, MAX_ACTIONS),
        ):
            if count > limit:
                raise SpecError(
                    f"environment '{self.name}' has {count} {what}; at most {limit} are taken"
                )
        if not self.observations:
            raise SpecError(
                f"environment '{self.name}' declares no observation; an agent that sees nothing "
                "observes a constant, such as one 1"
            )
        if isinstance(self.action, Discrete) and self.action.num_actions < 2:
            raise SpecError(
                f"environment '{self.name}' has a choice among {self.action.num_actions} actions: "
                "nothing to learn; give it 2 or more"
            )
        if isinstance(self.action, Continuous):
            _check_bounds(self.name, self.action)
        if self.max_episode_steps > MAX_EPISODE_STEPS:
            raise SpecError(
                f"environment '{self.name}' has max_episode_steps {self.max_episode_steps}; at "
                f"most {MAX_EPISODE_STEPS} are taken; 0 says that episodes have no bound"
            )
        derived = [self.derived_array(d) for d in self.derived]
        for observation in (*self.observations, *derived):
            _check_reserved(self, observation)
        names = [o.name for o in (*self.observations, *derived)]
        for kind, every in (("observation", names), ("metric", list(self.metrics))):
            for name in every:
                if every.count(name) > 1:
                    raise SpecError(f"environment '{self.name}' declares {kind} '{name}' twice")
        shapes = {o.name: o.shape for o in self.observations if o.name not in _UNCHANGED}
        for symmetry in self.symmetries:
            discrete = isinstance(self.action, Discrete)
            check_symmetry(symmetry, shapes.get, actions, discrete=discrete)

    @property
    def agent_names(self) -> tuple[str, ...]:
        """Return the A names of agents; agent_0, agent_1, ... if the environment gives none."""
        return self.agents or tuple(f"agent_{a}" for a in range(self.num_agents))

    @property
    def takes_turns(self) -> bool:
        """Return whether one agent acts at a time, told by TURN_MASK."""
        return self.observation(TURN_MASK) is not None

    @property
    def own_images(self) -> tuple[ArraySpec, ...]:
        """Return the arrays [C, H, W] that each agent observes; a state is not among them."""
        own = (o for o in self.observations if o.per_agent and o.name != STATE)
        return tuple(o for o in own if len(o.shape) == 3)

    @property
    def gives_adjacency(self) -> bool:
        """Return whether the environment says in each step which agents hear each other."""
        o = self.observation(ADJACENCY)
        return o is not None and o == ArraySpec(ADJACENCY, "uint8", (self.num_agents,))

    @property
    def acting_agents(self) -> int:
        """Return the number of agents that act in each step."""
        return 1 if self.takes_turns else self.num_agents

    def agent_label(self, agent: int) -> str:
        """Name an agent in a message: "agent 'uav_1'", or "agent 1" if it has no name."""
        return f"agent '{self.agents[agent]}'" if self.agents else f"agent {agent}"

    def observation(self, name: str) -> ArraySpec | None:
        """Return the observation of that name, or None."""
        return next((o for o in self.observations if o.name == name), None)

    def derived_array(self, derived: DerivedMap) -> ArraySpec:
        """Return a derived map as an observation.

        Raises:
            SpecError: if it cannot be computed from the observations.
        """
        check_name("derived map", derived.name)
        what, channels = f"derived map '{derived.name}'", derived.channels
        if not 0 < len(channels) <= MAX_CHANNELS:
            raise SpecError(f"{what} has {len(channels)} channels; it may have 1 to {MAX_CHANNELS}")
        sizes: set[tuple[int, ...]] = set()
        owners: set[bool] = set()
        for number, channel in enumerate(channels):
            where = f"channel {number} of {what}"
            check_channel(where, channel, self.num_agents)
            if channel.kind == "constant":
                continue
            source = self.observation(channel.source)
            if source is None:
                raise SpecError(
                    f"{where} is computed from '{channel.source}', which does not travel"
                )
            shape, rank = source.shape, 1 if channel.kind == "fill" else 3
            if len(shape) != rank or source.dtype != "float32" or not 0 <= channel.index < shape[0]:
                raise SpecError(
                    f"{where} needs entry {channel.index} of '{channel.source}', a float32 array "
                    f"with {rank} dimension{'s' * (rank > 1)}; it is {source.dtype} {shape}"
                )
            owners.add(source.per_agent)
            if rank == 3:
                sizes.add(shape[1:])
        if len(sizes) != 1 or len(owners) != 1:
            raise SpecError(
                f"{what} needs sources of one height and width, all per agent or all shared; its "
                f"maps are {sorted(sizes)}, per agent: {sorted(owners)}"
            )
        return ArraySpec(derived.name, "float32", (len(channels), *sizes.pop()), owners.pop())


def _check_reserved(spec: "EnvSpec", observation: ArraySpec) -> None:
    """Refuse an observation with a reserved name and another layout than the name requires.

    Raises:
        SpecError: for a wrong layout, naming it and the required one.
    """
    o, factors = observation, action_factors(spec.action)
    if o.name == ACTION_MASK and not factors:
        raise SpecError(
            f"environment '{spec.name}' declares '{o.name}', but its actions are continuous; "
            "leave it out"
        )
    dtype, size = action_layout(spec.action)
    layouts: dict[str, tuple[str, tuple[int, ...]]] = {
        AGENT_MASK: ("uint8", ()),
        TURN_MASK: ("uint8", ()),
        AGENT_CELL: ("int32", (2,)),
        ACTION_MASK: ("uint8", (sum(factors),)),
        EXPERT_ACTION: (dtype.name, size),
    }
    wanted = layouts.get(o.name)
    if wanted is not None and (not o.per_agent or (o.dtype, o.shape) != wanted):
        whose = "of each agent" if o.per_agent else "of all agents together"
        raise SpecError(
            f"environment '{spec.name}' declares '{o.name}' as {o.dtype} {o.shape} {whose}; the "
            f"name is reserved for {wanted[0]} {wanted[1]} of each agent: declare it so "
            "(per_agent=True) or rename it"
        )


def _check_agents(spec: "EnvSpec") -> None:
    """Refuse agent names unless each agent has a different one.

    Raises:
        SpecError: for missing, repeated or long names, naming the agent or the number.
    """
    if not spec.agents:
        return
    if len(spec.agents) != spec.num_agents:
        raise SpecError(
            f"environment '{spec.name}' has {spec.num_agents} agents and {len(spec.agents)} names "
            "of agents; name each agent, or none"
        )
    for agent in spec.agents:
        check_name("agent", agent)
    agent, count = Counter(spec.agents).most_common(1)[0]
    if count > 1:
        raise SpecError(
            f"environment '{spec.name}' names {count} agents {agent[:_SHOWN_CHARACTERS]!r}; each "
            "agent needs a name of its own"
        )
    size = sum(len(agent.encode()) for agent in spec.agents)
    if size > MAX_AGENT_NAME_BYTES:
        raise SpecError(
            f"environment '{spec.name}' has names of agents of {size} bytes together; at most "
            f"{MAX_AGENT_NAME_BYTES} travel; give them shorter names"
        )


def _check_bounds(environment: str, action: Continuous) -> None:
    """Refuse actions of no size, or without a lower bound below an upper one (NaN included).

    Bounds may be infinite; algorithms that scale actions to them refuse those.

    Raises:
        SpecError: for a wrong size or bounds, naming them.
    """
    if action.size < 1 or not action.low < action.high:
        raise SpecError(
            f"environment '{environment}' has actions of size {action.size} in [{action.low:g}, "
            f"{action.high:g}]; need a size of 1 or more and two bounds, the lower one first"
        )


def _check_composite(spec: EnvSpec, action: Composite) -> None:
    """Refuse a composite action without a choice or number, or with impossible ones.

    Raises:
        SpecError: for impossible sizes, bounds or flags, or a symmetry that changes actions.
    """
    what = f"environment '{spec.name}'"
    if any(count < 1 for count in action.factors):
        raise SpecError(f"{what} has choices among {list(action.factors)}; each needs 1 or more")
    if not action.size and sum(action.factors) == len(action.factors):
        raise SpecError(
            f"{what} has choices among {list(action.factors)} alternatives and no number: nothing "
            "to learn; give it a choice among 2 or more"
        )
    # What a policy computes: all choices with as many alternatives as the largest.
    if len(action.factors) * max(action.factors, default=0) > MAX_ACTIONS:
        raise SpecError(
            f"{what} has {len(action.factors)} choices, one among {max(action.factors)}; at most "
            f"{MAX_ACTIONS} alternatives are taken, counted as if all choices had as many"
        )
    if len(action.low) != len(action.high):
        raise SpecError(
            f"{what} has actions with {len(action.low)} lower and {len(action.high)} upper bounds; "
            "give one of each for every number"
        )
    for low, high in zip(action.low, action.high, strict=True):
        _check_bounds(spec.name, Continuous(action.size, low, high))
    if action.idle and [len(flags) for flags in action.idle] != [action.size] * spec.num_agents:
        raise SpecError(
            f"{what} names idle numbers of {len(action.idle)} agents; give {action.size} flags for "
            f"each of its {spec.num_agents} agents, or none"
        )
    if any(symmetry.action or symmetry.action_signs for symmetry in spec.symmetries):
        raise SpecError(
            f"{what} has a symmetry that changes actions of several choices or numbers; murmur "
            "changes single choices and vectors alone: leave the symmetry out"
        )


def with_expert(spec: EnvSpec) -> EnvSpec:
    """Return the spec with the observation `expert_action`."""
    dtype, shape = action_layout(spec.action)
    expert = ArraySpec(EXPERT_ACTION, dtype.name, shape)
    return replace(spec, observations=(*spec.observations, expert))


def without_expert(spec: EnvSpec) -> EnvSpec:
    """Return the spec without `expert_action`, which no policy observes."""
    kept = tuple(o for o in spec.observations if o.name != EXPERT_ACTION)
    return spec if len(kept) == len(spec.observations) else replace(spec, observations=kept)


def agent_order(ours: EnvSpec, theirs: EnvSpec) -> tuple[int, ...]:
    """Find the rows of `theirs` that hold the agents of `ours`, in the order of `ours`.

    Returns:
        [A] rows; empty if both have one order, other agents, or one of them has no names.
    """
    if ours.agents == theirs.agents or sorted(ours.agents) != sorted(theirs.agents):
        return ()
    row = {agent: i for i, agent in enumerate(theirs.agents)}
    return tuple(row[agent] for agent in ours.agents)


def _agents_difference(ours: EnvSpec, theirs: EnvSpec) -> str:
    """Describe the difference of two specs' agent names, and the fix."""
    here, there = ours.agents, theirs.agents
    first = next(a for a, (x, y) in enumerate(zip(here, there, strict=True)) if x != y)
    fits = max(map(len, here + there)) * _SHOWN_AGENTS <= _SHOWN_TOGETHER
    start = 0 if first < _SHOWN_AGENTS and fits else first
    names = [shown_agents(agents, start) for agents in (here, there)]
    fix = _SAME_ORDER if agent_order(ours, theirs) else "give the agents the same names"
    return f"agents: {names[0]} here, {names[1]} there; {fix}"


def shown_agents(agents: tuple[str, ...], start: int = 0) -> str:
    """List names of agents for a message, from row `start` on; dots stand for omitted ones."""
    shown: list[str] = []
    for name in agents[start : start + _SHOWN_AGENTS]:
        short = name if len(name) <= _SHOWN_CHARACTERS else f"{name[:12]}...{name[-25:]}"
        if shown and len("".join([*shown, short])) > _SHOWN_TOGETHER:
            break
        shown.append(short)
    left_out = start + len(shown) < len(agents)
    return ", ".join(["..."] * (start > 0) + shown + ["..."] * left_out)


def agent_numbers(given: Iterable[int | str], spec: EnvSpec, where: str) -> tuple[int, ...]:
    """Return the numbers of agents, in ascending order.

    Args:
        given: numbers, names, or names without the number at their end, for all agents named so.
        spec: spec of the environment.
        where: key of the option, for messages.

    Raises:
        ConfigError: if there is no such agent.
    """
    known: dict[str, list[int]] = {name: [a] for a, name in enumerate(spec.agent_names)}
    for agent, name in enumerate(spec.agent_names):
        if (kind := _NUMBER.sub("", name)) and kind != name:
            known.setdefault(kind, []).append(agent)
    found = set[int]()
    for entry in given:
        if isinstance(entry, str) and entry in known:
            found.update(known[entry])
        elif isinstance(entry, int) and 0 <= entry < spec.num_agents:
            found.add(entry)
        else:
            hint = f"0 to {spec.num_agents - 1} are there"
            if isinstance(entry, str):
                hint = known_names(entry, known)
            raise ConfigError(f"{where}: '{spec.name}' has no agent {entry!r}; {hint}")
    return tuple(sorted(found))


def check_name(what: str, name: str) -> None:
    """Refuse a name that is empty, too long or not printable.

    Raises:
        SpecError: for such a name, with its beginning.
    """
    if not 0 < len(name) <= MAX_NAME_CHARACTERS or not name.isprintable():
        raise SpecError(
            f"{what} {name[:40]!r} has a name of {len(name)} characters; it may have 1 to "
            f"{MAX_NAME_CHARACTERS}, all printable"
        )


def first_difference(ours: EnvSpec, theirs: EnvSpec) -> str | None:
    """Name the first field in which two specs differ, or None if they are equal.

    Returns:
        description such as "observations['maps'].shape: (7, 11, 11) here, (6, 11, 11) there".
    """
    # The agents before what may depend on their order.
    for field in sorted(fields(EnvSpec), key=lambda f: f.name not in _COMPARED_FIRST):
        here, there = getattr(ours, field.name), getattr(theirs, field.name)
        if here == there:
            continue
        if field.name == "agents" and here and there:
            return _agents_difference(ours, theirs)
        if field.name == "agents":
            continue  # environments need not name them; older checkpoints do not
        if field.name == "metrics" and sorted(here) == sorted(there):
            continue  # they are read by name, and those of teams follow the agents' order
        if field.name == "symmetries" and not (here and there):
            continue  # nothing that travels depends on them; older checkpoints have none
        if field.name == "symmetries":
            other = next((a for a, b in zip(here, there, strict=False) if a != b), None)
            if other is not None:
                return f"symmetries: {other.name[:40]!r} here is another one there"
            here, there = len(here), len(there)
        if field.name == "observations":
            for a, b in zip(here, there, strict=False):
                for part in fields(ArraySpec):
                    x, y = getattr(a, part.name), getattr(b, part.name)
                    if x != y:
                        return f"observations['{a.name}'].{part.name}: {x} here, {y} there"
            here, there = [o.name for o in here], [o.name for o in there]
        return f"{field.name}: {here} here, {there} there"
    return None


def spec_to_proto(spec: EnvSpec) -> pb.EnvSpec:
    """Encode an EnvSpec as a protobuf message; the messages have the fields of the dataclasses."""
    action = to_fields(spec.action)
    if isinstance(spec.action, Composite):
        action["idle"] = [flag for flags in spec.action.idle for flag in flags]
    kind = type(spec.action).__name__.lower()
    return pb.EnvSpec(**(to_fields(spec) | {"action": {kind: action}}))


def to_fields(value: Any) -> Any:  # noqa: ANN401 - of a dataclass
    """Return a dataclass as the fields of its message; unlike `asdict`, copies no numbers."""
    if is_dataclass(value):
        return {field.name: to_fields(getattr(value, field.name)) for field in fields(value)}
    parts = isinstance(value, tuple) and value and is_dataclass(value[0])
    return [to_fields(part) for part in value] if parts else value


def spec_from_proto(message: pb.EnvSpec) -> EnvSpec:
    """Decode an EnvSpec from a protobuf message.

    Raises:
        SpecError: if the message names no action or an impossible spec.
    """
    kind = message.action.WhichOneof("kind")
    if kind is None:
        raise SpecError(f"environment {message.name[:40]!r} names no action spec")
    action: ActionSpec = _plain(getattr(message.action, kind))
    if isinstance(action, Composite):
        size, flags = action.size, message.action.composite.idle
        rows = range(0, len(flags), max(1, size))
        action = replace(action, idle=tuple(tuple(flags[row : row + size]) for row in rows))
    return from_proto(EnvSpec, message, action=action)


def from_proto(kind: type[Spec], message: Message, **given: object) -> Spec:
    """Build a dataclass from the message that has its fields.

    Args:
        kind: dataclass.
        message: message with the fields' values.
        given: fields that the message has in another form.
    """
    names = [field.name for field in fields(kind) if field.name not in given]  # type: ignore[arg-type]
    return kind(**{name: _plain(getattr(message, name)) for name in names}, **given)


_PARTS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        *(ArraySpec, Discrete, Continuous, Composite),
        *(DerivedMap, Channel, Symmetry, ArrayChange),
    )
}


def _plain(value: Any) -> Any:  # noqa: ANN401 - of protobuf
    """Return a field's value as dataclasses hold it, with tuples and dataclasses inside."""
    if isinstance(value, Message):
        return from_proto(_PARTS[value.DESCRIPTOR.name], value)
    if isinstance(value, str | int | float):
        return value
    entries = tuple(value)
    # Numbers and texts are taken as they are: a Hello may hold a million.
    return tuple(map(_plain, entries)) if entries and isinstance(entries[0], Message) else entries
