"""What every run has, whatever it learns from: folder, device, metrics, threads, and its end."""

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from learner_service.algorithms.base import Algorithm
from learner_service.checkpoint import CheckpointFolder
from learner_service.group.group import ALONE, Group
from learner_service.runtime.device import require_compiler, select_device
from learner_service.runtime.memory import limited
from learner_service.storage.feed import Feed
from learner_service.telemetry.device_clock import DeviceClock
from learner_service.telemetry.device_info import describe_device, device_text, keep_device
from learner_service.telemetry.gpu import Gpu
from learner_service.telemetry.liveness import Liveness
from learner_service.telemetry.metrics import LearnerMetrics
from learner_service.telemetry.nvtx import nvtx_ranges
from learner_service.telemetry.persistent_counters import counters_of
from learner_service.telemetry.profiling import Profiling
from learner_service.telemetry.progress import Progress, ProgressLog
from learner_service.training.duties import Duties
from learner_service.training.gathering import Gathering
from learner_service.training.learner import Learner
from learner_service.training.resume import warn_of_changed_plugins
from learner_service.training.share import begin_alike
from learner_service.training.start_from import load_origin
from shared.config.experiment import ExperimentConfig
from shared.config.plugin_folders import plugin_files
from shared.config.text import config_text
from shared.errors import MurmurError, ResourceError, SpecError
from shared.files import disk_error, make_folder, write_whole
from shared.ledger import Ledger
from shared.process import CriticalThread, end_process, exit_code, logger
from shared.run_lock import RunLock


