"""Folder of a run: the files that training writes, and their places.

runs/<name>-<timestamp>/
    config.yaml         the whole configuration of the run
    resume.yaml         while a resumed run is at work: the configuration that it was given
    measured.json       options in it that the learner chose by its speed
    command.json        how, where, when and by which process it was started
    learner.json        process id and ports of the learner; learner-<rank>.json of further ones
    started_from.json   of a fine-tuned run: the checkpoint, and the weights taken from it
    progress.jsonl      a line a second: progress, and one line for each evaluation
    servers.jsonl       counters of the environment servers that `murmur train` started
    notices.jsonl       what the run changes, ignores or guesses, a line for each different thing
    checkpoints/        update-<number>.pt, the latest few; best.pt by evaluation.best_metric
    tensorboard/        the same figures for TensorBoard
    tracking/           what W&B and MLflow were sent; W&B's files if it is offline
    logs/               what each process logged
    episode.npz         of the newest evaluation: what pictures of its first episode need
    evaluations/        results and pictures of `murmur report`, kept for the next one
    begun-<timestamp>/  what an earlier start left that ended before its first checkpoint
    run.lock            locked by the process that trains here
"""

import contextlib
import json
import os
import re
import shlex
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil

from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.config.files import Overrides, load
from murmur.shared.process.checkpoints import find_checkpoint, numbered_checkpoints
from murmur.shared.process.errors import ConfigError
from murmur.shared.process.files import make_folder, read_json
from murmur.shared.process.process import process_began
from murmur.shared.process.run_lock import LOCK_FILE, RunLock
from murmur.shared.wire.notices import FILE as NOTICES

EPISODE = "episode.npz"
_MEASURED, _PRECISION = "measured.json", "precision.json"
# Patterns of what a run that has no checkpoint may have written.
_WRITTEN = (
    *("config.yaml", "command.json", "learner*.json", "started_from.json", "progress.jsonl"),
    *("counters*.bin", "batch-size.json", "servers.jsonl", _MEASURED, _PRECISION, NOTICES, EPISODE),
    *("checkpoints", "tensorboard", "tracking", "profile", "logs", "evaluations", "rank-*"),
)
MOST_RECORDS = 10_000  # of progress.jsonl that are kept in memory; a run of a day has 86 400
BLOCK = 1 << 20  # bytes of a log or of progress.jsonl that are read at once; no line is longer
_STAMP = "%Y%m%d-%H%M%S"
_BEGUN = ("config.yaml", "checkpoints", "progress.jsonl", "counters.bin")  # any: a run began here


