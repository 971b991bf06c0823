"""Line charts as inline SVG that follow the page's text colour, in light and in dark."""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

# Colours told apart by most readers with colour-blindness (Okabe and Ito), on white and on black.
COLOURS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c8c8c")
_INK = "#123456"  # stands for the page's text colour until the SVG is written
_MAX_POINTS = 400


@dataclass(frozen=True)
class Series:
    """One line.

    Attributes:
        name: for the legend; empty for none.
        x, y: its points; None and NaN leave a gap.
        half_width: of the band around it, per point; empty for none.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    half_width: Sequence[float | None] = ()


def line_chart(
    series: Sequence[Series], x_label: str, y_label: str, *, markers: bool = False
) -> str:
    """A chart as an <svg> element."""
    with mpl.rc_context(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": "murmur",
            "font.family": "sans-serif",
            "font.size": 11,
            "text.color": _INK,
            "axes.edgecolor": _INK,
            "axes.labelcolor": _INK,
            "xtick.color": _INK,
            "ytick.color": _INK,
            "axes.linewidth": 0.6,
        }
    ):
        figure = Figure(figsize=(5.4, 3.3), layout="constrained")
        axis = figure.subplots()
        for i, line in enumerate(series):
            colour = COLOURS[i % len(COLOURS)]
            x, y, half = (_thin(values) for values in (line.x, line.y, line.half_width))
            marker = "o" if markers or len(x) == 1 else None
            width = 2.4 if i == 0 else 1.4  # the first line is what the chart is about
            axis.plot(
                x, y, color=colour, linewidth=width, label=line.name, marker=marker, ms=1.5 + width
            )
            if len(half) == len(y) > 0:
                axis.fill_between(
                    x, y - half, y + half, color=colour, alpha=0.2 if i == 0 else 0.08, linewidth=0
                )
        axis.set_xlabel(x_label)
        axis.set_ylabel(y_label)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(color=_INK, alpha=0.12, linewidth=0.6)
        axis.margins(x=0.02)
        axis.ticklabel_format(axis="x", style="plain", useOffset=False)
        axis.xaxis.set_major_locator(mpl.ticker.MaxNLocator(6))
        axis.xaxis.set_major_formatter(mpl.ticker.EngFormatter(sep=""))
        if any(line.name for line in series):
            axis.legend(frameon=False, fontsize=9, loc="best", labelspacing=0.25)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].replace(_INK, "currentColor")
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    return re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', 'role="img"', svg, count=1).replace(
        "<svg", f'<svg aria-label="{y_label} over {x_label}"', 1
    )


def matrix_chart(
    shares: np.ndarray[Any, np.dtype[np.float64]], names: Sequence[str], label: str
) -> str:
    """A square matrix of shares as an <svg> element: the darker, the larger.

    Args:
        shares: [K, K] from 0 to 1.
        names: of rows and columns alike.
        label: what rows and columns are.
    """
    cell, margin = 18, 10 + 7 * max(len(name) for name in names)
    side = margin + cell * len(names)
    out = [
        f'<svg role="img" aria-label="{escape(label)}" viewBox="0 0 {side} {side}" '
        'fill="currentColor" font-family="sans-serif" font-size="11">'
    ]
    for i, name in enumerate(names):
        at = margin + cell * i + cell * 0.7
        out.append(f'<text x="{margin - 6}" y="{at}" text-anchor="end">{escape(name)}</text>')
        out.append(
            f'<text transform="translate({at} {margin - 6}) rotate(-90)">{escape(name)}</text>'
        )
        for j, share in enumerate(shares[i]):
            x, y = margin + cell * j, margin + cell * i
            out.append(
                f'<rect x="{x}" y="{y}" width="{cell - 1}" height="{cell - 1}" '
                f'fill-opacity="{0.05 + 0.95 * share:.2f}"><title>{escape(name)} as '
                f"{escape(names[j])}: {share:.3f}</title></rect>"
            )
    return "".join([*out, "</svg>"])


def _thin(values: Sequence[float | None]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """As floats, at most _MAX_POINTS of them: the means of equal stretches."""
    array = np.array([np.nan if v is None else v for v in values], np.float64)
    if len(array) <= _MAX_POINTS:
        return array
    return np.array([np.mean(part) for part in np.array_split(array, _MAX_POINTS)])
