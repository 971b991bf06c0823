"""A Slurm of two nodes on this machine, from the programs of Debian's slurm-wlm and munge."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.waiting import wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue")
# Two names that this machine answers to: jobs connect to each other by the names of their nodes.
NODES = (socket.gethostname(), "localhost")
CONFIGURATION = """
ClusterName=one-machine
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1
SlurmdParameters=config_overrides
GresTypes=gpu
KillWait=20
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=1:00:00 State=UP
"""


class Cluster:
    """A Slurm that runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith("MURMUR")}
        self.environment["SLURM_CONF"] = str(folder / "slurm.conf")
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        for made in ("state", *(f"spool-{node}" for node in NODES)):
            (self.folder / made).mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        ports = _free_ports(1 + len(NODES))
        nodes = "\n".join(
            f"NodeName={name} NodeAddr=127.0.0.1 Port={port} CPUs=8 Gres=gpu:2 State=UNKNOWN"
            for name, port in zip(NODES, ports[1:], strict=True)
        )
        (self.folder / "slurm.conf").write_text(
            CONFIGURATION.format(
                host=socket.gethostname(), controller_port=ports[0], folder=self.folder, nodes=nodes
            )
        )
        (self.folder / "cgroup.conf").write_text("")
        # GPUs that stand in for real ones: nothing opens these files.
        (self.folder / "gres.conf").write_text(
            "AutoDetect=off\nName=gpu File=/dev/null\nName=gpu File=/dev/zero\n"
        )
        self._spawn(
            *("munged", "--foreground", "--force", f"--socket={self.folder}/munge.socket"),
            *(f"--key-file={key}", f"--pid-file={self.folder}/munged.pid"),
            *(f"--log-file={self.folder}/munged.log", f"--seed-file={self.folder}/munged.seed"),
        )
        wait_until((self.folder / "munge.socket").exists, self.logs)
        self._spawn("slurmctld", "-D", "-c")
        for node in NODES:  # slurmd takes its node from the host name: give each one its own
            self._spawn("unshare", "--uts", "bash", "-c", f"hostname {node}; exec slurmd -D")
        wait_until(lambda: self.command("sinfo", "-h", "-o", "%t %D") == "idle 2", self.logs)

    def _spawn(self, *command: str) -> None:
        with (self.folder / f"{command[0]}.out").open("ab") as log:
            self._processes.append(
                subprocess.Popen(
                    command, env=self.environment, stdout=log, stderr=log, start_new_session=True
                )
            )

    def command(self, *words: str) -> str:
        """What a command of Slurm prints; empty if it fails."""
        done = subprocess.run(
            words, env=self.environment, capture_output=True, text=True, check=False, timeout=60
        )
        return done.stdout.strip() if done.returncode == 0 else ""

    def logs(self) -> str:
        files = sorted([*self.folder.glob("*.log"), *self.folder.glob("*.out")])
        return "\n".join(f"== {f.name}\n{f.read_text()[-2000:]}" for f in files)

    def stop(self) -> None:
        self.command("scancel", "--user=root")
        with contextlib.suppress(TimeoutError):
            wait_until(lambda: not self.command("squeue", "-h"), "no job is left", 40)
        for process in reversed(self._processes):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        pytest.skip(
            f"{', '.join(missing)} missing: Debian's packages slurm-wlm and munge have all of Slurm"
        )
    if os.geteuid() != 0:
        pytest.skip("slurmd runs jobs as their users: this needs root")
    one = Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        one.start()
        yield one
    finally:
        one.stop()


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
