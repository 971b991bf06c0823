"""Gymnasium's action spaces as actions of the contract.

Needs gymnasium; plug-ins import this module when they make an environment.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from murmur.env_service.adapters.casts import WHOLE
from murmur.shared.process.errors import ConfigError
from murmur.shared.wire.spec import (
    ACTION_MASK,
    MOST_JOINT_ACTIONS,
    ActionSpec,
    Composite,
    Continuous,
    Discrete,
    action_layout,
    factor_starts,
)
from murmur.shared.wire.timestep import Array

Space = spaces.Space[Any]
Bounds = tuple[float, float]
_NO_BOUND = 1e30  # a wider Box has no bounds that mean anything
_SCALED = -1.0, 1.0  # range of the contract's numbers that have both bounds
_FREE = -math.inf, math.inf
_ROUNDING = 1e-5  # tolerance of a scaled number at its bound


class _Choices(dict[int, Any]):
    """Map from the number of an action to the environment's action, or to what makes it."""

    def __init__(self, agent: str, actions: Sequence[Any]) -> None:
        super().__init__(enumerate(actions))
        self._agent = agent

    def __missing__(self, number: int) -> Any:
        raise ValueError(
            f"agent '{self._agent}' has {len(self)} actions and was told to take number {number}; "
            f"the policy must apply '{ACTION_MASK}'"
        )


@dataclass(frozen=True)
class MaskPlace:
    """Place of an agent's action mask among the contract's entries.

    Attributes:
        space: the agent's action space.
        size: entries of the environment's mask: alternatives of the agent's choices, in order.
        place: their entries in the contract's mask.
        combined: [count, F] entries of the alternatives that each combination takes; None: an
            action is no combination.
    """

    space: Space
    size: int
    place: slice | NDArray[np.intp]
    combined: NDArray[np.intp] | None = None

    def view(self, row: Array) -> tuple[Array, Any]:
        """Return the part of a row [K] that holds the agent's mask, and the index within it."""
        return (row[self.place], ...) if isinstance(self.place, slice) else (row, self.place)

    def read(self, mask: Any) -> Array:
        """Return a mask whose parts, as a Tuple's or Dict's sample() takes them, are joined."""
        entries = _mask_entries(self.space, mask)
        return np.concatenate(entries) if entries else np.zeros(0)

    def legal(self, mask: Array) -> Array:
        """Return a mask [..., size] with an entry for each action."""
        if self.combined is None:
            return mask
        legal: NDArray[np.bool_] = np.logical_and.reduce(mask[..., self.combined], axis=-1)
        return legal


@dataclass
class _Own:
    """One agent's action space, taken apart.

    Attributes:
        space: the space.
        factors: number of alternatives of each choice.
        boxes: Boxes in it, in order.
    """

    space: Space
    factors: list[int]
    boxes: list[spaces.Box]

    def bounds(self) -> list[Bounds]:
        """Return each number's bounds in the contract: _SCALED, or as they are if one is none."""
        found: list[Bounds] = []
        for box in self.boxes:
            for low, high in zip(box.low.flat, box.high.flat, strict=True):
                both = math.isfinite(low) and math.isfinite(high)
                found.append(_SCALED if both else (float(low), float(high)))
        return found


