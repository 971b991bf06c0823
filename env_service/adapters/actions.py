"""Gymnasium's action spaces as actions of the contract.

Needs gymnasium; plug-ins import this module when they make an environment.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from murmur.env_service.adapters.casts import WHOLE
from murmur.shared.process.errors import ConfigError
from murmur.shared.wire.spec import ACTION_MASK, ActionSpec, Continuous, Discrete
from murmur.shared.wire.timestep import Array

Space = spaces.Space[Any]
_NO_BOUND = 1e30  # a wider Box has no bounds that mean anything
_MOST_JOINT_ACTIONS = 4096  # of a MultiDiscrete or MultiBinary space


class _Choices(dict[int, Any]):
    """Map from the number of an action to the environment's action."""

    def __init__(self, agent: str, actions: Sequence[Any]) -> None:
        super().__init__(enumerate(actions))
        self._agent = agent

    def __missing__(self, number: int) -> Any:  # noqa: ANN401
        raise ValueError(
            f"agent '{self._agent}' has {len(self)} actions and was told to take number {number}; "
            f"the policy must apply '{ACTION_MASK}'"
        )


class ActionLayout:
    """Conversion of the contract's actions to the environment's actions.

    Discrete, MultiDiscrete (every combination is one action) and MultiBinary become Discrete with
    the largest number of actions of any agent. Boxes become Continuous of the largest size, scaled
    from [-1, 1] to each Box's bounds; entries beyond an agent's own size are ignored.

    Attributes:
        spec: action spec of the contract.
        counts: [A] number of discrete actions of each agent; empty if continuous.
        convert: [A] functions from an agent's entry of `prepare` to its action.
        maskable: true if all agents' spaces are Discrete, so that the environment's masks fit.
        doubts: agent -> sentence about values that its continuous actions cannot express.
    """

    def __init__(self, agents: Mapping[str, Space]) -> None:
        """Find one action spec for all agents.

        Raises:
            ConfigError: if there is none, naming the agents and the fix.
        """
        finite = {name: _choices(name, space) for name, space in agents.items()}
        boxes = {name: s for name, s in agents.items() if isinstance(s, spaces.Box)}
        for name, space in agents.items():
            if finite[name] is None and name not in boxes:
                team = isinstance(space, spaces.Tuple)
                raise ConfigError(
                    f"agent '{name}' acts in a {type(space).__name__} space; murmur takes "
                    "Discrete, MultiDiscrete, MultiBinary and Box: wrap the environment in a "
                    "factory of your own"
                    + "; or, for a Gymnasium environment whose tuples have one entry for each "
                    "agent of a team, set environment.team: true" * team
                )
        if boxes and len(boxes) < len(agents):
            rest = [name for name in agents if name not in boxes]
            raise ConfigError(
                f"agents {_list(boxes)} have continuous actions, {_list(rest)} discrete ones; all "
                "must be of one kind: wrap the environment in a factory of your own that gives "
                "the continuous ones some fixed actions to choose from"
            )
        self.spec: ActionSpec
        self.counts: list[int] = []
        self.convert: list[Callable[[Any], Any]] = []
        self.doubts: dict[str, str] = {}
        self.maskable = all(isinstance(s, spaces.Discrete) for s in agents.values())
        if boxes:
            self._continuous(boxes)
            return
        for choices in finite.values():
            assert choices is not None
            self.counts.append(len(choices))
            self.convert.append(choices.__getitem__)
        self.spec = Discrete(max(self.counts))

    def _continuous(self, boxes: Mapping[str, spaces.Box]) -> None:
        sizes = [math.prod(box.shape) for box in boxes.values()]
        self.spec = Continuous(max(sizes))
        # Other numbers, rounded to float32, could lie outside of their bounds.
        dtype = np.result_type(np.float32, *(box.low.dtype for box in boxes.values()))
        self._low = np.zeros((len(boxes), max(sizes)), dtype)
        self._high = np.zeros_like(self._low)
        for a, (name, box) in enumerate(boxes.items()):
            low, high = _inside(box.low, dtype), _inside(box.high, dtype)
            if not (np.isfinite(low).all() and np.isfinite(high).all()):
                raise ConfigError(
                    f"agent '{name}' acts in {box}, which has no bounds to scale [-1, 1] to; "
                    "wrap it, for example in gymnasium.wrappers.TransformAction, in a factory of "
                    "your own"
                )
            if doubt := _doubt(box):
                self.doubts[name] = doubt
            self._low[a, : sizes[a]], self._high[a, : sizes[a]] = low.ravel(), high.ravel()
            self.convert.append(_box_action(box, sizes[a], self._low))
        self._half = self._high / 2 - self._low / 2
        self._middle = self._high / 2 + self._low / 2

    def prepare(self, action: Array) -> Any:  # noqa: ANN401 - [copy][agent]
        """Return the actions of all copies, ready for `convert`, in memory of their own."""
        if isinstance(self.spec, Discrete):
            return action.tolist()
        scaled = np.clip(action.astype(self._low.dtype), -1, 1)
        scaled *= self._half
        scaled += self._middle
        return np.clip(scaled, self._low, self._high, out=scaled)  # rounding may step outside


def _choices(agent: str, space: Space) -> _Choices | None:
    """List all actions of a finite space; None for another space.

    Raises:
        ConfigError: if there are too many.
    """
    if isinstance(space, spaces.Discrete):
        return _Choices(agent, [int(space.start) + k for k in range(int(space.n))])
    if isinstance(space, spaces.MultiDiscrete):
        nvec, start = space.nvec, np.asarray(space.start)
    elif isinstance(space, spaces.MultiBinary):
        nvec, start = np.full(space.shape, 2), np.zeros(space.shape, np.int64)
    else:
        return None
    count = math.prod(int(n) for n in nvec.reshape(-1))
    if count > _MOST_JOINT_ACTIONS:
        raise ConfigError(
            f"agent '{agent}' acts in {space}: {count} combinations, more than "
            f"{_MOST_JOINT_ACTIONS}; choose some of them in a factory of your own"
        )
    digits = np.unravel_index(np.arange(count), nvec.reshape(-1))
    combinations = np.stack(digits, axis=-1).reshape(count, *nvec.shape) + start
    combinations = combinations.astype(space.dtype)
    combinations.flags.writeable = False  # the environment is given these very arrays
    return _Choices(agent, list(combinations))


def _doubt(box: spaces.Box) -> str:
    """Return a sentence about actions of a Box that numbers in [-1, 1] express badly."""
    high, low = float(np.max(box.high)), float(np.min(box.low))
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


def _box_action(box: spaces.Box, size: int, rows: Array) -> Callable[[Any], Any]:
    """Return a function that cuts and shapes one agent's row of scaled actions, a row of `rows`."""
    dtype, shape, whole = box.dtype, box.shape, np.issubdtype(box.dtype, np.integer)
    if dtype == rows.dtype and shape == rows.shape[1:]:
        return lambda row: row

    def convert(row: Any) -> Any:  # noqa: ANN401
        cut = row[:size].reshape(shape)
        return (np.rint(cut) if whole else cut).astype(dtype)

    return convert


def _list(names: Mapping[str, Any] | Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)
