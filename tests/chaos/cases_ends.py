"""How a run ends that is told to, or that cannot continue: real runs, real signals, real loss."""

import fcntl
import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.chaos.cases import Case
from tests.chaos.cases_runs import small_disk
from tests.waiting import wait_until

STILL = """
import gymnasium, numpy as np
from gymnasium.spaces import Box, Discrete

class Still(gymnasium.Env):
    observation_space, action_space = Box(0, 1, (1,), np.float32), Discrete(2)

    def __init__(self, ends=True):
        self.ends = ends

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.zeros(1, np.float32), 0.0, self.ends and self.t == 5, False, {}
"""
STILL_CONFIG = """
environment: {name: gymnasium, factory: "still:Still"}
algorithm: {name: ppo}
evaluation: {environment: {arguments: {ends: false}}}
"""

SMALL = {
    "env_server.num_workers": 1,
    "env_server.envs_per_worker": 8,
    "env_server.metrics_port": 0,
    "learner.port": 0,
    "learner.metrics_port": 0,
    "learner.checkpoint_every_updates": 100_000,
    "algorithm.unroll_steps": 16,
    "evaluation.every_updates": 0,
    "run.max_minutes": 5,
}


def command(run: Path, config: str = "spread", **settings: object) -> list[str]:
    """A short `murmur train`; settings are keys with __ for the dot."""
    items = {**SMALL, **{k.replace("__", "."): v for k, v in settings.items()}}
    sets = [part for key, value in items.items() for part in ("--set", f"{key}={value}")]
    train = [sys.executable, "-m", "murmur", "train", config, "--no-page"]
    return [*train, "--run", str(run), *sets]


def updates(run: Path) -> int:
    """Updates that progress.jsonl tells of."""
    try:
        last = (run / "progress.jsonl").read_text().splitlines()[-1]
        return int(json.loads(last).get("updates", 0))
    except (OSError, IndexError, ValueError):
        return 0


def checkpoints(run: Path) -> list[str]:
    return sorted(file.name for file in run.glob("checkpoints/update-*.pt"))


def fill(file: Path) -> None:
    """Write to a file until that raises."""
    with file.open("wb", buffering=0) as rest:
        while True:
            rest.write(bytes(1 << 14))


