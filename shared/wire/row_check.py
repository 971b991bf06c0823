"""Checks, in both services, of docs/wire.md's rules for every time step."""

import math
from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from shared.wire.codec import timestep_layout
from shared.wire.spec import ACTION_MASK, AGENT_CELL, AGENT_MASK, EXPERT_ACTION, Discrete, EnvSpec
from shared.wire.timestep import Array, StepType, TimeStep

_HALF = 2  # bytes; BLAS has no half precision
# NumPy compares faster with ints.
_FIRST, _MID = int(StepType.FIRST), int(StepType.MID)
_LAST, _ABORTED = int(StepType.LAST), int(StepType.ABORTED)
_LARGEST = float(np.finfo(np.float32).max)
# Beyond it sums within a network overflow float32, and actions of NaN would mean nothing.
MAX_ABS_OBSERVATION = 1e18
_MAX_SQUARE = MAX_ABS_OBSERVATION**2  # of a float32 sum of squares, which bounds each number


class RowCheck:
    """Check of the rows of a message. Keeps no state between messages.

    `passes` takes a few passes over usual rows and no allocation of their size. Only rows that it
    does not accept are checked number by number, by `broken`.
    """

    def __init__(
        self,
        spec: EnvSpec,
        num_envs: int,
        max_abs_reward: float = math.inf,
        *,
        received: bool = True,
    ) -> None:
        """Prepare for messages of one shape.

        Args:
            spec: spec of the rows.
            num_envs: number of environments N.
            max_abs_reward: largest reward allowed, absolute (learner.max_abs_reward).
            received: true if the rows came in a message: its arrays have the spec's dtypes and
                shapes, and ABORTED may stand in the place of any row; false for an environment's.
        """
        self._layout = () if received else timestep_layout(spec, num_envs).fields
        self._observations = tuple(o.name for o in spec.observations)
        self._metrics = spec.metrics
        self._largest_kind = _ABORTED if received else _LAST
        self._max_abs_reward = max_abs_reward
        self._bound = min(max_abs_reward, _LARGEST)
        self._max_square = min(max_abs_reward * max_abs_reward, _LARGEST)
        self._ones = np.ones(num_envs, np.float32).tobytes()
        self._mids = bytes([_MID]) * num_envs
        self._flags = tuple(
            o.name for o in spec.observations if o.name in (ACTION_MASK, AGENT_MASK)
        )
        self._agent = spec.agent_label
        self._agents = [spec.agent_label(agent) for agent in range(spec.num_agents)]
        self._per_agent = {o.name for o in spec.observations if o.per_agent}
        self._num_actions = 0  # of an expert's actions; 0: it says none
        if spec.observation(EXPERT_ACTION) and isinstance(spec.action, Discrete):
            self._num_actions = spec.action.num_actions
        maps = next((o for o in spec.observations if o.per_agent and len(o.shape) == 3), None)
        self._map_size: tuple[int, ...] = ()  # (rows, columns); empty: nothing to check
        if maps and spec.observation(AGENT_CELL):
            self._map_size = maps.shape[1:]

    def passes(self, t: TimeStep, restart: NDArray[np.bool_] | None = None) -> bool:
        """Return whether rows certainly keep all rules; if not, `broken` must decide.

        Args:
            t: N rows.
            restart: [N] bool, true where an episode must begin, with FIRST; None if that is not
                known.
        """
        if self._layout:
            arrays = (
                t.reward,
                t.discount,
                *map(t.observation.get, self._observations),
                *map(t.metrics.get, self._metrics),
                t.step_type,
            )
            for (_, dtype, shape), array in zip(self._layout, arrays, strict=True):
                if not isinstance(array, np.ndarray):
                    return False
                if array.dtype != dtype or array.shape != shape:
                    return False
        # The sum of squares bounds each number, and is not finite if one of them is not.
        if not float(np.vdot(t.reward, t.reward)) <= self._max_square:
            return False
        if t.discount.tobytes() != self._ones and not _within(t.discount, 0, 1):
            return False
        kind = t.step_type
        if kind.tobytes() != self._mids or (restart is not None and np.count_nonzero(restart)):
            first = kind == _FIRST
            if np.count_nonzero(kind > self._largest_kind):
                return False
            if restart is not None and np.count_nonzero((first != restart) & (kind <= _LAST)):
                return False
            if np.count_nonzero(t.reward[first]):
                return False
            if np.count_nonzero(kind == _LAST):
                for metric in t.metrics.values():
                    if not math.isfinite(np.vdot(metric, metric)):
                        return False
        for array in t.observation.values():
            # A sum of squares bounds each number, in one pass by BLAS.
            quick = array.dtype.kind != "f" or (
                array.dtype.itemsize > _HALF and np.vdot(array, array) <= _MAX_SQUARE  # type: ignore[arg-type]
            )
            if not quick and not _possible(array):
                return False
        for name in self._flags:
            flags: Array = t.observation[name]
            if name == ACTION_MASK and flags.dtype == np.uint8:
                flags = np.maximum.reduce(flags, axis=-1)  # 1 where one action at least is legal
                if not _within(flags, 1, 1):
                    return False
            elif not _within(flags, 0, 1):
                return False
        if self._num_actions and not _within(
            t.observation[EXPERT_ACTION], -1, self._num_actions - 1
        ):
            return False
        return not self._map_size or bool(self._on_maps(t.observation[AGENT_CELL]).all())

    def broken(
        self, timestep: TimeStep, restart: NDArray[np.bool_] | None = None
    ) -> dict[int, str]:
        """Find the first rule that each environment breaks.

        Args:
            timestep: N rows of the dtypes and shapes of the spec.
            restart: [N] bool, true where an episode must begin; None if that is not known.

        Returns:
            number of the environment -> array, value and rule as the end of the sentence
            "environment 3 returned ..."; empty if all rules are kept.
        """
        found: dict[int, str] = {}
        with np.errstate(invalid="ignore"):
            disorder = self._disorder(timestep.step_type, restart)
            for env, what in chain(disorder, self._breaches(timestep)):
                found.setdefault(env, what)
        return found

    def _disorder(
        self, step_type: NDArray[np.uint8], restart: NDArray[np.bool_] | None
    ) -> Iterator[tuple[int, str]]:
        """Yield (environment, description) of step types that cannot come here."""
        largest = self._largest_kind
        for env in np.flatnonzero(step_type > largest).tolist():
            numbers = ", ".join(map(str, range(largest)))
            yield env, f"step_type {step_type[env]}, expected {numbers} or {largest}"
        if restart is None:
            return
        wrong = ((step_type == _FIRST) != restart) & (step_type <= _LAST)
        for env in np.flatnonzero(wrong).tolist():
            if largest == _ABORTED:
                begins = f"{'an' if restart[env] else 'no'} episode begins here"
                must = f"{begins}; FIRST must follow LAST and ABORTED, and nothing else"
            else:
                must = (
                    "a restart gives FIRST"
                    if restart[env]
                    else "without a restart comes MID or LAST"
                )
            yield env, f"step_type {StepType(step_type[env]).name}, but {must}"

    def _on_maps(self, cell: Array) -> NDArray[np.bool_]:
        """Return [N, A] bool, true if the agent's cell lies on its maps."""
        on: NDArray[np.bool_] = np.logical_and(cell >= 0, cell < self._map_size).all(-1)  # type: ignore[operator]
        return on

    def _breaches(self, t: TimeStep) -> Iterator[tuple[int, str]]:
        """Yield every breach as (environment, description), in the order of the arrays."""
        yield from _not_finite("reward", t.reward, self._agents)
        too_large = np.abs(t.reward) > self._bound
        for env, agent in np.argwhere(too_large).tolist():
            yield (
                env,
                f"a reward of {t.reward[env, agent]:g} for {self._agent(agent)}, beyond "
                f"±{self._max_abs_reward:g} (learner.max_abs_reward)",
            )
        on_first = (t.step_type == _FIRST)[:, None] & (t.reward != 0)
        for env, agent in np.argwhere(on_first).tolist():
            yield (
                env,
                f"a reward of {t.reward[env, agent]:g} for {self._agent(agent)} on FIRST, where no "
                "action has been taken yet",
            )
        for env in np.flatnonzero(~((t.discount >= 0) & (t.discount <= 1))).tolist():
            yield env, f"a discount of {t.discount[env]:g}, which must be within 0 and 1"
        for name, array in t.observation.items():
            label = f"observation '{name}'"
            agents = self._agents if name in self._per_agent else ()
            yield from _not_finite(label, array, agents)
            if array.dtype.kind == "f" and array.dtype.itemsize > _HALF:
                too_large = np.isfinite(array) & (np.abs(array) > MAX_ABS_OBSERVATION)
                for env, what in _named(label, array, too_large, agents):
                    yield env, f"{what}, beyond ±{MAX_ABS_OBSERVATION:g}"
        yield from self._choices(t)
        last = t.step_type == _LAST
        for name, values in t.metrics.items():
            for env in np.flatnonzero(last & ~np.isfinite(values)).tolist():
                yield env, f"{values[env]} in metric '{name}' on LAST"

    def _choices(self, t: TimeStep) -> Iterator[tuple[int, str]]:
        """Yield breaches in masks, expert actions and cells, which are used as indices."""
        for name in self._flags:
            flags = t.observation[name]
            for env, agent, *rest in np.argwhere(~np.isin(flags, (0, 1))).tolist():
                value = flags[(env, agent, *rest)]
                yield env, f"{value} in {name} of {self._agent(agent)}, where 0 or 1 must be"
        if ACTION_MASK in self._flags:
            stuck = ~t.observation[ACTION_MASK].any(-1)
            for env, agent in np.argwhere(stuck).tolist():
                yield env, f"an {ACTION_MASK} that allows no action to {self._agent(agent)}"
        if self._num_actions:
            advice: NDArray[np.int32] = t.observation[EXPERT_ACTION].astype(np.int32)
            for env, agent in np.argwhere((advice < -1) | (advice >= self._num_actions)).tolist():
                yield (
                    env,
                    f"{advice[env, agent]} as {EXPERT_ACTION} of {self._agent(agent)}, which has "
                    f"{self._num_actions} actions",
                )
        if self._map_size:
            cell = t.observation[AGENT_CELL]
            for env, agent in np.argwhere(~self._on_maps(cell)).tolist():
                yield (
                    env,
                    f"{cell[env, agent].tolist()} as {AGENT_CELL} of {self._agent(agent)}, "
                    f"outside the maps of {self._map_size}",
                )


