"""Comparison of groups of runs: tables, profiles, probabilities of improvement, curves."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from murmur.comparison.groups import (
    ComparedRun,
    Group,
    Task,
    collect,
    differing,
    make_groups,
    make_tasks,
    require_same_steps,
    require_same_task,
)
from murmur.comparison.statistics import (
    Estimate,
    Scores,
    bootstrap,
    estimate,
    interquartile_mean,
    percentile_interval,
    performance_profile,
    probability_of_improvement,
)
from murmur.comparison.statistics import normalise as scale
from murmur.runs.scores import Metric
from murmur.shared.process.errors import ConfigError

FEW_RUNS = 5  # with fewer the bootstrap's intervals are too narrow
_POINTS = 60  # of a curve or a profile
_CURVE_REPEATS = 2000
_REACHED = 0.95  # of --at-steps


@dataclass(frozen=True)
class Line:
    """A curve with its interval.

    Attributes:
        x, y: [K] coordinates of its points.
        low, high: [K] ends of the interval; empty of a single run.
    """

    x: Scores
    y: Scores
    low: Scores
    high: Scores


@dataclass(frozen=True)
class TaskResult:
    """Result of a comparison on one task, or over all of them.

    Attributes:
        name: name of the task.
        unit: unit of the scores, for axes.
        scores: [R, M] scores of each group.
        iqm: interquartile mean of each group.
        improvement: probability that a run of the first group beats one of the second.
        profiles: share of runs above a score, of each group.
        curves: interquartile mean over environment steps, of each group; none over all tasks.
        env_steps: smallest and largest number of steps that a run of each group used.
    """

    name: str
    unit: str
    scores: dict[str, Scores]
    iqm: dict[str, Estimate]
    improvement: dict[tuple[str, str], Estimate]
    profiles: dict[str, Line]
    curves: dict[str, Line] = field(default_factory=dict)
    env_steps: dict[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    """Result that `murmur compare` shows.

    Attributes:
        metric: metric that judges the runs.
        groups: groups of runs.
        tasks: results on each task.
        overall: result over all tasks with scaled scores; None with one task, or if groups lack
            runs.
        notes: caveats for the reader.
    """

    metric: Metric
    groups: list[Group]
    tasks: list[TaskResult]
    overall: TaskResult | None
    notes: list[str]

    @property
    def results(self) -> list[TaskResult]:
        """All results, that over all tasks first."""
        return [*([self.overall] if self.overall else []), *self.tasks]


def compare(
    targets: Sequence[str],
    *,
    metric: str | None = None,
    by: Sequence[str] = (),
    best: bool = False,
    at_steps: int | None = None,
    any_steps: bool = False,
    across_tasks: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> Comparison:
    """Compare runs by the interquartile mean of their scores, with stratified-bootstrap intervals.

    Args:
        targets: folders of runs or sweeps, folders that hold runs, or patterns.
        metric: metric that judges the runs, "-" before it if less is better; None: each run's
            evaluation.best_metric.
        by: configuration keys that tell groups apart; none: all that differ.
        best: flag to score a run by its best evaluation, not by its last.
        at_steps: environment steps at which scores are taken; None: at the end.
        any_steps: flag to allow different numbers of environment steps.
        across_tasks: flag to allow runs of different tasks.
        say: function called with a line for each run that is left out.

    Raises:
        ConfigError: if the runs do not compare, saying what differs.
    """
    runs = collect(targets, metric, say)
    if not across_tasks:
        require_same_task(runs)
    if at_steps is not None:
        runs = _up_to(runs, at_steps, say)
    groups = make_groups(runs, by)
    tasks = make_tasks(groups)
    if at_steps is None and not any_steps:
        for task in tasks:
            require_same_steps([run for members in task.groups.values() for run in members])
    judged = runs[0].curve.metric
    sign = -1.0 if judged.less_is_better else 1.0
    table = {task.name: _scores(task, best) for task in tasks}
    results = [_on_task(task, table[task.name], judged.name, sign) for task in tasks]
    notes = _notes(runs, groups, tasks, best=best, at_steps=at_steps)
    overall = _overall(table, groups, sign, notes) if len(tasks) > 1 else None
    return Comparison(judged, groups, results, overall, notes)


def _up_to(
    runs: Sequence[ComparedRun], at_steps: int, say: Callable[[str], None]
) -> list[ComparedRun]:
    """Return the runs that got as far as `at_steps`, with their curves up to there; name others.

    Raises:
        ConfigError: if none did.
    """
    reached = []
    for run in runs:
        if run.env_steps < _REACHED * at_steps:
            say(f"left out: {run.name}: it ended after {run.env_steps} environment steps")
        elif run.curve.env_steps[0] > at_steps:
            first = run.curve.env_steps[0]
            say(f"left out: {run.name}: its first evaluation is after {first} steps")
        else:
            count = bisect_right(run.curve.env_steps, at_steps)
            steps, values = run.curve.env_steps[:count], run.curve.values[:count]
            reached.append(replace(run, curve=replace(run.curve, env_steps=steps, values=values)))
    if not reached:
        raise ConfigError(f"--at-steps {at_steps}: no run has a score at that number of steps")
    return reached


def _scores(task: Task, best: bool) -> dict[str, Scores]:
    """Return scores [N, 1] of each group's N runs: the best or the last values of their curves."""
    return {
        name: np.array([[run.curve.best if best else run.curve.last] for run in members], float)
        for name, members in task.groups.items()
    }


