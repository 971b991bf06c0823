"""The environment server as real processes: metrics, kill and restart, stop, user errors."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest

from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.rpc import rollout_pb2 as pb
from murmur.shared.wire.seeding import episode_seeds
from murmur.shared.wire.timestep import StepType
from tests.env_service.tiny_learner import TinyLearner, experiment
from tests.waiting import wait_until

pytestmark = pytest.mark.system

SERVER = """
import json
import sys
from murmur.env_service import worker_process
from murmur.env_service.app import run_env_server
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.process.process import configure_logging, stop_on_signals

if __name__ == "__main__":
    configure_logging("env-server")
    config = ExperimentConfig.model_validate_json(sys.argv[1])
    options = json.loads(sys.argv[2])
    for name in ("MAX_HANGS", "MAX_FAILED_STARTS"):
        setattr(worker_process, name, options.pop(name.lower(), getattr(worker_process, name)))
    sys.exit(run_env_server(config, stop=stop_on_signals(), **options))
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
    with urllib.request.urlopen(url + path, timeout=30) as reply:
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
            wait_until(lambda: len(learner.sessions) == 6)  # its two sessions reconnect
            assert {s.hello.preferred_first_slot for s in learner.sessions[4:]} < slots
            text = _get(log, "/metrics")
            assert _sample(text, "murmur_env_worker_restarts_total ") == 1
            wait_until(lambda: _sample(_get(log, "/metrics"), "murmur_env_sessions ") == 4)
            assert _sample(_get(log, "/metrics"), "murmur_env_steps_total") > 0

            children = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
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
        assert process.wait(60) == 2
    assert "unknown key 'environment.num_agent'; did you mean 'num_agents'?" in log.read_text()
    assert "Traceback" not in log.read_text()


def test_a_constructor_that_ends_its_process_ends_the_server(tmp_path: Path) -> None:
    config = experiment("127.0.0.1:1", environment=troubled("Quits"))
    with server(tmp_path, config, max_failed_starts=2) as (process, log):
        assert process.wait(60) == 2
    text = log.read_text()
    assert text.count("died with code 0, though it was not asked to end") == 2
    assert "ended its process 2 times in a row while it was made in worker 0" in text


def test_workers_killed_while_they_start_are_started_again(tmp_path: Path) -> None:
    """Killing is no fault of the environment, however often it comes before the first step."""
    config = experiment("127.0.0.1:1")
    with server(tmp_path, config, max_failed_starts=2) as (process, log):
        for killed in range(3):
            wait_until(lambda: _workers(process))
            for worker in _workers(process):
                worker.kill()
            died = killed + 1
            wait_until(lambda died=died: log.read_text().count("died with code -9") >= died)
        assert process.poll() is None


def test_an_environment_without_spaces_ends_the_server_at_once(tmp_path: Path) -> None:
    with server(tmp_path, experiment("127.0.0.1:1", environment=troubled("Blind"))) as (
        process,
        log,
    ):
        assert process.wait(60) == 2
    assert "troubled:Blind': reading observation_space raised AttributeError" in log.read_text()
    assert "Traceback" not in log.read_text()


def test_an_evaluator_evaluates_again_and_again(tmp_path: Path) -> None:
    with TinyLearner() as learner:
        config = experiment(learner.address)
        evaluation = config.evaluation.model_copy(update={"episodes": 3})
        config = config.model_copy(update={"evaluation": evaluation})
        with server(tmp_path, config, evaluate=True) as (process, _):
            wait_until(lambda: len(learner.sessions) > 2)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
    one, two = learner.sessions[:2]
    assert (one.hello.mode, one.hello.num_envs) == (pb.MODE_EVALUATE, 3)
    assert not one.hello.HasField("preferred_first_slot")
    assert len(one.rows) == len(two.rows) == 26
    assert one.half_closed
    assert (one.rows[7].reward == two.rows[7].reward).all()  # the same seeds


def troubled(name: str, **arguments: object) -> dict[str, object]:
    factory = f"tests.env_service.troubled:{name}"
    return {"name": "gymnasium", "factory": factory, "arguments": arguments}


def _dropped(log: Path, reason: str) -> float:
    name = f'murmur_env_episodes_dropped_total{{reason="{reason}"}}'
    return _sample(_get(log, "/metrics"), name)