class ActionLayout:
    """Conversion of the contract's actions to the environment's actions.

    One choice of each agent becomes Discrete with the largest number of actions of any agent.
    Numbers with bounds become Continuous of the largest size, scaled from [-1, 1] to each Box's
    bounds, and numbers without any Continuous without bounds; entries beyond an agent's own size
    are ignored. Anything else becomes Composite: choices in their order, each with the largest
    number of alternatives of any agent, then numbers of one range after the other. With `joint`
    every combination of an agent's choices is one action.

    Attributes:
        spec: action spec of the contract.
        legal: [A, K] mask of each agent's alternatives, the first one of a choice that it lacks.
        first: [K] mask of the first alternative of each choice.
        masks: [A] places of the agents' masks.
        convert: [A] functions from an agent's entry of `prepare` to its action.
        doubts: agent -> sentence about values that its continuous actions cannot express.
    """

    def __init__(self, agents: Mapping[str, Space], *, joint: bool = False) -> None:
        """Find one action spec for all agents.

        Args:
            agents: action space of each agent, by name.
            joint: whether every combination of an agent's choices is one action.

        Raises:
            ConfigError: if there is none, naming the agents and the fix.
        """
        own = {name: _own(name, space) for name, space in agents.items()}
        if joint:
            _require_one_kind(own)
        self.spec: ActionSpec
        self.masks: list[MaskPlace] = []
        self.convert: list[Callable[[Any], Any]] = []
        self.doubts: dict[str, str] = {}
        self._own = list(own.values())
        numbers = any(one.boxes for one in own.values())
        choices = {len(one.factors) for one in own.values()}
        if not numbers and (choices == {1} or (joint and 0 not in choices)):
            self._discrete(own)
        else:
            self._several(own)

    @property
    def masked(self) -> bool:
        """Return whether some agent lacks an alternative that another one has."""
        return bool((self.legal == 0).any())

    @property
    def maskable(self) -> bool:
        """Return whether there are choices, so that the environment's masks fit."""
        return bool(self.legal.shape[1])

    def _discrete(self, agents: Mapping[str, _Own]) -> None:
        """Take one choice of each agent, or every combination of its choices."""
        counts = [math.prod(own.factors) for own in agents.values()]
        for (name, own), count in zip(agents.items(), counts, strict=True):
            convert, combined = _combinations(name, own, count)
            self.convert.append(convert)
            self.masks.append(MaskPlace(own.space, sum(own.factors), slice(0, count), combined))
        self.spec = Discrete(max(counts))
        self.first = (np.arange(max(counts)) == 0).astype(np.uint8)
        self.legal = (np.arange(max(counts)) < np.array(counts)[:, None]).astype(np.uint8)

    def _several(self, agents: Mapping[str, _Own]) -> None:
        """Take several choices and numbers of each agent."""
        own = list(agents.values())
        most = max(len(one.factors) for one in own)
        factors = tuple(
            max(one.factors[f] for one in own if f < len(one.factors)) for f in range(most)
        )
        starts = factor_starts(factors)
        self.first = np.zeros(sum(factors), np.uint8)
        self.first[starts] = 1
        self.legal = np.tile(self.first, (len(own), 1))
        bounds, columns = _columns([one.bounds() for one in own])
        self._columns = columns
        self._num_choices, self._width = most, most + len(bounds)
        if bounds:
            self._scale(agents, columns, len(bounds))
        for a, (name, one) in enumerate(agents.items()):
            entries = [
                entry
                for start, count in zip(starts, one.factors, strict=False)
                for entry in range(start, start + count)
            ]
            self.legal[a, entries] = 1
            self.masks.append(MaskPlace(one.space, sum(one.factors), _place(entries)))
            read = self._reader(one.space, columns[a])
            self.convert.append(_checked(name, one.factors, read) if one.factors else read)
        if not factors and len(set(bounds)) == 1 and bounds[0] in (_SCALED, _FREE):
            self.spec = Continuous(len(bounds), *bounds[0])
            return
        low, high = zip(*bounds, strict=True) if bounds else ((), ())
        idle = ~np.array([np.isin(range(len(bounds)), own) for own in columns])
        self.spec = Composite(
            factors, low, high, tuple(map(tuple, idle.tolist())) if idle.any() else ()
        )

    def _scale(self, agents: Mapping[str, _Own], columns: list[list[int]], size: int) -> None:
        """Find each number's range, and the factor and summand that lead there."""
        boxes = [box for own in agents.values() for box in own.boxes]
        # Other numbers, rounded to float32, could lie outside of their bounds.
        dtype = np.result_type(np.float32, *(box.low.dtype for box in boxes))
        self._low = np.zeros((len(agents), size), dtype)
        self._high = np.zeros_like(self._low)
        free = np.zeros(self._low.shape, np.bool_)
        for a, (name, own) in enumerate(agents.items()):
            if doubts := [doubt for doubt in map(_doubt, own.boxes) if doubt]:
                self.doubts[name] = doubts[0]
            self._low[a, columns[a]] = _joined([box.low for box in own.boxes], dtype)
            self._high[a, columns[a]] = _joined([box.high for box in own.boxes], dtype)
            free[a, columns[a]] = [bounds != _SCALED for bounds in own.bounds()]
        self._half = np.where(free, 1, self._high / 2 - self._low / 2).astype(dtype)
        self._middle = np.where(free, 0, self._high / 2 + self._low / 2).astype(dtype)
        self._least: Array | float
        self._most: Array | float
        self._least, self._most = _SCALED
        if free.any():
            self._least, self._most = np.where(free, self._low, -1), np.where(free, self._high, 1)

    def prepare(self, action: Array) -> Any:
        """Return the actions of all copies, ready for `convert`, in memory of their own."""
        if isinstance(self.spec, Discrete):
            return action.tolist()
        if not self.spec.size:
            return action
        prepared = action.astype(self._low.dtype)
        scaled = prepared[..., self._num_choices :]
        np.clip(scaled, self._least, self._most, out=scaled)
        scaled *= self._half
        scaled += self._middle
        np.clip(scaled, self._low, self._high, out=scaled)  # rounding may step outside
        return prepared

    def encode(self, action: Any) -> Array:
        """Encode an action of the first agent's space as it is sent, the inverse of `convert`.

        Numbers outside of the space's bounds stay outside.

        Args:
            action: action of the space.

        Returns:
            [...] action of one agent, in the layout of the spec.

        Raises:
            ValueError: if the action is not of the space.
        """
        own = self._own[0]
        choices, numbers = list[int](), list[float]()
        _take_apart(own.space, action, choices, numbers)
        if isinstance(self.spec, Discrete):
            return np.asarray(np.ravel_multi_index(choices, own.factors), np.int32)
        dtype, shape = action_layout(self.spec)
        row: Array = np.zeros(shape, dtype)
        row[: len(choices)] = choices
        if numbers:
            given = np.zeros(self._half.shape[1], self._half.dtype)
            given[self._columns[0]] = numbers
            scaled = (given - self._middle[0]) / self._half[0]
            within = np.clip(scaled, self._least, self._most).reshape(scaled.shape)
            near = np.abs(scaled - within) < _ROUNDING
            row[self._num_choices :] = np.where(near, within, scaled)
        return row

    def batched(self, num_envs: int) -> Callable[[Array], Any]:
        """Return a function from actions [N, 1, ...] to a batch of one agent's actions.

        Args:
            num_envs: number of copies N.
        """
        own = self._own[0]
        if isinstance(self.spec, Discrete):
            digits = _digits(own.factors)
            read = _reader(own.space, iter(range(len(own.factors))), iter(()), (num_envs,))
            return lambda action: read(digits[action[:, 0]])
        read = self._reader(own.space, list(range(self.spec.size)), (num_envs,))
        return lambda action: read(self.prepare(action)[:, 0])

    def _reader(
        self, space: Space, columns: list[int], lead: tuple[int, ...] = ()
    ) -> Callable[[Any], Any]:
        """Return the function from prepared rows [*lead, F + U] to actions of a space.

        Args:
            space: action space of an agent.
            columns: the agent's numbers among the U.
            lead: leading dimensions of rows.
        """
        if isinstance(space, spaces.Box) and self._width and not lead:
            whole_row = columns == list(range(self._width)) and space.shape == (self._width,)
            if whole_row and space.dtype == self._low.dtype:
                return lambda row: row
        numbers = (self._num_choices + column for column in columns)
        return _reader(space, iter(range(self._num_choices)), numbers, lead)