def _on_task(task: Task, scores: dict[str, Scores], unit: str, sign: float) -> TaskResult:
    """Compare the groups on one task."""
    result = _result(task.name, unit, scores, sign)
    for name, members in task.groups.items():
        result.curves[name] = learning_curve(members)
        steps = [run.env_steps for run in members]
        result.env_steps[name] = (min(steps), max(steps))
    return result


def _result(name: str, unit: str, scores: dict[str, Scores], sign: float) -> TaskResult:
    """Compare groups by scores of which less is better if `sign` is -1."""
    thresholds = _thresholds(scores)
    order = sorted(scores, key=lambda group: -sign * float(interquartile_mean(scores[group])))
    pairs = [(a, b) for i, a in enumerate(order) for b in order[i + 1 :]]

    def share_above(drawn: Scores) -> Scores:
        return performance_profile(sign * drawn, sign * thresholds)

    return TaskResult(
        name,
        unit,
        {group: scores[group] for group in order},
        {group: estimate(interquartile_mean, scores[group]) for group in order},
        {
            (a, b): estimate(probability_of_improvement, sign * scores[a], sign * scores[b])
            for a, b in pairs
        },
        {group: _line(thresholds, share_above, scores[group]) for group in order},
    )


def _thresholds(scores: dict[str, Scores]) -> Scores:
    """Return scores at which profiles are drawn: the range of all runs, and a little beyond."""
    low = min(float(s.min()) for s in scores.values())
    high = max(float(s.max()) for s in scores.values())
    margin = 0.02 * ((high - low) or abs(high) or 1.0)
    return np.linspace(low - margin, high + margin, _POINTS)


def _line(x: Scores, statistic: Callable[[Scores], Scores], scores: Scores) -> Line:
    """Return a statistic [..., R, M, ...] -> [..., K] of scores, with its interval at each x."""
    low = high = np.empty(0)
    if len(scores) > 1:
        low, high = percentile_interval(bootstrap(statistic, scores, repeats=_CURVE_REPEATS))
    return Line(x, statistic(scores), low, high)


def learning_curve(runs: Sequence[ComparedRun]) -> Line:
    """Return the interquartile mean of runs over the environment steps that all of them have.

    Between two evaluations of a run its score is interpolated linearly. The curve begins after
    the first update: between the untrained policy and the next evaluation nothing was measured.

    Args:
        runs: runs of one group on one task.
    """
    trained = [next(filter(None, run.curve.env_steps), 0) for run in runs]
    start = max(trained) if all(trained) else max(run.curve.env_steps[0] for run in runs)
    end = min(run.curve.env_steps[-1] for run in runs)
    x = np.linspace(start, max(start, end), _POINTS if end > start else 1)
    values = np.array([np.interp(x, run.curve.env_steps, run.curve.values) for run in runs])

    def middle(scores: Scores) -> Scores:  # [..., R, 1, K] -> [..., K]
        return interquartile_mean(np.moveaxis(scores, -1, -3))

    return _line(x, middle, values[:, None, :])  # [R, 1 task, K]


def _overall(
    table: dict[str, dict[str, Scores]], groups: Sequence[Group], sign: float, notes: list[str]
) -> TaskResult | None:
    """Compare groups over all tasks; None, with a note, if none of them has the same runs."""
    joined: dict[str, Scores] = {}
    of_task = [sign * np.concatenate([*table[task].values()]) for task in table]
    lows = np.array([scores.min() for scores in of_task])
    highs = np.array([scores.max() for scores in of_task])
    for group in groups:
        columns = [table[task].get(group.name, np.empty((0, 1))) for task in table]
        counts = [len(column) for column in columns]
        if min(counts) == max(counts):
            joined[group.name] = scale(sign * np.hstack(columns), lows, highs)
        else:
            told = ", ".join(f"{n} on {task}" for task, n in zip(table, counts, strict=True))
            notes.append(
                f"{group.name} is left out over all tasks: it needs as many runs on each, and has "
                f"{told}."
            )
    return _result("all tasks", "scaled score", joined, 1.0) if joined else None


def _notes(
    runs: Sequence[ComparedRun],
    groups: Sequence[Group],
    tasks: Sequence[Task],
    *,
    best: bool,
    at_steps: int | None,
) -> list[str]:
    """Return the caveats about the scores."""
    curve = runs[0].curve
    kind = "best evaluation" if best else "last evaluation"
    at = f", up to {at_steps:,} environment steps" if at_steps is not None else ""
    notes = [f"A run's score is the mean {curve.metric.name} of its {kind}{at}."]
    if not curve.evaluated:
        notes = [
            f"The runs were not evaluated: a score is the mean {curve.metric.name} of recent "
            f"training episodes, in which the policy explores{at}."
        ]
    if best:
        notes.append("The best of many evaluations is optimistic; more so if there were more.")
    least = min(len(members) for task in tasks for members in task.groups.values())
    if least < FEW_RUNS:
        notes.append(
            f"A group has {least} run{'s' if least > 1 else ''} on a task: with fewer than "
            f"{FEW_RUNS}, bootstrap intervals are narrower than the uncertainty is."
        )
    for group in groups:
        seeds = [(run.seed, str(run.task)) for run in group.runs]
        if again := {seed for seed, task in seeds if seeds.count((seed, task)) > 1}:
            notes.append(
                f"{group.name}: seed {min(again)} occurs more than once; such runs are not "
                "independent."
            )
    for group in groups:
        if within := differing([run.config for run in group.runs]):
            more = " and more" if len(within) > FEW_RUNS else ""
            notes.append(
                f"Runs of {group.name} differ in {', '.join(within[:FEW_RUNS])}{more} as well."
            )
    working = [run.name for run in runs if run.state != "complete"]
    if working:
        notes.append(f"Not complete: {', '.join(working)}.")
    return notes
