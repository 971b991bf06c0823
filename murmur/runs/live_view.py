"""Views of work under way: drawn on a terminal, else lines now and then."""

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from murmur.doctor.device_report import gpu_figures
from murmur.runs.drops import dropped_message, rollout_message
from murmur.runs.scores import Pace, completion
from murmur.shared.config.experiment import RunConfig
from murmur.text import duration, in_rows, number, plain, print_plain, rough_time

TROUBLE_SHOWN = 240  # characters of a log's line; the log has it all
_RATE, _SAMPLE_RATE = "agent-steps/s", "samples/s"
METRICS_SHOWN = 4  # of the environment's
_FORETELL_AFTER_S, _FORETOLD_S = 20.0, 180.0  # the pace is known; a time that is worth a line


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


class TrainingView(LiveView):
    """Progress of a training: a live bar on a terminal, else a plain line every ten seconds."""

    def __init__(self, run: RunConfig, console: Console, best: str = "return") -> None:
        """Show the progress of a run.

        Args:
            run: section `run` of the configuration.
            console: console to draw on.
            best: name of the metric that chooses the best checkpoint, always among those shown.
        """
        self._run, self._best = run, best
        self._last: dict[str, Any] = {}
        self._troubles, self._newest = 0, ""
        self._untold = False  # the newest trouble
        self._told = -math.inf
        self._before: dict[str, Any] = {}  # the record of the line before
        self._said: set[str] = set()
        self._bar = Progress(
            TextColumn("{task.description}", "bold", markup=False),
            BarColumn(None),
            TextColumn("{task.fields[eta]}"),
        )
        self._pace, self._foretold = Pace(run), False
        self._task = self._bar.add_task(run.name, total=1.0, eta="starting …")
        super().__init__(console, self._bar)

    def __exit__(self, *error: object) -> None:
        """Stop drawing."""
        super().__exit__(*error)
        self._tell_trouble()

    def update(self, record: dict[str, Any]) -> None:
        """Show a record of progress.jsonl."""
        if record.get("kind") == "evaluation":
            means = _shown(record.get("metrics", {}), self._best)
            shown = ", ".join(f"{name} {number(metric['mean'])}" for name, metric in means.items())
            after = f"evaluation after {record.get('updates', 0)} updates"
            print_plain(self._console, f"{after}: {shown}")
            return
        self._last = record
        for message in (rollout_message(record), dropped_message(record)):
            if message and (key := message.rpartition(" %")[2]) not in self._said:
                self._said.add(key)  # once, whatever the share becomes
                self.say(message)
        self._pace.note(record)
        self._foretell(record)
        share = completion(self._run, record)
        self._bar.update(self._task, completed=share or 0.0)
        if self._plain:
            if self._line_due():
                print_plain(self._console, self._line(share))
                self._tell_trouble()
            return
        self._bar.update(self._task, eta=self._eta(share))
        self._draw()

    def _foretell(self, record: Mapping[str, Any]) -> None:
        """Say once, after the first updates, about how long the run takes."""
        left = self._pace.left_s()
        if self._foretold or left is None or self._pace.measured_s < _FORETELL_AFTER_S:
            return
        self._foretold = True
        before = record.get("seconds", 0.0) - self._pace.measured_s
        resumed = before > _FORETOLD_S
        takes = left + (self._pace.measured_s if resumed else record.get("seconds", 0.0))
        if takes >= _FORETOLD_S:
            what = "the rest of this run" if resumed else "this run"
            print_plain(self._console, f"{what} takes about {rough_time(takes)}")

    def trouble(self, log: Path, line: str) -> None:
        """Note a warning or an error of a log; the newest is shown."""
        self._troubles += 1
        before = f" ({self._troubles - 1} before it)" if self._troubles > 1 else ""
        line = line if len(line) <= TROUBLE_SHOWN else line[: TROUBLE_SHOWN - 2] + " …"
        self._newest = f"{log}{before}: {line}"
        if not self._plain:
            self._draw()
            return
        self._untold = True
        if time.monotonic() - self._told >= self.line_every_s:
            self._tell_trouble()

    def _tell_trouble(self) -> None:
        """Print the newest trouble once if there is no terminal."""
        if self._untold:
            self._untold, self._told = False, time.monotonic()
            print_plain(self._console, self._newest, "yellow")

    def _draw(self) -> None:
        parts: list[RenderableType] = [self._bar]
        if self._last:
            cells = [
                Text("\n").join([plain(name, "dim"), plain(value)])
                for name, value in _figures(self._last, self._best, self._run).items()
            ]
            parts.append(Columns(cells, padding=(0, 3), equal=True))
        if self._newest:
            parts.append(plain(self._newest, "yellow"))
        self._live.update(Group(*parts))

    @property
    def _awaits_rows(self) -> bool:
        waits = self._last.get("rows_received") == 0 and "samples" not in self._last
        return waits and not self._run.offline

    def _eta(self, share: float | None) -> str:
        if self._awaits_rows:
            return "environments start; compiling may take minutes"
        if share is None:
            return "no end set; Ctrl-C stops"
        if share >= 1:
            return "100 %, ending"
        left = self._pace.left_s()
        return f"{100 * share:.0f} %" + ("" if left is None else f", {duration(left)} left")

    def _update_rate(self) -> list[str]:
        """Return the updates per second since the line before, if there were some."""
        updates, seconds = (
            self._last.get(key, 0) - self._before.get(key, 0) for key in ("updates", "seconds")
        )
        return [f"{number(updates / seconds)} updates/s"] if updates > 0 and seconds > 0 else []

    def _line(self, share: float | None) -> str:
        """Return the figures as text, in lines of the console's width, indented by the time."""
        at = f"{duration(self._last.get('seconds', 0))}  "
        parts = [self._eta(share)]
        figures = {} if self._awaits_rows else _figures(self._last, self._best, self._run)
        for name, value in figures.items():
            parts.append(f"{value} {name}" if name in (_RATE, _SAMPLE_RATE) else f"{name} {value}")
            if name == _RATE and not self._last.get("agent_steps_per_s"):
                parts += self._update_rate()
        self._before = self._last
        lines = in_rows(parts, len, gap=2, limit=self._console.width - len(at))
        return at + ("\n" + " " * len(at)).join("  ".join(line) for line in lines)


