"""Real runs: `murmur train` in processes of its own, over real sockets."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.waiting import wait_until

SPREAD = """
environment: {name: spread, episode_steps: 10}
env_server: {num_workers: 1, envs_per_worker: 8, sessions_per_worker: 2, metrics_port: 0}
algorithm: {name: coma, batch_size: 60, batch_number: 4, data_passes: 2}
network: {name: mlp, hidden: [32]}
learner: {port: 0, metrics_port: 0, log_every_s: 0.000001, checkpoint_every_updates: 3}
"""

# For trainings that are looked at from outside: one of spread would fill two cores meanwhile.
PACED = (
    "{name: gymnasium, factory: 'tests.system.paced_environment:Paced', "
    "arguments: {delay_ms: 2}, metrics: [score]}"
)


class Training:
    """A `murmur train` under way."""

    def __init__(self, config: Path, run: Path, arguments: list[str]) -> None:
        self.run = run
        environment = {k: v for k, v in os.environ.items() if not k.startswith("MURMUR")}
        self._output = (run.parent / f"{run.name}.out").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "murmur", "train", str(config), "--run", str(run), *arguments],
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env=environment,
        )

    def wait(self, timeout_s: float = 240) -> int:
        return self.process.wait(timeout_s)

    def output(self) -> str:
        self._output.seek(0)
        return self._output.read()

    def lines(self, kind: str = "progress") -> list[dict[str, Any]]:
        path = self.run / "progress.jsonl"
        if not path.exists():
            return []
        whole = [line for line in path.read_text().splitlines(keepends=True) if line[-1] == "\n"]
        return [d for d in map(json.loads, whole) if d["kind"] == kind]

    def losses(self) -> dict[int, dict[str, float]]:
        """Update -> its losses."""
        return {d["updates"]: d["losses"] for d in self.lines()}

    def updates(self) -> int:
        lines = self.lines()
        return lines[-1]["updates"] if lines else 0

    def until(self, condition: Callable[[], bool], timeout_s: float = 60) -> None:
        """Poll for a condition; fail with the run's output."""

        def met() -> bool:
            assert self.process.poll() is None, self.output()
            return condition()

        wait_until(met, self.output, timeout_s)

    def learner_pid(self) -> int:
        pid: int = json.loads((self.run / "learner.json").read_text())["pid"]
        return pid

    def workers(self) -> list[psutil.Process]:
        """The processes that step environments: children of the environment server."""
        try:
            return [
                worker
                for server in psutil.Process(self.process.pid).children()
                if "env-server" in server.cmdline()
                for worker in server.children()
                if "spawn_main" in " ".join(worker.cmdline())
            ]
        except psutil.Error:  # one of them ended while we looked
            return []

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._output.close()


@pytest.fixture
def train(tmp_path: Path) -> Iterator[Callable[..., Training]]:
    """Start trainings: train("name", "--set", "run.max_updates=5"), of spread or another."""
    config = tmp_path / "spread.yaml"
    config.write_text(SPREAD)
    started: list[Training] = []

    def start(name: str, *arguments: str, environment: str = "", whole: str = "") -> Training:
        file = config
        if whole:
            file = tmp_path / "whole.yaml"
            file.write_text(whole)
        if environment:
            file = tmp_path / "other.yaml"
            file.write_text(f"extends: {config}\nenvironment: {environment}\n")
        started.append(Training(file, tmp_path / name, list(arguments)))
        return started[-1]

    yield start
    for training in started:
        training.close()
