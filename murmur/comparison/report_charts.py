"""Charts of a run's page: of an episode, of evaluations, and of the training."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from murmur.comparison.charts import COLOURS, Chart, Series, Style, line_chart, styles
from murmur.runs.readings import direction, loss_reading, metric_reading
from murmur.runs.scores import Metric
from murmur.text import short_number

LEARNED = "learned policy"

# What is worth a curve over mission time, if the environment reports it; all others have `return`.
_MISSION_METRICS = ("entropy", "f1", "coverage")
_TEAM = "return/"  # of metrics: the return of a team
_X_LABEL = "environment steps"
_MARKED_STEPS = 60  # of an episode: the points of longer ones would hide the lines


def best_baseline(results: Mapping[str, Mapping[str, Any]], metric: Metric) -> str | None:
    """Return the baseline with the best mean of this metric; None if none has it."""
    means = {
        name: result["summary"][metric.name]["mean"]
        for name, result in results.items()
        if name != LEARNED and metric.name in result["summary"]
    }
    return metric.best_name(means)


def mission_charts(results: Mapping[str, Mapping[str, Any]], metric: Metric) -> list[Chart]:
    """Draw each metric over an episode's steps, one line for each policy.

    The axes show the learned policy and the best baseline by `metric` whole.
    """
    known = {name for r in results.values() for name in r["mean_curves"]}
    names = [name for name in _MISSION_METRICS if name in known] or sorted(known & {"return"})
    first = (LEARNED, best_baseline(results, metric))
    look = styles(results, first=LEARNED)
    charts = []
    for name in names:
        curves = {k: c for k, r in results.items() if (c := r["mean_curves"].get(name))}
        shown = [policy for policy in curves if policy in first] or list(curves)
        steps = max(len(curves[policy]) for policy in shown)
        means = {policy: _held(curve, steps) for policy, curve in curves.items()}
        series = []
        for policy, mean in means.items():
            half = _held(results[policy]["curves_ci95"][name], steps)
            line = Series(policy, range(steps), mean, mean - half, mean + half, look[policy])
            series.append(line)
        seen = [v for policy in shown for v in means[policy] if not np.isnan(v)] or [0.0]
        room = 0.4 * ((max(seen) - min(seen)) or 1.0)
        low, high = min(seen) - room, max(seen) + room
        title = name.replace("f1", "F1")
        svg = line_chart(
            series,
            "step of the episode",
            title,
            markers=steps <= _MARKED_STEPS,
            y_limits=(low, high),
        )
        reading = metric_reading(name, direction(name, metric))
        if any(((mean < low) | (mean > high)).any() for mean in means.values()):
            reading += " Lines of other baselines leave the picture."
        charts.append(Chart(f"{title} over an episode", svg, reading.strip()))
    return charts


def _held(values: Sequence[float | None], steps: int) -> NDArray[np.float64]:
    """Return values of an episode's steps; one that has ended before keeps its last value."""
    held = [*values, *[values[-1]] * (steps - len(values))]
    return np.array(held[:steps], np.float64)


def evaluation_charts(
    evaluations: list[dict[str, Any]],
    results: Mapping[str, Mapping[str, Any]],
    metric: Metric,
) -> list[Chart]:
    """Draw evaluations during training, with the best baseline's level.

    Args:
        evaluations: lines of progress.jsonl.
        results: results of the policies on this page.
        metric: metric that chooses best.pt; it always has a chart.
    """
    # A line from the evaluation before training would be a wedge that nothing measured, and often
    # squash the rest.
    trained = [e for e in evaluations if e.get("updates") != 0]
    before = [e for e in evaluations if e.get("updates") == 0]
    untrained = before[-1] if before and trained else None
    evaluations = trained or evaluations
    x = [e["env_steps"] for e in evaluations]
    names = list(dict.fromkeys(name for e in evaluations for name in e["metrics"]))
    wanted = ("return", metric.name, *_MISSION_METRICS)
    wanted = (*wanted, *(n for n in names if n.startswith(_TEAM)))
    best, look = best_baseline(results, metric), styles(results, first=LEARNED)
    charts = []
    for name in [n for n in dict.fromkeys(wanted) if n in names]:
        entries = [e["metrics"].get(name) for e in evaluations]
        mean = [m["mean"] if m else None for m in entries]
        low, high = ([m["ci95"][end] if m else None for m in entries] for end in (0, 1))
        series = [Series(LEARNED, x, mean, low, high, look[LEARNED])]
        if best and (level := results[best]["summary"].get(name)):
            ends, style = [x[0], x[-1]], look[best]
            label = f"{best}, the best baseline"
            series.append(Series(label, ends, [level["mean"]] * 2, style=style))
        svg = line_chart(series, _X_LABEL, name, markers=True)
        better = direction(name, metric)
        reading = f"{metric_reading(name, better)}\n{_course(x, mean)}"
        if known := untrained and untrained["metrics"].get(name):
            reading += f" Before training it was {short_number(known['mean'])}."
        charts.append(Chart(f"Evaluation: {name} {better}".strip(), svg, reading.strip()))
    return charts


