"""When an evaluation is due, with which policy, and its result.

An evaluation is one session in MODE_EVALUATE. Environment i of n plays the episodes i, i + n,
i + 2n, ...; further ones do not count. The learner delays its Welcome until one is due. Training
never waits.
"""

import math
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from murmur.learner_service.learning.base import Policy
from murmur.shared.config.section import known_names
from murmur.shared.process.errors import ConfigError
from murmur.shared.process.process import logger
from murmur.shared.wire.timestep import StepType, TimeStep

_ASKED_LATELY_S = 5.0  # a waiting evaluation session asks far more often; one may be reconnecting


@dataclass(eq=False)
class Evaluation:
    """One evaluation under way.

    Attributes:
        policy: acts greedily and does not change while it lasts.
        updates: number of updates that the policy had.
        env_steps: number of environment steps that it had learned from.
        state: content of a checkpoint of that policy, should it be the best.
        wanted: number of episodes; 0: one for each environment.
    """

    policy: Policy
    updates: int
    env_steps: int
    state: dict[str, Any] | None = None
    wanted: int = 0
    _played: list[tuple[int, int, dict[str, float]]] = field(default_factory=list)
    _return: NDArray[np.float64] | None = None
    _steps: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    _number: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    def observe(self, timestep: TimeStep) -> bool:
        """Note rewards and results; return whether every episode has ended."""
        n, step_type = len(timestep.step_type), timestep.step_type
        if self._return is None:
            self._return = np.zeros(n)
            self._steps, self._number = np.zeros(n, np.int64), np.arange(n)  # episode under way
        self._return += timestep.reward.sum(1)
        self._steps += 1
        # After ABORTED the next episode counts instead.
        begins = (step_type == StepType.FIRST) | (step_type == StepType.ABORTED)
        self._return[begins] = 0
        self._steps[begins] = 0
        wanted = self.wanted or n
        ended = (step_type == StepType.LAST) & (self._number < wanted)
        for i in np.flatnonzero(ended).tolist():
            values = {"return": float(self._return[i])}
            values |= {k: float(v[i]) for k, v in timestep.metrics.items() if k != "return"}
            self._played.append((int(self._steps[i]), int(self._number[i]), values))
        self._number[ended] += n
        return len(self._played) == wanted

    @property
    def episodes(self) -> dict[str, list[float]]:
        """Metric -> value of each finished episode, shorter episodes first.

        The order does not depend on the number of environments, nor does a mean's last digit.
        """
        out: dict[str, list[float]] = {}
        for _, _, values in sorted(self._played, key=lambda played: played[:2]):
            for name, value in values.items():
                out.setdefault(name, []).append(value)
        return out

    def restart(self) -> None:
        """Reset the statistics."""
        self._played.clear()
        self._return = None

    def summary(self) -> dict[str, dict[str, Any]]:
        """Metric -> mean, std, and the 95 % interval of the mean (normal approximation)."""
        out = {}
        for name, values in self.episodes.items():
            x = np.asarray(values)
            half = 1.96 * x.std(ddof=1) / np.sqrt(len(x)) if len(x) > 1 else 0.0
            mean = float(x.mean())
            out[name] = {
                "mean": mean,
                "std": float(x.std()),
                "ci95": [mean - float(half), mean + float(half)],
                "episodes": len(x),
            }
        return out


def check_best_metric(wanted: str, whose: str, metrics: Iterable[str]) -> None:
    """Find a misspelt evaluation.best_metric before anything is trained.

    Args:
        wanted: evaluation.best_metric.
        whose: owner of the metrics, for the message.
        metrics: their names, "return" apart.

    Raises:
        ConfigError: if there is none of that name.
    """
    name = wanted.removeprefix("-")
    known = dict.fromkeys(["return", *metrics])
    if name not in known:
        raise ConfigError(
            f"evaluation.best_metric: {whose} has no metric '{name}'; {known_names(name, known)}"
        )


class EvaluationScheduler:
    """Hands a due evaluation to the next evaluation session. Used by several threads."""

    def __init__(self, finished: Callable[[Evaluation], None]) -> None:
        """`finished` is called by the inference thread with every completed evaluation."""
        self._lock = threading.Lock()
        self._due: Evaluation | None = None
        self._running: set[Evaluation] = set()
        self._asked = -math.inf
        self._serving: Callable[[], Evaluation] | None = None
        self.finished = finished

    def serve(self, make: Callable[[], Evaluation]) -> None:
        """Begin an evaluation for every session that asks, whether or not one is due."""
        self._serving = make

    def offer(self, evaluation: Evaluation) -> None:
        """An evaluation is due; it replaces one that has not started."""
        with self._lock:
            self._due = evaluation

    def start(self) -> Evaluation | None:
        """Take the due evaluation, if there is one. Evaluation sessions ask again and again."""
        if self._serving is not None:
            return self._serving()
        with self._lock:
            self._asked = time.monotonic()
            due, self._due = self._due, None
            if due is not None:
                self._running.add(due)
        return due

    def end(self, evaluation: Evaluation, complete: bool, given_up: bool = False) -> None:
        """Release an evaluation whose session is over; one that was cut off is due again.

        Args:
            evaluation: the session's.
            complete: whether every episode has ended.
            given_up: whether the evaluator has said that it stops before that.
        """
        with self._lock:
            self._running.discard(evaluation)
            self._asked = time.monotonic()  # its evaluator was here till now and asks for the next
            if given_up and not complete:
                if self._serving is None:
                    logger.warning(
                        "the evaluation after %d updates is given up by its evaluator, whose log "
                        "says why; the run continues without it",
                        evaluation.updates,
                    )
                return
            if not complete and self._due is None:
                evaluation.restart()
                self._due = evaluation

    @property
    def busy(self) -> bool:
        """Return True if an evaluation is under way, or due while an evaluator is connected."""
        with self._lock:
            asked = time.monotonic() - self._asked < _ASKED_LATELY_S
            return bool(self._running) or (self._due is not None and asked)

    @property
    def awaits_evaluator(self) -> bool:
        """Return True if an evaluation is due and no evaluator has asked for one yet."""
        with self._lock:
            return self._due is not None and self._asked == -math.inf
