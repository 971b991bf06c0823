"""The environment server as real processes: metrics, kill and restart, stop, user errors."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from shared.config import ExperimentConfig
from shared.rpc import rollout_pb2 as pb
from tests.env_service.tiny_learner import TinyLearner, experiment, wait_until

pytestmark = pytest.mark.system

SERVER = """
import json
import sys
from env_service.app import run_env_server
from shared.config import ExperimentConfig
from shared.process import configure_logging, stop_on_signals

if __name__ == "__main__":
    configure_logging("env-server")
    config = ExperimentConfig.model_validate_json(sys.argv[1])
    sys.exit(run_env_server(config, stop=stop_on_signals(), **json.loads(sys.argv[2])))
"""


@contextmanager
def server(
    tmp_path: Path, config: ExperimentConfig, **options: object
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A running environment server and its log."""
    script, log = tmp_path / "server.py", tmp_path / "log"
    script.write_text(SERVER)
    root = Path(__file__).parents[2]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, str(script), config.model_dump_json(), json.dumps(options)],
            env=os.environ | {"PYTHONPATH": str(root)},
            stderr=out,
        )
    try:
        yield process, log
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def _workers(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    children = psutil.Process(process.pid).children()
    return [c for c in children if any("spawn_main" in part for part in c.cmdline())]


def _get(log: Path, path: str) -> str:
    """GET from the port that the server logged."""
    url = next(w for w in log.read_text().split() if w.startswith("http://"))
    with urllib.request.urlopen(url + path, timeout=5) as reply:
        text: str = reply.read().decode()
    return text


def _sample(text: str, name: str) -> float:
    return sum(float(li.rsplit(" ", 1)[1]) for li in text.splitlines() if li.startswith(name))


def test_restarts_a_killed_worker_and_stops_when_asked(tmp_path: Path) -> None:
    with TinyLearner(pause_s=0.01) as learner:
        config = experiment(learner.address, num_workers=2)
        with server(tmp_path, config, first_worker=4) as (process, log):
            wait_until(lambda: len(learner.sessions) == 4)
            slots = {s.hello.preferred_first_slot for s in learner.sessions}
            assert slots == {32, 36, 40, 44}
            assert _get(log, "/healthz") == "ok\n"
            wait_until(lambda: _sample(_get(log, "/metrics"), "murmur_env_sessions ") == 4)

            victim = _workers(process)[0]
            victim.kill()
            wait_until(lambda: len(learner.sessions) == 6)  # its two sessions dial again
            assert {s.hello.preferred_first_slot for s in learner.sessions[4:]} < slots
            text = _get(log, "/metrics")
            assert _sample(text, "murmur_env_worker_restarts_total ") == 1
            wait_until(lambda: _sample(_get(log, "/metrics"), "murmur_env_sessions ") == 4)
            assert _sample(_get(log, "/metrics"), "murmur_env_steps_total") > 0

            children = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGTERM)
            assert process.wait(8) == 0
            wait_until(lambda: not any(c.is_running() for c in children))
        # The killed worker's streams broke, the four others were closed in order.
        wait_until(lambda: sum(s.half_closed for s in learner.sessions) == 4)
    assert "died with code -9; restart" in log.read_text()


def test_workers_die_with_their_parent(tmp_path: Path) -> None:
    with (
        TinyLearner(mute=True) as learner,
        server(tmp_path, experiment(learner.address)) as (process, _),
    ):
        wait_until(lambda: len(learner.sessions) == 2)
        workers = _workers(process)
        assert workers
        process.kill()
        wait_until(lambda: not any(w.is_running() for w in workers))


def test_a_users_error_ends_the_server_at_once(tmp_path: Path) -> None:
    config = experiment("127.0.0.1:1", environment={"num_agent": 2})
    with server(tmp_path, config) as (process, log):
        assert process.wait(20) == 2
    assert "unknown key 'environment.num_agent'; did you mean 'num_agents'?" in log.read_text()
    assert "Traceback" not in log.read_text()


def test_an_evaluator_evaluates_again_and_again(tmp_path: Path) -> None:
    with TinyLearner() as learner:
        config = experiment(learner.address)
        evaluation = config.evaluation.model_copy(update={"episodes": 3})
        config = config.model_copy(update={"evaluation": evaluation})
        with server(tmp_path, config, evaluate=True) as (process, _):
            wait_until(lambda: len(learner.sessions) > 2)
            process.send_signal(signal.SIGTERM)
            assert process.wait(8) == 0
    one, two = learner.sessions[:2]
    assert (one.hello.mode, one.hello.num_envs) == (pb.MODE_EVALUATE, 3)
    assert not one.hello.HasField("preferred_first_slot")
    assert len(one.rows) == len(two.rows) == 26
    assert one.half_closed
    assert (one.rows[7].reward == two.rows[7].reward).all()  # the same seeds
