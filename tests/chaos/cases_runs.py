"""Faults of run folders: a second writer, a start over a run."""

import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from murmur.supervisor import child_environment, murmur_command
from tests.chaos.cases import Case
from tests.chaos.stack import Stack, wait_until

ONE_LINE_S = 60.0  # importing torch on a busy machine takes a while
MATRIX: dict[str, Any] = {
    "environment": {"name": "matrix"},
    "env_server": {"envs_per_worker": 8},
    "algorithm": {"name": "mappo", "unroll_steps": 1, "batch_size": 32, "batch_number": 1},
    "network": {"name": "mlp", "hidden": [8]},
    "learner": {"device": "cpu", "log_every_s": 0.1, "checkpoint_every_updates": 5},
}


def refusal(*arguments: str, cwd: Path, more: Mapping[str, str] | None = None) -> str:
    """The error line of a murmur command that must end with code 2 and without a traceback.

    Raises:
        AssertionError: with all that it printed, if it does not.
    """
    done = subprocess.run(
        murmur_command(*arguments),
        cwd=cwd,
        env=child_environment() | {"MURMUR_PARENT": ""} | dict(more or {}),
        capture_output=True,
        text=True,
        timeout=ONE_LINE_S,
        check=False,
    )
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    if done.returncode != 2 or len(lines) != 1 or "Traceback" in done.stderr + done.stdout:
        raise AssertionError(f"{arguments} ended with {done.returncode}:\n{done.stderr}")
    return lines[0]


def _require(line: str, *parts: str) -> None:
    for part in parts:
        if part not in line:
            raise AssertionError(f"'{part}' is missing in: {line}")


def one_writer(folder: Path) -> dict[str, Any]:
    """A run folder that a learner trains in is refused to others, and free once it is killed."""
    with Stack(folder, MATRIX) as stack:
        first = stack.start_learner()
        stack.start_server()
        wait_until(lambda: any(stack.run.glob("checkpoints/update-*.pt")), "a checkpoint")
        run = ["--run", str(stack.run)]
        for command in (
            ["learner", str(stack.config), *run, "--resume"],
            ["train", "--resume", *run],
        ):
            _require(refusal(*command, cwd=folder), f"in use by process {first.pid};", "--run")
        first.end(signal.SIGKILL)
        before = {p.name: p.stat().st_mtime_ns for p in stack.run.rglob("*") if p.is_file()}
        line = refusal("learner", str(stack.config), *run, cwd=folder)
        _require(line, "already holds a run", "--resume", "another folder")
        after = {p.name: p.stat().st_mtime_ns for p in stack.run.rglob("*") if p.is_file()}
        del before["run.lock"], after["run.lock"]
        if after != before:
            raise AssertionError("a refused start wrote to the run folder")
    return {}


CASES = [Case("second writer of a run folder", one_writer)]