class RunFolder:
    """Folder of one run.

    Attributes:
        path: path of the folder.
        lock: lock that this process holds while it trains here.
    """

    def __init__(self, path: Path) -> None:
        """Name the folder; `open`, `create` and `newest` check that it is what it should be."""
        self.path = path
        self.lock = RunLock(None)

    @classmethod
    def open(cls, path: Path) -> "RunFolder":
        """Open the folder of a run that exists.

        Raises:
            ConfigError: if there is no run in it.
        """
        if not (path / "config.yaml").is_file():
            why = "holds no run (no config.yaml)" if path.is_dir() else "does not exist"
            raise ConfigError(
                f"run folder '{path}' {why}; `murmur train CONFIG` makes one under runs/"
            )
        return cls(path)

    @classmethod
    def create(cls, config: ExperimentConfig, path: Path | None) -> "RunFolder":
        """Create the folder of a new run, locked: `path`, or one named after the run and the time.

        What a start without a checkpoint left in `path` is put aside, into begun-<time>/.

        Raises:
            ConfigError: if it holds a run that can be resumed, or cannot be written.
            ResourceError: if another process trains in it.
        """
        if path is None:
            path = _new_folder(Path(config.run.directory), config.run.name)
        run = cls(path)
        run.acquire()
        try:
            if any((path / name).exists() for name in _BEGUN):
                run._put_aside(path / f"begun-{time.strftime(_STAMP)}")
            run.logs.mkdir(exist_ok=True)
        except BaseException as error:
            run.lock.release()
            if isinstance(error, OSError):
                raise ConfigError(f"cannot make run folder '{path}': {error.strerror}") from None
            raise
        return run

    def acquire(self) -> None:
        """Lock the folder for training; nothing if this process holds the lock already.

        Raises:
            ResourceError: if another process trains in it, or it cannot be written.
        """
        if self.lock.fd is None:
            self.lock = RunLock.acquire(self.path)

    def discard(self) -> None:
        """Remove what a start wrote before its learner refused; folders only if they are empty."""
        for pattern in (*_WRITTEN, "logs/*.log", LOCK_FILE):
            for file in self.path.glob(pattern):
                if not file.is_dir():
                    file.unlink(missing_ok=True)
        for folder in (self.logs, self.path):
            with contextlib.suppress(OSError):  # it holds something else
                folder.rmdir()

    def _put_aside(self, aside: Path) -> None:
        if self.has_checkpoint():
            raise ConfigError(
                f"'{self.path}' holds a run already; add --resume to continue with it, or name "
                "another folder with --run"
            )
        processes = [self.process("command.json"), self.process("learner.json")]
        # This process holds the folder's lock.
        if pid := next((pid for pid in processes if pid and pid != os.getpid()), None):
            raise ConfigError(
                f"'{self.path}' is the run of process {pid}, which is at work; name another folder"
            )
        aside.mkdir()
        for found in [found for pattern in _WRITTEN for found in self.path.glob(pattern)]:
            found.rename(aside / found.name)

    @classmethod
    def newest(
        cls, directory: Path, name: str | None = None, *, begun: bool = False
    ) -> "RunFolder":
        """Find the newest run in a folder of runs.

        Args:
            directory: folder of runs.
            name: name of the run, which its folder has before the time; None: any.
            begun: flag to accept a run without a checkpoint.

        Raises:
            ConfigError: if there is none.
        """
        found = [cls(p.parent) for p in directory.glob("*/config.yaml")]
        if name is not None:
            stamped = re.compile(re.escape(name) + r"-\d{8}-\d{6}")
            found = [run for run in found if stamped.fullmatch(run.path.name)]
        will_do = [run for run in found if begun or run.has_checkpoint()]
        if not will_do:
            what = "run" if name is None else f"run of '{name}'"
            with_one = " with a checkpoint" if found else ""
            raise ConfigError(
                f"no {what}{with_one} under '{directory}'; `murmur train CONFIG` makes one"
            )
        return max(will_do, key=lambda run: (run.path / "config.yaml").stat().st_mtime)

    @property
    def logs(self) -> Path:
        """Folder of the processes' logs."""
        return self.path / "logs"

    @property
    def progress_file(self) -> Path:
        """The learner's record of progress and evaluations."""
        return self.path / "progress.jsonl"

    def config(self, overrides: Overrides = ()) -> ExperimentConfig:
        """Load the run's configuration, changed by overrides.

        Raises:
            ConfigError: naming the file, or the item, that is at fault.
        """
        file = str(self.path / "config.yaml")
        try:
            unchanged = load(file, environ={})
        except ConfigError as error:
            reason = str(error)
            raise ConfigError(reason if file in reason else f"{file}: {reason}") from None
        return load(file, overrides, environ={}) if overrides else unchanged

    def config_file(self, *, resume: bool) -> Path:
        """Return the file of the configuration that the run begins with, or resumes with."""
        return self.path / ("resume.yaml" if resume else "config.yaml")

    def read_json(self, name: str) -> dict[str, Any]:
        """Read a JSON file of the run; empty if it is missing or half written."""
        return read_json(self.path / name)

    def measured(self) -> dict[str, Any]:
        """Return the options that the learner chose by its speed, by dotted key."""
        precision = self.read_json(_PRECISION).get("precision")
        return self.read_json(_MEASURED) | ({"learner.precision": precision} if precision else {})

    def process(self, name: str) -> int | None:
        """Return the process id in a JSON file of the run, if that process is alive here.

        Args:
            name: name of the file: learner.json, or command.json for `murmur train` itself.
        """
        try:
            found = self.read_json(name)
            pid = int(found["pid"])
            if found.get("began") is not None and psutil.pid_exists(pid):
                return pid if found["began"] == process_began(pid) else None
            written = (self.path / name).stat().st_mtime
            # One that began later has the number of a learner that is gone. A second to be sure:
            # the system reckons the begin from its boot time.
            return pid if psutil.Process(pid).create_time() <= written + 1 else None
        except (OSError, KeyError, TypeError, ValueError, psutil.Error):
            return None

    def again(self) -> str:
        """Return the command that resumes the run or, without a checkpoint, restarts it."""
        path = shlex.quote(str(self.path))
        if self.has_checkpoint():
            return f"murmur train --resume --run {path}"
        return f"murmur train {shlex.quote(str(self.path / 'config.yaml'))} --run {path}"

    def records(self, kind: str) -> list[dict[str, Any]]:
        """Return the lines of progress.jsonl of one kind, "progress" or "evaluation".

        All of them or, of more than MOST_RECORDS, evenly many and the last.
        """
        found: list[dict[str, Any]] = []
        every, last = 1, None
        for i, line in enumerate(
            line for line in LineTail(self.progress_file).records() if line.get("kind") == kind
        ):
            last = line
            if i % every:
                continue
            found.append(line)
            if len(found) > MOST_RECORDS:
                found, every = found[::2], 2 * every
        return found if last is None or found[-1] is last else [*found, last]

    def newest_records(self, kind: str) -> Iterator[dict[str, Any]]:
        """Return lines of progress.jsonl of one kind, the newest first; read by blocks."""
        records = self.lines_from_end(self.progress_file.name)
        return (record for record in records if record.get("kind") == kind)

    def lines_from_end(self, name: str) -> Iterator[dict[str, Any]]:
        """Return the records of a file of JSON lines, the newest first; read by blocks."""
        return _records(_lines_from_end(self.path / name))

    def has_checkpoint(self) -> bool:
        """Return whether a learner could continue from here."""
        return bool(numbered_checkpoints(self.path / "checkpoints"))

    def checkpoint(self, which: str) -> Path:
        """Return a checkpoint: "best" (the latest if there is no best), "latest", or a path.

        Raises:
            CheckpointError: if there is none.
        """
        return find_checkpoint(self.path / "checkpoints", which)


