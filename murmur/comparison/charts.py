"""Charts as inline SVG that follow the page's text color, in light and in dark."""

import io
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

# Colors told apart by most readers with color-blindness (Okabe and Ito), on white and on black.
COLOURS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c8c8c")
RANDOM = COLOURS[-1]  # gray, of the random policy alone
_DASHES = ("-", "--", ":", "-.")  # of lines beyond the colors
INK = "#123456"  # stands for the page's text color until the SVG is written
_MAX_POINTS = 400
_WIDTH = 4.0  # inches; 288 px, the narrowest that a page shows it: letters keep their size
_LONG = 10_000  # of a y axis: from here 12000 is written 12k
_MOST_INSIDE = 4  # names of a legend that leaves lines free; more stand below the axes
_LETTERS = 23  # of a name that leaves room for another beside it


Values = Sequence[float | None] | NDArray[np.float64]


@dataclass(frozen=True)
class Chart:
    """A figure and how to read it."""

    title: str
    svg: str
    reading: str


@dataclass(frozen=True)
class Style:
    """Look of a line: a color, and matplotlib's name of its dashes."""

    color: str
    dashes: str = "-"


@dataclass(frozen=True)
class Series:
    """One line of a chart.

    Attributes:
        name: name in the legend; empty for none.
        x, y: coordinates of its points; None and NaN leave a gap.
        low, high: ends of the band at each point; empty for none.
        style: color and dashes; None: by its place in the chart.
    """

    name: str
    x: Values
    y: Values
    low: Values = ()
    high: Values = ()
    style: Style | None = None


def styles(names: Iterable[str], first: str = "") -> dict[str, Style]:
    """Return a style for each name, the same in all charts; no two are alike.

    Args:
        names: names of policies or groups.
        first: name that gets the first color, and no other does; "random" gets gray.
    """
    rest = [name for name in dict.fromkeys(names) if name not in (first, "random")]
    colors = COLOURS[1:-1] if first else COLOURS[:-1]
    found = {first: Style(COLOURS[0]), "random": Style(RANDOM)}
    for i, name in enumerate(rest):
        dashes = _DASHES[i // len(colors) % len(_DASHES)]
        found[name] = Style(colors[i % len(colors)], dashes)
    return found


STYLE: Any = {  # of matplotlib
    "svg.fonttype": "none",
    "svg.hashsalt": "murmur",
    "font.family": "sans-serif",
    "font.size": 10.5,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.linewidth": 0.6,
}


def line_chart(
    series: Sequence[Series],
    x_label: str,
    y_label: str,
    *,
    markers: bool = False,
    equal: bool = False,
    counts: bool = True,
    y_limits: tuple[float, float] | None = None,
) -> str:
    """Draw a chart as an <svg> element.

    Args:
        series: lines of the chart.
        x_label: name of x.
        y_label: name of y.
        markers: flag to mark points.
        equal: flag to draw all lines alike; else the first stands out.
        counts: flag of an x axis of counts: 20 000 is written 20k.
        y_limits: limits of the y axis; None: the range of all lines.
    """
    named = [line.name for line in series if line.name]
    columns = 2 if max(map(len, named), default=0) <= _LETTERS else 1
    rows = math.ceil(len(named) / columns) if len(named) > _MOST_INSIDE else 0  # below the axes
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(_WIDTH, 2.6 + 0.19 * rows), layout="constrained")
        axis = figure.subplots()
        default = list(styles(map(str, range(len(series)))).values())[2:]  # "" and "random" first
        look = [line.style or default[i] for i, line in enumerate(series)]
        for i, line in enumerate(series):
            # The first line is what the chart is about.
            width, alpha = (1.6, 0.15) if equal else (1.2, 0.08) if i else (2.0, 0.2)
            _draw(axis, line, look[i], width, alpha, markers=markers)
        axis.set_xlabel(x_label)
        axis.set_ylabel(y_label)
        axis.margins(x=0.02)
        if y_limits:
            axis.set_ylim(y_limits)
        furnish(axis, 6, counts=counts)
        legend = {"frameon": False, "labelspacing": 0.2, "fontsize": 10.5, "handlelength": 1.4}
        if rows:
            figure.legend(loc="outside lower center", ncols=columns, columnspacing=1.0, **legend)
        elif named:
            axis.legend(loc="best", **legend)
        svg = svg_of(figure, f"{y_label} over {x_label}")  # lays the figure out
        left, bottom, right, top = axis.get_position().extents
        hover = {
            "box": [round(float(v), 4) for v in (left, 1 - top, right, 1 - bottom)],
            "range": [float(v) for v in axis.get_xlim()],
            "label": x_label,
            "lines": [_points(line, style) for line, style in zip(series, look, strict=True)],
        }
        return svg.replace("<svg", f'<svg data-hover="{escape(json.dumps(hover))}"', 1)


