"""Measurement of a configuration's costs by training with it for some seconds on this machine."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import psutil

from murmur.benchmarks._processes import Processes
from murmur.plan.costs import Window, window
from murmur.runs.run_folder import ProgressTail
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.config.text import plain_data
from murmur.shared.process.errors import ConfigError
from murmur.shared.process.host_cpu import machine_busy_seconds

_WARM_UPDATES = 2
_TIMEOUT_S = 300.0
_POLL_S = 0.1


def small(config: ExperimentConfig) -> dict[str, Any]:
    """Return a probe's configuration as data: one worker, on the CPU, no evaluations, no end."""
    data = plain_data(config)
    data["run"] |= {
        "max_updates": 0,
        "max_env_steps": 0,
        "max_minutes": 0,
        "max_episodes": 0,
        "name": "plan",
    }
    data["env_server"] |= {"num_workers": 1, "learner": "127.0.0.1:50051"}
    data["learner"] |= {"device": "cpu", "precision": "fp32", "log_every_s": 0.2}
    data["learner"] |= {"checkpoint_every_updates": 1_000_000_000}
    data["evaluation"] |= {"every_updates": 0, "every_env_steps": 0, "every_minutes": 0}
    data.pop("security", None)
    return data


def measure(
    config: ExperimentConfig,
    servers: tuple[int, ...],
    seconds: float,
    say: Callable[[str], None] = lambda line: None,
) -> dict[int, Window]:
    """Train with one environment server after the other, a worker each.

    Args:
        config: the experiment.
        servers: numbers of servers, in rising order; a window is measured at each.
        seconds: length of a window [s].
        say: function called with a line about each slow step.

    Returns:
        windows by number of servers.

    Raises:
        ConfigError: if no update is made in time.
    """
    windows = {}
    with Processes(small(config)) as processes:
        started = 1
        for wanted in servers:
            while started < wanted:
                processes.add_server()
                started += 1
            say(f"measuring with {wanted} worker{'s' if wanted > 1 else ''} for {seconds:.0f} s")
            windows[wanted] = look(processes, wanted, config, seconds)
    return windows


def look(processes: Processes, workers: int, config: ExperimentConfig, seconds: float) -> Window:
    """Measure one window once all sessions are there and updates have warmed up.

    Raises:
        ConfigError: if it does not come to that.
    """
    wanted = workers * config.env_server.envs_per_worker
    _environments(processes, wanted)
    begun = _record(processes, lambda r: True)
    ready = begun["updates"] + _WARM_UPDATES
    _record(processes, lambda r: r["updates"] >= ready)
    before = _record(processes, lambda r: True)
    cpu, machine, began = processes.servers_cpu_s(), machine_busy_seconds(), time.monotonic()
    until = before["time"] + seconds
    after = _record(
        processes, lambda r: r["time"] >= until and r["updates"] > before["updates"] + 1
    )
    seen = window(before, after)
    spent = processes.servers_cpu_s() - cpu
    took = time.monotonic() - began
    others = max(0.0, (machine_busy_seconds() - machine - spent - seen.learner_s) / took)
    return replace(seen, workers_s=spent, others=others)


def _environments(processes: Processes, wanted: int) -> None:
    """Wait until this number is connected: their servers import and compile before that."""
    deadline = time.monotonic() + _TIMEOUT_S
    while processes.snapshot().metrics.get("environments", 0) < wanted:
        if time.monotonic() > deadline:
            raise ConfigError(f"fewer than {wanted} environments came within {_TIMEOUT_S:.0f} s")
        time.sleep(_POLL_S)


def _record(processes: Processes, enough: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Wait for the next record of progress.jsonl that is enough.

    Raises:
        ConfigError: if none comes in time.
        RuntimeError: if the learner ends, with the last lines of the logs.
    """
    deadline = time.monotonic() + _TIMEOUT_S
    tail = ProgressTail(processes.folder / "progress.jsonl", skip=True)
    while time.monotonic() < deadline:
        for record in tail:
            if record.get("kind") == "progress" and record["work"]["requests"] and enough(record):
                return record
        if processes.learner.status() == psutil.STATUS_ZOMBIE:
            raise RuntimeError(f"the learner ended while it was measured:\n{processes.log()}")
        time.sleep(_POLL_S)
    raise ConfigError(f"the configuration made too few updates within {_TIMEOUT_S:.0f} s to plan")
