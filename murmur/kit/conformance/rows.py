"""Rules of the rows of one stream, for every environment."""

import hashlib
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from env_service.environment import random_action
from murmur.kit.conformance.checklist import Checklist
from shared.wire.codec import MAX_ABS_OBSERVATION
from shared.wire.spec import ACTION_MASK, AGENT_CELL, EXPERT_ACTION, Discrete, EnvSpec
from shared.wire.timestep import Array, StepType, TimeStep

_FIRST, _LAST, _ABORTED = int(StepType.FIRST), int(StepType.LAST), int(StepType.ABORTED)


class RowRules:
    """Checks of the rows of one stream by the contract, one message after another.

    Attributes:
        longer: True if a notice said that episodes exceed max_episode_steps.
    """

    def __init__(self, spec: EnvSpec, checklist: Checklist, fresh: bool) -> None:
        """Begin a stream.

        Args:
            spec: specification of its environments.
            checklist: checklist that receives the findings.
            fresh: True if all episodes begin here; else Welcome says that some are under way.
        """
        self._spec = spec
        self._checklist = checklist
        self._fresh = fresh
        self._row, self.longer = 0, False
        self._ended: NDArray[np.bool_] | None = None  # [N] by the last row
        self._age: NDArray[np.int64] | None = None  # [N] decisions since FIRST; negative: unknown

    def examine(self, timestep: TimeStep) -> None:
        """Check N rows by every rule."""
        self._row += 1
        with np.errstate(invalid="ignore"):  # NaN is a finding of one rule, not an error
            for key, problem in (
                ("step_type", self._step_type(timestep)),
                ("length", self._length(timestep)),
                ("first", self._first(timestep)),
                ("discount", self._discount(timestep)),
                ("finite", self._finite(timestep)),
                ("choices", self._choices(timestep)),
            ):
                self._hold(key, problem)
            if (timestep.step_type == _ABORTED).any():
                self._hold("aborted", self._aborted(timestep))
        self._ended = timestep.step_type >= _LAST

    def _hold(self, key: str, problem: str | None) -> None:
        self._checklist.hold(key, problem and f"row {self._row}: {problem}")

    def _step_type(self, t: TimeStep) -> str | None:
        if t.step_type.max() > _ABORTED:
            return f"step_type holds {t.step_type.max()}, expected 0, 1, 2 or 3"
        first, aborted = t.step_type == _FIRST, t.step_type == _ABORTED
        if self._ended is None:
            if self._fresh and not (first | aborted).all():
                i = int(np.argmin(first | aborted))
                return f"environment {i} begins with {_name(t.step_type[i])}, not FIRST"
            return None
        wrong = (first != self._ended) & ~aborted  # ABORTED may stand in the place of any row
        if not wrong.any():
            return None
        i = int(np.argmax(wrong))
        before = "LAST or ABORTED" if self._ended[i] else "FIRST or MID"
        return f"environment {i} is {_name(t.step_type[i])} after {before}"

    def _length(self, t: TimeStep) -> str | None:
        first = t.step_type == _FIRST
        if self._age is None:
            self._age = np.full(len(first), 0 if self._fresh else -(1 << 40))
        else:
            self._age += 1
        self._age[first] = 0
        limit = 0 if self.longer else self._spec.max_episode_steps
        late = (self._age >= limit) & (t.step_type < _LAST) if limit else np.zeros(1, np.bool_)
        if not late.any():
            return None
        i = int(np.argmax(late))
        return (
            f"environment {i} continues after {self._age[i]} decisions, its spec says that {limit} "
            "is the longest"
        )

    def _first(self, t: TimeStep) -> str | None:
        first = t.step_type == _FIRST
        wrong = first & ((t.reward != 0).any(1) | (t.discount != 1))
        if not wrong.any():
            return None
        i = int(np.argmax(wrong))
        return (
            f"environment {i} is FIRST with rewards {t.reward[i].tolist()} and discount "
            f"{t.discount[i]:g}"
        )

    def _discount(self, t: TimeStep) -> str | None:
        may_be_zero = t.step_type == _LAST
        right = (t.discount == 1) | (may_be_zero & (t.discount == 0))
        if right.all():
            return None
        i = int(np.argmin(right))
        return f"environment {i} has discount {t.discount[i]:g} on {_name(t.step_type[i])}"

    def _finite(self, t: TimeStep) -> str | None:
        last = t.step_type == _LAST
        for label, array in arrays_of(t):
            if array.dtype.kind != "f":
                continue
            bad = ~np.isfinite(array.reshape(len(array), -1)).all(1)
            bad &= last if label.startswith("metric") else True
            if bad.any():
                return f"{label} of environment {int(np.argmax(bad))} holds NaN or infinity"
            if label.startswith("observation") and np.abs(array).max() > MAX_ABS_OBSERVATION:
                return f"{label} holds numbers beyond ±{MAX_ABS_OBSERVATION:g}"
        return None

    def _choices(self, t: TimeStep) -> str | None:
        mask = t.observation.get(ACTION_MASK)
        if mask is not None and isinstance(self._spec.action, Discrete):
            none = ~mask.reshape(*mask.shape[:2], -1).any(-1)
            if none.any():
                i, agent = np.argwhere(none)[0]
                return f"{ACTION_MASK} of environment {i} allows agent {agent} nothing"
        expert = t.observation.get(EXPERT_ACTION)
        if expert is not None and isinstance(self._spec.action, Discrete):
            wrong = np.less(expert, -1) | np.greater_equal(expert, self._spec.action.num_actions)
            if wrong.any():
                i, agent = np.argwhere(wrong)[0]
                return (
                    f"{EXPERT_ACTION} of agent {agent} of environment {i} is {expert[i, agent]}, "
                    f"of {self._spec.action.num_actions} actions"
                )
        cell = t.observation.get(AGENT_CELL)
        maps = next((o for o in self._spec.observations if o.per_agent and len(o.shape) == 3), None)
        if cell is not None and maps is not None:
            outside = ~(np.greater_equal(cell, 0) & np.less(cell, maps.shape[1:])).all(-1)
            if outside.any():
                i, agent = np.argwhere(outside)[0]
                where = np.asarray(cell)[i, agent].tolist()
                return (
                    f"{AGENT_CELL} of agent {agent} of environment {i} is {where}, outside the "
                    f"maps of {maps.shape[1:]}"
                )
        return None

    def _aborted(self, t: TimeStep) -> str | None:
        for i in np.flatnonzero(t.step_type == _ABORTED).tolist():
            for label, array in arrays_of(t):
                if label == "step_type" or label.startswith("metric"):
                    continue
                wanted = 1 if label in ("discount", f"observation '{ACTION_MASK}'") else 0
                if (array[i] != wanted).any():
                    return f"environment {i} is ABORTED, but its {label} is not {wanted}"
        return None


