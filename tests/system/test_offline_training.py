"""Whole runs that begin with a dataset, in turn equal bit for bit, and those with nothing else."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from murmur.cli.results import record
from tests.system.conftest import Training

pytestmark = [pytest.mark.system, pytest.mark.long]

EXPERIMENT = """
environment: {{name: spread}}
env_server: {{num_workers: 1, envs_per_worker: 8, sessions_per_worker: 2, metrics_port: 0}}
algorithm: {algorithm}
imitation: {{dataset: '{cloned}', updates: 5}}
network: {{name: mlp, hidden: [16]}}
learner: {{port: 0, metrics_port: 0, pipeline: sync, log_every_s: 0.000001}}
"""
CLONING = "{name: mappo, batch_size: 60, batch_number: 2, unroll_steps: 5}"
FILLED = (
    "{{name: qmix, replay: {{capacity_rows: 2000, start_rows: 64, batch_size: 32, "
    "update_interval: 64, unroll_steps: 4, dataset: '{folder}'}}}}"
)


def recorded(kind: str, folder: Path) -> tuple[Path, Path]:
    """Record episodes; write the configuration of a run that clones them or is filled with them.

    Returns:
        configuration file and folder of the dataset, both in `folder`.
    """
    data, config = folder / "data", folder / "spread.yaml"
    record(out=data, baseline="assignment", config="spread", episodes=16)
    algorithm = CLONING if kind == "cloning" else FILLED.format(folder=data)
    cloned = data if kind == "cloning" else ""
    config.write_text(EXPERIMENT.format(algorithm=algorithm, cloned=cloned))
    return config, data


@pytest.fixture
def started() -> Iterator[list[Training]]:
    runs: list[Training] = []
    yield runs
    for run in runs:
        run.close()


@pytest.mark.parametrize("kind", ["cloning", "filled"])
def test_runs_are_equal_and_resume_to_the_bit(
    kind: str, tmp_path: Path, started: list[Training]
) -> None:
    config, _ = recorded(kind, tmp_path)

    def train(run: str, updates: int, *more: str) -> Training:
        limit = ["--set", f"run.max_updates={updates}"]
        started.append(Training(config, tmp_path / run, [*limit, *more]))
        assert started[-1].wait() == 0, started[-1].output()
        return started[-1]

    whole = train("whole", 8).losses()
    train("halves", 3)  # in the middle of cloning
    halves = train("halves", 8, "--resume")
    assert sorted(whole) == list(range(1, 9))
    assert halves.losses() == whole
    assert all(rows >= 0 for rows in halves.lines()[-1]["rows_dropped"].values())


@pytest.mark.parametrize("kind", ["cloning", "filled"])
def test_a_run_without_environments_is_whole(
    kind: str, tmp_path: Path, started: list[Training]
) -> None:
    config, folder = recorded(kind, tmp_path)
    wanted = ("run.offline=true", "run.max_updates=8", "evaluation.every_updates=4")
    settings = [part for item in wanted for part in ("--set", item)]
    runs = []
    for name in ("run", "again"):
        started.append(Training(config, tmp_path / name, settings))
        assert started[-1].wait() == 0, started[-1].output()
        runs.append(started[-1])
    run = runs[0]
    assert runs[1].losses() == run.losses()
    assert f"no environments: learns from {folder}" in run.output()
    assert f"rows of {folder}" in " ".join(run.output().split())
    assert not (run.run / "logs/env-server.log").exists()
    last = run.lines()[-1]
    assert last["rows_received"] == 0 < last["env_steps"]
    assert run.lines("evaluation")[-1]["updates"] == 8
    assert (run.run / "checkpoints/best.pt").is_file()
    for command, code, words in (
        (("evaluate", str(run.run), "--episodes", "4"), 0, "return"),
        (("doctor", str(run.run)), 2, "learns from a dataset alone"),
        (("env-server", str(run.run / "config.yaml")), 2, "leave the environment server out"),
        (("plan", str(run.run / "config.yaml")), 2, "nothing is forecast"),
    ):
        command_line = [sys.executable, "-m", "murmur", *command]
        found = subprocess.run(command_line, capture_output=True, text=True, timeout=240)
        assert found.returncode == code, found.stderr
        assert words in " ".join((found.stdout + found.stderr).split())


def test_a_run_from_its_best_reads_the_dataset_again(
    tmp_path: Path, started: list[Training]
) -> None:
    config, _ = recorded("filled", tmp_path)
    run = tmp_path / "run"
    evaluated = "--set", "evaluation.every_updates=3", "--set", "evaluation.episodes=1"
    started.append(Training(config, run, [*evaluated, "--set", "run.max_updates=3"]))
    assert started[-1].wait() == 0, started[-1].output()
    (run / "checkpoints/best.pt").replace(run / "checkpoints/update-000003.pt")
    started.append(Training(config, run, ["--set", "run.max_updates=6", "--resume"]))
    assert started[-1].wait() == 0, started[-1].output()
    log = (run / "logs/learner.log").read_text()
    assert "update-000003.pt holds no replay: it starts as that of a new run" in log
    assert log.count("replay: begins with 400 transitions of 16 episodes") == 2
