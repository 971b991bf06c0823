"""Certificates and tokens between real processes, replaced while they train."""

import json
import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from murmur.kit.certs import make_certificates
from tests.system.conftest import SPREAD
from tests.waiting import wait_until

pytestmark = pytest.mark.system
HOSTS = ["localhost", "127.0.0.1"]


class Service:
    """A `murmur learner` or `murmur env-server`, its log in a file."""

    def __init__(self, log: Path, *arguments: str) -> None:
        self._log = log.open("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "murmur", *arguments],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={k: v for k, v in os.environ.items() if not k.startswith("MURMUR")},
        )

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._log.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Service]]:
    """Start services: start("name", "learner", …)."""
    services: list[Service] = []

    def one(name: str, *arguments: str) -> Service:
        services.append(Service(tmp_path / f"{name}.log", *arguments))
        return services[-1]

    yield one
    for service in reversed(services):
        service.close()


@pytest.mark.long
def test_credentials_are_replaced_without_a_dropped_row(
    start: Callable[..., Service], tmp_path: Path
) -> None:
    config, run, certs = tmp_path / "spread.yaml", tmp_path / "run", tmp_path / "certs"
    # Rows are not to be dropped for their age either: this machine may be busy.
    config.write_text(
        SPREAD.replace("learner: {", "learner: {max_policy_lag: 100000, ")
        + "evaluation: {every_updates: 5, episodes: 4}\n"
    )
    make_certificates(certs, HOSTS, 30)
    first = Path(shutil.copytree(certs, tmp_path / "first"))

    def secure(folder: Path) -> tuple[str, str]:
        return ("--set", f"security.folder={folder}")

    learner = start(
        "learner", "learner", str(config), "--run", str(run), *secure(certs / "learner")
    )

    def lines(kind: str = "progress") -> list[dict[str, Any]]:
        path = run / "progress.jsonl"
        text = path.read_text() if path.exists() else ""
        whole = [line for line in text.splitlines(keepends=True) if line[-1] == "\n"]
        return [d for d in map(json.loads, whole) if d["kind"] == kind]

    def until(condition: Callable[[], bool]) -> None:
        def logs() -> str:
            return "\n".join(p.read_text() for p in tmp_path.glob("*.log"))

        def met() -> bool:
            assert learner.process.poll() is None, logs()
            return condition()

        wait_until(met, logs, 100)

    def more(updates: int = 0, evaluations: int = 0) -> None:
        have = len(lines()), len(lines("evaluation"))
        until(lambda: len(lines()) >= have[0] + updates)
        until(lambda: len(lines("evaluation")) >= have[1] + evaluations)

    until((run / "learner.json").exists)
    port = json.loads((run / "learner.json").read_text())["port"]

    def server(name: str, folder: Path, *more: str) -> Service:
        connect = ("--set", f"env_server.learner=127.0.0.1:{port}", *secure(folder))
        return start(name, "env-server", str(config), *connect, *more)

    servers = [
        server("environment", certs / "environment"),
        server("evaluator", certs / "evaluator", "--evaluate"),
    ]
    more(updates=3, evaluations=1)
    for _ in range(2):  # the second time, the first token is no longer known
        make_certificates(certs, HOSTS, 30, renew=True)
        # The evaluator opens a stream for each evaluation, now with the new certificate.
        more(updates=3, evaluations=2)
    assert "credentials in" in (tmp_path / "evaluator.log").read_text()
    servers.append(server("late", certs / "environment", "--first-worker", "1"))
    until(lambda: _sessions(run) == 4)
    more(updates=3, evaluations=1)
    assert all(s.process.poll() is None for s in servers)
    last = lines()[-1]
    assert last["rows_trained"] > 0
    assert sum(last["rows_dropped"].values()) == 0, last

    # The token that was given out first no longer admits a client.
    turned_away = server("turned-away", first / "environment")
    assert turned_away.process.wait(60) == 2
    assert "this token is not one of the learner's" in turned_away.log()
    # Nor does plain text.
    plain = start(
        "plain",
        *("env-server", str(config), "--set", f"env_server.learner=127.0.0.1:{port}"),
        *("--set", "env_server.give_up_after_s=1"),
    )
    assert plain.process.wait(60) == 2
    assert "the learner wants a certificate that it knows: see security.folder" in plain.log()
    more(updates=3)
    assert sum(lines()[-1]["rows_dropped"].values()) == 0


SOURCE = """
source: {name: "tests.supply.toy_source:ToySource", train: 40, valid: 6}
env_server: {num_workers: 1, metrics_port: 0, give_up_after_s: 1}
algorithm: {name: segmentation, epochs: 3, batch_size: 8, warmup_epochs: 0}
network: {name: unet, channels: [8, 8], groups: 4}
learner: {port: 0, metrics_port: 0, num_threads: 1, session_timeout_s: 60}
"""


@pytest.mark.long
def test_samples_are_supplied_over_tls_by_those_with_a_token(
    start: Callable[..., Service], tmp_path: Path
) -> None:
    """Who has no token, another authority's, an evaluator's, or speaks plain text, is refused."""
    config, run, certs = tmp_path / "toy.yaml", tmp_path / "run", tmp_path / "certs"
    config.write_text(SOURCE)
    make_certificates(certs, HOSTS, 30)
    make_certificates(tmp_path / "others", HOSTS, 30)
    learner = start(
        *("learner", "learner", str(config), "--run", str(run)),
        *("--set", f"security.folder={certs / 'learner'}"),
    )
    wait_until((run / "learner.json").exists, learner.log, 100)
    port = json.loads((run / "learner.json").read_text())["port"]

    def server(name: str, *security: str) -> Service:
        connect = ("--set", f"env_server.learner=127.0.0.1:{port}")
        return start(name, "env-server", str(config), *connect, *security)

    mixed = Path(shutil.copytree(certs / "environment", tmp_path / "mixed"))
    shutil.copy(tmp_path / "others" / "environment" / "tokens", mixed / "tokens")
    refused = {
        "plain": ((), "the learner wants a certificate that it knows: see security.folder"),
        "others": ((tmp_path / "others" / "environment",), "is of another authority"),
        "mixed": ((mixed,), "this token is not one of the learner's"),
    }
    services = {
        name: server(name, *(w for f in folder for w in ("--set", f"security.folder={f}")))
        for name, (folder, _) in refused.items()
    }
    for name, (_, words) in refused.items():
        assert services[name].process.wait(100) == 2, services[name].log()
        assert words in services[name].log()
    assert learner.process.poll() is None, learner.log()
    good = server("good", "--set", f"security.folder={certs / 'environment'}")
    assert learner.process.wait(100) == 0, learner.log() + good.log()
    assert "mode='supply'" in learner.log()
    assert "role='environment'" in learner.log()


def _sessions(run: Path) -> int:
    """Training sessions that the learner has."""
    port = json.loads((run / "learner.json").read_text())["metrics_port"]
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30).read().decode()
    (line,) = [
        t for t in text.splitlines() if t.startswith('murmur_learner_sessions{mode="train"}')
    ]
    return int(float(line.split()[1]))


def test_server_connects_to_no_other_machine_unprotected(
    start: Callable[..., Service], tmp_path: Path
) -> None:
    config = tmp_path / "spread.yaml"
    config.write_text(SPREAD)
    service = start("far", "env-server", str(config), "--set", "env_server.learner=learner:50051")
    assert service.process.wait(60) == 2
    (line,) = service.log().splitlines()
    assert "env_server.learner=learner:50051 reaches beyond this machine" in line
    assert "`murmur certs FOLDER`" in line