def _within(array: Array, low: float, high: float) -> bool:
    """Return whether all numbers are within a range; False for NaN."""
    least, most = np.minimum.reduce(array, axis=None), np.maximum.reduce(array, axis=None)
    return bool(low <= least and most <= high)


def _possible(array: Array) -> bool:
    """Return whether no number is NaN, infinite or beyond ±MAX_ABS_OBSERVATION."""
    if array.dtype.itemsize <= _HALF:
        return bool(np.isfinite(array).all())
    return _within(array, -MAX_ABS_OBSERVATION, MAX_ABS_OBSERVATION)


def _not_finite(label: str, array: Array, agents: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Yield every NaN and infinity as (environment, description)."""
    if array.dtype.kind == "f":
        yield from _named(label, array, ~np.isfinite(array), agents)


def _named(
    label: str, array: Array, bad: NDArray[np.bool_], agents: Sequence[str]
) -> Iterator[tuple[int, str]]:
    """Yield (environment, description) of bad numbers; `agents` label axis A of [N, A, ...]."""
    for env, *index in np.argwhere(bad).tolist():
        value = array[(env, *index)]
        of = f" of {agents[index.pop(0)]}" if agents else ""
        yield env, f"{value:g} in {label}{of}" + (f" at index {index}" if index else "")
