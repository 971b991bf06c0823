"""A rank is killed: the group ends with a message, restarts and continues; each row is counted."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from murmur.bench import run_benchmark
from murmur.benchmarks.effort import Effort
from murmur.learner_service.checkpoint import files
from murmur.learner_service.checkpoint.folder import CheckpointFolder
from murmur.learner_service.telemetry.persistent_counters import PersistentCounters
from murmur.runs.child import murmur_command
from murmur.runs.run_folder import RunFolder
from tests.chaos.kills_ranks import RankStack, experiment
from tests.chaos.stack import free_port
from tests.system.conftest import SPREAD, Training
from tests.waiting import wait_until

pytestmark = [pytest.mark.long, pytest.mark.system]


def pid(run: Path, rank: int) -> int:
    """The process of a rank; 0 while it does not listen."""
    found = RunFolder(run).process(f"learner-{rank}.json" if rank else "learner.json")
    return found or 0


def require_balance(run: Path) -> None:
    """By the counters that outlive processes, and by the last checkpoint, of each rank."""
    latest = CheckpointFolder(run, 1).find("latest").name
    for rank in range(2):
        state = files.load(run / "checkpoints" / (f"rank{rank}-{latest}" if rank else latest))
        p = state["progress"]
        held = sum(u["arrays"]["step_type"].shape[1] * u["rows"] for u in state["storage"]["ready"])
        dropped = sum(p["rows_dropped"].values())
        assert p["rows_received"] == p["rows_trained"] + dropped + held
        counted: dict[str, float] = {}
        for name, count in (
            PersistentCounters(run / (f"counters-{rank}.bin" if rank else "counters.bin"))
            .items()
            .items()
        ):
            metric = json.loads(name)[0]
            counted[metric] = counted.get(metric, 0) + count
        assert counted["rows_received"] == counted["rows_trained"] + counted["rows_dropped"] + held
        assert counted["rows_trained"] - counted["rows_undone"] == p["rows_trained"]


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Callable[..., Training]]:
    """Start `murmur train --learners 2`."""
    config = tmp_path / "spread.yaml"
    config.write_text(SPREAD.replace("num_workers: 1", "num_workers: 2"))
    started: list[Training] = []

    def start(*arguments: str) -> Training:
        started.append(Training(config, tmp_path / "run", ["--learners", "2", *arguments]))
        return started[-1]

    yield start
    for training in started:
        training.close()


def kill(training: Training, rank: int) -> None:
    """Kill a rank, and wait until all have started again and continue."""
    before = training.updates()
    training.until(lambda: training.updates() > before + 6)
    pids = [pid(training.run, r) for r in range(2)]
    os.kill(pids[rank], signal.SIGKILL)
    training.until(lambda: all(pid(training.run, r) not in (0, pids[r]) for r in range(2)))
    at = len(training.lines())
    training.until(lambda: len(training.lines()) > at + 3)


def test_a_killed_rank_is_started_again_with_the_others(two: Callable[..., Training]) -> None:
    training = two("--set", "run.max_updates=100000")
    for rank in (1, 0):
        kill(training, rank)
    training.process.send_signal(signal.SIGINT)
    assert training.wait() == 130
    log = (training.run / "logs/learner.log").read_text()
    assert re.search(r"ERROR rank 0 of 2: another rank is gone", log)
    assert re.search(r"ERROR rank 1 of 2: another rank is gone", log)
    require_balance(training.run)


def test_random_kills_of_ranks_lose_count_of_no_row(tmp_path: Path) -> None:
    """The smoke form of `murmur bench kills_ranks`, and that its result is kept."""
    file = run_benchmark(
        "kills_ranks", Effort.SMOKE, Console(), save=True, dirty=True, folder=tmp_path
    )
    assert file is not None
    result = json.loads(file.read_text())["result"]
    assert result["kills"] == 1
    assert result["time until both train again, s"]["all"]["worst"] > 0


def test_a_paused_rank_is_noticed_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "3")  # s, for a rank that is paused
    with RankStack(tmp_path, experiment()) as stack:
        learners = stack.start_ranks()
        stack.start_server(address=stack.server_address)
        wait_until(stack.updated, stack.log_end, 180)
        before = stack.ranks()
        before[1].suspend()
        wait_until(lambda: len(set(stack.ranks()) - set(before)) == 2, stack.log_end, 120)
        wait_until(stack.updated, stack.log_end, 180)
        assert re.search(r"rank 0 of 2: no sign of life of rank 1 for 20 s", learners.text())


@contextlib.contextmanager
def env_server(config: Path, run: Path) -> Iterator[None]:
    """One that finds both ranks by the ports they have written."""
    wait_until(lambda: pid(run, 0) and pid(run, 1), timeout_s=120)
    files = (run / f"{name}.json" for name in ("learner", "learner-1"))
    addresses = ",".join(f"127.0.0.1:{json.loads(file.read_text())['port']}" for file in files)
    connect = ["--set", f"env_server.learner={addresses}"]
    command = [sys.executable, "-m", "murmur", "env-server", str(config), *connect]
    with subprocess.Popen(command, env=plain_environment()) as server:
        try:
            yield
        finally:
            server.terminate()


def plain_environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith("MURMUR")}


Torchrun = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def torchrun(tmp_path: Path) -> Iterator[Torchrun]:
    """Start torchrun, of a run in tmp_path."""
    config = tmp_path / "spread.yaml"
    config.write_text(SPREAD.replace("num_workers: 1", "num_workers: 2"))
    learner = ["murmur", "learner", str(config), "--run", str(tmp_path / "run"), "--auto-resume"]
    started: list[subprocess.Popen[bytes]] = []

    def start(options: list[str], *settings: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "torch.distributed.run", "--max-restarts=3", *options]
        command += ["-m", "--", *learner, *(f"--set={setting}" for setting in settings)]
        started.append(subprocess.Popen(command, env=plain_environment()))
        return started[-1]

    yield start
    for process in started:
        process.terminate()
    for process in started:
        process.wait(60)


def test_plain_torchrun_starts_the_ranks_again(tmp_path: Path, torchrun: Torchrun) -> None:
    run = tmp_path / "run"
    learners = torchrun(["--standalone", "--nproc-per-node=2"], "run.max_updates=60")
    with env_server(tmp_path / "spread.yaml", run):
        wait_until(lambda: any((run / "checkpoints").glob("update-*.pt")))
        psutil.Process(pid(run, 1)).kill()
        assert learners.wait(120) == 0
    assert RunFolder(run).checkpoint("latest").name == "update-000060.pt"
    require_balance(run)


def test_machines_that_stop_together_continue_together(tmp_path: Path, torchrun: Torchrun) -> None:
    """A restart of all machines, each with a torchrun of its own, loses no update."""
    run = tmp_path / "run"
    meet = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=one"]
    options = ["--nnodes=2", "--nproc-per-node=1", *meet]

    def latest() -> str:
        return CheckpointFolder(run, 1).find("latest").name

    both = [torchrun(options), torchrun(options)]
    with env_server(tmp_path / "spread.yaml", run):
        wait_until(lambda: any((run / "checkpoints").glob("update-*.pt")))
        before = {pid(run, 0), pid(run, 1)}
        for machine in both:
            machine.terminate()
        for machine in both:
            machine.wait(60)
    stopped = latest()
    progress = (run / "progress.jsonl").read_text().splitlines()[-1]
    assert f"update-{json.loads(progress)['updates']:06d}.pt" == stopped  # nothing is undone
    both = [torchrun(options), torchrun(options)]
    wait_until(lambda: not before & {pid(run, 0), pid(run, 1), 0}, timeout_s=120)
    with env_server(tmp_path / "spread.yaml", run):
        wait_until(lambda: latest() > stopped)
    require_balance(run)


def test_ranks_of_plain_variables_start_again(tmp_path: Path) -> None:
    """As docker-compose.yml and Slurm start them: no torchrun; each is started again by itself."""
    config, run, port = tmp_path / "spread.yaml", tmp_path / "run", str(free_port())
    config.write_text(SPREAD.replace("num_workers: 1", "num_workers: 2"))
    learner = ["learner", str(config), "--run", str(run), "--auto-resume"]
    command = [sys.executable, "-m", "tests.chaos.restarter", *murmur_command(*learner)]
    meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    own = {**meeting, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    with contextlib.ExitStack() as stack:
        for rank in range(2):
            environment = {**plain_environment(), **own, "RANK": str(rank)}
            machine = subprocess.Popen([*command, "--set=run.max_updates=100000"], env=environment)
            stack.callback(machine.wait, 60)
            stack.callback(machine.terminate)
        stack.enter_context(env_server(config, run))
        for rank in (1, 0):
            wait_until(lambda: any((run / "checkpoints").glob("update-*.pt")), timeout_s=120)
            before = CheckpointFolder(run, 1).find("latest").name
            psutil.Process(pid(run, rank)).kill()
            wait_until(
                lambda name=before: CheckpointFolder(run, 1).find("latest").name > name,  # type: ignore[misc]
                timeout_s=180,
            )
    require_balance(run)
