"""Figures of results: curves with bands over seeds, named at their ends, beside baselines."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from murmur.comparison.analysis import Line
from murmur.comparison.charts import COLOURS, INK, STYLE, furnish, svg_of

_COLUMNS = 3
_WIDTH, _HEIGHT = 4.6, 3.0  # of a panel, in inches
_NAME_SIZE = 10  # points
_NAME_GAP = 0.075  # between names, in heights of a panel
_FOLLOW_SCHEME = (
    "<style>svg{color:#1f2328}@media(prefers-color-scheme:dark){svg{color:#e6edf3}}</style>"
)
_LEVELS = 3  # baselines that a panel has room for


@dataclass(frozen=True)
class Panel:
    """One chart of a figure.

    Attributes:
        title: name of y.
        x_label: name of x.
        lines: curves by name.
        levels: figures of baselines, drawn dashed from side to side.
    """

    title: str
    x_label: str
    lines: Mapping[str, Line]
    levels: Mapping[str, float] = field(default_factory=dict)


def draw(panels: Sequence[Panel], file: Path) -> None:
    """Write the panels as an SVG file, three in a row.

    Lines and levels carry their names at the right end instead of a legend.
    """
    columns = min(_COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(_WIDTH * columns, _HEIGHT * rows), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False).ravel()
        for axis, panel in zip(axes, panels, strict=False):
            _draw(axis, panel)
        for axis in axes[len(panels) :]:
            axis.remove()
        _write(figure, ", ".join(panel.title for panel in panels), file)


def _write(figure: Figure, label: str, file: Path) -> None:
    """Write a figure as a file of its own, light or dark as its reader has chosen."""
    svg = svg_of(figure, label)
    width, height = (72 * side for side in figure.get_size_inches())
    head, tag, rest = svg.partition(">")
    size = f' width="{width:.0f}" height="{height:.0f}"'
    file.write_text(head + size + tag + _FOLLOW_SCHEME + rest + "\n")


def mean_and_range(curves: Sequence[Sequence[Mapping[str, float]]], x: str, y: str) -> Line:
    """Return the mean of several runs' curves, with a band from the lowest to the highest.

    Points before the first update are left out: a line from the untrained policy would show what
    nothing measured.

    Args:
        curves: points of each run's curve; shorter runs end the line.
        x: key of the x axis in the points; its values grow along a curve.
        y: key of the y axis in the points.
    """
    curves = [[p for p in points if p.get("updates", 1)] or points for points in curves]
    grid = np.unique([point[x] for points in curves for point in points])
    first = max(points[0][x] for points in curves)
    last = min(points[-1][x] for points in curves)
    grid = grid[(first <= grid) & (grid <= last)]
    values = np.array(
        [np.interp(grid, [p[x] for p in points], [p[y] for p in points]) for points in curves]
    )
    several = len(curves) > 1
    ends = [end if several else end[:0] for end in (values.min(0), values.max(0))]
    return Line(grid, values.mean(0), *ends)


def chosen_baselines(
    levels: Mapping[str, float], *, less_is_better: bool = False
) -> dict[str, float]:
    """Return at most three baselines: random, then the best."""
    ranked = sorted(levels, key=lambda name: levels[name], reverse=not less_is_better)
    chosen = sorted(ranked, key=lambda name: name != "random")[:_LEVELS]  # stable
    return {name: levels[name] for name in chosen}


def _draw(axis: Axes, panel: Panel) -> None:
    ends = []
    looks = itertools.product(("-", "--"), COLOURS)
    for (name, line), (dash, colour) in zip(
        panel.lines.items(), itertools.cycle(looks), strict=False
    ):
        marker = "o" if len(line.x) == 1 else ""  # a line of one point would not be seen
        axis.plot(line.x, line.y, color=colour, linestyle=dash, linewidth=1.8, marker=marker)
        if len(line.low):
            axis.fill_between(line.x, line.low, line.high, color=colour, alpha=0.18, linewidth=0)
        ends.append((line.y[-1], name, colour))
    for name, level in panel.levels.items():
        axis.axhline(level, linestyle="--", linewidth=0.9, color=INK, alpha=0.6)
        ends.append((level, name, INK))
    axis.set_title(panel.title, fontsize=11)
    axis.set_xlabel(panel.x_label)
    axis.margins(x=0)
    furnish(axis, 5, counts=True)
    bottom, top = axis.get_ylim()
    at = spread([(end - bottom) / (top - bottom) for end, *_ in ends], _NAME_GAP)
    for height, (_, name, colour) in zip(at, ends, strict=True):
        axis.text(
            *(1.015, height, name),
            transform=axis.transAxes,
            color=colour,
            va="center",
            fontsize=_NAME_SIZE,
        )


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """Move heights as little as keeps `gap` between neighbors, in their order.

    The least squares of their moves: isotonic regression of height - gap x rank, by pooling.
    """
    order = np.argsort(heights, kind="stable")
    ranks = np.arange(len(heights))
    pools: list[tuple[float, int]] = []  # (mean, size), from the lowest
    for wanted in np.asarray(heights, np.float64)[order] - gap * ranks:
        pools.append((wanted, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (upper, n), (lower, m) = pools.pop(), pools.pop()
            pools.append(((n * upper + m * lower) / (n + m), n + m))
    found = np.empty(len(heights))
    found[order] = np.repeat([mean for mean, _ in pools], [n for _, n in pools]) + gap * ranks
    return list(found.tolist())
