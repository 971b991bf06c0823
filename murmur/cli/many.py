"""Commands about many runs: sweep, compare, runs."""

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from murmur.cli.app import RESULTS, TRAIN, command, typed_command
from murmur.cli.options import (
    SHORT,
    Device,
    Minutes,
    Sbatch,
    Set,
    Steps,
    Updates,
    complete_config,
    complete_run,
)
from murmur.shared.process.errors import ConfigError
from murmur.shared.process.files import size_text, write_json, write_output
from murmur.text import counted, print_plain, print_table


@command(TRAIN)
def sweep(
    targets: Annotated[list[str] | None, typer.Argument(autocompletion=complete_config)] = None,
    seeds: str | None = None,
    vary: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUES")] = None,
    set_: Set = None,
    minutes: Minutes = None,
    steps: Steps = None,
    updates: Updates = None,
    device: Device = None,
    parallel: Annotated[int | None, typer.Option(min=0)] = None,
    folder: Path | None = None,
    resume: bool = False,
    slurm: bool = False,
    sbatch: Sbatch = None,
) -> None:
    """Train many runs on this machine, or by Slurm: seeds, settings, several configurations.

    Complete runs are never repeated; runs that had begun resume from their checkpoint. Ends with 1
    if a run failed. See docs/many-runs.md.

    [bold]Examples[/]

      murmur sweep formation --seeds 5 --minutes 10

      murmur sweep spread lbf-5x5 --seeds 5 --vary algorithm.name=mappo,coma,qmix

      murmur sweep sweep.yaml --parallel 4

      murmur sweep --resume runs/sweep-formation-20260101-120000

      murmur sweep spread --seeds 10 --slurm --sbatch=--time=4:00:00 --sbatch=--cpus-per-task=4

    Options:
        targets: A sweep's file, or configurations; with --resume a sweep's folder.
        seeds: Seeds of each: 5 stands for 1 to 5; or 1,7,9.
        vary: Values of one key, e.g. algorithm.name=mappo,coma. Repeatable: all combinations.
        parallel: Runs at once; default: as many as the machine holds.
        folder: The sweep's folder; default: runs/sweep-<name>-<time>.
        resume: Continue the sweep in a folder, or else the newest one.
        slurm: Train nothing here: write a job array, SWEEP/array.sh, with a run for each task.
    """
    from murmur.runs.settings import with_options
    from murmur.sweeps.run import open_sweep, run_sweep, write_array
    from murmur.sweeps.spec import varied

    if sbatch and not slurm:
        raise ConfigError("--sbatch is for --slurm: add it, or leave both out")
    short = {
        "run.max_minutes": minutes,
        "run.max_env_steps": steps,
        "run.max_updates": updates,
        "learner.device": device,
    }
    given = {"seeds": _seeds(seeds), "vary": varied(vary) if vary else None}
    overrides = with_options(set_ or [], short, SHORT)
    opened = open_sweep(targets or [], given, overrides, folder, resume=resume)
    with opened.lock:
        if slurm:
            print_plain(Console(), write_array(opened, parallel or 0, sbatch or []))
        elif run_sweep(opened, console=Console(), parallel=parallel):
            raise SystemExit(1)


def _seeds(text: str | None) -> int | list[int] | None:
    """Parse --seeds: a number of them, or numbers with commas.

    Raises:
        ConfigError: for another text.
    """
    if text is None:
        return None
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts) or text.strip() == "0":
        raise ConfigError(f"--seeds {text!r}: write a number from 1, or numbers with commas")
    return [int(part) for part in parts] if len(parts) > 1 else int(text)


@command(RESULTS)
def compare(
    targets: Annotated[list[str], typer.Argument(metavar="RUNS...", autocompletion=complete_run)],
    metric: str | None = None,
    by: Annotated[list[str] | None, typer.Option(metavar="KEY")] = None,
    best: bool = False,
    at_steps: Annotated[int | None, typer.Option(min=1)] = None,
    any_steps: bool = False,
    across_tasks: bool = False,
    out: Path | None = None,
) -> None:
    """Compare groups of runs: interquartile means with intervals, on the screen and on one page.

    Runs that differ in nothing but their seeds are a group; groups are named by what differs. See
    docs/many-runs.md.

    [bold]Examples[/]

      murmur compare runs/sweep-formation-20260101-120000

      murmur compare 'runs/spread-*' --by algorithm.name --out spread.html

      murmur compare runs/sweep-one runs/sweep-two --across-tasks --at-steps 200000

    Options:
        targets: Folders of runs or of sweeps, folders that hold runs, or patterns in quotes.
        metric: What runs are judged by, with - before it if less is better; default: their
            evaluation.best_metric.
        by: Group runs by this configuration key alone. Repeatable.
        best: Take each run's best evaluation, not its last.
        at_steps: Compare scores after this many environment steps.
        any_steps: Runs may have used different numbers of steps.
        across_tasks: Runs may be of different tasks: one table for each.
        out: The page; default: compare.html, in the sweep's folder if one is given.
    """
    from murmur.comparison.analysis import compare as compare_runs
    from murmur.comparison.page import render, tables

    console = Console()
    found = compare_runs(
        targets,
        metric=metric,
        by=by or [],
        best=best,
        at_steps=at_steps,
        any_steps=any_steps,
        across_tasks=across_tasks,
        say=partial(print_plain, console, style="yellow"),
    )
    for table in tables(found):
        print_table(console, table)
        console.print()
    for note in found.notes:
        print_plain(console, note, "dim")
    alone = Path(targets[0]) if len(targets) == 1 and Path(targets[0]).is_dir() else Path()
    file = out or alone / "compare.html"
    write_output(file, render(found, typed_command()))
    print_plain(console, f"written: {file}")


@command(RESULTS)
def runs(
    targets: Annotated[
        list[str] | None, typer.Argument(metavar="[RUNS]...", autocompletion=complete_run)
    ] = None,
    sort: Literal[
        "date", "name", "state", "algorithm", "environment", "steps", "score", "size"
    ] = "date",
    state: Literal["running", "complete", "stopped", "begun", "unreadable"] | None = None,
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
    delete: bool = False,
    yes: bool = False,
) -> None:
    """List runs with state, score and size on disk; delete them with --delete.

    A run that is at work is never deleted.

    [bold]Examples[/]

      murmur runs

      murmur runs --sort size --state stopped

      murmur runs runs/sweep-formation-20260101-120000 --sort score

      murmur runs 'runs/spread-*' --state begun --delete

    Options:
        targets: Folders of runs or of sweeps, folders that hold them, or patterns; default: runs
        sort: What the list is sorted by; of numbers and dates the largest first.
        state: Only runs in this state; begun: without a checkpoint; unreadable: of a version of
            murmur with other options.
        json_file: Write the list here; -: to standard output.
        delete: Delete what is listed, after a question.
        yes: With --delete: do not ask.
    """
    from murmur.runs.run_list import delete_runs, list_runs, runs_table

    to_stdout = str(json_file) == "-"
    console = Console(stderr=to_stdout)
    found = list_runs(targets or ["runs"], sort=sort, state=state)
    print_table(console, runs_table(found))
    total = sum(run.size for run in found)
    print_plain(console, f"{counted(len(found), 'run')}, {size_text(total)}")
    if json_file is not None:
        write_json(json_file, [run.record() for run in found])
    if not delete or not found:
        return
    if not yes:
        typer.confirm(f"Delete {counted(len(found), 'run')} for good?", abort=True)
    freed = delete_runs(found, lambda line: print_plain(console, line, "yellow"))
    print_plain(console, f"deleted: {size_text(freed)}")
