"""Learning curves of a sweep: runs `murmur sweep`, keeps what `murmur compare` finds.

    python -m benchmarks.sweep_curves lag spread --seeds 3 --vary learner.max_policy_lag=1,16

passes what follows the topic to `murmur sweep`, in runs/sweep-<topic>, one run at a time unless
--parallel says otherwise. A sweep that exists there is resumed: complete runs are not repeated.
The results are benchmarks/results/<topic>-curves.json, tables (.md) and the learning curves (.svg).
"""

import argparse
import io
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks._trainings import run_training
from benchmarks.figures import Panel, draw
from murmur.comparison.analysis import Comparison, TaskResult, compare
from murmur.comparison.groups import make_tasks
from murmur.comparison.page import tables
from murmur.doctor import machine
from murmur.learner_service.checkpoint.files import load
from murmur.results import PAGE_WIDTH, origin_text, provenance, require_clean_source, run_command
from murmur.runs.run_folder import RunFolder
from murmur.sweeps.folder import INDEX

DESCRIPTION = "run a sweep and keep its interquartile means, curves, policy lag and dropped rows"
_COLUMNS = (
    "task",
    "group",
    "seed",
    "score",
    "steps",
    "updates",
    "optimiser steps",
    "minutes",
    "CPU-s",
    "lag",
    "dropped",
)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=DESCRIPTION)
    parser.add_argument("topic", help="name of the result")
    parser.add_argument("--note", action="append", default=[], help="a line for the table")
    parser.add_argument("--by", action="append", default=[], help="as of `murmur compare`")
    parser.add_argument("--metric", action="append", help="as of `murmur compare`; several: each")
    parser.add_argument("--dirty", action="store_true", help="save from source not committed")
    arguments, sweep = parser.parse_known_args()
    require_clean_source(arguments.dirty)
    origin = provenance("benchmarks.sweep_curves")
    folder = Path("runs") / f"sweep-{arguments.topic}"
    run_sweep(folder, sweep)
    comparisons = [
        compare([str(folder)], metric=metric, by=arguments.by, across_tasks=True, say=print)
        for metric in arguments.metric or [None]
    ]
    record = {
        "benchmark": "sweep_curves",
        **origin,
        "notes": [*arguments.note, *comparisons[0].notes],
        "tasks": {
            f"{task.name}, {task.unit}" if arguments.metric else task.name: task_record(task)
            for comparison in comparisons
            for task in comparison.tasks
        },
        "runs": run_records(comparisons[0]),
    }
    machine.RESULTS.mkdir(parents=True, exist_ok=True)
    file = machine.RESULTS / f"{arguments.topic}-curves.json"
    file.write_text(json.dumps(record, indent=1) + "\n")
    file.with_suffix(".md").write_text(page(record, comparisons))
    picture([task for found in comparisons for task in found.tasks], file.with_suffix(".svg"))
    print(f"written: {file}, .md, .svg")


def run_sweep(folder: Path, arguments: list[str]) -> None:
    """Start the sweep, or resume the one in the folder."""
    command = [sys.executable, "-m", "murmur", "sweep", "--parallel", "1"]
    if (folder / INDEX).is_file():
        command += ["--resume", str(folder)]
    else:
        command += [*arguments, "--folder", str(folder)]
    run_training(command)


def task_record(task: TaskResult) -> dict[str, Any]:
    """Return interquartile means, scores, curves and probabilities of improvement on one task."""
    return {
        "metric": task.unit,
        "groups": {
            name: {
                "iqm": found.value,
                "low": found.low,
                "high": found.high,
                "scores": task.scores[name].ravel().tolist(),
                "env_steps": task.env_steps[name],
                "curve": {
                    part: np.round(getattr(task.curves[name], part), 4).tolist()
                    for part in ("x", "y", "low", "high")
                },
            }
            for name, found in task.iqm.items()
        },
        "improvement": [
            {"of": a, "over": b, "is": found.value, "low": found.low, "high": found.high}
            for (a, b), found in task.improvement.items()
        ],
    }


def run_records(comparison: Comparison) -> list[dict[str, Any]]:
    """Return each run's final score with its policy lag and dropped rows."""
    found = []
    for task in make_tasks(comparison.groups):
        for name, members in task.groups.items():
            for run in members:
                record = {"task": task.name, "group": name, "seed": run.seed}
                record |= {"score": run.curve.last, **progress_of(run.path)}
                found.append(record | {"optimiser_steps": optimiser_steps(run.path)})
    return found


def optimiser_steps(path: Path) -> int:
    """Steps of all optimisers of a run's algorithm, as its latest checkpoint counts them."""
    state = load(RunFolder(path).checkpoint("latest"))
    parts = [part for part in state["algorithm"]["parts"].values() if "param_groups" in part]
    return sum(
        max((int(of.get("step", 0)) for of in part["state"].values()), default=0) for part in parts
    )


def progress_of(path: Path) -> dict[str, Any]:
    """Return steps, updates, times, policy lag and dropped rows from the progress of a run."""
    progress = RunFolder(path).records("progress")
    lags = [line["policy_lag"] for line in progress if line.get("policy_lag") is not None]
    last = progress[-1]
    return {
        "env_steps": last["env_steps"],
        "updates": last["updates"],
        "minutes": last["seconds"] / 60,
        "learner_cpu_s": last.get("work", {}).get("cpu_s"),
        "mean_lag": float(np.mean(lags)) if lags else None,
        "largest_lag": max(lags, default=None),
        "rows_dropped": last["rows_dropped"],
    }


def page(record: dict[str, Any], comparisons: list[Comparison]) -> str:
    """Return the results as Markdown: the tables of `murmur compare`, then one row for each run."""
    console = Console(file=io.StringIO(), width=PAGE_WIDTH, record=True)
    for table in itertools.chain.from_iterable(map(tables, comparisons)):
        console.print(table, "")
    shown = [line.rstrip() for line in console.export_text().splitlines()]
    return "\n".join(
        [
            *(f"`{record['command']}`", "", f"{origin_text(record)}.", *record["notes"], ""),
            *("```text", *shown, "```", ""),
            "CPU-s: of the learner; lag: updates between acting and learning, mean over the run;",
            "dropped: rows that were too old.",
            "",
            f"| {' | '.join(_COLUMNS)} |",
            "|---" * len(_COLUMNS) + "|",
            *map(_row, record["runs"]),
            "",
        ]
    )


def _row(run: dict[str, Any]) -> str:
    def short(value: float | None, digits: int) -> str:
        return "" if value is None else f"{value:.{digits}f}"

    cells = [run["task"], run["group"], run["seed"], short(run["score"], 2), run["env_steps"]]
    cells += [run["updates"], run["optimiser_steps"]]
    cells += [short(run["minutes"], 1), short(run["learner_cpu_s"], 0)]
    cells += [short(run["mean_lag"], 1), run["rows_dropped"].get("lag", 0)]
    return "| " + " | ".join(map(str, cells)) + " |"


def picture(tasks: Sequence[TaskResult], file: Path) -> None:
    """Plot interquartile means over environment steps, a panel for each task and metric."""
    panels = [
        Panel(f"{task.name}: {task.unit}", "environment steps", task.curves) for task in tasks
    ]
    draw(panels, file)


if __name__ == "__main__":
    run_command(main)