def _own(agent: str, space: Space) -> _Own:
    """Take an agent's action space apart.

    Raises:
        ConfigError: for a space that murmur does not take, naming it and its place.
    """
    own = _Own(space, [], [])

    def take_apart(space: Space, path: str) -> None:
        if isinstance(space, spaces.Discrete):
            own.factors.append(int(space.n))
        elif isinstance(space, spaces.MultiDiscrete):
            own.factors.extend(int(n) for n in space.nvec.flat)
        elif isinstance(space, spaces.MultiBinary):
            own.factors.extend([2] * math.prod(space.shape))
        elif isinstance(space, spaces.Box):
            own.boxes.append(space)
        elif isinstance(space, spaces.Tuple | spaces.Dict):
            for key, part in _parts(space):
                take_apart(part, f"{path}.{key}" if path else str(key))
        else:
            at = f" at '{path}'" if path else ""
            raise ConfigError(
                f"agent '{agent}' acts in a {type(space).__name__} space{at}; murmur takes "
                "Discrete, MultiDiscrete, MultiBinary, Box, and Tuple and Dict of them: wrap the "
                "environment in a factory of your own"
            )

    take_apart(space, "")
    return own


def _take_apart(space: Space, action: Any, choices: list[int], numbers: list[float]) -> None:
    """Append the choices and numbers of a space's action, in the order of `_Own`."""
    if isinstance(space, spaces.Tuple | spaces.Dict):
        for key, part in _parts(space):
            _take_apart(part, action[key], choices, numbers)
    elif isinstance(space, spaces.Box):
        numbers.extend(np.asarray(action, np.float64).ravel().tolist())
    elif isinstance(space, spaces.Discrete):
        choices.append(int(action) - int(space.start))
    else:
        start = np.asarray(getattr(space, "start", 0))
        choices.extend((np.asarray(action) - start).ravel().astype(int).tolist())


