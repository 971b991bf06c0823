"""Other releases of protobuf, and code generated for older ones, beside murmur."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from murmur.runs.child import murmur_command

SPREAD = ("train", "spread", "--set", "run.max_updates=2", "--set", "env_server.metrics_port=0")
PORTS = ("--set", "learner.port=0", "--set", "learner.metrics_port=0")


def installed(folder: Path, *packages: str) -> dict[str, str]:
    """The environment variables of a Python that has these packages before its own."""
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder)]
    done = subprocess.run([*command, *packages], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no package index gave {', '.join(packages)}: {done.stderr[-200:]}")
    return {**os.environ, "PYTHONPATH": str(folder)}


@pytest.mark.long
def test_training_with_the_oldest_protobuf(tmp_path: Path) -> None:
    env = installed(tmp_path / "site", "protobuf==6.31.1", "grpcio-health-checking==1.75.1")
    version = "import google.protobuf as p; print(p.__version__)"
    shown = subprocess.run([sys.executable, "-c", version], env=env, capture_output=True, text=True)
    assert shown.stdout.strip() == "6.31.1"
    command = murmur_command(*SPREAD, *PORTS, "--run", str(tmp_path / "run"))
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "2 updates" in done.stdout


@pytest.mark.long
def test_starcrafts_messages_beside_murmurs(tmp_path: Path) -> None:
    env = installed(tmp_path / "site", "s2clientprotocol")
    both = (
        "import s2clientprotocol.sc2api_pb2 as s, murmur.shared.rpc.rollout_pb2 as r;"
        "s.Request(); print(r.Hello(worker_id='x').SerializeToString())"
    )
    command = [sys.executable, "-c", both]
    refused = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert "Descriptors cannot be created directly" in refused.stderr
    env["PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"] = "python"
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == r"b'\x12\x01x'", done.stderr