class RunProcess(ABC):
    """See the module.

    Attributes:
        begun: whether a session that trains has been admitted.
        learner: None before the run is open, and where nothing is learned.
        busy: whether something is under way that the end of a complete run waits for.
        group: the learners of the run.
        gathering: begins the run when all of them can.
        lock: of the run's folder.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        run_dir: Path,
        checkpoint: tuple[Path, dict[str, Any]] | None,
        serve_only: bool,
        stop: threading.Event,
        group: Group = ALONE,
    ) -> None:
        self._config = config
        self._run_dir = run_dir
        self._stop = stop
        self.group, self.gathering = group, Gathering(group)
        self._checkpoint, self._serve_only = checkpoint, serve_only
        self._plugins = plugin_files(config.model_dump(mode="json"))
        if checkpoint and not group.rank:
            warn_of_changed_plugins(checkpoint[1].get("plugins", {}), self._plugins)
        begins = checkpoint is None and not serve_only and group.rank == 0  # others get its weights
        self._origin = load_origin(config) if begins else None
        self._sync = config.learner.pipeline == "sync"
        self._folder = CheckpointFolder(run_dir, config.learner.keep_checkpoints, group)
        self.device = select_device(config.learner)
        self.metrics = LearnerMetrics(
            None if serve_only else counters_of(run_dir, group.rank, group.size),
            group.rank if group.size > 1 else None,
        )
        if not serve_only:
            self.metrics.notices.keep_in(run_dir)
        self.metrics.clock = self._clock = DeviceClock(self.device)
        if self.device.type == "cuda":
            self.metrics.gpu = Gpu(str(torch.cuda.get_device_properties(self.device).uuid))
            if self.metrics.gpu.trouble:
                logger.warning(
                    "the GPU's driver tells nothing (%s): no murmur_learner_gpu_ metrics",
                    self.metrics.gpu.trouble,
                )
        self.metrics.gauge(
            "info",
            run=config.run.name,
            environment=config.environment.name or config.source.name,
            algorithm=config.algorithm.name,
            device=self.device.type,
        ).set(1)
        self.progress = Progress()
        self.run_seed = config.run.seed
        self.begun = False
        self.learner: Learner | None = None
        self.lock = RunLock(None)
        self._threads: list[CriticalThread] = []
        self._resumed_at = 0  # updates before this process
        self.liveness = Liveness(
            config.learner.stalled_after_s,
            lambda: config.learner.compile and self.progress.updates == self._resumed_at,
        )
        self._prepare()
        if checkpoint:
            with limited(config.learner.memory_limit_gib):
                self._open_saved(checkpoint[1])

    @abstractmethod
    def _prepare(self) -> None:
        """Make what there is before the run knows what it learns from. Called by the constructor.

        Raises:
            MurmurError: if the run cannot be as it is configured.
        """

    @abstractmethod
    def _open_saved(self, state: dict[str, Any]) -> None:
        """Build the run for what a checkpoint was trained on. Called by the constructor."""

    @property
    def policy_version(self) -> int:
        """Updates made."""
        return self.progress.updates

    @property
    def busy(self) -> bool:
        """Whether something is under way that the end of a complete run waits for."""
        return False

    @contextlib.contextmanager
    def _opening(self) -> Iterator[None]:
        """While the run is built: an error that no later session can avoid ends the process.

        Raises:
            SpecError: what the next session may do better.
        """
        try:
            with limited(self._config.learner.memory_limit_gib):
                yield
        except MurmurError as error:
            if isinstance(error, SpecError) and self.group.size == 1:
                raise
            logger.error("%s", error)  # of a group the others wait for this rank
            end_process(exit_code(error))
        except OSError as error:
            known = disk_error(error)
            logger.error("%s", known or error, exc_info=known is None)
            end_process(2 if known else 1)
        except Exception:
            logger.exception("the run cannot begin; the process ends")
            end_process(1)

    def _make_ready(self, algorithm: Algorithm[Any]) -> None:
        """Give an algorithm rank 0's networks; let it be captured and compiled as configured."""
        learner = self._config.learner
        begin_alike(algorithm, self.group)
        algorithm.graphs.enabled &= learner.cuda_graph
        self.metrics.watch(algorithm.graphs)
        if learner.compile and not self._serve_only:
            require_compiler(self.device)
            algorithm.compile()

    def _make_learner(
        self,
        config: ExperimentConfig,
        algorithm: Algorithm[Any],
        feed: Feed[Any],
        duties: Duties,
        state: Callable[[], dict[str, Any]],
        num_agents: int,
    ) -> Learner:
        """The learner, with the best score so far; rank 0 alone keeps a log."""
        rank = self.group.rank
        own = self._run_dir / f"rank-{rank}" if rank else self._run_dir
        learner = Learner(
            config,
            algorithm,
            feed,
            self._folder,
            duties,
            self.progress,
            None if rank else self._log(num_agents),
            self.metrics,
            self._clock,
            lambda: {**state(), "plugins": self._plugins},
            self._stop,
            Profiling(own, self.metrics.ledgers, self.device.type == "cuda"),
            self.group,
        )
        if self._checkpoint:
            learner.best = self._folder.best_score(config.evaluation.best_metric)
        self.learner = learner
        return learner

    def _log(self, num_agents: int) -> ProgressLog:
        """progress.jsonl, TensorBoard and the trackers."""
        log = ProgressLog(self._run_dir, self.progress, num_agents, self._config.tracking)
        self.metrics.log = log
        return log

    def _note_device(self, what: str, precision: str) -> None:
        """Log what the run learns on, and keep it."""
        about = describe_device(self.device, precision, self.metrics.gpu)
        shown = {name: about[name] for name in ("name", "driver", "cuda", "precision")}
        self.metrics.gauge("device_info", **shown).set(1)
        if not self._serve_only and not self.group.rank:
            keep_device(self._run_dir, about)
        logger.info("%s; learning on %s", what, device_text(about))

    def _thread(self, name: str, target: Callable[[], None]) -> CriticalThread:
        """A thread that keeps a ledger of its time."""
        ledger = Ledger(name)
        ledger.watcher = nvtx_ranges()
        self.metrics.keep(ledger)

        def run() -> None:
            ledger.adopt()
            target()

        thread = CriticalThread(name, run)
        self.liveness.watch(thread, ledger)
        return thread

    @abstractmethod
    def _completed(self) -> ExperimentConfig:
        """The configuration with what was chosen."""

    def keep_config(self) -> None:
        """Write config.yaml; a run that is resumed does not before its first session.

        Until then the checkpoint may turn out to be of another environment, and the run continues
        with the configuration that it had. Of a group rank 0 writes it.

        Raises:
            ResourceError: if it cannot be written.
        """
        if self.group.rank:
            return
        write_whole(self._run_dir / "config.yaml", config_text(self._completed()))

    def _keep_folder(self) -> None:
        """Report a run folder that was moved or deleted, or whose lock was; before a checkpoint.

        A moved one gets the last checkpoint where it is now. A deleted one is made again, with
        its configuration.

        Raises:
            ResourceError: if another process has locked the folder.
        """
        if moved := self.lock.moved_to():
            if not self._stop.is_set() or self._folder.path.parent != moved:
                logger.error(
                    "run folder %s was moved to %s while the run trains: it stops, with a last "
                    "checkpoint there",
                    self._run_dir,
                    moved,
                )
            self._folder.path = moved / self._folder.path.name
            self._stop.set()
        if moved or self.group.rank:
            return
        if self._run_dir.exists() and self.lock.retake():
            logger.warning(
                "run.lock of %s was deleted while the run trains; made again", self._run_dir
            )
        if (self._run_dir / "config.yaml").is_file():
            return
        logger.error(
            "run folder %s was deleted while the run trains: its earlier checkpoints and its logs "
            "are lost; this checkpoint, with config.yaml, is written to a new folder of that name",
            self._run_dir,
        )
        with contextlib.suppress(ResourceError):  # the checkpoint's own error follows
            make_folder(self._run_dir)
            self.keep_config()
            self.lock.retake()

    @abstractmethod
    def drain(self) -> None:
        """Sessions are about to be ended: let what they work on arrive."""

    @abstractmethod
    def _end_input(self) -> None:
        """Sessions have ended: nothing arrives any more."""

    def finish(self) -> None:
        """Save what the last sessions have left; all of them have ended."""
        self._end_input()
        for thread in self._threads:
            thread.join(timeout=5)
        if self.learner is not None and not any(thread.is_alive() for thread in self._threads):
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # with streams of threads that are gone
            self.learner.finish()

    def close(self) -> None:
        """Stop the threads; one in the middle of a long update is left to the process's end."""
        self.gathering.cancel()
        self._end_input()
        for thread in self._threads:
            thread.join(timeout=5)
        if self.learner is not None and not any(thread.is_alive() for thread in self._threads):
            self.learner.close()
