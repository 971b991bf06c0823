"""`murmur sweep`: runs a sweep to its end, shows it, and reports the result.

Each run is a `murmur train` process, as many at once as the machine holds. A run that fails is
noted with its message; the others continue. Processes die with the sweep. A sweep that was killed
continues from its index: complete runs are kept, runs that had begun come first and resume from
their last checkpoint.
"""

import contextlib
import shlex
import signal
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console, Group
from rich.table import Table

from murmur.runs.child import Child, murmur_command
from murmur.runs.interrupts import stopped_by_signals
from murmur.runs.live_view import LiveView
from murmur.runs.run_folder import RunFolder
from murmur.runs.scores import Metric, completion, last_progress, read_curve
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.config.files import Overrides, changes_of, dotted, load
from murmur.shared.config.text import plain_value
from murmur.shared.process.errors import ConfigError
from murmur.shared.process.host_memory import available_bytes
from murmur.sweeps.capacity import Capacity, Gpu, measure_capacity, shares
from murmur.sweeps.folder import SweepFolder, SweepRun
from murmur.sweeps.spec import load_spec
from murmur.text import counted, duration, number, plain, print_plain, print_table, screen_table

_STATES = ("complete", "running", "waiting", "stopped", "pruned", "failed")
TICK_S = 0.25
_STOP_S = 90.0  # for a run to save and end; its supervisor gives the learner 60 s
_GIB = 2**30
_SHOWN = 200  # characters of a failed run's message in the table; sweep.json has them all


def open_sweep(
    targets: list[str],
    given: Mapping[str, Any],
    overrides: Overrides,
    folder: Path | None,
    *,
    resume: bool,
) -> SweepFolder:
    """Open the folder of a new sweep, or of one to continue, locked by this process.

    Args:
        targets: configurations, or the file of a sweep; to continue one, its folder.
        given: keys of the sweep that options set; None: not given.
        overrides: changes of all runs.
        folder: folder of the sweep; None: a new one, or to continue one the newest.
        resume: flag to continue a sweep.

    Raises:
        ConfigError: if it is not clear which sweep is meant, if options would change one that
            continues, or for a mistake in a configuration.
        ResourceError: if another process runs the sweep.
    """
    changes = {key: plain_value(value, key) for key, value in given.items() if value is not None}
    if same := {dotted(path, source): value for path, value, source in changes_of(overrides)}:
        changes["set"] = same
    if not resume:
        if targets:
            return SweepFolder.create(load_spec(targets, changes), folder)
        raise ConfigError("which configurations? `murmur config` lists those that come with murmur")
    if changes:
        raise ConfigError(
            f"resume continues a sweep as it is; leave out {', '.join(sorted(changes))}, or start "
            "another sweep"
        )
    folders = [Path(target) for target in targets] + ([folder] if folder else [])
    if len(folders) > 1:
        raise ConfigError(f"one sweep's folder can be continued, not {len(folders)}")
    return SweepFolder.open(folders[0] if folders else SweepFolder.newest(Path("runs")), lock=True)


def run_sweep(
    sweep: SweepFolder,
    *,
    console: Console,
    parallel: int | None = None,
) -> int:
    """Run what is left of a sweep, showing progress.

    Args:
        sweep: folder of the sweep, which this process has locked.
        console: console that shows the progress.
        parallel: number of runs at once, in place of the sweep's own; 0: as many as the machine
            holds.

    Returns:
        the number of runs that failed.

    Raises:
        KeyboardInterrupt: after a graceful stop, by Ctrl-C or SIGTERM.
        MurmurError: for what the user can fix.
    """
    left = [run for run in sweep.runs if run.state not in ("complete", "pruned")]
    configs = [load(str(sweep.config_file(run)), environ={}) for run in left or sweep.runs[:1]]
    metric = Metric.parse(configs[0].evaluation.best_metric)
    capacity = measure_capacity(configs, sweep.parallel if parallel is None else parallel)
    before = len(sweep.runs) - len(left)
    known = f", {before} of them complete before" if before else ""
    print_plain(console, f"sweep of {counted(len(sweep.runs), 'run')}{known}, in {sweep.path}")
    print_plain(console, capacity.text())
    view = SweepView(sweep, console)
    scheduler = Scheduler(sweep, capacity, view)
    try:
        with stopped_by_signals(), view:
            scheduler.run()
    except KeyboardInterrupt:
        again = f"murmur sweep --resume {shlex.quote(str(sweep.path))}"
        print_plain(console, f"\nstopped; continue with:  {again}")
        raise
    return _print_end(sweep, metric, console)


