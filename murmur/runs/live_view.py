"""A view of work under way: drawn on a terminal, else lines now and then."""

import time
from typing import ClassVar, Self

from rich.console import Console, RenderableType
from rich.live import Live

from murmur.text import print_plain


class LiveView:
    """Base of progress displays; a subclass draws on `_live` or, if `_plain`, prints lines.

    Attributes:
        line_every_s: shortest interval between two lines [s].
    """

    line_every_s: ClassVar[float] = 10.0

    def __init__(self, console: Console, first: RenderableType = "") -> None:
        """Show `first` on `console` until something else is drawn."""
        self._console = console
        self._live = Live(first, console=console, refresh_per_second=4)
        self._plain = not console.is_terminal
        self._printed = time.monotonic()

    def __enter__(self) -> Self:
        """Begin to draw."""
        if not self._plain:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop drawing."""
        if not self._plain:
            self._live.stop()

    def say(self, line: str) -> None:
        """Print a line above what is drawn."""
        print_plain(self._console, line, "yellow")

    def _line_due(self) -> bool:
        """Return whether it is time for the next line; if so, set the time of the one after."""
        now = time.monotonic()
        if now - self._printed < self.line_every_s:
            return False
        self._printed = now
        return True
