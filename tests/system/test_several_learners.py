"""Environment servers with several learners, all in processes of their own: killed, and back."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.env_service.sessions.serving import load
from tests.system.conftest import PACED
from tests.waiting import wait_until

pytestmark = [pytest.mark.system, pytest.mark.long]
CONFIG = f"""
environment: {PACED}
env_server: {{num_workers: 2, envs_per_worker: 8, sessions_per_worker: 2, metrics_port: 0,
  move_after_s: 3, balance_every_s: 1, reconnect_max_s: 1}}
algorithm: {{name: coma, batch_size: 60, batch_number: 4, data_passes: 2}}
network: {{name: mlp, hidden: [32]}}
learner: {{metrics_port: 0, checkpoint_every_updates: 1, num_threads: 1}}
"""


@contextmanager
def murmur(log: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("ab") as out:
        command = [sys.executable, "-m", "murmur", *arguments]
        process = subprocess.Popen(command, stdout=out, stderr=out)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def environments(port: int) -> int:
    return load(f"127.0.0.1:{port}").environments


def test_environments_leave_a_killed_learner_and_come_back(tmp_path: Path) -> None:
    """Eight sessions of four environments: 16 and 16, then 32, then 16 and 16 again."""
    config = tmp_path / "several.yaml"
    config.write_text(CONFIG)
    logs = {name: tmp_path / f"{name}.log" for name in ("one", "two", "servers")}

    def learner(name: str, port: int = 0) -> subprocess.Popen[bytes]:
        run = tmp_path / name
        (run / "learner.json").unlink(missing_ok=True)
        arguments = ("--auto-resume", "--set", f"learner.port={port}")
        process = stack.enter_context(
            murmur(logs[name], "learner", str(config), "--run", str(run), *arguments)
        )
        wait_until((run / "learner.json").exists, logs[name].read_text)
        return process

    def port(name: str) -> int:
        found: int = json.loads((tmp_path / name / "learner.json").read_text())["port"]
        return found

    with ExitStack() as stack:
        first, second = learner("one"), learner("two")
        ports = [port("one"), port("two")]
        connect = "env_server.learner=" + ",".join(f"127.0.0.1:{at}" for at in ports)
        servers = [
            stack.enter_context(
                murmur(logs["servers"], "env-server", str(config), "--set", connect, *more)
            )
            for more in ((), ("--first-worker", "2"))
        ]

        def counts() -> list[int]:
            assert all(server.poll() is None for server in servers), logs["servers"].read_text()
            return [environments(at) for at in ports]

        wait_until(lambda: counts() == [16, 16], logs["servers"].read_text)
        checkpoints = tmp_path / "two/checkpoints"
        wait_until(lambda: list(checkpoints.glob("update-*.pt")), logs["two"].read_text)
        second.kill()
        wait_until(lambda: environments(ports[0]) == 32, logs["servers"].read_text)
        second = learner("two", ports[1])
        wait_until(lambda: counts() == [16, 16], logs["servers"].read_text)
        for process in (*servers, first, second):
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
    text = logs["servers"].read_text()
    assert text.count("is lost: a session goes to") == 4
    assert text.count("a session moves from learner") >= 4
    assert "Traceback" not in text