@pytest.mark.parametrize("how", ["sleep", "hold"])
def test_a_worker_whose_environment_hangs_is_replaced(tmp_path: Path, how: str) -> None:
    with TinyLearner() as learner:
        config = experiment(
            learner.address,
            environment=troubled("Hangs", how=how, once=str(tmp_path / "hung")),
            envs_per_worker=3,
            sessions_per_worker=1,
            step_timeout_s=1,
        )
        with server(tmp_path, config) as (process, log):
            wait_until(lambda: len(learner.sessions) == 2, timeout_s=60)
            wait_until(lambda: len(learner.sessions[1].rows) > 40)
            wait_until(lambda: _dropped(log, "hung") == 3)
            assert _dropped(log, "raised") == _dropped(log, "died") == 0
            assert _sample(_get(log, "/metrics"), "murmur_env_worker_restarts_total ") == 1
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
    first = learner.sessions[0]
    assert len(first.rows) == 20  # the row that would have been the 21st never came
    assert not first.half_closed
    # The first copy hung; its seed is that of slot 0, episode 0.
    (seed,) = episode_seeds(7, np.array([0]), np.array([0]))
    text = log.read_text()
    words = r"'gymnasium' \(tests\.env_service\.troubled:Hangs\) took longer than 1(\.\d+)? s for"
    assert re.search(words, text)
    assert f"in the episode with seed {seed} at step 20; worker 0 is replaced" in text
    assert re.search(r'troubled\.py", line \d+ in step', text)  # where it hangs


def test_an_environment_that_always_hangs_ends_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TinyLearner() as learner:
        config = experiment(
            learner.address,
            environment=troubled("Hangs", how="sleep"),
            envs_per_worker=1,
            sessions_per_worker=1,
            step_timeout_s=0.3,
        )
        with server(tmp_path, config, max_hangs=2) as (process, log):
            assert process.wait(60) == 2
    assert len(learner.sessions) == 2
    last = log.read_text().splitlines()[-2]  # then it says what it sent
    assert "hung 2 times in a row in worker 0: fix it, or raise env_server.step_timeout_s" in last


def test_a_slow_learner_is_no_hanging_environment(tmp_path: Path) -> None:
    with TinyLearner(mute=True) as learner:
        config = experiment(learner.address, step_timeout_s=0.2)
        with server(tmp_path, config) as (process, log):
            wait_until(lambda: len(learner.sessions) == 2)
            time.sleep(2.5)  # ten times the timeout, and the warm-up's is 2 s
            assert len(learner.sessions) == 2
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
    assert "took longer" not in log.read_text()


def test_a_simulator_that_ends_its_process_is_counted(tmp_path: Path) -> None:
    with TinyLearner() as learner:
        config = experiment(
            learner.address,
            environment=troubled("Breaks", how="die"),
            envs_per_worker=2,
            sessions_per_worker=1,
        )
        with server(tmp_path, config) as (_, log):
            wait_until(
                lambda: len(learner.sessions) > 1 and len(learner.sessions[1].rows) > 1,
                timeout_s=60,
            )
            wait_until(lambda: _dropped(log, "died") >= 2)
    assert "died with code 7; restart" in log.read_text()


def test_a_worker_that_grows_too_large_is_replaced_in_order(tmp_path: Path) -> None:
    control = tmp_path / "control"
    control.mkdir()
    with TinyLearner(pause_s=0.01) as learner:
        config = experiment(
            learner.address,
            environment={
                "name": "gymnasium",
                "factory": "tests.chaos.controlled_environment:make",
                "arguments": {"control": str(control), "delay_ms": 0},
            },
            envs_per_worker=2,
            sessions_per_worker=1,
            worker_memory_mib=250,
        )
        with server(tmp_path, config) as (process, log):
            wait_until(lambda: len(learner.sessions) == 1 and len(learner.sessions[0].rows) > 3)
            (control / "leak").touch()
            wait_until(lambda: len(learner.sessions) == 2, timeout_s=60)
            wait_until(lambda: _dropped(log, "memory") == 2)
            assert _sample(_get(log, "/metrics"), "murmur_env_worker_restarts_total ") == 1
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
    assert learner.sessions[0].half_closed  # it said goodbye: no row was on its way
    text = log.read_text()
    assert "MiB, more than env_server.worker_memory_mib = 250; it is replaced" in text
    assert text.splitlines()[-1].endswith(" 0 of them not answered")


def test_an_environment_that_always_fails_ends_the_server(tmp_path: Path) -> None:
    with TinyLearner() as learner:
        config = experiment(
            learner.address, environment=troubled("Breaks", how="raise"), max_faults_per_minute=20
        )
        with server(tmp_path, config) as (process, log):
            assert process.wait(60) == 2
    lines = log.read_text().splitlines()[:-1]
    assert "21 faults within a minute" in lines[-1]
    assert "raised RuntimeError: the simulator is gone, in the episode with seed" in lines[-1]
    dropped = [line for line in lines if "episode dropped" in line]
    assert len(dropped) == 20
    aborted = sum(
        int((r.step_type == StepType.ABORTED).sum()) for s in learner.sessions for r in s.rows
    )
    assert aborted >= 16  # the last ones were not sent any more