def _new_folder(directory: Path, name: str) -> Path:
    """Make a folder named after a run and the time; waits while another run has this second's."""
    while True:
        path = directory / f"{name}-{time.strftime(_STAMP)}"
        make_folder(path.parent)
        try:
            path.mkdir()
        except FileExistsError:
            time.sleep(0.05)
        except OSError:
            make_folder(path)  # says what is wrong
        else:
            return path


class LineTail:
    """Iterator over the whole lines that were added to a file since the last look."""

    def __init__(self, path: Path, *, skip: bool = False) -> None:
        """Begin at the file's start, or behind what is there; it need not exist yet."""
        self._path = path
        self._offset = path.stat().st_size if skip and path.exists() else 0

    def __iter__(self) -> Iterator[str]:
        """Yield each new whole line."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                while True:
                    data = file.read(BLOCK)
                    whole = data[: data.rfind(b"\n") + 1]
                    if not whole and len(data) == BLOCK:  # part of a line that is too long
                        whole = data
                    self._offset = file.seek(self._offset + len(whole))
                    yield from whole.decode(errors="replace").split("\n")[:-1]
                    if len(data) < BLOCK:
                        return
        except OSError:
            return

    def records(self) -> Iterator[dict[str, Any]]:
        """Return the records of new lines; skip torn lines, which killed processes leave."""
        return _records(self)


def _records(lines: Iterable[str | bytes]) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects among lines; torn lines and other values are passed over."""
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            yield record


def _lines_from_end(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, the last first; of one that is longer than a block only a part."""
    try:
        file = path.open("rb")
    except OSError:
        return
    with file:
        at, rest = file.seek(0, os.SEEK_END), b""
        while at > 0:
            start = max(0, at - BLOCK)
            file.seek(start)
            lines = (file.read(at - start) + rest).split(b"\n")
            at = start
            rest = lines.pop(0) if at else b""  # it begins in the block before
            if len(rest) > BLOCK:
                rest = b"\xff"  # in no record
            yield from reversed(lines)
