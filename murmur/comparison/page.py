"""The page and the tables of `murmur compare`."""

from collections.abc import Mapping

from rich.table import Table

from murmur.comparison.analysis import Comparison, Line, TaskResult
from murmur.comparison.charts import Chart, Series, Style, interval_chart, line_chart, styles
from murmur.comparison.report import render_template, written_now
from murmur.comparison.statistics import LEVEL, REPEATS, Estimate
from murmur.runs.readings import DOWN, UP
from murmur.text import number, plain, screen_table

_INTERVAL = f"{100 * LEVEL:.0f} % interval"


def tables(comparison: Comparison) -> list[Table]:
    """Return the tables for the screen: one of groups and one of pairs for each task."""
    found = []
    for result in comparison.results:
        found.append(_groups_table(result))
        if result.improvement:
            found.append(_pairs_table(result))
    return found


def _groups_table(result: TaskResult) -> Table:
    title = f"{result.name}: interquartile mean (IQM) of {result.unit}"
    table = screen_table("group", "runs", "IQM", _INTERVAL, "min", "max", title=title)
    steps = result.env_steps
    if steps:
        table.add_column("env steps", no_wrap=True)
    for name, found in result.iqm.items():
        scores = result.scores[name]
        table.add_row(
            plain(name),
            "x".join(map(str, scores.shape)) if scores.shape[1] > 1 else str(len(scores)),
            number(found.value),
            interval_text(found),
            number(float(scores.min())),
            number(float(scores.max())),
            *([_range(steps[name])] if steps else []),
        )
    return table


def _pairs_table(result: TaskResult) -> Table:
    table = screen_table("probability that a run of", "beats one of", "is", _INTERVAL)
    for (first, second), found in result.improvement.items():
        table.add_row(plain(first), plain(second), number(found.value), interval_text(found))
    return table


def interval_text(found: Estimate) -> str:
    """Return an interval for tables."""
    if found.low is None or found.high is None:
        return "–"
    return f"{number(found.low)} … {number(found.high)}"


def _range(steps: tuple[int, int]) -> str:
    least, most = steps
    return number(least) if least == most else f"{number(least)} … {number(most)}"


def render(comparison: Comparison, command: str) -> str:
    """Render one self-contained page as HTML.

    Args:
        comparison: comparison to show.
        command: command that made the page.
    """
    groups = comparison.groups
    runs = [run for group in groups for run in group.runs]
    look = styles(group.name for group in groups)  # the same on every task
    return render_template(
        "compare.html.j2",
        name=_title(comparison),
        summary="A comparison of training runs of murmur by the interquartile mean of their "
        "scores.",
        facts={
            "groups": number(len(groups)),
            "runs": number(len(runs)),
            "tasks": number(len(comparison.tasks)),
            "judged by": str(comparison.metric),
        },
        dropped="",
        notes=comparison.notes,
        level=f"{100 * LEVEL:.0f}",
        repeats=number(REPEATS),
        less_is_better=comparison.metric.less_is_better,
        results=[(result, _charts(result, look)) for result in comparison.results],
        arrow=DOWN if comparison.metric.less_is_better else UP,
        look=look,
        best=_best,
        interval=interval_text,
        span=_range,
        overall=comparison.overall is not None,
        keys=list(groups[0].settings),
        groups=groups,
        provenance={
            "command": command,
            "runs": ", ".join(str(run.path) for run in runs),
            "page written": written_now(),
        },
    )


def _best(result: TaskResult) -> float | None:
    """Return the best interquartile mean; None if there is one alone."""
    values = [found.value for found in result.iqm.values()]  # the best first
    return values[0] if len(values) > 1 else None


def _title(comparison: Comparison) -> str:
    names = [group.name for group in comparison.groups]
    shown = " – ".join(names) if len(names) <= 3 else f"{len(names)} groups of runs"
    task = comparison.tasks[0].name if len(comparison.tasks) == 1 else "several tasks"
    return f"{shown} on {task}"


def _charts(result: TaskResult, look: Mapping[str, Style]) -> list[Chart]:
    rows = [(name, *found) for name, found in result.iqm.items()]
    charts = [
        Chart(
            "Interquartile mean",
            interval_chart(rows, result.unit, look),
            "Mean of the middle half of the runs' scores; the bar is its interval.",
        )
    ]
    if result.curves:
        charts.append(
            Chart(
                "Learning",
                _lines(result.curves, look, "environment steps", result.unit),
                "Interquartile mean of the runs of each group while they trained, up to where all "
                "of them came; the band is its interval at each point.",
            )
        )
    charts.append(
        Chart(
            "Performance profile",
            _lines(result.profiles, look, result.unit, "share of runs"),
            "Share of runs that are better than the score on the x axis: the higher, the better. "
            "Where curves cross, neither group is better throughout.",
        )
    )
    return charts


def _lines(lines: Mapping[str, Line], look: Mapping[str, Style], x_label: str, y_label: str) -> str:
    """Draw curves of groups, in the same order and colors in every chart of a page."""
    series = [
        Series(name, line.x, line.y, line.low, line.high, look[name])
        for name in look
        if (line := lines.get(name))
    ]
    counts = x_label == "environment steps"
    return line_chart(series, x_label, y_label, equal=True, counts=counts)
