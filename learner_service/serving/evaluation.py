"""When an evaluation is due, with which policy, and its result.

An evaluation is one session in MODE_EVALUATE with as many environments as episodes: the first
episode of each counts. The learner delays its Welcome until one is due. Training never waits.
"""

import math
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from learner_service.algorithms.base import Policy
from shared.checking import known_names
from shared.errors import ConfigError
from shared.timestep import StepType, TimeStep

_ASKED_LATELY_S = 5.0  # a waiting evaluation session asks far more often; one may be reconnecting


@dataclass(eq=False)
class Evaluation:
    """One evaluation under way.

    Attributes:
        policy: acts greedily and does not change while it lasts.
        updates: how many updates the policy had.
        env_steps: how many environment steps it had learned from.
        state: what a checkpoint of that policy holds, should it be the best.
        episodes: metric -> value of each finished episode.
    """

    policy: Policy
    updates: int
    env_steps: int
    state: dict[str, Any] | None = None
    episodes: dict[str, list[float]] = field(default_factory=dict)
    _return: NDArray[np.float64] | None = None
    _finished: NDArray[np.bool_] | None = None

    def observe(self, timestep: TimeStep) -> bool:
        """Note rewards and results; returns whether every environment has finished an episode."""
        n = len(timestep.step_type)
        if self._return is None or self._finished is None:
            self._return, self._finished = np.zeros(n), np.zeros(n, np.bool_)
        self._return += timestep.reward.sum(1)
        self._return[timestep.step_type == StepType.ABORTED] = 0  # the next one counts instead
        newly = (timestep.step_type == StepType.LAST) & ~self._finished
        if newly.any():
            self.episodes.setdefault("return", []).extend(self._return[newly].tolist())
            for name, values in timestep.metrics.items():
                if name != "return":
                    self.episodes.setdefault(name, []).extend(values[newly].tolist())
            self._finished |= newly
        return bool(self._finished.all())

    def restart(self) -> None:
        """Reset the statistics."""
        self.episodes.clear()
        self._return = self._finished = None

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
        whose: what has the metrics, for the message.
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

    def end(self, evaluation: Evaluation, complete: bool) -> None:
        """An evaluation's session is over; one that is incomplete is due again."""
        with self._lock:
            self._running.discard(evaluation)
            if not complete and self._due is None:
                evaluation.restart()
                self._due = evaluation

    @property
    def busy(self) -> bool:
        """Whether an evaluation is under way, or due while an evaluator is connected."""
        with self._lock:
            asked = time.monotonic() - self._asked < _ASKED_LATELY_S
            return bool(self._running) or (self._due is not None and asked)
