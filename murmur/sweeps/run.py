"""`murmur sweep`: runs a sweep to its end and reports the result."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from murmur.runs.interrupts import stopped_by_signals
from murmur.runs.scores import Metric
from murmur.shared.config.files import load
from murmur.shared.process.errors import ConfigError
from murmur.sweeps.capacity import Gpu, measure_capacity
from murmur.sweeps.folder import SweepFolder
from murmur.sweeps.scheduler import Scheduler
from murmur.sweeps.spec import load_spec
from murmur.sweeps.view import SweepView, end_table, failures
from murmur.text import counted, print_plain, print_table


def open_sweep(
    targets: list[str], changes: Mapping[str, Any], folder: Path | None, *, resume: bool
) -> SweepFolder:
    """Open the folder of a new sweep, or of one to continue, locked by this process.

    Args:
        targets: configurations, or the file of a sweep; to continue one, its folder.
        changes: keys of the sweep that options set.
        folder: folder of the sweep; None: a new one, or to continue one the newest.
        resume: flag to continue a sweep.

    Raises:
        ConfigError: if it is not clear which sweep is meant, if options would change one that
            continues, or for a mistake in a configuration.
        ResourceError: if another process runs the sweep.
    """
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
    gpus: list[Gpu] | None = None,
) -> int:
    """Run what is left of a sweep, showing progress.

    Args:
        sweep: folder of the sweep, which this process has locked.
        console: console that shows the progress.
        parallel: number of runs at once, in place of the sweep's own; 0: as many as the machine
            holds.
        gpus: GPUs that runs may use; None: those of this machine.

    Returns:
        the number of runs that failed.

    Raises:
        KeyboardInterrupt: after a graceful stop, by Ctrl-C or SIGTERM.
        MurmurError: for what the user can fix.
    """
    left = [run for run in sweep.runs if run.state not in ("complete", "pruned")]
    configs = [load(str(sweep.config_file(run)), environ={}) for run in left or sweep.runs[:1]]
    metric = Metric.parse(configs[0].evaluation.best_metric)
    capacity = measure_capacity(configs, sweep.parallel if parallel is None else parallel, gpus)
    before = len(sweep.runs) - len(left)
    known = f", {before} of them complete before" if before else ""
    print_plain(console, f"sweep of {counted(len(sweep.runs), 'run')}{known}, in {sweep.path}")
    print_plain(console, capacity.text())
    view = SweepView(sweep, console)
    scheduler = Scheduler(sweep, capacity, say=view.say, on_tick=view.update)
    try:
        with stopped_by_signals(), view:
            scheduler.run()
    except KeyboardInterrupt:
        again = f"murmur sweep --resume {shlex.quote(str(sweep.path))}"
        print_plain(console, f"\nstopped; continue with:  {again}")
        raise
    finally:
        sweep.lock.release()
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

    try:
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
    finally:
        sweep.lock.release()
    return (
        f"written: {file}, {counted(len(left), 'task')}\nnext: read it, then  sbatch {file}, and "
        f"at the end  murmur compare {shlex.quote(str(sweep.path))}"
    )


def _print_end(sweep: SweepFolder, metric: Metric, console: Console) -> int:
    """Print the table of all runs, those that failed, and what to do next."""
    console.print()
    print_table(console, end_table(sweep, metric))
    for line in failures(sweep):
        print_plain(console, line, "red")
    path = shlex.quote(str(sweep.path))
    failed = sum(run.state == "failed" for run in sweep.runs)
    if failed:
        again = f"murmur sweep --resume {path}"
        print_plain(console, f"\nto repeat the runs that failed:  {again}")
    print_plain(console, f"\nnext:  murmur compare {path}")
    return failed
