"""Basis of a forecast: the environment, costs measured of a run or here, or stated."""

import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from murmur.benchmarks._processes import Processes
from murmur.env_service.environment import RandomPolicy, make_environment
from murmur.learner_service.device.precision import Precision
from murmur.learner_service.learning.base import build_algorithm
from murmur.learner_service.tuning.probe import checkpoint_spec
from murmur.learner_service.tuning.resolve import with_learner_options
from murmur.plan import stated
from murmur.plan.costs import Window, costs_of, load_costs, run_window, window
from murmur.plan.forecast import Basis, Size, system_of
from murmur.plan.model import Costs
from murmur.plan.simulate import Limits, Simulation
from murmur.runs.run_folder import LineTail, RunFolder
from murmur.shared.config.cores import available_cores
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.config.text import plain_data
from murmur.shared.process.errors import ConfigError
from murmur.shared.process.host_cpu import machine_busy_seconds
from murmur.shared.wire.spec import EnvSpec
from murmur.shared.wire.timestep import StepType

_SERVERS = (1, 3)  # that a probe starts: batches of different sizes tell what a message adds
_STEP_S = 0.5  # how long environments are timed
_MESSAGE_S, _MESSAGE_BYTE_S = 107e-6, 0.55e-9  # of a worker: murmur bench transport
_CALIBRATION = Limits(messages=3_000, warm=500, least=1_500, updates=3)
_MOST_HOP_S = 5e-3
_HALVINGS = 7
_WARM_UPDATES = 2
_TIMEOUT_S = 300.0
_POLL_S = 0.1


def plan_config(config: ExperimentConfig) -> ExperimentConfig:
    """Return the configuration with all options of its algorithm and network.

    Raises:
        ConfigError: if it has no environment.
    """
    if config.run.offline:
        raise ConfigError(
            "run.offline=true: nothing is forecast of a run that learns from a dataset alone; its "
            "updates follow one another"
        )
    if config.supervised:
        raise ConfigError(
            f"`murmur plan` forecasts runs with an environment; this one learns from the source "
            f"'{config.source.name}'"
        )
    return with_learner_options(config)


def environment_spec(config: ExperimentConfig, run: RunFolder | None) -> EnvSpec:
    """Return the environment's spec, from a run's checkpoint or by building one.

    Raises:
        MurmurError: if neither can be had.
    """
    if run is not None and run.has_checkpoint():
        return checkpoint_spec(run.checkpoint("latest"))
    with closing(make_environment(config.environment, 1, config.algorithm.name)) as environment:
        return environment.spec


def parameters_of(config: ExperimentConfig, spec: EnvSpec) -> int:
    """Return the number of weights with gradients that ranks exchange."""
    device = torch.device("cpu")
    algorithm = build_algorithm(
        config.algorithm, spec, config.network, Precision("fp32", device), device, 0, config.augment
    )
    parts = algorithm.parts.values()
    networks = [part for part in parts if isinstance(part, torch.nn.Module)]
    return sum(p.numel() for n in networks for p in n.parameters() if p.requires_grad)


def step_seconds(config: ExperimentConfig, envs: int) -> float:
    """Return CPU seconds of a worker for a message: the environment's step, timed, and gRPC.

    What a message costs beside the step is stated: murmur bench transport.
    """
    with closing(make_environment(config.environment, envs, config.algorithm.name)) as environment:
        seeds = np.arange(envs, dtype=np.uint64)
        timestep = environment.reset(seeds)
        action = RandomPolicy(environment).act(timestep)
        for _ in range(3):  # compiled on first use
            timestep = environment.step(action, timestep.step_type == StepType.LAST, seeds)
        steps, cpu, until = 0, time.process_time(), time.monotonic() + _STEP_S
        while time.monotonic() < until:
            timestep = environment.step(action, timestep.step_type == StepType.LAST, seeds)
            steps += 1
        step_s = (time.process_time() - cpu) / steps
        size = sum(a.nbytes for a in timestep.observation.values())
    return step_s + _MESSAGE_S + _MESSAGE_BYTE_S * size


