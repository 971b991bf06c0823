"""Environments that end, hang or multiply the process of their worker."""

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from tests.chaos.cases import Case
from tests.chaos.stack import Server, alive
from tests.env_service.tiny_learner import TinyLearner
from tests.waiting import wait_until


@contextmanager
def treacherous(
    folder: Path, *settings: str, at_start: Sequence[str] = (), **arguments: str
) -> Iterator[tuple[Server, Path]]:
    """An environment server that plays with a small learner; and the folder of control files."""
    control = folder / "control"
    control.mkdir()
    for fault in at_start:
        (control / fault).touch()
    config = folder / "config.yaml"
    config.write_text("environment: {name: gymnasium}\n")
    options = {
        "environment.factory": "tests.chaos.treacherous_environment:Treacherous",
        "environment.arguments.control": control,
        **{f"environment.arguments.{name}": value for name, value in arguments.items()},
        "env_server.envs_per_worker": 1,
        "env_server.sessions_per_worker": 1,
        "env_server.metrics_port": 0,
    }
    with TinyLearner() as learner:
        command = ["env-server", str(config), "--set", f"env_server.learner={learner.address}"]
        for setting in (*(f"{k}={v}" for k, v in options.items()), *settings):
            command += ["--set", setting]
        server = Server(command, folder / "log", (), {}, "127.0.0.1")
        try:
            yield server, control
        finally:
            server.close()


def _ends_in_order(server: Server) -> None:
    assert server.process.poll() is None, server.text()
    assert server.end(signal.SIGTERM) == 0, server.text()


def _plays(server: Server, workers: int) -> None:
    sessions = "murmur_env_sessions"
    wait_until(lambda: server.metrics().get(sessions) == workers, f"{workers} sessions")


def end_process(folder: Path) -> dict[str, Any]:
    """sys.exit() and KeyboardInterrupt cost an episode; os._exit() and abort() the worker."""
    restarts = "murmur_env_worker_restarts_total"
    dropped = 'murmur_env_episodes_dropped_total{{reason="{}"}}'.format
    with treacherous(folder, "env_server.num_workers=3") as (server, control):
        _plays(server, 3)
        for fault in ("step-sys-exit-0", "step-interrupt", "step-recurse", "reset-sys-exit-0"):
            (control / fault).touch()
        wait_until(lambda: server.metrics().get(dropped("raised")) == 4, "four episodes dropped")
        assert server.metrics()[restarts] == 0, server.text()
        began = time.monotonic()
        for fault in ("step-exit-0", "step-exit-2", "reset-abort"):
            (control / fault).touch()
        wait_until(lambda: server.metrics().get(restarts) == 3, "three restarts")
        wait_until(lambda: server.metrics().get(dropped("died")) == 3, "three episodes dropped")
        over = time.monotonic() - began
        _plays(server, 3)
        _ends_in_order(server)
        text = server.text()
    for words in (
        "raised SystemExit: 0, in the episode with seed",
        "raised KeyboardInterrupt, in the episode with seed",
        "died with code 0, though it was not asked to end; restart in",
        "died with code 2; restart in",
        "died with code -6; restart in",
    ):
        assert words in text, text
    return {"over s": round(over, 1), "counter": "episodes_dropped_total, worker_restarts_total"}


def hang_at_start(folder: Path) -> dict[str, Any]:
    """A constructor and a first reset() that hang are given up after start_timeout_s."""
    limits = ("env_server.num_workers=2", "env_server.start_timeout_s=8")
    restarts = "murmur_env_worker_restarts_total"
    with treacherous(folder, *limits, at_start=("make-hang", "reset-hang")) as (server, control):
        began = time.monotonic()
        wait_until(lambda: not list(control.iterdir()), "both hang")
        wait_until(lambda: server.metrics().get(restarts) == 2, "two restarts")
        noticed = time.monotonic() - began
        _plays(server, 2)
        _ends_in_order(server)
        text = server.text()
    assert text.count("s to be made (env_server.start_timeout_s); worker") == 2, text
    assert "in _obey" in text, text  # where it hangs
    return {"noticed s": round(noticed, 1), "counter": restarts}


def leave_children(folder: Path) -> dict[str, Any]:
    """Processes and daemons of an environment end with its worker, and with a killed server."""
    children = folder / "children"

    def started() -> list[int]:
        return [int(x) for x in children.read_text().split()] if children.exists() else []

    limits = ("env_server.step_timeout_s=0.5",)
    with treacherous(folder, *limits, children=str(children)) as (server, control):
        _plays(server, 1)
        wait_until(lambda: len(started()) == 3, "three processes")
        first = started()
        assert all(map(_runs, first)), server.text()
        (control / "step-stop").touch()  # it cannot even be asked for a traceback
        wait_until(lambda: len(started()) == 6, "three more processes")
        wait_until(lambda: not any(map(_runs, first)), "the first worker's processes end")
        assert all(map(_runs, started()[3:])), server.text()
        began = time.monotonic()
        os.kill(server.pid, signal.SIGKILL)
        wait_until(lambda: not any(map(_runs, started())), "all processes end")
        over = time.monotonic() - began
        assert "left 3 processes of its environments behind; killed" in server.text()
    return {"over s": round(over, 1), "counter": "log"}


def _runs(pid: int) -> bool:
    """Whether a process is there and not merely unreaped."""
    try:
        return alive(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


CASES = [
    Case("environment calls sys.exit, os._exit, abort", end_process),
    Case("environment hangs in its constructor or first reset", hang_at_start),
    Case("environment leaves processes and daemons behind", leave_children),
]
