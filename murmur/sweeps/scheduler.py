"""Runs of a sweep: each is a `murmur train` process, as many at once as the machine holds.

A run that fails is noted with its message; the others continue. Processes die with the sweep. A
sweep that was killed continues from its index: complete runs are kept, runs that had begun come
first and resume from their last checkpoint.
"""

import contextlib
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from murmur.runs.child import Child, murmur_command
from murmur.runs.run_folder import RunFolder
from murmur.runs.scores import Metric, last_progress, read_curve
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.config.files import load
from murmur.shared.process.errors import ConfigError
from murmur.shared.process.host_memory import available_bytes
from murmur.sweeps.capacity import Capacity, Gpu, shares
from murmur.sweeps.folder import SweepFolder, SweepRun

TICK_S = 0.25
_STOP_S = 90.0  # for a run to save and end; its supervisor gives the learner 60 s
_GIB = 2**30


@dataclass
class Active:
    """A run that is at work.

    Attributes:
        run: entry of the run in the index.
        config: configuration of the run.
        child: process of `murmur train`.
        folder: folder of the run.
        gpu: GPU of the run; None: the CPU.
    """

    run: SweepRun
    config: ExperimentConfig
    child: Child
    folder: RunFolder
    gpu: Gpu | None = None


class Scheduler:
    """Scheduler that starts and watches a sweep's runs. All methods are called from one thread."""

    def __init__(
        self,
        sweep: SweepFolder,
        capacity: Capacity,
        *,
        say: Callable[[str], None],
        on_tick: Callable[[list[Active]], None],
    ) -> None:
        """Prepare; nothing is started yet.

        Args:
            sweep: the sweep; its index is written after each change.
            capacity: resources that the runs may use.
            say: function called with lines about events of runs.
            on_tick: function called with the runs at work, several times a second.
        """
        self._sweep = sweep
        self._capacity = capacity
        self._say, self._on_tick = say, on_tick
        self._active: list[Active] = []
        begun = [run for run in sweep.runs if run.state in ("running", "stopped")]
        others = [run for run in sweep.runs if run.state in ("waiting", "failed")]
        self._waiting = deque([*begun, *others])
        self._waits_for_memory = False

    def run(self) -> None:
        """Run until no run is left.

        Raises:
            KeyboardInterrupt: after all runs were stopped gracefully.
        """
        try:
            while True:
                self._start_what_fits()
                if not self._active:
                    return
                for active in list(self._active):
                    self._look_at(active)
                self._on_tick(self._active)
                time.sleep(TICK_S)
        except KeyboardInterrupt:
            if self._active:
                self._say("stopping: every run that has begun writes a checkpoint first …")
            raise
        finally:
            self._stop_all()

    def _start_what_fits(self) -> None:
        """Start runs while there is room; one at least, if there is one left."""
        while self._waiting and len(self._active) < self._capacity.parallel:
            if self._active and not self._has_memory():
                return
            run = self._waiting.popleft()
            try:
                self._active.append(self._start(run))
            except ConfigError as error:
                self._fail(run, str(error))
            self._sweep.save()

    def _has_memory(self) -> bool:
        """Return whether one more run fits beside those at work, by the largest memory of them."""
        free = available_bytes() / _GIB
        largest = max(resident_bytes(active.child) for active in self._active) / _GIB
        needed = max(self._capacity.memory_gib, largest)
        fits = free >= needed
        if not fits and not self._waits_for_memory:
            self._say(
                f"the next run waits: {free:.1f} GiB of memory is free, a run takes {needed:.1f}"
            )
        self._waits_for_memory = not fits
        return fits

    def _start(self, run: SweepRun) -> Active:
        """Begin or resume a run.

        Raises:
            ConfigError: if its configuration cannot be read.
        """
        folder = self._sweep.folder_of(run)
        resume = folder.has_checkpoint()
        config = folder.config() if resume else load(str(self._sweep.config_file(run)), environ={})
        to_do = ["--resume"] if resume else [str(self._sweep.config_file(run))]
        items = [part for item in shares(config, self._capacity) for part in ("--set", item)]
        command = murmur_command("train", *to_do, "--no-page", "--run", str(folder.path), *items)
        gpu = self._free_gpu(config)
        variables = {"CUDA_VISIBLE_DEVICES": gpu.visible} if gpu else {}
        log = self._sweep.log_file(run)
        child = Child(run.name, lambda _: command, log, variables=variables)
        child.start()
        run.state, run.message = "running", ""
        return Active(run, config, child, folder, gpu)

    def _free_gpu(self, config: ExperimentConfig) -> Gpu | None:
        """Return the GPU with the fewest runs; None for a run on the CPU."""
        if config.learner.device == "cpu" or not self._capacity.gpus:
            return None
        used = [active.gpu for active in self._active]
        return min(self._capacity.gpus, key=used.count)

    def _look_at(self, active: Active) -> None:
        """Note the end of a run."""
        if active.child.running:
            return
        self._active.remove(active)
        if failure := active.child.wait(0.0):
            self._fail(active.run, failure)
        else:
            active.run.state = "complete"
        self._note_scores(active)
        self._sweep.save()

    def _fail(self, run: SweepRun, message: str) -> None:
        """Note that a run failed, and print why."""
        run.state, run.message = "failed", message
        self._say(f"{run.name} failed: {message}")

    def _note_scores(self, active: Active) -> None:
        """Write into the index what a run came to."""
        run, last = active.run, last_progress(active.folder)
        metric = Metric.parse(active.config.evaluation.best_metric)
        curve = read_curve(active.folder, metric)
        run.last, run.best = curve.last, curve.best
        run.env_steps = int(last.get("env_steps", run.env_steps))
        run.minutes = round(last.get("seconds", 60 * run.minutes) / 60, 3)

    def _stop_all(self) -> None:
        """Stop the runs at work; each saves a checkpoint first."""
        for active in self._active:
            active.child.signal(signal.SIGTERM)
        deadline = time.monotonic() + _STOP_S
        for active in self._active:
            failure = active.child.wait(max(0.0, deadline - time.monotonic()))
            active.run.state = "stopped" if failure else "complete"
            self._note_scores(active)
        self._active.clear()
        self._sweep.save()


def resident_bytes(child: Child) -> int:
    """Return the memory in use by a process and all its descendants [bytes]."""
    total = 0
    with contextlib.suppress(psutil.Error):
        assert child.process is not None, "started with it"
        process = psutil.Process(child.process.pid)
        for one in [process, *process.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):  # it has just ended
                total += one.memory_info().rss
    return total