def costs_of_run(config: ExperimentConfig, run: RunFolder) -> tuple[Costs, str]:
    """Return the costs of a run, and their source. Its environment is timed here.

    Raises:
        MurmurError: if the run has logged too little.
    """
    seen = run_window(run)
    server = config.env_server
    envs = server.envs_per_worker // server.sessions_per_worker
    step_s = step_seconds(config, envs)
    seen = replace(seen, workers_s=step_s * seen.messages)
    costs = costs_of([seen], threads=max(1, run.config().learner.num_threads))
    return costs, (
        f"measured: {seen.seconds:.0f} s of '{run.path.name}'; environments for {_STEP_S:g} s here"
    )


def calibrated(config: ExperimentConfig, spec: EnvSpec, windows: Mapping[int, Window]) -> Costs:
    """Fit costs to windows, and the time on the way so that the first one comes out as measured.

    Args:
        config: the experiment.
        spec: spec of its environment.
        windows: windows by number of workers.
    """
    costs = costs_of(list(windows.values()), threads=max(1, config.learner.num_threads))
    cores = max(1, round(available_cores()))
    workers, first = next(iter(windows.items()))
    measured = first.rows / first.seconds

    def rate(hop_s: float) -> float:
        basis = Basis(
            config,
            replace(costs, hop_s=hop_s),
            spec,
            stated.network("loopback"),
            others=first.others,
        )
        system = system_of(basis, Size(1, cores, workers))
        return Simulation(system, _CALIBRATION).run().rows

    low, high = 0.0, _MOST_HOP_S
    if rate(low) <= measured:
        return costs
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if rate(middle) > measured else (low, middle)
    return replace(costs, hop_s=(low + high) / 2)


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
    tail = LineTail(processes.folder / "progress.jsonl", skip=True)
    while time.monotonic() < deadline:
        for record in tail.records():
            if record.get("kind") == "progress" and record["work"]["requests"] and enough(record):
                return record
        if processes.learner.status() == psutil.STATUS_ZOMBIE:
            raise RuntimeError(f"the learner ended while it was measured:\n{processes.log()}")
        time.sleep(_POLL_S)
    raise ConfigError(f"the configuration made too few updates within {_TIMEOUT_S:.0f} s to plan")


def basis_of(
    config: ExperimentConfig,
    run: RunFolder | None,
    *,
    gpu: bool,
    network: str,
    costs_file: Path | None,
    seconds: float,
    link_gbit: float,
    learners: int,
    say: Callable[[str], None],
) -> tuple[Basis, list[str]]:
    """Return the common basis of all forecasts, and the source of each part, a line each.

    Args:
        config: the experiment.
        run: run with the costs; None: they are measured here.
        gpu: True if learners are on GPUs.
        network: name of the network between learners.
        costs_file: costs that were kept; None: measure.
        seconds: length of a probe's window [s].
        link_gbit: Gbit/s from environment servers to a learner; 0: no limit.
        learners: number of learners; one exchanges nothing.
        say: function called with a line about each slow step.

    Raises:
        MurmurError: if the costs cannot be measured.
    """
    net = stated.network(network)
    config = plan_config(config)
    spec = environment_spec(config, run)
    if costs_file is not None:
        costs, source = load_costs(costs_file), f"kept: {costs_file}"
    elif run is not None:
        costs, source = costs_of_run(config, run)
    else:
        costs = calibrated(config, spec, measure(config, _SERVERS, seconds, say))
        source = f"measured: training here with {_SERVERS[0]} and {_SERVERS[1]} workers"
    sources = [source]
    if gpu and not costs.device:
        costs = stated.on_gpu(costs, config, spec.acting_agents)
        sources.append("stated, not measured: a GPU, by counted launches at an H100's pace")
    if costs.device and costs.eager:
        sources.append(f"measured: {100 * costs.eager:.0f} % of the updates run eagerly")
    if learners > 1:
        if not costs.parameters:
            costs = replace(costs, parameters=parameters_of(config, spec))
        sources.append(f"stated, not measured: {net.what}, {costs.parameters:,} weights")
    return Basis(config, costs, spec, net, link_gbit * 1e9 / 8), sources
