"""The two services by themselves, as containers start them."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from murmur.shared.rpc import PROTOCOL_VERSION
from tests.system.conftest import Training

pytestmark = pytest.mark.system
LEARNER = ("--set", "learner.port=0", "--set", "learner.metrics_port=0")
Popen = subprocess.Popen[str]


@pytest.fixture
def murmur(tmp_path: Path) -> Iterator[Callable[..., Popen]]:
    """Start commands: murmur("learner", "spread", ...)."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MURMUR")}
    started: list[Popen] = []

    def start(*arguments: str, program: tuple[str, ...] = ("-m", "murmur")) -> Popen:
        started.append(
            subprocess.Popen(
                [sys.executable, *program, *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def _ports(process: Popen, file: Path) -> dict[str, int]:
    """What a learner writes once it listens; its log says when."""
    assert process.stderr is not None
    for line in process.stderr:
        if "listening on" in line:
            ports: dict[str, int] = json.loads(file.read_text())
            return ports
    raise AssertionError(f"the learner ended with {process.wait()}")


def test_auto_resume_begins_where_there_is_nothing(
    murmur: Callable[..., Popen], tmp_path: Path
) -> None:
    folder = tmp_path / "new"
    learner = murmur("learner", "spread", "--run", str(folder), "--auto-resume", *LEARNER)
    ports = _ports(learner, folder / "learner.json")
    url = f"http://127.0.0.1:{ports['metrics_port']}/healthz"
    assert urllib.request.urlopen(url, timeout=30).status == 200
    learner.send_signal(signal.SIGTERM)
    assert learner.wait(30) == 0


@pytest.mark.long
def test_a_run_is_resumed_and_served(
    murmur: Callable[..., Popen],
    train: Callable[..., Training],
    tmp_path: Path,
) -> None:
    run = train("run", "--set", "run.max_updates=3")
    assert run.wait() == 0, run.output()
    config = str(run.run / "config.yaml")
    more = murmur("learner", config, "--run", str(run.run), "--auto-resume", *LEARNER)
    _, log = more.communicate(timeout=60)
    assert more.returncode == 0, log
    assert "update-000003.pt has reached run.max_updates=3" in log

    serve = ("--serve", "--checkpoint=best", "--run", str(run.run))
    port = _ports(murmur("learner", config, *serve, *LEARNER), run.run / "serve.json")["port"]
    evaluations = {
        "served": (f"--learner=127.0.0.1:{port}", f"--config={config}"),
        "by itself": (str(run.run),),
    }
    results = []
    for name, arguments in evaluations.items():
        out = tmp_path / f"{name}.json"
        evaluation = murmur("evaluate", *arguments, "--episodes=6", f"--json={out}")
        _, log = evaluation.communicate(timeout=60)
        assert evaluation.returncode == 0, log
        results.append(json.loads(out.read_text())["metrics"])
    assert results[0] == results[1]
    assert len(results[0]["return"]) == 6


def test_server_of_another_release_is_named_in_both_logs(
    murmur: Callable[..., Popen], tmp_path: Path
) -> None:
    newer = (
        "import murmur.shared.rpc as r; r.PROTOCOL_VERSION += 1; from murmur.cli import main; "
        "main()"
    )
    learner = murmur(
        "learner", "spread", "--run", str(tmp_path / "run"), *LEARNER, program=("-c", newer)
    )
    port = _ports(learner, tmp_path / "run/learner.json")["port"]
    connect = f"env_server.learner=127.0.0.1:{port}"
    server = murmur("env-server", "spread", "--set", connect, "--set", "env_server.metrics_port=0")
    _, servers_log = server.communicate(timeout=60)
    assert server.returncode == 2
    learner.send_signal(signal.SIGTERM)
    _, learners_log = learner.communicate(timeout=60)
    ours = f"speaks protocol version {PROTOCOL_VERSION}, this learner {PROTOCOL_VERSION + 1}"
    for log in (servers_log, learners_log):
        assert ours in log
        assert "use the same release of murmur on both sides" in log
    assert "Traceback" not in servers_log + learners_log