def _parts(space: spaces.Tuple[Any] | spaces.Dict) -> Iterable[tuple[Any, Space]]:
    """Return the keys and spaces of a Tuple or Dict, in order."""
    return space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)


def _mask_entries(space: Space, mask: Any) -> list[Array]:
    """Return the masks of a space's choices, in their order; numbers have None."""
    if mask is None:
        return []
    if isinstance(space, spaces.Dict) and isinstance(mask, Mapping):
        own = [(part, mask.get(key)) for key, part in _parts(space)]
    elif isinstance(mask, tuple | list):
        parts: Sequence[Space] = space.spaces if isinstance(space, spaces.Tuple) else ()
        if len(parts) != len(mask):  # of one space, or of choices that are not parts alone
            parts = [space] * len(mask)
        own = list(zip(parts, mask, strict=True))
    else:
        return [np.atleast_1d(mask)]
    return [entry for part, of_part in own for entry in _mask_entries(part, of_part)]


def _require_one_kind(agents: Mapping[str, _Own]) -> None:
    """Refuse choices beside numbers, where an action is one of them.

    Raises:
        ConfigError: for both, naming the agents and the fix.
    """
    fix = (
        "only mappo, happo, ippo and ppo take both (environment.joint_actions: false); or wrap the "
        "environment in a factory of your own that gives continuous actions some fixed values to "
        "choose from"
    )
    boxes = [name for name, own in agents.items() if own.boxes]
    choices = [name for name, own in agents.items() if own.factors]
    for name in boxes:
        if name in choices:
            raise ConfigError(
                f"agent '{name}' acts in {agents[name].space}, choices and numbers at once; {fix}"
            )
    if boxes and choices:
        raise ConfigError(
            f"agents {_list(boxes)} have continuous actions, {_list(choices)} discrete ones; {fix}"
        )


def _digits(factors: Sequence[int]) -> NDArray[np.int64]:
    """Return the alternatives [count, F] that each combination of F choices takes."""
    found = np.unravel_index(np.arange(math.prod(factors)), factors)
    return np.stack(found, axis=-1).astype(np.int64)


def _combinations(
    agent: str, own: _Own, count: int
) -> tuple[Callable[[Any], Any], NDArray[np.intp] | None]:
    """Make the conversion of the number of an action, and `combined` of MaskPlace.

    Raises:
        ConfigError: if there are too many combinations.
    """
    several = len(own.factors) > 1
    if several and count > MOST_JOINT_ACTIONS:
        raise ConfigError(
            f"agent '{agent}' acts in {own.space}: {count} combinations, more than "
            f"{MOST_JOINT_ACTIONS}; use mappo, happo, ippo or ppo with "
            "environment.joint_actions: false, or choose some of them in a factory of your own"
        )
    digits = _digits(own.factors)
    read = _reader(own.space, iter(range(len(own.factors))), iter(()))
    combined = digits + np.array(factor_starts(tuple(own.factors))) if several else None
    if isinstance(own.space, spaces.Tuple | spaces.Dict):  # may hold what can be changed
        rows = _Choices(agent, list(digits))
        return lambda number: read(rows[number]), combined
    actions = [read(row) for row in digits]
    for action in actions:
        if isinstance(action, np.ndarray):  # the environment is given this very array
            action.flags.writeable = False
    return _Choices(agent, actions).__getitem__, combined


def _columns(agents: Sequence[Sequence[Bounds]]) -> tuple[list[Bounds], list[list[int]]]:
    """Give numbers of one range one column for all agents.

    Args:
        agents: bounds of each agent's numbers.

    Returns:
        bounds of the columns, and the columns of each agent's numbers.
    """
    known: dict[tuple[Bounds, int], int] = {}  # bounds and count of equal ones before -> column
    columns = []
    for own in agents:
        used: Counter[Bounds] = Counter()
        columns.append(list[int]())
        for one in own:
            columns[-1].append(known.setdefault((one, used[one]), len(known)))
            used[one] += 1
    return [one for one, _ in known], columns