def _points(line: Series, style: Style) -> Mapping[str, Any]:
    """Return a line's points for the page's script, in four digits."""
    points = {"x": line.x, "y": line.y}
    if len(line.low):
        points |= {"low": line.low, "high": line.high}
    shown = {axis: _short(_thin(values)) for axis, values in points.items()}
    return {"name": line.name, "color": style.color, **shown}


def _short(values: Iterable[float]) -> list[float | None]:
    return [float(f"{v:.6g}") if np.isfinite(v) else None for v in values]


def furnish(axis: Axes, ticks: int, *, counts: bool) -> None:
    """Style the grid and the x axis of every line chart.

    Args:
        axis: axis to furnish.
        ticks: largest number of intervals along x.
        counts: flag of an x axis of counts; see line_chart.
    """
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(color=INK, alpha=0.12, linewidth=0.6)
    axis.ticklabel_format(axis="x", style="plain", useOffset=False)
    axis.xaxis.set_major_locator(mpl.ticker.MaxNLocator(ticks))
    if counts:
        axis.xaxis.set_major_formatter(mpl.ticker.EngFormatter(sep=""))
    if max(map(abs, axis.get_ylim())) >= _LONG:
        axis.yaxis.set_major_formatter(mpl.ticker.EngFormatter(sep=""))


def _draw(
    axis: Axes, line: Series, style: Style, width: float, alpha: float, *, markers: bool
) -> None:
    """Draw one line with its band, `alpha` opaque."""
    x, y = _thin(line.x), _thin(line.y)
    marker = "o" if markers or len(x) == 1 else None
    colour, dashes = style.color, style.dashes
    axis.plot(x, y, dashes, color=colour, linewidth=width, marker=marker, ms=1.5 + width)
    axis.lines[-1].set_label(line.name or "_")  # matplotlib leaves out what begins with "_"
    if len(line.low):
        low, high = _thin(line.low), _thin(line.high)
        axis.fill_between(x, low, high, color=colour, alpha=alpha, linewidth=0)


def interval_chart(
    rows: Sequence[tuple[str, float, float | None, float | None]],
    label: str,
    look: Mapping[str, Style],
) -> str:
    """Draw figures with their intervals as an <svg> element, one below the other.

    Args:
        rows: (name, value, low, high) of each row; without low and high a point alone.
        label: name of the values.
        look: style of each name.
    """
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(_WIDTH, 0.8 + 0.36 * len(rows)), layout="constrained")
        axis = figure.subplots()
        for i, (name, value, low, high) in enumerate(rows):
            colour = look[name].color
            if low is not None and high is not None:
                axis.plot([low, high], [i, i], color=colour, linewidth=7, alpha=0.35)
            axis.plot([value], [i], color=colour, marker="|", ms=15, mew=2.4)
        axis.set_yticks(range(len(rows)), [name for name, *_ in rows])
        axis.set_ylim(len(rows) - 0.4, -0.6)
        axis.set_xlabel(label)
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.tick_params(axis="y", length=0)
        axis.grid(color=INK, alpha=0.12, linewidth=0.6, axis="x")
        return svg_of(figure, label)


def svg_of(figure: Figure, label: str) -> str:
    """Return a figure as an <svg> element without size and date; `label` is for screen readers."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor")
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    return re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', 'role="img"', svg, count=1).replace(
        "<svg", f'<svg aria-label="{escape(label)}"', 1
    )


def _thin(values: Values) -> NDArray[np.float64]:
    """Thin values to at most _MAX_POINTS floats: the means of equal stretches; None is NaN."""
    array = np.array(values, np.float64)
    if len(array) <= _MAX_POINTS:
        return array
    return np.array([np.mean(part) for part in np.array_split(array, _MAX_POINTS)])
