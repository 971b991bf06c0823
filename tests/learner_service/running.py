"""A learner in this process or in one of its own, for tests that play with it over the wire."""

import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from prometheus_client.parser import text_string_to_metric_families

from murmur.env_service.environment import VectorEnvironment
from murmur.learner_service.app import run_learner
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.config.section import validate
from murmur.shared.rpc import rollout_pb2 as pb
from murmur.shared.wire.spec import action_layout
from murmur.shared.wire.timestep import StepType
from tests.wire import Client, Refused

TIMEOUT_S = 60.0


def play(client: Client, welcome: pb.Welcome, game: VectorEnvironment, rows: int) -> None:
    """Take up the episodes where Welcome says, then play this number of rows, or until the end."""
    n, spec = game.num_envs, game.spec
    dtype, _ = action_layout(spec.action)
    taken_before = [
        np.frombuffer(s.actions, dtype).reshape(-1, spec.num_agents) for s in welcome.slots
    ]
    seeds = np.zeros(n, np.uint64)
    longest = max(len(p) for p in taken_before)
    timestep = game.reset(seeds)
    for t in range(longest):
        action = np.zeros((n, spec.num_agents), dtype)
        waiting = np.zeros(n, np.bool_)
        for i, taken in enumerate(taken_before):
            at = t - (longest - len(taken))
            waiting[i] = at < 0
            action[i] = taken[max(at, 0)] if len(taken) else 0
        timestep = game.step(action, waiting, seeds)
    try:
        for _ in range(rows):
            action = client.exchange(timestep)
            timestep = game.step(action, timestep.step_type == StepType.LAST, seeds)
    except Refused:
        return


class RunningLearner:
    """What a test sees of `run_learner`."""

    def __init__(self, port: int, metrics_port: int, run_dir: Path, stop: threading.Event) -> None:
        self.port, self.metrics_port, self.run_dir = port, metrics_port, run_dir
        self._stop = stop

    def stop(self) -> None:
        self._stop.set()

    def metric(self, name: str, **labels: str) -> float:
        """Sum of all samples of that name with these labels."""
        return sum(
            s.value
            for s in self.samples()
            if s.name == f"murmur_learner_{name}" and labels.items() <= s.labels.items()
        )

    def samples(self) -> list[Any]:
        url = f"http://127.0.0.1:{self.metrics_port}/metrics"
        with urllib.request.urlopen(url, timeout=10) as response:
            text = response.read().decode()
        return [s for family in text_string_to_metric_families(text) for s in family.samples]


def experiment(**sections: dict[str, Any]) -> ExperimentConfig:
    """A configuration with small sizes: two sessions of two environments."""
    base: dict[str, dict[str, Any]] = {
        "environment": {"name": "toy"},
        "env_server": {"envs_per_worker": 4, "sessions_per_worker": 2},
        "algorithm": {
            "name": "coma",
            "unroll_steps": 4,
            "batch_size": 4,
            "batch_number": 2,
            "data_passes": 1,
        },
        "network": {"name": "mlp", "hidden": [8]},
        "learner": {"port": 0, "metrics_port": 0, "device": "cpu"},
    }
    for name, section in sections.items():
        base[name] = {**base.get(name, {}), **section}
    return validate(ExperimentConfig, base)


@contextmanager
def running_learner(
    run_dir: Path, config: ExperimentConfig, **options: Any
) -> Iterator[RunningLearner]:
    """`run_learner` on a thread; its error, if any, is raised at the end."""
    stop, ready = threading.Event(), threading.Event()
    ports: list[int] = []
    errors: list[BaseException] = []

    def on_ready(port: int, metrics_port: int) -> None:
        ports.extend((port, metrics_port))
        ready.set()

    def run() -> None:
        try:
            run_learner(
                config,
                run_dir,
                **{"resume": False, "stop": stop, "on_ready": on_ready, **options},
            )
        except BaseException as error:
            errors.append(error)
        finally:
            ready.set()

    interval, threads = sys.getswitchinterval(), torch.get_num_threads()
    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert ready.wait(TIMEOUT_S)
        if ports:
            yield RunningLearner(ports[0], ports[1], run_dir, stop)
    finally:
        stop.set()
        thread.join(120)
        sys.setswitchinterval(interval)
        torch.set_num_threads(threads)
    assert not thread.is_alive()
    if errors:
        raise errors[0]


_SCRIPT = """
import sys, threading
from pathlib import Path
from murmur.learner_service.app import run_learner
from murmur.shared.config.experiment import ExperimentConfig
config = ExperimentConfig.model_validate_json(sys.argv[1])
run_learner(config, Path(sys.argv[2]), resume=False, stop=threading.Event(),
            on_ready=lambda port, metrics: print(port, metrics, flush=True))
"""


class LearnerProcess:
    """A learner in a process of its own, for ends that take the process with them."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self._process = process
        self.port, self.metrics_port = map(int, process.stdout.readline().split())

    def wait(self) -> tuple[int, str]:
        """The exit code and what was written to standard error."""
        _, errors = self._process.communicate(timeout=120)
        return self._process.returncode, errors


@contextmanager
def learner_process(run_dir: Path, config: ExperimentConfig) -> Iterator[LearnerProcess]:
    """`run_learner` in a process of its own; killed at the end if it still runs."""
    with subprocess.Popen(
        [sys.executable, "-c", _SCRIPT, config.model_dump_json(), str(run_dir)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield LearnerProcess(process)
        finally:
            process.kill()