def write_array(sweep: SweepFolder, parallel: int, sbatch: Sequence[str]) -> str:
    """Write the job array of what is left of a sweep; return what to say about it.

    Args:
        sweep: folder of the sweep, which this process has locked.
        parallel: number of tasks at once; 0: the sweep's own, or as many as Slurm starts.
        sbatch: further options of sbatch.

    Raises:
        MurmurError: for what the user can fix.
    """
    from murmur.slurm import array_script, write_script

    left = [run for run in sweep.runs if run.state not in ("complete", "pruned")]
    if not left:
        raise ConfigError(f"all runs of '{sweep.path}' are complete")
    configs = [load(str(sweep.config_file(run)), environ={}) for run in left]
    script = array_script(
        sweep.path.absolute(),
        [run.name for run in left],
        gpus=int(any(config.learner.device != "cpu" for config in configs)),
        parallel=parallel or sweep.parallel,
        sbatch=sbatch,
    )
    file = sweep.path / "array.sh"
    file.unlink(missing_ok=True)  # of the same sweep
    write_script(script, sweep.path, file)
    return (
        f"written: {file}, {counted(len(left), 'task')}\nnext: read it, then  sbatch {file}, and "
        f"at the end  murmur compare {shlex.quote(str(sweep.path))}"
    )


def _print_end(sweep: SweepFolder, metric: Metric, console: Console) -> int:
    """Print the table of all runs, those that failed, and what to do next."""
    console.print()
    print_table(console, end_table(sweep, metric))
    failed = [run for run in sweep.runs if run.state == "failed"]
    for run in failed:
        more = " …" if len(run.message) > _SHOWN else ""
        print_plain(console, f"{run.name} failed: {run.message[:_SHOWN]}{more}", "red")
    path = shlex.quote(str(sweep.path))
    if failed:
        again = f"murmur sweep --resume {path}"
        print_plain(console, f"\nto repeat the runs that failed:  {again}")
    print_plain(console, f"\nnext:  murmur compare {path}")
    return len(failed)


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

    def __init__(self, sweep: SweepFolder, capacity: Capacity, view: "SweepView") -> None:
        """Prepare; nothing is started yet.

        Args:
            sweep: the sweep; its index is written after each change.
            capacity: resources that the runs may use.
            view: view that shows the runs at work, and lines about events of runs.
        """
        self._sweep, self._view = sweep, view
        self._capacity = capacity
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
                self._view.update(self._active)
                time.sleep(TICK_S)
        except KeyboardInterrupt:
            if self._active:
                self._view.say("stopping: every run that has begun writes a checkpoint first …")
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
            self._view.say(
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
        self._view.say(f"{run.name} failed: {message}")

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


class SweepView(LiveView):
    """View of a sweep: a live table on a terminal, else plain lines every ten seconds."""

    def __init__(self, sweep: SweepFolder, console: Console) -> None:
        """Show `sweep` on `console`."""
        super().__init__(console)
        self._sweep, self._began = sweep, time.monotonic()

    def update(self, active: list[Active]) -> None:
        """Show the runs at work."""
        if not self._plain:
            self._live.update(Group(plain(self._counts(), "bold"), _active_table(active)))
        elif self._line_due():
            at = duration(time.monotonic() - self._began)
            print_plain(self._console, f"{at}  {self._counts()}")
            self._console.print(_active_table(active))

    def _counts(self) -> str:
        found = Counter[str](run.state for run in self._sweep.runs)
        parts = [f"{found[state]} {state}" for state in _STATES if found[state]]
        return f"runs: {', '.join(parts)}"


def _active_table(active: list[Active]) -> Table:
    """Return the runs at work, one in each row."""
    table = screen_table("run", "done", "env steps", "return", "time")
    for one in active:
        progress = last_progress(one.folder)
        share = completion(one.config.run, progress) if progress else None
        done = "starting" if not progress else "" if share is None else f"{100 * share:.0f} %"
        table.add_row(
            plain(one.run.name),
            done,
            number(progress.get("env_steps", 0)),
            number(progress.get("return")),
            duration(progress.get("seconds", 0)),
        )
    return table


def end_table(sweep: SweepFolder, metric: Metric) -> Table:
    """Return a table of every run with its scores, the best of each configuration first.

    Args:
        sweep: the sweep.
        metric: metric that judges its runs.
    """
    last, best = f"last {metric.name}", f"best {metric.name}"
    table = screen_table("run", "state", "env steps", last, best, "time")
    for run in sorted(sweep.runs, key=lambda run: _rank(run, metric)):
        table.add_row(
            plain(run.name),
            plain(run.state, "red" if run.state == "failed" else ""),
            number(run.env_steps),
            number(run.last),
            number(run.best),
            duration(60 * run.minutes),
        )
    return table


def _rank(run: SweepRun, metric: Metric) -> tuple[str, bool, float]:
    """Return a key that sorts the runs of one configuration by their last score."""
    value = run.last if run.last is not None else 0.0
    return run.config, run.last is None, value if metric.less_is_better else -value
