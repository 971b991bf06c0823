"""Runs topics one after the other, each in a process with a time limit, and keeps what they give.

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
from pathlib import Path
from typing import Any

from murmur.child import child_environment
from shared.files import make_folder, write_whole

LEAST_S = 10.0  # no topic begins with less
_TAIL = 400  # characters of a failed topic's output that are kept


@dataclass
class Outcome:
    """The result of a topic.

    Attributes:
        figures: by name.
        seconds: it took.
        error: why it has no figures, or not all; "" if it has.
    """

    figures: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    error: str = ""


class Store:
    """Outcomes of topics in a folder: one JSON file each."""

    def __init__(self, folder: Path) -> None:
        """Use a folder, which need not exist.

        Args:
            folder: of this source, this device and this effort.
        """
        self.folder = folder

    def load(self) -> dict[str, Outcome]:
        """Outcomes by topic; files that cannot be read are missing."""
        found = {}
        for file in sorted(self.folder.glob("*.json")):
            try:
                found[file.stem] = Outcome(**json.loads(file.read_text()))
            except (OSError, ValueError, TypeError):
                continue
        return found

    def keep(self, topic: str, outcome: Outcome) -> None:
        """Write an outcome."""
        make_folder(self.folder)
        write_whole(self.folder / f"{topic}.json", json.dumps(asdict(outcome)))

    def clear(self) -> None:
        """Reset all."""
        for file in self.folder.glob("*.json"):
            file.unlink(missing_ok=True)

    def missing(self, topics: Sequence[str]) -> list[str]:
        """Topics without a result, in order; all of them if every one has a result."""
        done = {name for name, outcome in self.load().items() if not outcome.error}
        left = [name for name in topics if name not in done]
        if left:
            return left
        self.clear()
        return list(topics)


def run_topic(
    command: Sequence[str], limit_s: float, known: Mapping[str, Any] | None = None
) -> Outcome:
    """Run a command that writes {"figures": ...} into the file that is its last argument.

    It may write the file several times: what it has when the time is over is kept.

    Args:
        command: without that argument.
        limit_s: then it and all that it has started is ended.
        known: figures of an earlier call, which the file holds when the command begins.
    """
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="murmur-bench-") as folder:
        file, log = Path(folder) / "figures.json", Path(folder) / "log"
        file.write_text(json.dumps({"figures": dict(known or {})}))
        with log.open("wb") as output:
            child = subprocess.Popen(
                [*command, str(file)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=child_environment(),
                start_new_session=True,
            )
            code: int | None = None
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = child.wait(limit_s)
            finally:
                _end(child)
        said = " ".join(log.read_text(errors="replace").split())[-_TAIL:]
        try:
            figures = json.loads(file.read_text())["figures"]
        except (OSError, ValueError, KeyError):  # killed while it wrote
            figures = dict(known or {})
    seconds = time.monotonic() - started
    if code == 0:
        return Outcome(figures, seconds)
    what = f"exit code {code}" if code is not None else f"not done within {limit_s:.0f} s"
    return Outcome(figures, seconds, f"{what}; it said: {said}")


def _end(child: subprocess.Popen[bytes]) -> None:
    """End what is left of a child's process group: servers of a topic that was cut short."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def topic_command(topic: str, effort: str, device: str) -> list[str]:
    """The command of a topic, but for its file."""
    module = "murmur.benchmarks.gpu_topics"
    return [sys.executable, "-P", "-m", module, topic, effort, device]


def run_all(
    store: Store,
    limits: Mapping[str, float],
    command: Callable[[str], Sequence[str]],
    budget_s: float,
    say: Callable[[str], None],
) -> dict[str, Outcome]:
    """Run the topics that have no result; returns the outcomes of all.

    Args:
        store: where results of earlier calls are, and where each is kept at once.
        limits: seconds by topic, in order.
        command: of a topic, see run_topic.
        budget_s: of all of them; a topic for which less than LEAST_S is left does not begin.
        say: called with each step and its result.
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
            outcome = run_topic(command(name), limit, known)
        store.keep(name, outcome)
        say(f"{name}: {outcome.error or f'{outcome.seconds:.0f} s'}")
    found = store.load()
    return {name: found[name] for name in limits if name in found}
