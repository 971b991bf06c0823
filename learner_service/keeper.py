"""Files that a run keeps: its folder with config.yaml, and checkpoints of what it has learned."""

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from murmur.learner_service.checkpoint.folder import CheckpointFolder
from murmur.learner_service.gathering import RankSync
from murmur.learner_service.ranks.group import Group
from murmur.learner_service.report import Report, Update
from murmur.learner_service.storage.storage import Storage
from murmur.shared.process.errors import CheckpointError, ResourceError
from murmur.shared.process.files import make_folder
from murmur.shared.process.ledger import enter
from murmur.shared.process.process import logger
from murmur.shared.process.run_lock import RunLock


@dataclass(eq=False)
class RunFolder:
    """Folder of a run, which may be moved or deleted while the run trains.

    Attributes:
        path: path at the start.
        checkpoints: its checkpoints, where the folder is now.
        lock: its lock.
        group: learners of the run, of which rank 0 writes config.yaml.
        stop: event that ends the run, set if the folder was moved.
        keep_config: writes config.yaml.
    """

    path: Path
    checkpoints: CheckpointFolder
    lock: RunLock
    group: Group
    stop: threading.Event
    keep_config: Callable[[], None]

    def require(self) -> None:
        """Report a folder that was moved or deleted, or whose lock was; before a checkpoint.

        A moved one gets the last checkpoint where it is now. A deleted one is made again, with
        its configuration.

        Raises:
            ResourceError: if another process has locked the folder.
        """
        folder = self.checkpoints
        if moved := self.lock.moved_to():
            if not self.stop.is_set() or folder.path.parent != moved:
                logger.error(
                    "run folder %s was moved to %s while the run trains: it stops, with a last "
                    "checkpoint there",
                    self.path,
                    moved,
                )
            folder.path = moved / folder.path.name
            self.stop.set()
        if moved or self.group.rank:
            return
        if self.path.exists() and self.lock.retake():
            logger.warning("run.lock of %s was deleted while the run trains; made again", self.path)
        if (self.path / "config.yaml").is_file():
            return
        logger.error(
            "run folder %s was deleted while the run trains: its earlier checkpoints and its logs "
            "are lost; this checkpoint, with config.yaml, is written to a new folder of that name",
            self.path,
        )
        with contextlib.suppress(ResourceError):  # the checkpoint's own error follows
            make_folder(self.path)
            self.keep_config()
            self.lock.retake()


@dataclass(eq=False)
class Keeper:
    """Writes checkpoints. Used by the thread that learns, but for `keep_best`.

    Attributes:
        folder: run's folder.
        run_state: returns the complete state of the run.
        storage: storage, which is saved with it.
        ranks: counters, and agreements with the other ranks.
        report: counts checkpoints.
        every_updates: updates from one checkpoint to the next.
        best_metric: result of an evaluation that chooses the best one; with "-" the least.
        settled: returns whether a checkpoint written now can be continued from, given whether an
            update was just made.
        waits_for_sessions: whether a run that is told to stop is saved when its sessions have
            ended, by `finish`, not at once.
        best: score of the best evaluation so far.
    """

    folder: RunFolder
    run_state: Callable[[], dict[str, Any]]
    storage: Storage[Any]
    ranks: RankSync
    report: Report
    every_updates: int
    best_metric: str
    settled: Callable[[bool], bool]
    waits_for_sessions: bool
    best: float | None
    _due: bool = False
    _ended: bool = False

    def __call__(self, update: Update | None, over: bool) -> bool:
        """Save what is due; end a run that was told to stop. The last Step."""
        updated = update is not None and update.kept
        if updated:
            self._due |= self.ranks.progress.updates % self.every_updates == 0
        stopping = self.ranks.stopping
        if stopping and self.waits_for_sessions:
            self._ended = True
            return True  # `finish` saves
        settled = (stopping or self._due) and self.ranks.group.all_ranks(self.settled(updated))
        if over or (stopping and settled):
            self.save()
            self._ended = True
            return True
        if self._due and settled:
            self.write_or_continue(self.save)
            self._due = False
        return False

    def state(self) -> dict[str, Any]:
        """Return the state of the run for a checkpoint of any kind; the folder is there."""
        self.folder.require()
        return {**self.run_state(), "best": self.best}

    def save(self) -> None:
        """Write a checkpoint.

        Raises:
            CheckpointError: if it cannot be written.
        """
        enter("checkpoint")
        started = time.monotonic()
        self.folder.checkpoints.save(self.state(), self.ranks.progress.updates, self.storage)
        self._due = False
        self.report.checkpoint(time.monotonic() - started)

    def write_or_continue(self, write: Callable[[], object]) -> None:
        """Write a checkpoint; if that fails, the next one that is due may succeed."""
        try:
            write()
        except CheckpointError as error:
            logger.error("%s; training continues", error)
            self.report.checkpoint(None)

    def keep_opponent(self) -> Path:
        """Write the policy as it is now, to be played against; return the file's path.

        Raises:
            CheckpointError: if it cannot be written.
        """
        return self.folder.checkpoints.save_opponent(self.state(), self.ranks.progress.updates)

    def keep_best(self, means: Mapping[str, float], state: Mapping[str, Any] | None) -> None:
        """Write the policy of an evaluation if it is the best so far.

        Args:
            means: results of the evaluation by name.
            state: run's state when it began; None: another rank writes it.
        """
        wanted = self.best_metric
        score = means[wanted.removeprefix("-")] * (-1 if wanted.startswith("-") else 1)
        if self.best is None or score > self.best:
            self.write_or_continue(lambda: self._write_best(score, state))

    def _write_best(self, score: float, state: Mapping[str, Any] | None) -> None:
        """Write the best policy; later ones have to beat its score.

        Raises:
            CheckpointError: if it cannot be written; the best is still what best.pt holds.
        """
        if state is not None:
            self.folder.checkpoints.save_best({**state, "best": score})
        self.best = score

    def finish(self) -> None:
        """Save what the last sessions have left. Called when all other threads have ended.

        A sync run is saved already, where it can continue exactly.

        Raises:
            CheckpointError: if it cannot be written.
        """
        self.report.count_rows()
        if self.waits_for_sessions and self._ended:
            self.save()
