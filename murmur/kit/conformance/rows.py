"""Rules of the rows of one stream, for every environment."""

import numpy as np
from numpy.typing import NDArray

from murmur.env_service.checks import digests
from murmur.env_service.environment import named_arrays, random_action
from murmur.kit.conformance.checklist import Checklist
from murmur.shared.wire.codec import RowCheck
from murmur.shared.wire.spec import ACTION_MASK, EnvSpec
from murmur.shared.wire.timestep import Array, StepType, TimeStep

_FIRST, _LAST, _ABORTED = int(StepType.FIRST), int(StepType.LAST), int(StepType.ABORTED)


class RowRules:
    """Checks of the rows of one stream by the contract, one message after another.

    Attributes:
        spec: specification of its environments.
        num_envs: number of environments, N.
        checklist: checklist that receives the findings.
        longer: True if a notice said that episodes exceed max_episode_steps.
    """

    def __init__(self, spec: EnvSpec, num_envs: int, checklist: Checklist, fresh: bool) -> None:
        """Begin a stream.

        Args:
            spec: specification of its environments.
            num_envs: number of environments, N.
            checklist: checklist that receives the findings.
            fresh: True if all episodes begin here; else Welcome says that some are under way.
        """
        self.spec = spec
        self.num_envs = num_envs
        self.checklist = checklist
        self._check = RowCheck(spec, num_envs)  # a learner's
        self._row, self.longer = 0, False
        # [N] by the last row; None: not known
        self._ended: NDArray[np.bool_] | None = np.ones(num_envs, np.bool_) if fresh else None
        # [N] decisions since FIRST; negative: not known
        self._age = np.full(num_envs, -1 if fresh else -(1 << 40))

    def examine(self, t: TimeStep) -> None:
        """Check N rows by every rule."""
        self._row += 1
        self._age = np.where(t.step_type == _FIRST, 0, self._age + 1)
        self._hold("rows", self._broken(t))
        self._hold("length", self._length(t))
        self._hold("discount", _discount(t))
        if (t.step_type == _ABORTED).any():
            self._hold("aborted", _aborted(t))
        self._ended = t.step_type >= _LAST

    def _hold(self, key: str, problem: str | None) -> None:
        self.checklist.note(key, problem and f"row {self._row}: {problem}")

    def _broken(self, t: TimeStep) -> str | None:
        for env, what in self._check.broken(t, self._ended).items():
            return f"environment {env} returned {what}"
        return None

    def _length(self, t: TimeStep) -> str | None:
        limit = 0 if self.longer else self.spec.max_episode_steps
        late = limit > 0 and (self._age >= limit) & (t.step_type < _LAST)
        for i in np.flatnonzero(late).tolist():
            return (
                f"environment {i} continues after {self._age[i]} decisions, its spec says that "
                f"{limit} is the longest"
            )
        return None


def _discount(t: TimeStep) -> str | None:
    last = t.step_type == _LAST
    for i in np.flatnonzero((t.discount != 1) & ~(last & (t.discount == 0))).tolist():
        return f"environment {i} has discount {t.discount[i]:g} on {_name(t.step_type[i])}"
    return None


def _aborted(t: TimeStep) -> str | None:
    for i in np.flatnonzero(t.step_type == _ABORTED).tolist():
        for label, array in named_arrays(t).items():
            if label == "step_type" or label.startswith("metric"):
                continue
            wanted = 1 if label in ("discount", f"observation '{ACTION_MASK}'") else 0
            if (array[i] != wanted).any():
                return f"environment {i} is ABORTED, but its {label} is not {wanted}"
    return None


def _name(step_type: np.uint8) -> str:
    return StepType(int(step_type)).name if step_type <= _ABORTED else str(step_type)


def row_digests(t: TimeStep) -> list[dict[str, bytes]]:
    """Return for each of N rows: label -> digest of the array; metrics on LAST rows only."""
    arrays = named_arrays(t).items()
    return [
        digests({k: a[i] for k, a in arrays if kind == _LAST or not k.startswith("metric")})
        for i, kind in enumerate(t.step_type)
    ]


def legal_action(spec: EnvSpec, t: TimeStep, random: np.random.Generator) -> Array:
    """Draw a random action for every agent: [N, A] int32 or [N, A, U] float32."""
    draws = random.integers(2**63, size=len(t.step_type), dtype=np.uint64)
    return random_action(spec, draws, t.observation.get(ACTION_MASK))
