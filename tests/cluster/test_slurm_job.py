"""Jobs of `murmur slurm` on a real Slurm: trained, saved, queued again, resumed, complete."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from murmur.machine import ROOT
from tests.cluster.conftest import Cluster
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
        words = [sys.executable, "-m", "murmur", "slurm", str(self.config), "--run", str(self.run)]
        made = subprocess.run(
            [*words, "--gpus=0", "--cpus-per-rank=1", "--cpus-per-node=1", "--time=30", *options],
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

    def words(self) -> str:
        logs = "\n".join(f"== {f.name}\n{f.read_text()[-3000:]}" for f in self.logs())
        return f"{self.state()} {logs}\n{self.cluster.logs()}"

    def logs(self) -> list[Path]:
        return sorted((self.run / "logs").glob("*.log"))

    def begin_again(self, starts: int) -> None:
        """Wait until the job is queued again, and skip the pause before its next start."""
        wait_until(lambda: self.state("Restarts") == str(starts), self.words, 120)
        wait_until(lambda: self.state() == "PENDING", self.words, 120)
        self.cluster.command("scontrol", "update", f"JobId={self.id}", "StartTime=now")


@pytest.mark.parametrize("options", [["--env-nodes=1"], ["--env-nodes=0"]], ids=["het", "one"])
def test_a_job_is_saved_queued_again_and_resumed(
    cluster: Cluster, tmp_path: Path, options: list[str]
) -> None:
    job = Job(cluster, tmp_path, *options)
    wait_until(lambda: job.updates() >= 8, job.words, 180)
    certs = job.run / f"certs-{job.id}"
    assert certs.stat().st_mode & 0o777 == 0o700
    # Saved on a signal: nothing is lost.
    cluster.command("scancel", "--batch", "--signal=USR1", job.id)
    job.begin_again(1)
    saved = job.updates()
    assert not certs.exists()
    wait_until(lambda: job.updates() >= saved + 6, job.words, 180)
    assert job.resumed_at() == [saved]
    # Requeued from outside: it resumes from a checkpoint, and now the run has an end.
    before = job.updates()
    job.write_config(before + 9)
    cluster.command("scontrol", "requeue", job.id)
    job.begin_again(2)
    wait_until(lambda: job.state() == "COMPLETED", job.words, 180)
    assert job.state("ExitCode") == "0:0"
    assert job.updates() == before + 9
    assert len(job.resumed_at()) == 2
    assert saved <= job.resumed_at()[1] <= job.updates()
    assert job.lines("evaluation")
    assert "stopped: " in job.log("env-server-0.log")
    assert not certs.exists()
    assert not cluster.command("squeue", "-h")
    assert _processes_of(job) == []


def _processes_of(job: Job) -> list[str]:
    """Command lines of processes that name the run's configuration."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if str(job.config) in line:
                found.append(line)
    return found