def _place(entries: Sequence[int]) -> slice | NDArray[np.intp]:
    """Return an index of entries: a slice where they are next to each other."""
    first = entries[0] if entries else 0
    if list(entries) == list(range(first, first + len(entries))):
        return slice(first, first + len(entries))
    return np.array(entries, np.intp)


def _reader(
    space: Space, choices: Iterator[int], numbers: Iterator[int], lead: tuple[int, ...] = ()
) -> Callable[[Any], Any]:
    """Return the function from rows [*lead, ...] of choices and numbers to actions of a space.

    Args:
        space: the space.
        choices: columns of its choices, in order; used up.
        numbers: columns of its numbers, in order; used up.
        lead: leading dimensions of rows, those of a batch of actions.
    """
    if isinstance(space, spaces.Tuple | spaces.Dict):
        parts = {key: _reader(part, choices, numbers, lead) for key, part in _parts(space)}
        if isinstance(space, spaces.Dict):
            return lambda row: {key: read(row) for key, read in parts.items()}
        return lambda row: tuple([read(row) for read in parts.values()])
    dtype, shape = space.dtype, (*lead, *(space.shape or ()))
    size = math.prod(space.shape or ())
    if isinstance(space, spaces.Box):
        place, whole = _place(list(islice(numbers, size))), np.issubdtype(space.dtype, np.integer)

        def number(row: Any) -> Any:
            cut = row[..., place].reshape(shape)
            return (np.rint(cut) if whole else cut).astype(dtype, copy=False)

        return number
    start = getattr(space, "start", 0)
    if isinstance(space, spaces.Discrete) and not lead:
        column = next(choices)
        return lambda row: int(row[column]) + int(start)
    place = _place(list(islice(choices, size)))
    return lambda row: (row[..., place].reshape(shape) + start).astype(dtype, copy=False)


def _checked(
    agent: str, factors: Sequence[int], read: Callable[[Any], Any]
) -> Callable[[Any], Any]:
    """Let a reader refuse choices that an agent does not have."""
    counts = np.array(factors)

    def convert(row: Any) -> Any:
        chosen = row[: len(counts)]
        if ((chosen < 0) | (chosen >= counts)).any():
            raise ValueError(
                f"agent '{agent}' has choices among {counts.tolist()} and was told to take "
                f"{chosen.astype(int).tolist()}; the policy must apply '{ACTION_MASK}'"
            )
        return read(row)

    return convert


def _joined(bounds: Sequence[Array], dtype: np.dtype[Any]) -> Array:
    """Join bounds of Boxes, each within its type and within `dtype`; without one, the type's."""
    found: list[Array] = [np.zeros(0, dtype)]
    for bound in bounds:
        if bound.dtype.kind == "f":
            bound = np.nan_to_num(bound)  # an infinite one becomes the type's largest
        found.append(_inside(bound, dtype).ravel())
    return np.concatenate(found)


def _doubt(box: spaces.Box) -> str:
    """Return a sentence about actions of a Box that numbers in [-1, 1] express badly."""
    bounded = np.isfinite(box.low) & np.isfinite(box.high)
    if not bounded.any():
        return ""
    high, low = float(np.max(box.high[bounded])), float(np.min(box.low[bounded]))
    if np.issubdtype(box.dtype, np.integer):
        steps = "" if high - low <= WHOLE else f"; float32 reaches only {WHOLE} of its values"
        return f"acts in whole numbers ({box.dtype} Box): continuous actions are rounded{steps}"
    if high - low > _NO_BOUND:
        return f"acts in a Box from {low:g} to {high:g}, to which [-1, 1] is scaled; narrow it"
    return ""


def _inside(bound: Array, dtype: np.dtype[Any]) -> Array:
    """Convert a bound of a Box to another dtype, rounding towards 0 if that cannot hold it."""
    cast = bound.astype(dtype)
    if bound.dtype.kind in "iu":  # beyond 2**53; Python compares such integers exactly
        pairs = zip(cast.ravel().tolist(), bound.ravel().tolist(), strict=True)
        outside = [abs(int(x)) > abs(exact) for x, exact in pairs]
        cast = np.where(np.reshape(outside, cast.shape), np.nextafter(cast, 0), cast)
    return cast


def _list(names: Mapping[str, Any] | Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)
