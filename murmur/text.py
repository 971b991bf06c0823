"""Formats of numbers, durations and rows for readers."""

import math
import os
import re
import sys
from collections.abc import Callable, Iterable
from typing import TextIO, TypeVar

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

T = TypeVar("T")
_STDOUT, _STDERR = 1, 2  # file descriptors
_WIDEST = 10_000  # characters of a line
_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\ud800-\udfff]")  # all but the line feed


def plain(text: object, style: str = "") -> Text:
    """Return words from outside for the screen: names, paths, errors, logs.

    Neither rich's markup ("[/s]") nor its emoji codes (":rat:") nor control characters of a
    terminal have an effect in them.
    """
    return Text(_CONTROL.sub("\N{REPLACEMENT CHARACTER}", str(text)), style)


def print_plain(console: Console, line: object, style: str = "") -> None:
    """Print words from outside, see `plain`; the terminal alone breaks long lines."""
    console.print(plain(line, style), soft_wrap=True)


def screen_table(*headings: str, title: str = "") -> Table:
    """Return an empty table; where the screen is narrow its first column breaks first."""
    return Table(
        *(Column(plain(text), no_wrap=i > 0, overflow="fold") for i, text in enumerate(headings)),
        box=None,
        padding=(0, 3, 0, 0),
        title=plain(title) if title else None,
        title_justify="left",
        title_style="bold",
        header_style="dim",
    )


def print_table(console: Console, table: Table) -> None:
    """Print a table with one line for each row, so that names can be searched and copied.

    On a narrower screen the terminal breaks the lines.
    """
    whole = console.options.update(max_width=_WIDEST)
    width = max(console.width, console.measure(table, options=whole).maximum)
    Console(file=console.file, width=width).print(table)


def counted(count: int, noun: str) -> str:
    """Format a count with its noun: 1 run, 2 runs."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def percent(share: float) -> str:
    """Format a share as whole percent."""
    return f"{100 * share:.0f} %"


def duration(seconds: float) -> str:
    """Format seconds as 1:02:03 or 4:05."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"


def rough_time(seconds: float) -> str:
    """Format a long time for an expectation: 25 minutes, 3.5 hours, 2.1 days."""
    minutes = seconds / 60
    if minutes < 100:
        return counted(max(1, round(minutes)), "minute")
    size, unit = (1440, "days") if minutes >= 2 * 1440 else (60, "hours")
    return f"{minutes / size:.2g} {unit}"


def number(value: object) -> str:
    """Format a number in at most about six characters; leave anything else as it is."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return "–" if value is None else str(value)
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    if value != 0 and abs(value) < 0.001:
        return f"{value:.1e}"
    return f"{value:.3g}" if abs(value) >= 100 else f"{value:.3f}"


def short_number(value: object) -> str:
    """Format a number with at most four digits: 12.35k, 0.0123, 1.2e-05; others as they are."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return "–" if value is None else str(value)
    if not math.isfinite(value):
        return str(value)
    rounded = float(f"{value:.4g}")
    size = abs(rounded)
    if size != 0 and (size < 0.001 or size >= 1e15):
        return f"{value:.1e}"
    for unit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= unit:
            scale = 1e3 if letter == "k" else unit
            return f"{rounded / scale:.4g}{letter}"
    return f"{rounded:.4g}" if size >= 1 else f"{rounded:.3g}"


def in_rows(
    items: Iterable[T], width: Callable[[T], int], *, gap: int, limit: int
) -> list[list[T]]:
    """Break items into rows, in order, each as long as fits; one that never fits has its own.

    Args:
        items: items to show.
        width: function from an item to its width in characters.
        gap: characters between two.
        limit: characters in a row.
    """
    rows: list[list[T]] = []
    used = limit
    for item in items:
        used += gap + width(item)
        if used > limit:
            rows.append([])
            used = width(item)
        rows[-1].append(item)
    return rows


def reserve_stdout() -> TextIO:
    """Return standard output for a result alone; what else is printed goes to standard error.

    For good, and for processes that this one starts: an environment may print at any time, also
    from C and when it is closed.
    """
    result = sys.stdout
    if result is not sys.__stdout__ or result is None:  # replaced, as in tests, or closed
        return result
    result.flush()
    kept = os.fdopen(os.dup(_STDOUT), "w", encoding=result.encoding, errors=result.errors)
    try:
        os.dup2(_STDERR, _STDOUT)
    except OSError:  # there is no standard error
        os.dup2(os.open(os.devnull, os.O_WRONLY), _STDOUT)
    return kept
