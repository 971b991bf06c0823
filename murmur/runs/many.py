"""Many runs in the Python API: sweep and compare. See docs/many-runs.md."""

from collections.abc import Iterable, Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from murmur.runs.run import Run
from murmur.text import print_plain
from shared.config.extras import advising
from shared.config.files import Overrides, changes_of, dotted
from shared.config.text import plain_value
from shared.process.errors import ResourceError
from shared.process.files import write_output

if TYPE_CHECKING:
    import pandas as pd

    from murmur.comparison import Comparison
    from murmur.sweeps.folder import SweepFolder

Names = str | PathLike[str] | Iterable[str | PathLike[str]]


@advising()
def sweep(
    configs: Names = (),
    *,
    seeds: int | Sequence[int] | None = None,
    vary: Mapping[str, object] | None = None,
    overrides: Overrides = (),
    parallel: int | None = None,
    folder: str | PathLike[str] | None = None,
    resume: bool = False,
    progress: bool = True,
) -> list[Run]:
    """Train many runs on this machine, like `murmur sweep`.

    Args:
        configs: one or several names or files of configurations, or the file of a sweep.
        seeds: number of seeds or the seeds; 5 stands for the seeds 1 to 5; None: 1, or those of the
            sweep's file.
        vary: values by key: {"algorithm.name": ["mappo", "coma"]}; all combinations are trained.
        overrides: changes of all runs, see murmur.config.
        parallel: number of runs at once; None or 0: as many as the machine holds.
        folder: the sweep's folder; None: a new folder under runs/, or with `resume` the newest.
        resume: flag to continue a sweep: complete runs are kept, others resume from their
            checkpoints.
        progress: flag to show progress.

    Returns:
        the runs that were trained to their end.

    Raises:
        KeyboardInterrupt: on Ctrl-C, after every run was stopped with a checkpoint.
        ResourceError: if runs failed; the others were trained all the same.
        MurmurError: for another error the user can fix.
    """
    from murmur.sweeps.folder import ENDED
    from murmur.sweeps.run import open_sweep, run_sweep

    given = {"seeds": seeds, "vary": vary}
    changes = {key: plain_value(value, key) for key, value in given.items() if value is not None}
    if same := {dotted(path, source): value for path, value, source in changes_of(overrides)}:
        changes["set"] = same
    path = None if folder is None else Path(folder)
    found = open_sweep(_paths(configs), changes, path, resume=resume)
    console = Console() if progress else Console(quiet=True, force_terminal=False)
    try:
        failed = run_sweep(found, console=console, parallel=parallel)
    finally:
        found.lock.release()
    if failed:
        raise ResourceError(_failures(found))
    return [Run(found.folder_of(run).path) for run in found.runs if run.state in ENDED]


def _failures(found: "SweepFolder") -> str:
    """Return a message on a sweep's failed runs, with errors and the call that tries again."""
    named = [f"{run.name}: {run.message}" for run in found.runs if run.state == "failed"]
    return (
        f"{len(named)} of {len(found.runs)} runs failed ({'; '.join(named)}); murmur.sweep(folder="
        f"{str(found.path)!r}, resume=True) tries them again"
    )


@advising()
def compare(
    runs: Names,
    *,
    metric: str | None = None,
    by: str | Sequence[str] = (),
    best: bool = False,
    at_steps: int | None = None,
    any_steps: bool = False,
    across_tasks: bool = False,
    page: str | PathLike[str] | None = None,
) -> "pd.DataFrame":
    """Compare groups of runs that differ in more than their seed, like `murmur compare`.

    Prints which runs are left out and what to keep in mind when reading the result.

    Args:
        runs: runs, their folders, folders of sweeps, or patterns.
        metric: metric to judge by, "-" before it if less is better; None: that of the runs'
            evaluation.best_metric.
        by: configuration keys that tell groups apart; none: all that differ.
        best: flag to take each run's best evaluation, not its last.
        at_steps: environment steps at which scores are taken; None: at the end.
        any_steps: flag to compare runs of different numbers of environment steps.
        across_tasks: flag to compare runs of different tasks.
        page: file for the page with curves and profiles; None: no page.

    Returns:
        a DataFrame with a row for each task and group and the columns task, group, runs, iqm
        (interquartile mean of the scores), low and high (its 95 % bootstrap interval, NaN of a
        single run), min and max (of the scores).

    Raises:
        ConfigError: if the runs do not compare, naming what differs.
    """
    from murmur.comparison import compare as compare_runs
    from murmur.comparison.page import render

    def say(line: str) -> None:
        print_plain(Console(), line, "yellow")

    targets = _paths(runs)
    found = compare_runs(
        targets,
        metric=metric,
        by=_paths(by),
        best=best,
        at_steps=at_steps,
        any_steps=any_steps,
        across_tasks=across_tasks,
        say=say,
    )
    for note in found.notes:
        say(note)
    if page is not None:
        command = f"murmur.compare({', '.join(map(repr, targets))})"
        write_output(Path(page), render(found, command))
    return _table(found)


def _table(comparison: "Comparison") -> "pd.DataFrame":
    """Return the interquartile means of all groups, see `compare`."""
    import pandas as pd

    rows: list[dict[str, Any]] = []
    for task in ([comparison.overall] if comparison.overall else []) + comparison.tasks:
        for group, (value, low, high) in task.iqm.items():
            scores = task.scores[group]
            row = {"task": task.name, "group": group, "runs": len(scores), "iqm": value}
            rows.append({**row, "low": low, "high": high, "min": scores.min(), "max": scores.max()})
    return pd.DataFrame(rows).astype({"low": float, "high": float})


def _paths(names: Names) -> list[str]:
    """Return one or several names as a list of text."""
    return [fspath(name) for name in ([names] if isinstance(names, str | PathLike) else names)]
