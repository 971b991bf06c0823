"""Alerts of a run: errors, warnings and notes, the most severe first."""

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from murmur.doctor.causes import CAUSES
from murmur.doctor.diagnosis import diagnose
from murmur.doctor.learning import learning_lines
from murmur.runs.drops import dropped_message
from murmur.runs.log_errors import TROUBLE, log_entry
from murmur.runs.run_folder import LineTail, RunFolder
from murmur.runs.snapshots import from_run
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.process.errors import MurmurError
from murmur.text import duration, short_number

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
SILENT_S = 60.0  # without a line of progress; updates may take as long
STARVED_S = 30.0  # without a row
NO_UPDATE_S = 600.0
_SLOW_OR_DEAD = "An update may take as long; else see logs/learner.log and `murmur doctor`."
_LONGEST = 4000  # characters of a log's line; the page links the log for the rest


@dataclass(frozen=True)
class Alert:
    """A condition of a run that its user should know.

    Attributes:
        severity: level: error, warning or note.
        what: one sentence on the condition.
        fix: actions to take, a line each; "" if none.
    """

    severity: Severity
    what: str
    fix: str = ""


class Movement:
    """Times at which counters of progress last grew."""

    def __init__(self) -> None:
        """Start without counters."""
        self._seen: dict[str, float] = {}
        self._grew_at: dict[str, float] = {}

    def add(self, record: Mapping[str, Any]) -> None:
        """Add a record of kind "progress"."""
        for name in ("rows_received", "rows_trained", "updates"):
            value = record.get(name) or 0
            if value != self._seen.get(name):  # less after a resumption
                self._seen[name], self._grew_at[name] = value, record.get("time") or 0.0

    def still_s(self, name: str, now: float) -> float:
        """Return the seconds since a counter changed; 0 if it was never seen."""
        return now - self._grew_at.get(name, now)


class LogWatch:
    """Warnings and errors in the logs of a run's processes."""

    def __init__(self, run: RunFolder) -> None:
        """Begin at the start of each log."""
        self._logs = run.logs
        self._tails: dict[Path, LineTail] = {}
        self._found: dict[tuple[str, Severity], tuple[int, str]] = {}

    def read(self) -> Iterator[None]:
        """Read what was added to the logs, a step for each line."""
        for log in sorted(self._logs.glob("*.log")):
            for line in self._tails.setdefault(log, LineTail(log)):
                if found := TROUBLE.match(line):
                    self._take(log.name, found[1] or found[2], line)
                yield

    def _take(self, log: str, level: str, line: str) -> None:
        severity: Severity = "warning" if level == "WARNING" else "error"
        count, _ = self._found.get((log, severity), (0, ""))
        self._found[log, severity] = (count + 1, _message(line))

    def alerts(self) -> Iterator[Alert]:
        """Yield the newest line of each log and severity."""
        for (log, severity), (count, line) in self._found.items():
            before = f" ({count - 1} before it)" if count > 1 else ""
            yield Alert(severity, f"logs/{log}{before}: {line}")


def _message(line: str) -> str:
    """Return the message of a log's line, which may be JSON."""
    line = str(log_entry(line).get("message", line))
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]} … (the log has the rest)"


def alerts_of_progress(
    last: Mapping[str, Any], moved: Movement, config: ExperimentConfig, *, running: bool
) -> Iterator[Alert]:
    """Yield the alerts that follow from the newest record of progress.

    Args:
        last: newest record; empty if there is none.
        moved: record of the counters' growth, called with all records.
        config: configuration of the run.
        running: True if the run is under way.
    """
    wrong = [
        name
        for name, value in [("return", last.get("return")), *(last.get("losses") or {}).items()]
        if isinstance(value, float) and not math.isfinite(value)
    ]
    if wrong:
        yield Alert(
            "error",
            f"{', '.join(wrong)}: the value is not finite",
            "Lower the learning rates, or set learner.precision=fp32.",
        )
    if skipped := last.get("updates_skipped"):
        yield Alert(
            "warning",
            f"{short_number(skipped)} updates were skipped: a loss or a weight was not finite",
            "Lower the learning rates, or set learner.precision=fp32.",
        )
    if message := dropped_message(last):
        what, _, fix = message.partition(": ")
        yield Alert("warning", what, fix[:1].upper() + fix[1:] + ("." if fix else ""))
    if broken := (last.get("samples") or {}).get("broken"):
        yield Alert("warning", f"{short_number(broken)} samples are broken and left out")
    if running and last:
        yield from _standstill(last, moved, config)


def _standstill(
    last: Mapping[str, Any], moved: Movement, config: ExperimentConfig
) -> Iterator[Alert]:
    """Yield an alert if a run that is under way makes no progress."""
    now, offline = time.time(), config.run.offline
    written = last.get("time") or now
    silent, idle = now - written, moved.still_s("updates", written)
    counter = "rows_trained" if last.get("samples") else "rows_received"
    still = moved.still_s(counter, written)
    # A dataset is learned from without rows: in the first updates, while they come, or alone.
    cloning = last.get("updates") and not (last.get(counter) and last.get("env_steps"))
    of_dataset = offline or (cloning and idle <= STARVED_S)
    if silent > max(SILENT_S, 10 * config.learner.log_every_s):
        yield Alert(
            "error",
            f"no progress for {duration(silent)}: the learner writes nothing",
            _SLOW_OR_DEAD,
        )
    elif still > STARVED_S and not of_dataset:
        yield Alert(
            "error",
            f"no row came from an environment server for {duration(still)}"
            if counter == "rows_received"
            else f"no sample was trained for {duration(still)}",
            "See logs/env-server.log: do its environments hang, or start again and again?",
        )
    elif idle > NO_UPDATE_S and offline:
        yield Alert("warning", f"there was no update for {duration(idle)}", _SLOW_OR_DEAD)
    elif idle > NO_UPDATE_S:
        yield Alert(
            "warning",
            f"rows come, but there was no update for {duration(idle)}",
            "An update needs batch_size * batch_number agent-transitions, with a replay "
            "start_rows: more environments, or rows are dropped.",
        )


def learning_alert(run: RunFolder) -> Iterator[Alert]:
    """Yield what the learner said of a run that does not learn, if it did."""
    for line in learning_lines(run):
        what, _, causes = line.partition(". ")
        yield Alert("warning", what, causes)


def doctors_finding(run: RunFolder, config: ExperimentConfig) -> Alert | None:
    """Return the finding of `murmur doctor` on a run's last seconds, without probes, or None."""
    try:
        seen = diagnose(*from_run(run, None), config)
    except (MurmurError, LookupError):
        return None
    first, fixes = CAUSES[seen.bottleneck], []
    for remedy in reversed(seen.remedies):  # the best first
        fix = f"{short_number(remedy.rate / seen.rate)} times as fast: {remedy.what}"
        if remedy.settings:
            fix += f" (`{' '.join(f'--set {item}' for item in remedy.settings)}`)"
        fixes.append(f"{fix}; {remedy.cost}." if remedy.cost else f"{fix}.")
    if first.advice:
        fixes.append(f"{first.advice[:1].upper()}{first.advice[1:]}; costs: {first.cost}.")
    fix = "\n".join(fixes)
    evidence = seen.causes[0].evidence
    if seen.waits and seen.bottleneck in {wait.kind for wait in seen.waits}:
        found = "; ".join(f"{CAUSES[wait.kind].words}: {wait.found}" for wait in seen.waits)
        return Alert("warning", found[:1].upper() + found[1:], fix)
    text = f"Waits for {first.words}" + (f": {evidence}" if evidence else "")
    return Alert("note", text, fix)