def _course(x: Sequence[float], values: Sequence[float | None]) -> str:
    """Return how figures went: the first, the last, and the extremes with their steps."""
    known = [(v, at) for v, at in zip(values, x, strict=True) if v is not None]
    if not known:
        return ""
    if len(known) == 1:
        return f"{short_number(known[0][0])} after {short_number(known[0][1])}."
    (low, low_at), (high, high_at) = min(known), max(known)
    first, last = short_number(known[0][0]), short_number(known[-1][0])
    if short_number(low) == short_number(high):
        return f"{last} throughout."
    return (
        f"From {first} to {last}; least {short_number(low)} at {short_number(low_at)}, "
        f"largest {short_number(high)} at {short_number(high_at)}."
    )


def learning_charts(progress: list[dict[str, Any]]) -> list[Chart]:
    """Return the charts of training; their x axis is environment steps throughout."""
    if not progress:
        return []
    charts = []
    x = [p["env_steps"] for p in progress]

    def curve(title: str, key: str, y_label: str, reading: str) -> Chart:
        return curve_chart(title, x, [p.get(key) for p in progress], _X_LABEL, y_label, reading)

    if any(p.get("return") is not None for p in progress):
        reading = "Mean return of recent training episodes, in which the policy still explores."
        charts.append(curve("Return while training", "return", "return", reading))
    if teams := [n for n in progress[-1].get("metrics", {}) if n.startswith(_TEAM)]:
        # All are of the learned policy, in its color.
        dashes = itertools.cycle(("-", "--", ":", "-."))
        series = [
            Series(
                n.removeprefix(_TEAM),
                x,
                [p.get("metrics", {}).get(n) for p in progress],
                style=Style(COLOURS[0], style),
            )
            for n, style in zip(teams, dashes, strict=False)
        ]
        svg = line_chart(series, _X_LABEL, "return")
        reading = "The same for each team alone: rewards of its agents, summed over an episode."
        charts.append(Chart("Return of each team while training", svg, reading))
    charts += _curriculum_charts(progress, x)
    reading = "Decisions of single agents a second; dips are updates or evaluations."
    speed = curve("Speed", "agent_steps_per_s", "agent-steps/s", reading)
    reading = "How many updates old the acting policy was when its rows were learned from."
    lag = curve("Policy lag", "policy_lag", "updates", reading)
    return [*charts, *loss_charts(progress, x, _X_LABEL), speed, lag]


def _curriculum_charts(progress: list[dict[str, Any]], x: list[float]) -> list[Chart]:
    """Draw every option of a run's curriculum over x, and name its changes of level."""
    names = dict.fromkeys(name for p in progress for name in p.get("curriculum", {}))
    charts = []
    for name in names:
        at = [p.get("curriculum", {}).get(name) for p in progress]
        values = [None if a is None else a["number"] for a in at]
        reading = "Value in the training episodes that begin; evaluations use the last one."
        changes = [
            f"{now['value']} from {short_number(steps)}"
            for before, now, steps in zip(at, at[1:], x[1:], strict=False)
            if now and "level" in now and (before is None or now["level"] != before["level"])
        ]
        course = f"Levels: {', '.join(changes)}." if changes else ""
        title = f"Curriculum: {name}"
        charts.append(curve_chart(title, x, values, _X_LABEL, name, reading, course))
    return charts


def loss_charts(progress: list[dict[str, Any]], x: list[float], x_label: str) -> list[Chart]:
    """Draw every loss of a run's lines of progress over x."""
    names = dict.fromkeys(name for p in progress for name in p.get("losses", {}))
    charts = []
    for name in names:
        values = [p.get("losses", {}).get(name) for p in progress]
        title = name.replace("_", " ")
        charts.append(curve_chart(title, x, values, x_label, name, loss_reading(name)))
    return charts


def curve_chart(
    title: str,
    x: Sequence[float],
    values: Sequence[float | None],
    x_label: str,
    y_label: str,
    reading: str,
    course: str = "",
    *,
    markers: bool = False,
) -> Chart:
    """Draw one line with its course below the reading; "": first, last and extreme values."""
    svg = line_chart([Series("", x, values)], x_label, y_label, markers=markers)
    return Chart(title, svg, f"{reading}\n{course or _course(x, values)}".strip())
