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

from tests.system.conftest import Training

pytestmark = pytest.mark.system
LEARNER = ("--set", "learner.port=0", "--set", "learner.metrics_port=0")


@pytest.fixture
def murmur(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start commands: murmur("learner", "spread", ...)."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MURMUR")}
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", "murmur", *arguments],
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


def _ports(process: subprocess.Popen[str], file: Path) -> dict[str, int]:
    """What a learner writes once it listens; its log says when."""
    assert process.stderr is not None
    for line in process.stderr:
        if "listening on" in line:
            ports: dict[str, int] = json.loads(file.read_text())
            return ports
    raise AssertionError(f"the learner ended with {process.wait()}")


def test_auto_resume_begins_and_goes_on(
    murmur: Callable[..., subprocess.Popen[str]],
    train: Callable[..., Training],
    tmp_path: Path,
) -> None:
    config = tmp_path / "spread.yaml"
    fresh = murmur(
        "learner", str(config), "--run", str(tmp_path / "new"), "--auto-resume", *LEARNER
    )
    ports = _ports(fresh, tmp_path / "new" / "learner.json")
    url = f"http://127.0.0.1:{ports['metrics_port']}/healthz"
    assert urllib.request.urlopen(url, timeout=5).status == 200
    fresh.send_signal(signal.SIGTERM)
    assert fresh.wait(30) == 0

    run = train("run", "--set", "run.max_updates=3")
    assert run.wait() == 0, run.output()
    more = murmur(
        *("learner", str(config), "--run", str(run.run), "--auto-resume", *LEARNER),
        *("--set", "run.max_updates=3"),
    )
    _, log = more.communicate(timeout=60)
    assert more.returncode == 0, log
    assert "resumed" in log
    assert "3 updates" in log


def test_evaluation_through_a_learner_that_serves(
    murmur: Callable[..., subprocess.Popen[str]],
    train: Callable[..., Training],
    tmp_path: Path,
) -> None:
    run = train("run", "--set", "run.max_updates=3")
    assert run.wait() == 0, run.output()
    config = str(run.run / "config.yaml")
    learner = murmur(
        "learner", config, "--serve", "--run", str(run.run), "--checkpoint=best", *LEARNER
    )
    port = _ports(learner, run.run / "serve.json")["port"]
    out = tmp_path / "result.json"
    served = murmur(
        *("evaluate", f"--learner=127.0.0.1:{port}", f"--config={config}"),
        *("--episodes=6", f"--json={out}"),
    )
    _, log = served.communicate(timeout=60)
    assert served.returncode == 0, log
    by_run = tmp_path / "by-run.json"
    alone = murmur("evaluate", str(run.run), "--episodes=6", f"--json={by_run}")
    _, log = alone.communicate(timeout=60)
    assert alone.returncode == 0, log
    assert json.loads(out.read_text())["metrics"] == json.loads(by_run.read_text())["metrics"]
