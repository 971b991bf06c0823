"""Charts of a run's page: of an episode, of evaluations, and of the training."""

from collections.abc import Mapping
from typing import Any

from murmur.comparison.charts import Chart, Series, line_chart
from murmur.runs.scores import Metric

LEARNED = "learned policy"

# What is worth a curve over mission time, if the environment reports it; all others have `return`.
_MISSION_METRICS = ("entropy", "f1", "coverage")
_TEAM = "return/"  # of metrics: the return of a team
_X_LABEL = "environment steps"
_MARKED_STEPS = 60  # of an episode: the points of longer ones would hide the lines
_READINGS = {
    "entropy": "How unsure the team is about the cells that matter, in bits: 1 is no idea, 0 is "
    "certain. Lower is better.",
    "f1": "How well the mapped region of interest matches the true one: 1 is exact. Higher is "
    "better.",
    "coverage": "Share of the area that has been seen at least once.",
    "return": "Rewards summed since the episode began. Higher is better.",
}


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
    charts = []
    for name in names:
        curves = {k: c for k, r in results.items() if (c := r["mean_curves"].get(name))}
        shown = [policy for policy in curves if policy in first] or list(curves)
        steps = max(len(curves[policy]) for policy in shown)
        series = []
        for policy, curve in curves.items():
            ends = [curve[-1]] * (steps - len(curve))  # episodes that have ended keep their value
            half = results[policy]["curves_ci95"].get(name, ())
            half = [*half, *[half[-1]] * len(ends)][:steps] if half else ()
            series.append(Series(policy, range(steps), [*curve, *ends][:steps], half))
        seen = [v for s in series if s.name in shown for v in s.y if v is not None] or [0.0]
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
        reading = _READINGS.get(name, "")
        if any(v is not None and not low <= v <= high for s in series for v in s.y):
            reading += " Lines of other baselines leave the picture."
        charts.append(Chart(f"{title} over an episode", svg, reading.strip()))
    return charts


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
    x = [e["env_steps"] for e in evaluations]
    names = list(dict.fromkeys(name for e in evaluations for name in e["metrics"]))
    wanted = ("return", metric.name, *_MISSION_METRICS)
    wanted = (*wanted, *(n for n in names if n.startswith(_TEAM)))
    best = best_baseline(results, metric)
    charts = []
    for name in [n for n in dict.fromkeys(wanted) if n in names]:
        entries = [e["metrics"].get(name) for e in evaluations]
        mean = [m["mean"] if m else None for m in entries]
        half = [(m["ci95"][1] - m["ci95"][0]) / 2 if m else None for m in entries]
        series = [Series(LEARNED, x, mean, half)]
        if best and (level := results[best]["summary"].get(name)):
            series.append(Series(f"{best}, the best baseline", [0, x[-1]], [level["mean"]] * 2))
        svg = line_chart(series, _X_LABEL, name, markers=True)
        reading = (
            "Greedy episodes with seeds of their own, at intervals during training; the band "
            "is the 95 % interval of the mean. " + _READINGS.get(name, "")
        )
        charts.append(Chart(f"Evaluation: {name}", svg, reading))
    return charts


def learning_charts(progress: list[dict[str, Any]]) -> list[Chart]:
    """Return the charts of training; their x axis is environment steps throughout."""
    if not progress:
        return []
    charts = []
    x = [p["env_steps"] for p in progress]

    def curve(title: str, key: str, y_label: str, reading: str) -> Chart:
        values = [p.get(key) for p in progress]
        return Chart(title, line_chart([Series("", x, values)], _X_LABEL, y_label), reading)

    if any(p.get("return") is not None for p in progress):
        reading = "Mean return of recent training episodes, in which the policy still explores."
        charts.append(curve("Return while training", "return", "return", reading))
    if teams := [n for n in progress[-1].get("metrics", {}) if n.startswith(_TEAM)]:
        series = [
            Series(n.removeprefix(_TEAM), x, [p["metrics"].get(n) for p in progress]) for n in teams
        ]
        svg = line_chart(series, _X_LABEL, "return")
        reading = "The same for each team alone: rewards of its agents, summed over an episode."
        charts.append(Chart("Return of each team while training", svg, reading))
    reading = "Decisions of single agents a second; dips are updates or evaluations."
    speed = curve("Speed", "agent_steps_per_s", "agent-steps/s", reading)
    reading = "How many updates old the acting policy was when its rows were learned from."
    lag = curve("Policy lag", "policy_lag", "updates", reading)
    return [*charts, *loss_charts(progress, x, _X_LABEL), speed, lag]


def loss_charts(progress: list[dict[str, Any]], x: list[float], x_label: str) -> list[Chart]:
    """Draw every loss of a run's lines of progress over x."""
    names = dict.fromkeys(name for p in progress for name in p.get("losses", {}))
    charts = []
    for name in names:
        values = [p["losses"].get(name) for p in progress]
        svg = line_chart([Series("", x, values)], x_label, name)
        charts.append(Chart(name.replace("_", " "), svg, _loss_reading(name)))
    return charts


def _loss_reading(name: str) -> str:
    """Return how to read a loss's curve."""
    if "grad" in name:
        return "Length of the gradient; spikes hint at an unstable update."
    if "entropy" in name:
        return "How undecided the policy is; it falls as the policy commits itself."
    if "critic" in name or "value" in name:
        return "How far the critic's predictions are off; it should fall, then stay."
    return "As the last update before each moment reported it."
