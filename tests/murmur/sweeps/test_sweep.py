"""Real sweeps: `murmur sweep` in a process, its runs as processes of their own."""

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

pytestmark = pytest.mark.system

TINY = """
environment: {name: matrix, episode_steps: 5}
env_server: {envs_per_worker: 8}
algorithm: {name: mappo, batch_size: 80, batch_number: 1, data_passes: 1}
network: {name: mlp, hidden: [8]}
run: {max_updates: 2}
learner: {pipeline: sync, device: cpu, log_every_s: 0.001, checkpoint_every_updates: 2}
"""


class Sweep:
    """A `murmur sweep` under way, in a folder of its own."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder
        environment = {k: v for k, v in os.environ.items() if not k.startswith("MURMUR")}
        self._output = (folder.parent / "sweep.out").open("a+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "murmur", "sweep", *arguments],
            cwd=folder.parent,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env=environment | {"COLUMNS": "150", "PYTHONPATH": os.getcwd()},
        )

    def wait(self, timeout_s: float = 800) -> int:
        return self.process.wait(timeout_s)

    def output(self) -> str:
        self._output.seek(0)
        return self._output.read()

    def index(self) -> dict[str, dict[str, Any]]:
        """Entries of the index by the name of the run."""
        file = self.folder / "sweep.json"
        runs = json.loads(file.read_text())["runs"] if file.exists() else []
        return {run["name"]: run for run in runs}

    def states(self) -> dict[str, str]:
        return {name: run["state"] for name, run in self.index().items()}

    def until(self, condition: Callable[[], bool], timeout_s: float = 200) -> None:
        def met() -> bool:
            assert self.process.poll() is None, self.output()
            return condition()

        wait_until(met, self.output, timeout_s)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._output.close()


@pytest.fixture
def sweep(tmp_path: Path) -> Iterator[Callable[..., Sweep]]:
    """Start sweeps of the tiny configuration, in the folder `sweep`."""
    (tmp_path / "tiny.yaml").write_text(TINY)
    started: list[Sweep] = []

    def start(*arguments: str) -> Sweep:
        started.append(Sweep(tmp_path / "sweep", *arguments))
        return started[-1]

    yield start
    for one in started:
        one.close()


def test_a_failed_run_is_named_and_the_others_continue(sweep: Callable[..., Sweep]) -> None:
    limits = "learner.memory_limit_gib=1.0e-9,0"
    arguments = ("tiny.yaml", "--vary", limits, "--folder", "sweep", "--parallel", "2")
    run = sweep(*arguments)
    assert run.wait() == 1, run.output()
    assert run.states() == {"0-seed-1": "complete", "1e-09-seed-1": "failed"}, run.output()
    words = run.index()["1e-09-seed-1"]["message"]
    assert "learner.memory_limit_gib allows" in words
    shown = run.output()
    assert f"1e-09-seed-1 failed: {words[:60]}" in shown
    assert "2 runs at once (as set)" in shown
    assert run.index()["0-seed-1"]["last"] is not None
    assert (run.folder / "0-seed-1" / "checkpoints" / "update-000002.pt").is_file()


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_killed_sweep_resumes(sweep: Callable[..., Sweep]) -> None:
    more = ("--set", "run.max_updates=100", "--set", "algorithm.batch_size=800")
    first = sweep("tiny.yaml", "--seeds", "3", *more, "--folder", "sweep", "--parallel", "1")
    names = [f"tiny-seed-{seed}" for seed in (1, 2, 3)]

    def second_saved() -> bool:
        complete = first.states().get(names[0]) == "complete"
        return complete and any((first.folder / names[1]).glob("checkpoints/update-*.pt"))

    first.until(second_saved)
    family = psutil.Process(first.process.pid).children(recursive=True)
    assert family
    first.process.send_signal(signal.SIGKILL)
    assert psutil.wait_procs(family, timeout=30)[1] == []  # nothing is left behind
    progress = first.folder / names[0] / "progress.jsonl"
    before = progress.read_bytes()
    begun = json.loads((first.folder / names[1] / "command.json").read_text())["started"]
    assert first.states() == dict(zip(names, ("complete", "running", "waiting"), strict=True))

    second = sweep("--resume", "sweep", "--parallel", "2")
    assert second.wait() == 0, second.output()
    assert set(second.states().values()) == {"complete"}
    assert progress.read_bytes() == before  # a complete run is not repeated
    assert json.loads((first.folder / names[1] / "command.json").read_text())["started"] == begun
    log = (first.folder / "logs" / f"{names[1]}.log").read_text()
    assert log.count("training") == 2  # begun once, resumed once
    assert "sweep of 3 runs, 1 of them complete before" in second.output()


@pytest.mark.long
def test_an_interrupted_sweep_saves_and_resumes(sweep: Callable[..., Sweep]) -> None:
    more = ("--set", "run.max_updates=100000", "--set", "learner.checkpoint_every_updates=100000")
    first = sweep("tiny.yaml", *more, "--folder", "sweep")
    progress = first.folder / "tiny-seed-1" / "progress.jsonl"
    first.until(lambda: progress.is_file() and progress.stat().st_size > 2000)
    first.process.send_signal(signal.SIGINT)
    assert first.wait() == 130
    assert first.states() == {"tiny-seed-1": "stopped"}
    assert list((first.folder / "tiny-seed-1" / "checkpoints").glob("update-*.pt"))
    assert "stopped; continue with:  murmur sweep --resume sweep" in first.output()


@pytest.mark.long
def test_a_run_of_a_sweep_equals_one_of_train(sweep: Callable[..., Sweep], tmp_path: Path) -> None:
    run = sweep("tiny.yaml", "--set", "run.max_updates=6", "--folder", "sweep")
    assert run.wait() == 0, run.output()
    options = ["--set", "run.max_updates=6", "--run", str(tmp_path / "alone")]
    command = [sys.executable, "-m", "murmur", "train", str(tmp_path / "tiny.yaml"), *options]
    subprocess.run(command, check=True, capture_output=True, timeout=200)

    def losses(folder: Path) -> dict[int, Any]:
        lines = map(json.loads, (folder / "progress.jsonl").read_text().splitlines())
        return {r["updates"]: r["losses"] for r in lines if r["kind"] == "progress"}

    alone, swept = losses(tmp_path / "alone"), losses(run.folder / "tiny-seed-1")
    both = alone.keys() & swept.keys()
    assert 6 in both
    assert {k: alone[k] for k in both} == {k: swept[k] for k in both}
