"""Runs of topics one after the other, each in a process with a time limit, and their results.

A topic that fails or takes too long is kept with its error, and the next one begins. Another call
continues with the topics that have no result; once all have one, it begins again.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from murmur.runs.child import child_environment
from murmur.shared.process.files import make_folder, write_whole

LEAST_S = 10.0  # no topic begins with less
_POLL_S = 0.5  # between two looks at what a topic has so far
_TAIL = 1500  # characters of a failed topic's output that are kept


_UNFINISHED = "cut short: the same command continues"


@dataclass
class Outcome:
    """The result of a topic.

    Attributes:
        figures: values by name.
        seconds: duration [s].
        error: reason for missing figures; "" if all are there.
        settings: settings of the topic's process.
    """

    figures: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    error: str = ""
    settings: dict[str, Any] = field(default_factory=dict)


class Store:
    """Outcomes of topics in one JSON file."""

    def __init__(self, file: Path, copy: Path | None = None) -> None:
        """Use a file, which need not exist.

        Args:
            file: file for this source, this device and this effort.
            copy: second file that receives the results, too; None: none.
        """
        self.file, self._copy = file, copy

    def load(self) -> dict[str, Outcome]:
        """Load outcomes by topic; none if the file cannot be read."""
        try:
            record = json.loads(self.file.read_text())
            return {topic: Outcome(**outcome) for topic, outcome in record.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}

    def keep(self, topic: str, outcome: Outcome) -> None:
        """Write an outcome."""
        self._write({**self.load(), topic: outcome})

    def clear(self, topics: Sequence[str]) -> None:
        """Reset some topics."""
        self._write({name: of for name, of in self.load().items() if name not in topics})

    def _write(self, outcomes: Mapping[str, Outcome]) -> None:
        record = json.dumps({name: asdict(of) for name, of in outcomes.items()})
        for file in filter(None, (self.file, self._copy)):
            make_folder(file.parent)
            write_whole(file, record)

    def missing(self, topics: Sequence[str]) -> list[str]:
        """Return topics without a result, in order; all of them if every topic has a result."""
        done = {name for name, outcome in self.load().items() if not outcome.error}
        left = [name for name in topics if name not in done]
        if left:
            return left
        self.clear(topics)
        return list(topics)


def run_topic(
    command: Sequence[str],
    limit_s: float,
    known: Mapping[str, Any] | None = None,
    keep: Callable[[Outcome], None] = lambda outcome: None,
) -> Outcome:
    """Run a command that writes {"figures": ...} into the file that is its last argument.

    It may write the file several times: what it has when the time is over is kept. If it has then
    written "whole": true, what it was still busy with is not missed.

    Args:
        command: command without its last two arguments, the limit and the file.
        limit_s: time limit [s], after which the command and all its descendants are ended.
        known: figures of an earlier call, which the file holds when the command begins.
        keep: function called with the figures so far whenever the command has written.
    """
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="murmur-bench-") as folder:
        file, log = Path(folder) / "figures.json", Path(folder) / "log"
        file.write_text(json.dumps({"figures": dict(known or {})}))
        with log.open("wb") as output:
            child = subprocess.Popen(
                [*command, f"{limit_s:.1f}", str(file)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=child_environment(),
                start_new_session=True,
            )
            code: int | None = None
            try:
                code = _wait(child, started + limit_s, file, known or {}, keep)
            finally:
                _end(child)
        said = " ".join(log.read_text(errors="replace").split())[-_TAIL:]
        outcome, whole = _read(file, known or {})
    outcome.seconds = time.monotonic() - started
    if code == 0 or whole:
        outcome.error = ""
        return outcome
    what = f"exit code {code}" if code is not None else f"not done within {limit_s:.0f} s"
    outcome.error = f"{what}; it said: {said}"
    return outcome


def _wait(
    child: subprocess.Popen[bytes],
    end: float,
    file: Path,
    known: Mapping[str, Any],
    keep: Callable[[Outcome], None],
) -> int | None:
    """Wait for a topic, and keep what it writes; return its exit code, None if time is over."""
    seen = file.stat().st_mtime_ns
    while (left := end - time.monotonic()) > 0:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return child.wait(min(left, _POLL_S))
        written = file.stat().st_mtime_ns
        if written != seen:
            seen = written
            keep(_read(file, known)[0])
    return None


def _read(file: Path, known: Mapping[str, Any]) -> tuple[Outcome, bool]:
    """Return what a topic has written, and whether that is all that it measures."""
    try:
        record = json.loads(file.read_text())
        figures, settings = record["figures"], record.get("settings", {})
    except (OSError, ValueError, KeyError):  # killed while it wrote
        return Outcome(dict(known), error=_UNFINISHED), False
    return Outcome(figures, error=_UNFINISHED, settings=settings), bool(record.get("whole"))


def _end(child: subprocess.Popen[bytes]) -> None:
    """End the rest of a child's process group: servers of a topic that was cut short."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def topic_command(topic: str, effort: str, device: str) -> list[str]:
    """Return the command of a topic, but for its limit and its file."""
    module = "murmur.benchmarks.gpu_topics"
    return [sys.executable, "-P", "-m", module, topic, effort, device]


def run_all(
    store: Store,
    limits: Mapping[str, float],
    command: Callable[[str], Sequence[str]],
    budget_s: float,
    say: Callable[[str], None],
    kept: Callable[[], None] = lambda: None,
) -> dict[str, Outcome]:
    """Run the topics that have no result; return the outcomes of all.

    Args:
        store: store of results, of earlier calls and of this one.
        limits: time limits [s] by topic, in order.
        command: function from a topic to its command; see run_topic.
        budget_s: time for all topics [s]; a topic with less than LEAST_S left does not begin.
        say: function called with each step and its result.
        kept: function called after each topic.
    """
    deadline = time.monotonic() + budget_s
    for name in store.missing(list(limits)):
        known = store.load().get(name, Outcome()).figures
        limit = min(limits[name], deadline - time.monotonic())
        if limit < LEAST_S:
            outcome = Outcome(
                known, error="not begun: the time is over; the same command continues"
            )
        else:
            say(f"{name}: at most {limit:.0f} s")
            outcome = run_topic(command(name), limit, known, partial(store.keep, name))
        store.keep(name, outcome)
        say(f"{name}: {outcome.error or f'{outcome.seconds:.0f} s'}")
        kept()
    found = store.load()
    return {name: found[name] for name in limits if name in found}
