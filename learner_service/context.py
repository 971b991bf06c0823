"""Parts of a run that do not depend on what it learns from: folder, device, metrics, threads."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from murmur.learner_service.after_update import compare_ranks
from murmur.learner_service.checkpoint.folder import CheckpointFolder
from murmur.learner_service.device.device import require_compiler, select_device
from murmur.learner_service.device.memory import limited
from murmur.learner_service.gathering import RankSync, StartBarrier
from murmur.learner_service.keeper import Keeper, RunFolder
from murmur.learner_service.learning.base import Algorithm
from murmur.learner_service.loop import Learner, Step
from murmur.learner_service.ranks.group import ALONE, Group
from murmur.learner_service.report import Report
from murmur.learner_service.start_from import load_origin, start_from
from murmur.learner_service.storage.storage import Storage
from murmur.learner_service.telemetry.device_clock import DeviceClock
from murmur.learner_service.telemetry.device_info import describe_device, device_text, keep_device
from murmur.learner_service.telemetry.gpu import Gpu
from murmur.learner_service.telemetry.liveness import Liveness
from murmur.learner_service.telemetry.metrics import LearnerMetrics
from murmur.learner_service.telemetry.persistent_counters import counters_of
from murmur.learner_service.telemetry.profiling import Profiling, nvtx_ranges
from murmur.learner_service.telemetry.progress import Progress, ProgressLog
from murmur.learner_service.telemetry.tracking import TrackerProcess
from murmur.shared.config.experiment import NO_AUGMENT, ExperimentConfig
from murmur.shared.config.files import code_of, save
from murmur.shared.config.plugin_folders import plugin_files
from murmur.shared.config.text import to_yaml
from murmur.shared.process.errors import MurmurError, SpecError
from murmur.shared.process.files import disk_error, write_whole
from murmur.shared.process.ledger import Ledger
from murmur.shared.process.process import CriticalThread, end_process, exit_code, logger
from murmur.shared.process.run_lock import RunLock
from murmur.shared.wire.samples import SampleSpec
from murmur.shared.wire.spec import EnvSpec


@dataclass(eq=False)
class RunContext:
    """Parts that every run has, and the learner once the run knows what it learns from.

    Making one raises a MurmurError if the run cannot be as it is configured.

    Attributes:
        config: experiment; as it was measured to be best, once the run is open.
        run_dir: run's folder at the start.
        loaded: checkpoint's path and content; None: the run begins.
        serve_only: whether nothing is learned: the checkpoint's policy is served to evaluations.
        stop: event that is set from outside to end the run.
        group: learners of the run.
        lock: lock of the folder.
        origin: checkpoint whose weights a new run starts from, if any.
        barrier: begins and ends the run together with the other ranks.
        device: device that the run learns on.
        metrics: Prometheus metrics.
        clock: clock of the device's work.
        progress: counters.
        liveness: says which thread hangs.
        folder: run's folder, with its checkpoints.
        resolved: configuration with every option and what was chosen, as config.yaml has it.
        begun: whether a session that trains has been admitted.
        learner: None before the run is open, and where nothing is learned.
        ranks: counters and agreements of the ranks; made by `make_learner`.
        report: metrics and log; made by `make_learner`.
        keeper: checkpoints; made by `make_learner`.
    """

    config: ExperimentConfig
    run_dir: Path
    loaded: tuple[Path, dict[str, Any]] | None
    serve_only: bool
    stop: threading.Event
    group: Group = ALONE
    lock: RunLock = field(default_factory=lambda: RunLock(None))
    resolved: ExperimentConfig = field(init=False)
    ranks: RankSync = field(init=False)
    report: Report = field(init=False)
    keeper: Keeper = field(init=False)
    begun: bool = field(init=False, default=False)
    learner: Learner | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        """Prepare the run."""
        config, run_dir, group, loaded = self.config, self.run_dir, self.group, self.loaded
        self.resolved = config
        self.barrier = StartBarrier(group)
        self._plugins = plugin_files(code_of(config))
        if loaded and not group.rank:
            _warn_of_changed_plugins(loaded[1].get("plugins", {}), self._plugins)
        # The other ranks get the weights of rank 0.
        begins = loaded is None and not self.serve_only and group.rank == 0
        self.origin = load_origin(config) if begins else None
        checkpoints = CheckpointFolder(run_dir, config.learner.keep_checkpoints, group)
        self.folder = RunFolder(run_dir, checkpoints, self.lock, group, self.stop, self.keep_config)
        self.device = select_device(config.learner)
        self.clock = DeviceClock(self.device)
        self.metrics = metrics = LearnerMetrics(
            None if self.serve_only else counters_of(run_dir, group.rank, group.size),
            group.rank if group.size > 1 else None,
        )
        if not self.serve_only:
            metrics.notices.keep_in(run_dir)
        metrics.clock = self.clock
        if self.device.type == "cuda":
            metrics.gpu = Gpu(str(torch.cuda.get_device_properties(self.device).uuid))
            if metrics.gpu.trouble:
                logger.warning(
                    "the GPU's driver tells nothing (%s): no murmur_learner_gpu_ metrics",
                    metrics.gpu.trouble,
                )
        metrics.gauge(
            "info",
            run=config.run.name,
            environment=config.environment.name or config.source.name,
            algorithm=config.algorithm.name,
            device=self.device.type,
        ).set(1)
        self.progress = Progress()
        self._resumed_at = 0 if loaded is None else loaded[1]["progress"]["updates"]
        self.liveness = Liveness(
            config.learner.stalled_after_s,
            lambda: config.learner.compile and self.progress.updates == self._resumed_at,
        )
        self._threads: list[CriticalThread] = []

    @contextlib.contextmanager
    def opening(self, text: str) -> Iterator[None]:
        """Build the run within: an error that no later session can avoid ends the process.

        Args:
            text: spec of what the run learns from; must be the same on all ranks.

        Raises:
            SpecError: what the next session may do better.
        """
        self.barrier.join(text)
        try:
            with limited(self.config.learner.memory_limit_gib):
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

    def make_ready(self, algorithm: Algorithm[Any], spec: EnvSpec | SampleSpec) -> None:
        """Give an algorithm its first weights; let it be captured and compiled as configured.

        Args:
            algorithm: algorithm with untrained networks; it gets those of rank 0.
            spec: spec of the run's environment or source.

        Raises:
            MurmurError: if the checkpoint that the run starts from does not fit.
        """
        if self.origin is not None:
            start_from(self.origin, self.config, spec, algorithm, self.run_dir)
        if self.config.augment != NO_AUGMENT:
            logger.info("augmentation on: %s", self.config.augment.text)
        parts = [part for part in algorithm.parts.values() if isinstance(part, nn.Module)]
        self.group.broadcast_([p for part in parts for p in (*part.parameters(), *part.buffers())])
        algorithm.graphs.enabled &= self.config.learner.cuda_graph
        self.metrics.watch(algorithm.graphs)
        if self.config.learner.compile and not self.serve_only:
            require_compiler(self.device)
            algorithm.compile()

    def make_learner(
        self,
        algorithm: Algorithm[Any],
        storage: Storage[Any],
        state: Callable[[], dict[str, Any]],
        steps: Callable[[], Iterable[Step]],
        *,
        num_agents: int = 1,
        best_metric: str,
        judged: bool = False,
        settled: Callable[[bool], bool] = lambda updated: True,
        waits_for_sessions: bool = False,
        figures: Callable[[], Mapping[str, Any]] = lambda: MappingProxyType({}),
        publish: Callable[[int], None] = lambda version: None,
    ) -> Learner:
        """Build ranks, report and keeper, then the learner. Rank 0 alone keeps a log.

        Args:
            algorithm: algorithm that learns.
            storage: source of batches.
            state: returns the state of the run for a checkpoint, to which the configuration and
                the files of plug-ins are added.
            steps: function that makes the steps after an update that come before the log and
                checkpoints; they may use the keeper.
            num_agents: number of agents that act in each step.
            best_metric: result of an evaluation that chooses the best checkpoint; see Keeper.
            judged: whether returns that stay mean that the run does not learn; see Report.
            settled: function that returns whether a checkpoint can be continued from; see Keeper.
            waits_for_sessions: whether a stopped run is saved after its sessions end; see Keeper.
            figures: function that returns further entries of a line of the log; see Report.
            publish: function that gives a policy's version to acting; see Learner.
        """
        config, group, log = self.config, self.group, None
        text = to_yaml(config)
        if not group.rank:
            tracking = config.tracking
            log = ProgressLog(
                self.run_dir,
                self.progress,
                num_agents,
                [TrackerProcess(self.run_dir, name, tracking) for name in tracking.services],
                tensorboard="tensorboard" in tracking.loggers,
                figures_every=tracking.figures_every_evaluations,
            )
            self.metrics.log = log
        own = self.run_dir / f"rank-{group.rank}" if group.rank else self.run_dir
        checkpoints = self.folder.checkpoints
        self.ranks = RankSync(group, self.progress, self.stop, config.run)
        self.report = Report(
            config,
            algorithm,
            storage,
            self.ranks,
            self.metrics,
            self.clock,
            checkpoints,
            log,
            Profiling(own, self.metrics.ledgers, self.device.type == "cuda"),
            judged,
            figures,
        )
        self.keeper = Keeper(
            self.folder,
            lambda: {**state(), "config": text, "plugins": self._plugins},
            storage,
            self.ranks,
            self.report,
            every_updates=config.learner.checkpoint_every_updates,
            best_metric=best_metric,
            settled=settled,
            waits_for_sessions=waits_for_sessions,
            best=checkpoints.best_score(config.evaluation.best_metric) if self.loaded else None,
        )
        every = config.learner.group_check_every_updates
        compare = partial(compare_ranks, algorithm, self.ranks, every)
        self.learner = Learner(
            algorithm=algorithm,
            storage=storage,
            ranks=self.ranks,
            report=self.report,
            clock=self.clock,
            publish=publish,
            after_update=[compare, *steps(), self.report, self.keeper],
        )
        return self.learner

    def start_threads(
        self, what: str, precision: str, targets: Mapping[str, Callable[[], None]]
    ) -> None:
        """Log what the run learns on, and start threads that keep a ledger of their time.

        Args:
            what: data that the run learns from, for the log.
            precision: precision of its arithmetic.
            targets: functions to run, by the thread's name.
        """
        about = describe_device(self.device, precision, self.metrics.gpu)
        self.metrics.gauge(
            "device_info",
            name=about["name"],
            driver=about["driver"],
            cuda=about["cuda"],
            precision=about["precision"],
        ).set(1)
        if not self.serve_only and not self.group.rank:
            keep_device(self.run_dir, about)
        logger.info("%s; learning on %s", what, device_text(about))
        self._threads = [self._thread(name, target) for name, target in targets.items()]
        for thread in self._threads:
            thread.start()

    def _thread(self, name: str, target: Callable[[], None]) -> CriticalThread:
        """Return a thread that keeps a ledger of its time."""
        ledger = Ledger(name)
        ledger.watcher = nvtx_ranges()
        self.metrics.keep(ledger)

        def run() -> None:
            ledger.adopt()
            target()

        thread = CriticalThread(name, run)
        self.liveness.watch(thread, ledger)
        return thread

    def begin(self) -> None:
        """Note that a session is admitted: the first one begins the run.

        Raises:
            ResourceError: if the configuration cannot be written.
        """
        if not self.begun:
            self.keep_config()
            self.begun = True

    def keep_config(self) -> None:
        """Write config.yaml; a run that is resumed does not before its first session.

        Until then the checkpoint may turn out to be of another environment, and the run continues
        with the configuration that it had.

        Raises:
            ResourceError: if it cannot be written.
        """
        if not self.group.rank:
            save(self.resolved, self.run_dir / "config.yaml")

    def keep_measured(self, config: ExperimentConfig) -> None:
        """Write config.yaml with what was chosen by measuring, and these options to measured.json.

        Runs that differ in these alone are one group for `murmur compare`: their machine was
        differently busy.

        Args:
            config: configuration after the choice, with every option.

        Raises:
            ResourceError: if they cannot be written.
        """
        given, self.resolved = self.resolved, config
        self.keep_config()
        if self.group.rank:
            return
        measured = {
            f"algorithm.{key}": value
            for key, value in config.algorithm.options.items()
            if given.algorithm.options.get(key) != value
        }
        if config.learner.max_policy_lag != given.learner.max_policy_lag:
            measured["learner.max_policy_lag"] = config.learner.max_policy_lag
        write_whole(self.run_dir / "measured.json", json.dumps(measured) + "\n")

    def finish(self) -> None:
        """Save what the last sessions have left; all of them have ended."""
        if self._learned():
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # with streams of threads that are gone
            self.keeper.finish()

    def close(self) -> None:
        """Stop the threads; one in the middle of a long update is left to the process's end."""
        self.barrier.cancel()
        if self._learned():
            self.report.close()

    def _learned(self) -> bool:
        """Wait for the threads; return whether there is a learner, and no thread uses it."""
        for thread in self._threads:
            thread.join(timeout=5)
        return self.learner is not None and not any(t.is_alive() for t in self._threads)


def _warn_of_changed_plugins(
    before: Mapping[str, Mapping[str, str]], now: Mapping[str, Mapping[str, str]]
) -> None:
    """Say which plug-ins are not what they were when a checkpoint was written.

    Args:
        before: files of plug-ins then, see `plugin_files`; empty in older checkpoints.
        now: files of plug-ins of this process.
    """
    for module, found in now.items():
        then = before.get(module)
        if then is not None and then.get("sha256") != found["sha256"]:
            logger.warning(
                "plug-in %s has changed since the checkpoint was written: the run continues with "
                "what the file says now",
                found["file"],
            )
