"""`murmur runs`: the runs on this machine, their sizes, and their deletion."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.table import Table

from murmur.runs.run_folder import RunFolder
from murmur.runs.scores import Metric, last_progress, read_curve, state_of
from murmur.shared.process.errors import ConfigError, MurmurError, ResourceError
from murmur.shared.process.files import disk_error, size_text
from murmur.shared.process.run_lock import RunLock
from murmur.sweeps.folder import find_runs
from murmur.text import number, plain, screen_table

_COLUMNS = ("date", "state", "algorithm", "environment", "seed", "steps", "best", "", "size")


@dataclass(frozen=True)
class ListedRun:
    """A row of the list of runs.

    Attributes:
        path: folder of the run.
        date: time of the start, in seconds since 1970.
        state: state of the run: running, complete, stopped, begun, or unreadable.
        algorithm: name of the algorithm.
        environment: name of the environment, or of the source.
        seed: value of run.seed; None if the configuration cannot be read.
        steps: environment steps learned from.
        metric: metric that judges the run.
        score: best value of the metric; None if there is none.
        size: bytes on disk.
    """

    path: Path
    date: float
    state: str
    algorithm: str
    environment: str
    seed: int | None
    steps: int
    metric: str
    score: float | None
    size: int

    def record(self) -> dict[str, Any]:
        """Return the run as JSON values."""
        date = datetime.fromtimestamp(self.date, UTC).isoformat(timespec="seconds")
        return {**asdict(self), "path": str(self.path), "date": date}


def list_runs(
    targets: Sequence[str], *, sort: str = "date", state: str | None = None
) -> list[ListedRun]:
    """Return the runs at these paths, those of sweeps too.

    Args:
        targets: folders of runs or sweeps, folders that hold them, or patterns.
        sort: a field of ListedRun, or "name".
        state: state of the runs to list.

    Raises:
        ConfigError: if a path means no run.
    """
    folders, _ = find_runs(targets)
    found = [run for run in map(_read, folders) if state in (None, run.state)]

    def key(run: ListedRun) -> Any:  # noqa: ANN401 - a number or text
        if sort == "name":
            return run.path.name
        value = getattr(run, sort)
        return float("-inf") if value is None else value

    return sorted(found, key=key, reverse=sort in ("date", "steps", "score", "size"))


def _read(folder: RunFolder) -> ListedRun:
    size = folder_size(folder.path)
    start = folder.path / "config.yaml"
    try:
        date = datetime.fromisoformat(folder.read_json("command.json")["started"]).timestamp()
    except (KeyError, TypeError, ValueError):  # no `murmur train` started it
        date = start.stat().st_mtime
    try:
        config = folder.config()
    except ConfigError:  # of a version of murmur that had other options
        return ListedRun(folder.path, date, "unreadable", "–", "–", None, 0, "–", None, size)
    plugin = config.source if config.supervised else config.environment
    last = last_progress(folder)
    metric = Metric.parse(config.evaluation.best_metric)
    return ListedRun(
        folder.path,
        date,
        state_of(folder, config, last),
        config.algorithm.name,
        str(plugin.options.get("factory", plugin.name)),
        config.run.seed,
        int(last.get("env_steps") or 0),
        metric.name,
        read_curve(folder, metric).best,
        size,
    )


def folder_size(folder: Path) -> int:
    """Return the bytes of all files in a folder; links count themselves."""
    total = 0
    for path in folder.rglob("*"):
        try:
            status = path.lstat()
        except OSError:  # it was removed meanwhile
            continue
        total += 0 if path.is_dir() else status.st_size
    return total


def runs_table(runs: Sequence[ListedRun]) -> Table:
    """Return a table for the screen, the path of a run at the end of its line."""
    table = screen_table(*_COLUMNS, "run")
    for run in runs:
        table.add_row(
            f"{datetime.fromtimestamp(run.date):%Y-%m-%d %H:%M}",
            plain(run.state, "green" if run.state == "running" else ""),
            plain(run.algorithm),
            plain(run.environment),
            number(run.seed),
            number(run.steps),
            number(run.score),
            plain("" if run.score is None else run.metric),
            size_text(run.size),
            plain(run.path),
        )
    return table


def delete_runs(runs: Sequence[ListedRun], say: Callable[[str], None]) -> int:
    """Delete runs; one that is at work stays and is named.

    A run is locked while it is removed: nothing can begin to train in it meanwhile.

    Returns:
        bytes that were freed.

    Raises:
        ResourceError: if a folder cannot be removed.
    """
    freed = 0
    for run in runs:
        folder = RunFolder(run.path)
        pid = folder.process("learner.json") or folder.process("command.json")
        if pid:
            say(f"not deleted: {run.path} is the run of process {pid}, which is at work")
            continue
        try:
            with RunLock.acquire(run.path):
                shutil.rmtree(run.path)
        except MurmurError as error:
            say(f"not deleted: {error}")
            continue
        except OSError as error:
            known = disk_error(error, run.path)
            raise known or ResourceError(f"cannot delete {run.path}: {error.strerror}") from None
        freed += run.size
    return freed