@contextmanager
def training(
    run: Path, *prefix: str, enough: int = 2, **settings: object
) -> Iterator[subprocess.Popen[str]]:
    """A `murmur train` that has made some updates; killed at the end if it still runs."""
    with subprocess.Popen(
        [*prefix, *command(run, **settings)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            wait_until(lambda: updates(run) >= enough or process.poll() is not None, "updates", 90)
            assert process.poll() is None, process.communicate()[0]
            yield process
        finally:
            process.kill()


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and output."""
    output = process.communicate(timeout=90)[0]
    return process.returncode, output


def hang_up(folder: Path, name: str = "SIGHUP") -> dict[str, Any]:
    """A signal that asks for the end, SIGHUP twice: the last checkpoint is there."""
    run = folder / "run"
    with training(run) as process:
        began = time.monotonic()
        process.send_signal(getattr(signal, name))
        if name == "SIGHUP":  # the shell sends another one
            time.sleep(0.3)
            process.send_signal(signal.SIGHUP)
        code, output = ended(process)
        took = time.monotonic() - began
    assert (code, len(checkpoints(run))) == (130, 1), output
    assert f"stopped; resume with:  murmur train --resume --run {run}" in output
    return {"over s": took}


def closed_terminal(folder: Path) -> dict[str, Any]:
    """A terminal that is closed: the last checkpoint is there."""
    run = folder / "run"
    terminal, own = pty.openpty()
    process = subprocess.Popen(
        command(run),
        stdin=own,
        stdout=own,
        stderr=own,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(own)

    def learned() -> bool:
        os.read(terminal, 1 << 16)
        return updates(run) >= 2

    try:
        wait_until(learned, "updates", 90)
        os.close(terminal)
        assert process.wait(90) == 130
    finally:
        process.kill()
        process.wait()
    assert len(checkpoints(run)) == 1
    return {}


def full_disk_at_the_end(folder: Path) -> dict[str, Any]:
    """Ctrl-C on a full disk: code 2, and the last line says that nothing was saved."""
    with small_disk(folder / "disk") as disk:
        if disk is None:
            return {"skipped": "no right to mount"}
        with training(disk / "run") as process:
            with suppress(OSError):
                fill(disk / "rest")
            process.send_signal(signal.SIGINT)
            code, output = ended(process)
    last = output.splitlines()[-1]
    assert code == 2, output
    assert re.match("error: the run stopped without a last checkpoint, all of it is lost: ", last)
    assert "No space left on device" in last, output
    assert "stopped; resume" not in output
    return {}


def deleted_lock(folder: Path) -> dict[str, Any]:
    """A deleted lock file is made again; where another process took it, the run stops."""
    run = folder / "run"
    with training(run, learner__checkpoint_every_updates=2) as process:
        (run / "run.lock").unlink()
        wait_until((run / "run.lock").exists, "another lock file")
        again = subprocess.run(command(run), capture_output=True, text=True, check=False)
        assert again.returncode == 2
        assert "is in use by process" in again.stderr
        (run / "run.lock").unlink()
        (run / "run.lock").touch()
        with (run / "run.lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            code, output = ended(process)
    assert code == 2, output
    assert "run.lock was deleted while the run trains: run folder" in output.splitlines()[-1]
    return {}


def moved_folder(folder: Path) -> dict[str, Any]:
    """A run folder that is moved: the run stops, its last checkpoint lies in the moved folder."""
    run, moved = folder / "run", folder / "moved"
    with training(run) as process:
        run.rename(moved)
        code, output = ended(process)
    assert (code, len(checkpoints(moved)), run.exists()) == (2, 1, False), output
    last = output.splitlines()[-1]
    assert f"was moved to {moved} while the run trains" in last
    assert f"murmur train --resume --run {moved}" in last
    return {}


def evaluation_without_end(folder: Path) -> dict[str, Any]:
    """A policy that never ends its episode: said with the key, then the run ends without it."""
    (folder / "still.py").write_text(STILL)
    run = folder / "run"
    (folder / "still.yaml").write_text(STILL_CONFIG)
    items = {"run.max_updates": 1, "evaluation.every_updates": 1, "evaluation.episodes": 2}
    settings = {key.replace(".", "__"): value for key, value in items.items()}
    done = subprocess.run(
        command(run, "still.yaml", **settings),
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    log = (run / "logs/evaluator.log").read_text()
    assert done.returncode == 0, done.stdout + done.stderr
    words = (
        "evaluation given up: .* has no end after .* steps, .* set environment.max_episode_steps"
    )
    assert re.search(words, log), log
    assert "given up by its evaluator" in done.stdout
    return {}


def proxies(folder: Path) -> dict[str, Any]:
    """A run on one machine whose environment names proxies and another program's metrics folder."""
    variables = dict.fromkeys(("http_proxy", "https_proxy", "grpc_proxy"), "http://127.0.0.1:9")
    train_once(folder / "run", {**variables, "PROMETHEUS_MULTIPROC_DIR": str(folder / "none")})
    return {}


def train_once(run: Path, variables: Mapping[str, str] | None = None, **settings: object) -> None:
    """A run of two updates must be complete."""
    done = subprocess.run(
        command(run, run__max_updates=2, **settings),
        env=os.environ | dict(variables or {}),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 updates" in done.stdout


CASES = [
    Case("hang-up", hang_up),
    Case("terminal closed", closed_terminal),
    Case("disk full at the end", full_disk_at_the_end),
    Case("lock deleted", deleted_lock),
    Case("run folder moved", moved_folder),
    Case("evaluation without end", evaluation_without_end),
    Case("proxy in the environment", proxies),
]
