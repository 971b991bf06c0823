"""Ports that are taken: a run takes others where none is set, and says so."""

import json
import os
import re
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest

from murmur.shared.config.experiment import ENV_METRICS_PORT
from murmur.shared.config.learner import METRICS_PORT, PORT
from tests.system.conftest import Training
from tests.waiting import wait_until

KEYS = ("learner.port", "learner.metrics_port", "env_server.metrics_port")
AUTO = tuple(part for key in KEYS for part in ("--set", f"{key}=auto"))
SHORT = ("--no-page", "--set", "run.max_updates=2", "--set", "evaluation.episodes=1")


@contextmanager
def taken(*ports: int) -> Iterator[None]:
    """Hold ports on loopback; one that another program has is taken already."""
    with ExitStack() as sockets:
        for port in ports:
            with suppress(OSError):
                sockets.enter_context(socket.create_server(("127.0.0.1", port)))
        yield


def test_a_run_takes_other_ports_and_says_so(train: Callable[..., Training]) -> None:
    with taken(PORT, METRICS_PORT, ENV_METRICS_PORT):
        run = train("beside", *SHORT, *AUTO)
        assert run.wait() == 0, run.output()
    ports = json.loads((run.run / "learner.json").read_text())
    said = run.output()
    for where in (
        f"learner: listening on 127.0.0.1:{ports['port']} (port {PORT} is in use), metrics on "
        f"http://127.0.0.1:{ports['metrics_port']} (port {METRICS_PORT} is in use)\n",
        "env-server: metrics and health on http://127.0.0.1:",
        f"(port {ENV_METRICS_PORT} is in use)\n",
    ):
        assert where in said
    # A run that continues, or starts from this file, is as free to choose.
    kept = (run.run / "config.yaml").read_text()
    assert re.findall(r"^  (?:metrics_)?port: (.*)$", kept, re.M) == ["null"] * 3


@pytest.mark.long
@pytest.mark.parametrize("key", [KEYS[0], KEYS[2]])
def test_a_port_that_is_set_and_taken_ends_the_run(
    key: str, train: Callable[..., Training]
) -> None:
    usual = dict(zip(KEYS, (PORT, METRICS_PORT, ENV_METRICS_PORT), strict=True))[key]
    with taken(usual):
        run = train("refused", *SHORT, "--set", f"{key}={usual}")
        assert run.wait() == 2, run.output()
    error = (
        rf"error: cannot bind .*127\.0\.0\.1:{usual}: .*set {key} to a free one, or to 0 for any"
    )
    assert re.search(error, run.output())


@pytest.mark.long
@pytest.mark.parametrize("count", [2, 4])
def test_runs_begun_at_once_all_finish(count: int, train: Callable[..., Training]) -> None:
    runs = [train(f"run-{number}", *SHORT, *AUTO) for number in range(count)]
    assert [run.wait() for run in runs] == [0] * count, [run.output() for run in runs]
    files = [json.loads((run.run / "learner.json").read_text()) for run in runs]
    ports = [file[key] for file in files for key in ("port", "metrics_port")]
    assert len(set(ports)) == 2 * count


@pytest.mark.long
def test_groups_of_learners_begun_at_once_all_finish(train: Callable[..., Training]) -> None:
    two = ("--learners", "2", "--set", "env_server.num_workers=2")
    runs = [train(f"run-{number}", *SHORT, *AUTO, *two) for number in range(2)]
    assert [run.wait() for run in runs] == [0, 0], [run.output() for run in runs]


@pytest.mark.long
def test_a_learner_whose_port_is_taken_meanwhile_is_found(train: Callable[..., Training]) -> None:
    run = train("moved", "--no-page", *AUTO)
    run.until(lambda: run.updates() > 1, 240)
    port = json.loads((run.run / "learner.json").read_text())["port"]
    os.kill(run.learner_pid(), signal.SIGKILL)
    with ExitStack() as held:

        def hold() -> bool:
            with suppress(OSError):
                held.enter_context(socket.create_server(("127.0.0.1", port)))
                return True
            return False

        wait_until(hold, "the port is free", poll_s=0.001)
        run.until(lambda: f"(port {port} is in use)" in run.output(), 240)
        lines = len(run.lines())
        run.until(lambda: len(run.lines()) > lines, 240)
        resumed_at = run.lines()[lines]["updates"]
        run.until(lambda: run.updates() > resumed_at + 1, 240)
