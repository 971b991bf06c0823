"""Jobs of `murmur slurm` on a real Slurm: trained, saved, queued again, resumed, complete."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from murmur.doctor.machine import ROOT
from tests.cluster.conftest import NODES, Cluster
from tests.waiting import wait_until

pytestmark = [pytest.mark.long, pytest.mark.system, pytest.mark.timeout(600)]

PACED = {
    "name": "gymnasium",
    "factory": "tests.system.paced_environment:Paced",
    "arguments": {"delay_ms": 2},
    "metrics": ["score"],
}
EXPERIMENT = {
    "environment": PACED,
    "env_server": {"num_workers": 1, "envs_per_worker": 8, "sessions_per_worker": 2},
    "algorithm": {"name": "coma", "batch_size": 60, "batch_number": 4, "data_passes": 2},
    "network": {"name": "mlp", "hidden": [32]},
    "learner": {"num_threads": 1, "checkpoint_every_updates": 3, "log_every_s": 0.000001},
    "evaluation": {"every_updates": 5, "episodes": 2},
}


class Job:
    """A submitted job."""

    def __init__(self, cluster: Cluster, folder: Path, *options: str) -> None:
        self.cluster, self.run, self.config = cluster, folder / "run", folder / "experiment.yaml"
        self.write_config(0)
        text = [sys.executable, "-m", "murmur", "slurm", str(self.config), "--run", str(self.run)]
        made = subprocess.run(
            [
                *text,
                *("--gpus=0", "--cpus-per-rank=1", "--cpus-per-node=1", "--sbatch=--time=30"),
                *options,
            ],
            env=cluster.environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert made.returncode == 0, made.stderr
        self.id = cluster.command("sbatch", "--parsable", str(self.run / "job.sh"))
        assert self.id.isdecimal(), cluster.logs()

    def write_config(self, max_updates: int) -> None:
        data = EXPERIMENT | {"run": {"max_updates": max_updates}}
        self.config.write_text(yaml.safe_dump(data))

    def state(self, key: str = "JobState") -> str:
        shown = self.cluster.command("scontrol", "show", "job", self.id)
        return "".join(re.findall(rf"\b{key}=(\S+)", shown)[:1])

    def states(self) -> set[str]:
        """Of all components; empty when the job has ended."""
        shown = self.cluster.command("squeue", "-h", "-j", self.id, "-o", "%T")
        return set(shown.split())

    def log(self, name: str) -> str:
        file = self.run / "logs" / name
        return file.read_text(errors="replace") if file.exists() else ""

    def lines(self, kind: str = "progress") -> list[dict[str, int]]:
        file = self.run / "progress.jsonl"
        text = file.read_text() if file.exists() else ""
        whole = [line for line in text.splitlines(keepends=True) if line[-1] == "\n"]
        return [line for line in map(json.loads, whole) if line["kind"] == kind]

    def updates(self) -> int:
        lines = self.lines()
        return lines[-1]["updates"] if lines else 0

    def resumed_at(self) -> list[int]:
        return [int(n) for n in re.findall(r"resumed .*: (\d+) updates", self.log("learner-0.log"))]

    def text(self) -> str:
        logs = "\n".join(f"== {f.name}\n{f.read_text()[-3000:]}" for f in self.logs())
        return f"{self.state()} {logs}\n{self.cluster.logs()}"

    def logs(self) -> list[Path]:
        return sorted((self.run / "logs").glob("*.log"))

    def processes(self, *text: str, program: str = "") -> list[int]:
        """Processes, of this program or of any, that name the configuration and these text."""
        found = []
        for process in psutil.process_iter():
            try:
                line = process.cmdline()
            except psutil.Error:  # it ended while we looked
                continue
            if program and line[:1] != [program]:
                continue
            if str(self.config) in line and all(word in line for word in text):
                found.append(process.pid)
        return found

    def begin_again(self, starts: int) -> None:
        """Wait until the job is queued again, and skip the pause before its next start."""
        wait_until(lambda: self.state("Restarts") == str(starts), self.text, 120)
        wait_until(lambda: self.states() == {"PENDING"}, self.text, 120)
        queued = int(time.time())
        # Nodes refuse a start within the second of the job's last end, as a message that is late.
        wait_until(lambda: time.time() >= queued + 2, "the next second")
        self.cluster.command("scontrol", "update", f"JobId={self.id}", "StartTime=now")


@pytest.fixture
def submit(cluster: Cluster, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs = []

    def begin(*options: str) -> Job:
        jobs.append(Job(cluster, tmp_path, *options))
        return jobs[-1]

    yield begin
    for job in jobs:
        cluster.command("scancel", job.id)
        wait_until(lambda job=job: not job.states(), job.text, 60)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_job_is_saved_queued_again_and_resumed(
    cluster: Cluster, submit: Callable[..., Job], ranks: int
) -> None:
    job = submit("--env-nodes=1", f"--ranks={ranks}")
    wait_until(lambda: job.updates() >= 5, job.text, 180)
    certs = job.run / f"certs-{job.id}"
    assert certs.stat().st_mode & 0o777 == 0o700
    # Saved on a signal: nothing is lost.
    cluster.command("scancel", "--batch", "--signal=USR1", job.id)
    job.begin_again(1)
    saved = job.updates()
    assert not certs.exists()
    wait_until(lambda: job.updates() >= saved + 4, job.text, 180)
    assert job.resumed_at() == [saved]
    # Requeued from outside: it resumes from a checkpoint, and now the run has an end.
    before = job.updates()
    job.write_config(before + 9)
    cluster.command("scontrol", "requeue", job.id)
    job.begin_again(2)
    wait_until(lambda: job.state() == "COMPLETED", job.text, 180)
    assert job.state("ExitCode") == "0:0"
    assert job.updates() == before + 9
    assert len(job.resumed_at()) == 2
    assert saved <= job.resumed_at()[1] <= job.updates()
    assert job.lines("evaluation")
    assert "stopped: " in job.log("env-server-0.log")
    assert len(list(job.run.glob("logs/learner-*.log"))) == ranks
    assert not certs.exists()
    assert job.processes() == []


def test_a_job_restarts_what_dies_and_saves_before_its_limit(
    cluster: Cluster, submit: Callable[..., Job]
) -> None:
    job = submit("--env-nodes=0", "--sbatch=--signal=B:USR1@60")
    wait_until(lambda: job.updates() >= 5, job.text, 180)
    # The log names both as they end, and the run continues from a checkpoint.
    os.kill(json.loads((job.run / "learner.json").read_text())["pid"], signal.SIGKILL)
    wait_until(lambda: len(job.resumed_at()) == 1, job.text, 180)
    (server,) = job.processes("env-server", "--first-worker", program=sys.executable)
    os.kill(server, signal.SIGKILL)
    log = f"job-{job.id}.log"
    wait_until(lambda: "env-server-0 ended with exit code 137" in job.log(log), job.text, 60)
    assert "the learner ended with exit code 137: restart 1 of 3" in job.log(log)
    reached = job.updates()
    wait_until(lambda: job.updates() >= reached + 4, job.text, 180)
    hours, minutes, _ = (int(part) for part in job.state("RunTime").split(":"))
    limit = f"TimeLimit={60 * hours + minutes + 2}"
    cluster.command("scontrol", "update", f"JobId={job.id}", limit)
    wait_until(lambda: job.state("Restarts") == "1", job.text, 180)
    assert "SIGUSR1: the learner saves" in job.log(log)
    saved = job.updates()
    cluster.command("scontrol", "update", f"JobId={job.id}", "TimeLimit=30")
    job.begin_again(1)
    wait_until(lambda: job.updates() > saved, job.text, 180)
    assert job.resumed_at()[-1] == saved
    cluster.command("scancel", job.id)
    wait_until(lambda: job.state() == "CANCELLED", job.text, 60)
    wait_until(lambda: job.processes() == [], job.text, 60)


# Says what Slurm gave it. Servers stay until they are told to stop.
STAND_IN = """#!/bin/bash
trap 'exit 0' USR1
if [[ $1 == certs ]]; then mkdir "$2"; exit; fi
ranks=$SLURMD_NODENAME/${CUDA_VISIBLE_DEVICES-}/${RANK-}/${WORLD_SIZE-}/${LOCAL_RANK-}
echo "$1 $ranks/$MASTER_ADDR $*" >> "$(dirname "$0")/calls"
if [[ $1 == env-server ]]; then while true; do sleep 0.1; done; fi
"""


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--gpus=2", "--env-nodes=1"], "a0 a1, b"),
        (["--gpus=4", "--gpus-per-node=2", "--env-nodes=0"], "a0 a1 b0 b1, a b"),
    ],
    ids=["two GPUs beside a server's node", "two nodes of two GPUs"],
)
def test_each_gpu_has_a_rank_and_each_node_its_server(
    cluster: Cluster, tmp_path: Path, options: list[str], expected: str
) -> None:
    file = tmp_path / "murmur"
    file.write_text(STAND_IN)
    file.chmod(0o755)
    text = [sys.executable, "-m", "murmur", "slurm", "spread", "--run", str(tmp_path / "run")]
    sizes = ["--cpus-per-rank=1", "--cpus-per-node=1", "--output", str(tmp_path / "job.sh")]
    subprocess.run([*text, *sizes, *options], env=cluster.environment, cwd=tmp_path, check=True)
    text = (tmp_path / "job.sh").read_text()
    text = re.sub(r"^murmur=.*$", f"murmur=({file})", text, flags=re.MULTILINE)
    (tmp_path / "job.sh").write_text(text)
    job = cluster.command("sbatch", "--parsable", str(tmp_path / "job.sh"))
    wait_until(
        lambda: "JobState=COMPLETED" in cluster.command("scontrol", "show", "job", job),
        lambda: f"{cluster.command('scontrol', 'show', 'job', job)}\n{cluster.logs()}",
        120,
    )
    calls = sorted((tmp_path / "calls").read_text().splitlines())
    ranks = [c.split()[1].split("/") for c in calls if c.startswith("learner")]
    servers = [c for c in calls if c.startswith("env-server") and "--evaluate" not in c]
    ranks.sort(key=lambda rank: int(rank[2]))
    names = {ranks[0][0]: "a"}  # of the nodes
    names |= {node: "b" for node in NODES if node not in names}
    own = [c.split()[1].split("/")[0] for c in servers]
    found = " ".join(names[node] + local for node, _, _, _, local, _ in ranks)
    assert f"{found}, {' '.join(sorted(names[node] for node in own))}" == expected
    size = len(ranks)
    assert [rank[2:4] for rank in ranks] == [[str(r), str(size)] for r in range(size)]
    assert {rank[1] for rank in ranks} == {"0,1"}  # LOCAL_RANK chooses among the GPUs of a node
    assert {rank[5] for rank in ranks} == {ranks[0][0]}  # all meet at the first node
    for call in servers:
        (addresses,) = re.findall(r"env_server\.learner=(\S+)", call)
        first = int(addresses.split(",")[0].rpartition(":")[2])
        assert addresses.split(",") == [f"{r[0]}:{first + i}" for i, r in enumerate(ranks)]
