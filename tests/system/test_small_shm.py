"""A /dev/shm without room, as a container has by default: nothing of murmur's needs it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TRAIN = (
    "train spread --no-page --run RUN {more} --set run.max_updates=2 "
    "--set env_server.num_workers=2 "
    "--set env_server.envs_per_worker=8 --set env_server.metrics_port=0 --set learner.port=0 "
    "--set learner.metrics_port=0 --set evaluation.episodes=2"
)


def _may_mount() -> bool:
    """Whether this process may mount in a namespace of its own."""
    if os.geteuid() or not shutil.which("unshare"):
        return False
    mount = "mount -t tmpfs -o size=64k tmpfs /dev/shm"
    return subprocess.run(["unshare", "-m", "sh", "-c", mount], check=False).returncode == 0


@pytest.mark.long
@pytest.mark.system
@pytest.mark.parametrize(
    "command",
    ["check-env spread", TRAIN.format(more=""), TRAIN.format(more="--learners 2")],
    ids=["check-env", "train", "two learners"],
)
def test_nothing_needs_shared_memory(command: str, tmp_path: Path) -> None:
    if not _may_mount():
        pytest.skip("mounting needs root and unshare")
    command = command.replace("RUN", str(tmp_path / "run"))
    script = (
        "mount -t tmpfs -o size=64k tmpfs /dev/shm && head -c 65536 /dev/zero > /dev/shm/full && "
        f"{sys.executable} -m murmur {command} && ls /dev/shm"
    )
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split()[-1] == "full"
