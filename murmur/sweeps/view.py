"""View of a sweep: the runs at work, and one table at the end."""

import time
from collections import Counter

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from murmur.runs.live_view import LiveView
from murmur.runs.scores import Metric, completion
from murmur.sweeps.folder import SweepFolder, SweepRun, short_value
from murmur.sweeps.scheduler import Active
from murmur.text import duration, number, plain, print_plain

_STATES = ("complete", "running", "waiting", "stopped", "pruned", "failed")
_BAR = 20  # characters
_GAP = 3  # characters between two columns
_SHOWN = 200  # characters of a failed run's message in the table; sweep.json has them all


class SweepView(LiveView):
    """View of a sweep: a live table on a terminal, else plain lines every ten seconds."""

    def __init__(self, sweep: SweepFolder, console: Console) -> None:
        """Show `sweep` on `console`."""
        super().__init__(console)
        self._sweep, self._began = sweep, time.monotonic()

    def update(self, active: list[Active]) -> None:
        """Show the runs at work."""
        if not self._plain:
            self._live.update(Group(plain(self._counts(), "bold"), _active_table(active)))
            return
        if self._line_due():
            at = f"{duration(time.monotonic() - self._began)}  "
            lines = [self._counts(), *(_line(one) for one in active)]
            text = ("\n" + " " * len(at)).join(lines)
            print_plain(self._console, at + text)

    def _counts(self) -> str:
        found = Counter[str](run.state for run in self._sweep.runs)
        parts = [f"{found[state]} {state}" for state in _STATES if found[state]]
        return f"runs: {', '.join(parts)}"


def _share(active: Active) -> float | None:
    return completion(active.config.run, active.progress) if active.progress else None


def _figures(active: Active) -> dict[str, str]:
    progress = active.progress
    return {
        "env steps": number(progress.get("env_steps", 0)),
        active.metric.name: number(active.run.last),
        "time": duration(progress.get("seconds", 0)),
    }


def _line(active: Active) -> str:
    """Return a run at work as text."""
    share = _share(active)
    done = "starting" if not active.progress else "" if share is None else f"{100 * share:.0f} %"
    figures = (f"{name} {value}" for name, value in _figures(active).items())
    return "  ".join(filter(None, [active.run.name, done, *figures]))


def _active_table(active: list[Active]) -> Table:
    """Return the runs at work, one in each row."""
    table = Table(box=None, padding=(0, 3, 0, 0), pad_edge=False, header_style="dim")
    names = list(dict.fromkeys(name for one in active for name in _figures(one)))
    for heading in ("run", "done", *names) if active else ():
        table.add_column(plain(heading))
    for one in active:
        share, figures = _share(one), _figures(one)
        filled = round(_BAR * (share or 0.0))
        bar = Text("━" * filled, "green") + Text("━" * (_BAR - filled), "dim")
        done = bar + Text(" starting" if not one.progress else f" {100 * (share or 0):.0f} %")
        table.add_row(plain(one.run.name), done, *(plain(figures.get(n, "")) for n in names))
    return table


def end_table(sweep: SweepFolder, metric: Metric, width: int) -> Table:
    """Return a table of every run with its scores, the best of each configuration first.

    Args:
        sweep: the sweep.
        metric: metric that judges its runs.
        width: width of the screen in characters; varied settings are shown if there is room for
            them.
    """
    runs = sorted(sweep.runs, key=lambda run: _rank(run, metric))
    columns: dict[str, list[str]] = {
        "run": [run.name for run in runs],
        "state": [run.state for run in runs],
    }
    figures = {
        "env steps": [number(run.env_steps) for run in runs],
        f"last {metric.name}": [number(run.last) for run in runs],
        f"best {metric.name}": [number(run.best) for run in runs],
        "time": [duration(60 * run.minutes) for run in runs],
    }
    varied = {
        key: [short_value(run.settings.get(key, "")) for run in runs] for key in sweep.spec.vary
    }
    shown = {**columns, **varied, **figures}
    if sum(_GAP + max(map(len, [name, *cells])) for name, cells in shown.items()) > width:
        shown = {**columns, **figures}
    table = Table(box=None, padding=(0, _GAP, 0, 0), header_style="dim")
    for name in shown:
        table.add_column(plain(name), no_wrap=name == "run")
    for cells in zip(*shown.values(), strict=True):
        table.add_row(*(plain(cell, "red" if cell == "failed" else "") for cell in cells))
    return table


def _rank(run: SweepRun, metric: Metric) -> tuple[str, bool, float]:
    """Return a key that sorts the runs of one configuration by their last score."""
    value = run.last if run.last is not None else 0.0
    return run.config, run.last is None, value if metric.less_is_better else -value


def failures(sweep: SweepFolder) -> list[str]:
    """Return a line for each failed run, with its message."""
    return [
        f"{run.name} failed: {run.message[:_SHOWN]}{' …' if len(run.message) > _SHOWN else ''}"
        for run in sweep.runs
        if run.state == "failed"
    ]
