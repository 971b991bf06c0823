"""Progress and scores of runs, for sweeps, comparisons and lists of runs."""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from murmur.runs.run_folder import RunFolder
from murmur.shared.config.experiment import ExperimentConfig, RunConfig

_PACE_S = 600.0  # of training, whose pace foretells the end


@dataclass(frozen=True)
class Metric:
    """Metric that judges runs.

    Attributes:
        name: name of an evaluation's metric, for example "return".
        less_is_better: True if a smaller value is a better one.
    """

    name: str
    less_is_better: bool = False

    @classmethod
    def parse(cls, text: str) -> "Metric":
        """Parse evaluation.best_metric: "return", or "-entropy", of which less is better."""
        return cls(text.removeprefix("-"), text.startswith("-"))

    def __str__(self) -> str:
        """Format the metric as evaluation.best_metric does."""
        return f"-{self.name}" if self.less_is_better else self.name

    def best(self, values: Iterable[float]) -> float:
        """Return the best of some values."""
        return min(values) if self.less_is_better else max(values)

    def best_name(self, values: Mapping[str, float]) -> str | None:
        """Return the name of the best value, of several the first; None if there is none."""
        best = self.best(values.values()) if values else None
        return next((name for name, value in values.items() if value == best), None)


@dataclass(frozen=True)
class Curve:
    """A metric over the training of a run.

    Attributes:
        metric: metric of the values.
        env_steps: environment steps at each point, growing.
        values: the metric's mean at each point.
        evaluated: True if values are of greedy evaluations; if not, means of training episodes.
    """

    metric: Metric
    env_steps: tuple[int, ...]
    values: tuple[float, ...]
    evaluated: bool

    @property
    def last(self) -> float | None:
        """The last value; None if there is none."""
        return self.values[-1] if self.values else None

    @property
    def best(self) -> float | None:
        """The best value; None if there is none."""
        return self.metric.best(self.values) if self.values else None


def read_curve(run: RunFolder, metric: Metric) -> Curve:
    """Read the metric of a run's evaluations; if it has none at all, of its training episodes."""
    evaluations = run.records("evaluation")
    points = [
        (e["env_steps"], e["metrics"][metric.name]["mean"])
        for e in evaluations
        if metric.name in e.get("metrics", {})
    ]
    if not evaluations:
        points = [
            (p["env_steps"], value)
            for p in run.records("progress")
            if (value := training_value(p, metric)) is not None
        ]
    latest = dict(points)  # a resumed run evaluates a step again: the later one counts
    steps = sorted(latest)
    return Curve(metric, tuple(steps), tuple(latest[s] for s in steps), bool(evaluations))


def training_value(record: Mapping[str, Any], metric: Metric) -> float | None:
    """Return a metric of recent training episodes in a record of progress; None if it has none."""
    found = record.get("return") if metric.name == "return" else None
    value = found if found is not None else record.get("metrics", {}).get(metric.name)
    return None if value is None else float(value)


def state_of(run: RunFolder, config: ExperimentConfig, last: Mapping[str, Any]) -> str:
    """Return the state of a run.

    Args:
        run: folder of the run.
        config: configuration of the run.
        last: the last record of its progress; empty if there is none.

    Returns:
        state: running, complete, stopped (it can be resumed), or begun (it has no checkpoint).
    """
    if run.process("learner.json") or run.process("command.json"):
        return "running"
    if last and (completion(config.run, last) or 0.0) >= 1.0:
        return "complete"
    return "stopped" if run.has_checkpoint() else "begun"


def last_progress(run: RunFolder) -> dict[str, Any]:
    """Return the last record of progress; empty if there is none."""
    return next(run.newest_records("progress"), {})


def completion(run: RunConfig, record: Mapping[str, Any]) -> float | None:
    """Return the completed share of the run, 0 to 1; None if it has no end."""
    shares = completed_shares(run, record)
    return min(1.0, max(shares.values())) if shares else None


def completed_shares(run: RunConfig, record: Mapping[str, Any]) -> dict[str, float]:
    """Return the completed share of each limit of the run by what it limits; the first ends it."""
    limits = {
        "updates": run.max_updates,
        "env_steps": run.max_env_steps,
        "seconds": 60 * run.max_minutes,
        "episodes": run.max_episodes,
    }
    shares = {key: record.get(key, 0) / limit for key, limit in limits.items() if limit}
    if samples := record.get("samples"):
        seen = max(1, samples["trained"] + samples["remaining"])
        shares["epochs"] = (samples["epoch"] + samples["trained"] / seen) / samples["epochs"]
    return shares


@dataclass(eq=False)
class Pace:
    """Pace of a run in its latest minutes, which foretells its end.

    It counts from this start of the run: a resumed run has made its first part at a pace of before.
    Nor does the time count in which environments start, or compile themselves.

    Attributes:
        run: section of the configuration, with the run's limits.
    """

    run: RunConfig
    _seen: deque[tuple[float, dict[str, float]]] = field(default_factory=deque)
    _rows_at_start: int | None = None

    def note(self, record: Mapping[str, Any]) -> None:
        """Take in a record of progress. The same record again changes nothing."""
        now, rows = float(record.get("seconds", 0.0)), record.get("rows_received")
        if not self._seen or now < self._seen[-1][0]:  # the learner went back to a checkpoint
            self._seen.clear()
            self._rows_at_start = rows
        elif rows is not None and rows == self._rows_at_start and not self.run.offline:
            # Environments start.
            self._seen.clear()
        elif now == self._seen[-1][0]:
            self._seen.pop()
        self._seen.append((now, completed_shares(self.run, record)))
        while self._seen[0][0] < now - _PACE_S:
            self._seen.popleft()

    @property
    def measured_s(self) -> float:
        """Training time that the pace is measured over [s]."""
        return self._seen[-1][0] - self._seen[0][0] if self._seen else 0.0

    def left_s(self) -> float | None:
        """Return the expected time until the first limit is reached [s]; None if not known yet."""
        if self.measured_s <= 0:
            return None
        (_, first), (_, last) = self._seen[0], self._seen[-1]
        ends = [
            max(0.0, 1 - share) * self.measured_s / (share - first[key])
            for key, share in last.items()
            if share > first.get(key, share)
        ]
        return min(ends) if ends else None
