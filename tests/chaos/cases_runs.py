"""Faults of run folders and configurations."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from murmur.runs.child import child_environment, murmur_command
from tests.chaos.cases import Case
from tests.chaos.odd_names import METRIC, OddNames
from tests.chaos.stack import Stack
from tests.waiting import wait_until

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


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path | None]:
    """A file system of 4 MiB, mounted on a folder; None without the right to mount."""
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", "size=4m", "tmpfs"]
    if os.geteuid() or subprocess.run(["mount", *options, folder], check=False).returncode:
        yield None
        return
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def run_folder_faults(folder: Path, *, short: bool = False) -> dict[str, Any]:
    """A run folder in use, holding a run, on a full and on a read-only disk, and damaged."""
    with small_disk(folder / "run") as disk, Stack(folder, MATRIX) as stack:
        first = stack.start_learner()
        stack.start_server()
        wait_until(lambda: any(stack.run.glob("checkpoints/update-*.pt")), "a checkpoint")
        _second_writer(stack, first.pid, short)
        first.end(signal.SIGKILL)
        stack.servers.pop().close()
        _start_over(stack)
        _disk_errors(stack, disk, short)
        (stack.run / "counters.bin").write_bytes(b"\xff" * 32768)
        line = refusal("train", "--resume", "--run", str(stack.run), cwd=folder)
        _require(line, "counters.bin holds no counters", "delete it")
        if (stack.run / "logs" / "learner.log").read_text().count("error:") != 1:
            raise AssertionError("a start that cannot succeed was repeated")
    return {"disk": disk is not None}


def _second_writer(stack: Stack, pid: int, short: bool) -> None:
    train = ["train", "--resume", "--run", str(stack.run)]
    learner = ["learner", str(stack.config), "--run", str(stack.run), "--resume"]
    for command in [train] if short else [train, learner]:
        _require(refusal(*command, cwd=stack.folder), f"in use by process {pid};", "--run")


def _start_over(stack: Stack) -> None:
    before = _written(stack.run)
    line = refusal("learner", str(stack.config), "--run", str(stack.run), cwd=stack.folder)
    _require(line, "already holds a run", "--resume", "another folder")
    if _written(stack.run) != before:
        raise AssertionError("a refused start wrote to the run folder")


def _written(run: Path) -> dict[str, int]:
    """When each file of a run was written last."""
    return {p.name: p.stat().st_mtime_ns for p in run.rglob("*.*") if p.name != "run.lock"}


def _disk_errors(stack: Stack, disk: Path | None, short: bool) -> None:
    """Starts on a full disk and on a read-only one."""
    if disk is None:
        return
    resume = ["train", "--resume", "--run", str(stack.run)]
    fill = disk / "fill"
    with contextlib.suppress(OSError), fill.open("wb") as file:
        while True:
            file.write(bytes(4096))
            file.flush()
    _require(refusal(*resume, cwd=stack.folder), "resume.yaml: No space left on device", "free")
    if not short:
        new = ["train", str(stack.config), "--run", str(disk / "new")]
        _require(refusal(*new, cwd=stack.folder), "No space left on device", "another folder")
    fill.unlink()
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    _require(refusal(*resume, cwd=stack.folder), "Read-only file system", "another folder")
    if not short:
        evaluate = murmur_command("evaluate", str(stack.run), "--episodes", "2")
        subprocess.run(evaluate, check=True, cwd=stack.folder, capture_output=True)
    subprocess.run(["mount", "-o", "remount,rw", disk], check=True)


def hostile_configuration(folder: Path) -> dict[str, Any]:
    """A YAML bomb and a run name that leaves the folder of runs are refused at once."""
    lines = ["environment: {name: matrix}", "a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    (folder / "bomb.yaml").write_text("\n".join(lines))
    began = time.monotonic()
    _require(refusal("config", "bomb.yaml", cwd=folder), "bomb.yaml holds more than 20000 values")
    seconds = time.monotonic() - began
    (folder / "matrix.yaml").write_text(lines[0])
    outside = ["train", "matrix.yaml", "--set", "run.name=../../x"]
    _require(refusal(*outside, cwd=folder), "run.name", "'/'", "run.directory")
    return {"refused s": seconds}


def odd_names(folder: Path) -> dict[str, Any]:
    """A metric and a run folder with names like markup: training and evaluation go through."""
    config = {
        **MATRIX,
        "environment": {
            "name": "gymnasium",
            "factory": f"{OddNames.__module__}:OddNames",
            "metrics": [METRIC],
        },
        "env_server": {"envs_per_worker": 4, "metrics_port": 0},
        "run": {"max_updates": 8},
        "evaluation": {"every_updates": 4, "episodes": 2},
    }
    (folder / "odd.yaml").write_text(yaml.safe_dump(config))
    run = str(folder / "a [/b] run")
    shown = ""
    for command in (["train", "odd.yaml", "--run", run], ["evaluate", run, "--episodes", "2"]):
        done = subprocess.run(
            murmur_command(*command),
            cwd=folder,
            env=child_environment() | {"MURMUR_PARENT": ""},
            capture_output=True,
            text=True,
            timeout=2 * ONE_LINE_S,
            check=False,
        )
        shown += done.stdout
        if done.returncode or METRIC not in done.stdout:
            raise AssertionError(f"{command} ended with {done.returncode}:\n{done.stderr}")
    _require(shown, "evaluation after", "a [/b] run")
    return {}


CASES = [
    Case("names like markup", odd_names),
    Case("run folder in use, full, read-only, damaged", run_folder_faults),
    Case("hostile configuration", hostile_configuration),
]
