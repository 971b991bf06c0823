"""View of a sweep: the runs at work, and one table at the end."""

import time
from collections import Counter

from rich.console import Console, Group
from rich.table import Table

from murmur.runs.live_view import LiveView
from murmur.runs.scores import Metric, completion
from murmur.sweeps.folder import SweepFolder, SweepRun
from murmur.sweeps.scheduler import Active
from murmur.text import duration, number, plain, print_plain, screen_table

_STATES = ("complete", "running", "waiting", "stopped", "pruned", "failed")
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
        elif self._line_due():
            at = duration(time.monotonic() - self._began)
            print_plain(self._console, f"{at}  {self._counts()}")
            self._console.print(_active_table(active))

    def _counts(self) -> str:
        found = Counter[str](run.state for run in self._sweep.runs)
        parts = [f"{found[state]} {state}" for state in _STATES if found[state]]
        return f"runs: {', '.join(parts)}"


def _active_table(active: list[Active]) -> Table:
    """Return the runs at work, one in each row."""
    table = screen_table("run", "done", "env steps", "return", "time")
    for one in active:
        progress = one.progress
        share = completion(one.config.run, progress) if progress else None
        done = "starting" if not progress else "" if share is None else f"{100 * share:.0f} %"
        table.add_row(
            plain(one.run.name),
            done,
            number(progress.get("env_steps", 0)),
            number(progress.get("return")),
            duration(progress.get("seconds", 0)),
        )
    return table


def end_table(sweep: SweepFolder, metric: Metric) -> Table:
    """Return a table of every run with its scores, the best of each configuration first.

    Args:
        sweep: the sweep.
        metric: metric that judges its runs.
    """
    last, best = f"last {metric.name}", f"best {metric.name}"
    table = screen_table("run", "state", "env steps", last, best, "time")
    for run in sorted(sweep.runs, key=lambda run: _rank(run, metric)):
        table.add_row(
            plain(run.name),
            plain(run.state, "red" if run.state == "failed" else ""),
            number(run.env_steps),
            number(run.last),
            number(run.best),
            duration(60 * run.minutes),
        )
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
