"""Numbers, durations and rows as a reader likes them."""

import re
from collections.abc import Callable, Iterable
from typing import TypeVar

from rich.console import Console
from rich.text import Text

T = TypeVar("T")
_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\ud800-\udfff]")  # all but the line feed


def plain(text: object, style: str = "") -> Text:
    """Words from outside for the screen: names, paths, errors, logs.

    Neither rich's markup ("[/s]") nor its emoji codes (":rat:") nor control characters of a
    terminal have an effect in them.
    """
    return Text(_CONTROL.sub("\N{REPLACEMENT CHARACTER}", str(text)), style)


def print_plain(console: Console, line: object, style: str = "") -> None:
    """Print words from outside, see `plain`; the terminal alone breaks long lines."""
    console.print(plain(line, style), soft_wrap=True)


def duration(seconds: float) -> str:
    """Seconds as 1:02:03 or 4:05."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"


def number(value: object) -> str:
    """A number in at most about six characters; anything else as it is."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return "–" if value is None else str(value)
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    if value != 0 and abs(value) < 0.001:
        return f"{value:.1e}"
    return f"{value:.3g}" if abs(value) >= 100 else f"{value:.3f}"


def in_rows(
    items: Iterable[T], width: Callable[[T], int], *, gap: int, limit: int
) -> list[list[T]]:
    """Break items into rows, in order, each as long as fits; one that never fits has its own.

    Args:
        items: what is shown.
        width: of an item, in characters.
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