def arrays_of(t: TimeStep) -> Iterator[tuple[str, Array]]:
    """Yield every array of N rows with a label, each [N, ...]."""
    yield "step_type", t.step_type
    yield "reward", t.reward
    yield "discount", t.discount
    for name, array in t.observation.items():
        yield f"observation '{name}'", array
    for name, metric in t.metrics.items():
        yield f"metric '{name}'", metric


def digests(t: TimeStep) -> list[dict[str, bytes]]:
    """Return for each of N rows: label -> digest of the array; metrics on LAST rows only."""
    found: list[dict[str, bytes]] = []
    for i, kind in enumerate(t.step_type):
        found.append(
            {
                label: hashlib.blake2b(array[i].tobytes(), digest_size=8).digest()
                for label, array in arrays_of(t)
                if kind == _LAST or not label.startswith("metric")
            }
        )
    return found


def legal_action(spec: EnvSpec, t: TimeStep, random: np.random.Generator) -> Array:
    """Draw a random action for every agent: [N, A] int32 or [N, A, U] float32."""
    draws = random.integers(2**63, size=len(t.step_type), dtype=np.uint64)
    return random_action(spec, draws, t.observation.get(ACTION_MASK))


def _name(step_type: np.uint8) -> str:
    return StepType(int(step_type)).name if step_type <= _ABORTED else str(step_type)