def _shown(metrics: Mapping[str, Any], best: str) -> dict[str, Any]:
    """Return the first few metrics; the last gives way to the one that chooses if that is not."""
    names = list(metrics)[:METRICS_SHOWN]
    if best in metrics and best not in names:
        names[-1] = best
    return {name: metrics[name] for name in names}


def _figures(record: Mapping[str, Any], best: str, run: RunConfig) -> dict[str, str]:
    """Return the figures that are shown of a record of progress, by name."""
    updates = {"updates": number(record.get("updates", 0))}
    rate, gpu = number(record.get("agent_steps_per_s")), gpu_figures(record.get("device", {}))
    if samples := record.get("samples"):
        seen = samples["trained"] + samples["remaining"]
        figures = {
            "epoch": f"{samples['epoch']} of {samples['epochs']}",
            "of this epoch": f"{samples['trained']} of {seen}",
            _SAMPLE_RATE: rate,
            "loss": number(record.get("losses", {}).get("loss")),
        }
        if samples["broken"]:
            figures["broken samples"] = number(samples["broken"])
        return updates | figures | gpu
    if run.offline:
        losses = {n: number(x) for n, x in record.get("losses", {}).items() if n.endswith("loss")}
        return updates | {"rows": number(record.get("env_steps", 0)), _RATE: rate} | losses | gpu
    figures = {
        "env steps": number(record.get("env_steps", 0)),
        _RATE: rate,
        "policy lag": number(record.get("policy_lag")),
        "return": number(record.get("return")),
    }
    if skipped := record.get("updates_skipped"):
        figures["skipped updates"] = number(skipped)
    metrics = _shown(record.get("metrics", {}), best)
    return updates | figures | gpu | {name: number(value) for name, value in metrics.items()}
