"""Dropped rows and returns of runs on default settings.

`murmur train` with an environment and an algorithm, and no other setting, as real processes. The
share dropped is that of the rows received; the return is the mean of the last hundred training
episodes at a number of environment steps learned from, so that runs that drop rows compare fairly.

    python -m benchmarks.defaults --against CHECKOUT

trains each task here and with another checkout's murmur at the same time, and compares their
returns where both have learned from equally many steps.
"""

import argparse
import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from benchmarks._commands import commit_of
from murmur.benchmarks.effort import Effort
from murmur.results import provenance, require_clean_source, run_command, save_result
from murmur.runs.child import murmur_command
from murmur.runs.run_folder import RunFolder
from murmur.shared.config.extras import missing_advice
from murmur.shared.process.errors import ResourceError

DESCRIPTION = (
    "share of rows dropped and return at equal steps learned from, on defaults, of six tasks: "
    "Gymnasium, VMAS, PettingZoo and level-based foraging"
)

NEEDS = ("gymnasium", "lbforaging", "mpe2", "vmas")

_SMOKE_UPDATES = 4
_GYMNASIUM = {"name": "gymnasium", "factory": "gymnasium:make"}
_FORAGING = "lbforaging:Foraging-8x8-2p-2f-coop-v3"

# Task: environment and algorithm; nothing else is set but ports and the end.
TASKS: dict[str, tuple[dict[str, Any], str]] = {
    "CartPole": ({**_GYMNASIUM, "arguments": {"id": "CartPole-v1"}}, "mappo"),
    "Pendulum": ({**_GYMNASIUM, "arguments": {"id": "Pendulum-v1"}}, "mappo"),
    "Hopper": ({**_GYMNASIUM, "arguments": {"id": "Hopper-v5"}}, "mappo"),
    "VMAS balance": ({"name": "vmas", "scenario": "balance"}, "mappo"),
    "simple_spread": (
        {
            "name": "pettingzoo",
            "factory": "mpe2.simple_spread_v3:parallel_env",
            "arguments": {"N": 3, "max_cycles": 25},
        },
        "mappo",
    ),
    "foraging": (
        {
            **_GYMNASIUM,
            "arguments": {"id": _FORAGING, "disable_env_checker": True},
            "team": True,
            "renew": True,
            "max_episode_steps": 50,
        },
        "coma",
    ),
}


def train(
    task: str, end: Mapping[str, Any], folder: Path, checkout: Path | None = None
) -> RunFolder:
    """Train a task on defaults until `end` (settings of `run`), in `folder`.

    Args:
        task: name in TASKS.
        end: limits of the training, settings of `run`.
        folder: folder that keeps the run.
        checkout: folder of another murmur, installed in its `.venv`; None: this one.

    Raises:
        ResourceError: if it fails, with its output.
    """
    environment, algorithm = TASKS[task]
    config = {
        "run": {"name": "defaults", **end},
        "environment": environment,
        "algorithm": {"name": algorithm},
        "env_server": {"metrics_port": 0},
        "learner": {"port": 0, "metrics_port": 0},
    }
    file = folder / "defaults.yaml"
    file.write_text(yaml.safe_dump(config))
    arguments = ("train", str(file), "--run", str(folder / "run"))
    command = murmur_command(*arguments)
    if checkout is not None:
        command = [str(checkout / ".venv" / "bin" / "murmur"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ResourceError(f"{task} on defaults failed: {done.stdout[-500:]} {done.stderr[-500:]}")
    return RunFolder.open(folder / "run")


def dropped_share(record: Mapping[str, Any]) -> float:
    """Return the share of the rows received that a record of progress.jsonl counts as dropped."""
    return float(sum(record["rows_dropped"].values()) / max(1, record["rows_received"]))


def measure(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return a run's dropped share, and its return after a third, two thirds and all of it."""
    last = records[-1]
    found = {
        "dropped, %": 100 * dropped_share(last),
        "updates": last["updates"],
        "steps learned from": last["env_steps"],
    }
    for name, share in (("return at 1/3", 1 / 3), ("return at 2/3", 2 / 3), ("return", 1.0)):
        enough = [r for r in records if r["env_steps"] >= share * last["env_steps"]]
        value = enough[0]["return"]
        found[name] = float("nan") if value is None else value
    return found


def run(effort: Effort = Effort.FULL) -> dict[str, Any]:
    """Train all tasks, one after the other; to smoke, one for a few updates."""
    minutes = effort.choose(0.0, 0.5, 1.5)
    end = {"max_minutes": minutes} if minutes else {"max_updates": _SMOKE_UPDATES}
    tasks: dict[str, Any] = {}
    for task in list(TASKS)[: effort.choose(1, None, None)]:
        if task == "Hopper" and find_spec("mujoco") is None:
            tasks[task] = {"skipped": missing_advice("mujoco", "mujoco")}
            continue
        with tempfile.TemporaryDirectory() as folder:
            records = train(task, end, Path(folder)).records("progress")
            tasks[task] = {"algorithm": TASKS[task][1], **measure(records)}
            print(f"{task}: {json.dumps(tasks[task])}", flush=True)
    return {"tasks": tasks, "end": end}


def compare(
    here: Sequence[Mapping[str, Any]], there: Sequence[Mapping[str, Any]]
) -> dict[str, float]:
    """Compare two runs of one task: dropped shares, and returns at equal steps learned from."""
    runs = {"here": here, "there": there}
    found = {f"dropped {name}, %": 100 * dropped_share(r[-1]) for name, r in runs.items()}
    found |= {f"steps {name}": r[-1]["rows_trained"] for name, r in runs.items()}
    steps = min(r[-1]["rows_trained"] for r in runs.values())
    for share in (1 / 2, 1.0):
        at = round(share * steps)
        for name, records in runs.items():
            record = next(r for r in records if r["rows_trained"] >= at)
            value = record["return"]
            found[f"return {name} at {share:.0%}"] = float("nan") if value is None else value
    return found


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--against", type=Path, required=True, help="checkout of another murmur")
    parser.add_argument("--minutes", type=float, default=1.5, help="of each run")
    parser.add_argument("--tasks", nargs="*", choices=TASKS, default=list(TASKS))
    parser.add_argument("--dirty", action="store_true", help="save from source not committed")
    arguments = parser.parse_args()
    require_clean_source(arguments.dirty)
    origin = provenance("benchmarks.defaults")
    end = {"max_minutes": arguments.minutes}
    tasks = {}
    for task in arguments.tasks:
        with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor() as pool:
            folders = [Path(name, side) for side in ("here", "there")]
            for folder in folders:
                folder.mkdir()
            runs = pool.map(train, [task] * 2, [end] * 2, folders, [None, arguments.against])
            tasks[task] = compare(*(run.records("progress") for run in runs))
            print(f"{task}: {json.dumps(tasks[task])}", flush=True)
    result = {"against": commit_of(arguments.against), "tasks": tasks}
    print(f"written: {save_result('defaults-compared', result, origin)}")


if __name__ == "__main__":
    run_command(main)
