"""VMAS: its own speed, the plug-in's speed, and MAPPO's whole loop through gRPC.

The loops are configs/acceptance/a6.yaml (balance, four agents), as it is in the sync pipeline and
with two sessions in the async one, and acting with as little learning as MAPPO allows: one pass
over 1024 copies of navigation with four agents. A frame is a step of one copy, all agents in it.
Rates are taken from the learner's counters between two moments well after the first update;
CPU-seconds are those of all processes, or of the environment's side alone.
"""

import time
from typing import Any

import numpy as np
import psutil

from benchmarks.acceptance.task import experiment, load_task
from murmur.benchmarks._processes import Processes, Snapshot
from murmur.benchmarks.effort import Effort
from murmur.env_service.envs.vmas import Config, make
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.config.section import validate
from murmur.shared.wire.timestep import StepType

DESCRIPTION = (
    "frames of VMAS per CPU-second: VMAS itself, the plug-in, MAPPO's whole loop through gRPC on "
    "balance (target 5 k; BenchMARL 2.3 k), delivered to the learner (target 40 k)"
)
NEEDS = ("vmas",)

_STEPS = 100  # of an episode


def own_rate(scenario: str, agents: int, copies: int, steps: int) -> float:
    """Measure frames per CPU-second of VMAS as its users run it, without resets."""
    import torch
    import vmas

    environment = vmas.make_env(scenario, copies, n_agents=agents, seed=0)
    environment.reset()
    actions = [2 * torch.rand(copies, 2) - 1 for _ in range(agents)]
    environment.step(list(actions))
    started = time.process_time()
    for _ in range(steps):
        environment.step(list(actions))
    return copies * steps / (time.process_time() - started)


def plugin_rate(scenario: str, agents: int, copies: int, steps: int) -> float:
    """Measure frames per CPU-second of the plug-in; every copy is reset once in 100 steps."""
    config = Config(scenario=scenario, arguments={"n_agents": agents}, max_episode_steps=_STEPS)
    environment = make(config, copies)
    seeds = np.arange(copies, dtype=np.uint64)
    random = np.random.default_rng(0)
    action = random.uniform(-1, 1, (copies, agents, 2)).astype(np.float32)
    timestep = environment.reset(seeds)
    # Copies end one after the other, as they do in a run that has lasted for a while.
    turn = np.arange(copies) % _STEPS
    started = time.process_time()
    for step in range(steps):
        last = (timestep.step_type == int(StepType.LAST)) | (turn == step % _STEPS)
        timestep = environment.step(action, last, seeds)
    return copies * steps / (time.process_time() - started)


def balance(sessions: int) -> dict[str, Any]:
    """Return the configuration of acceptance test A6 without an end; two sessions: async."""
    task = load_task("A6")
    config = experiment("A6", task, "mappo", 1).model_dump(mode="json")
    if sessions == 2:
        config["learner"]["pipeline"] = "async"
        config["env_server"]["sessions_per_worker"] = 2
        config["env_server"]["envs_per_worker"] *= 2
    return config


def delivery(copies: int) -> dict[str, Any]:
    """Return a configuration with acting and one pass of learning."""
    return {
        "environment": {
            "name": "vmas",
            "scenario": "navigation",
            "arguments": {"n_agents": 4},
            "max_episode_steps": _STEPS,
        },
        "env_server": {"envs_per_worker": copies, "sessions_per_worker": 1},
        "network": {"name": "mlp", "hidden": [64]},
        "algorithm": {
            "name": "mappo",
            "centralized": False,
            "unroll_steps": 20,
            "batch_size": copies * 20 * 4,
            "batch_number": 1,
            "data_passes": 1,
        },
        "learner": {"device": "cpu", "checkpoint_every_updates": 1_000_000},
    }


def loop(config: dict[str, Any], warm_up_s: float, seconds: float) -> dict[str, float]:
    """Train for some seconds."""
    with Processes(config) as processes:
        processes.wait_for_updates(2 if warm_up_s else 1)
        time.sleep(warm_up_s)
        return rates(*processes.window(seconds))


def rates(before: Snapshot, after: Snapshot) -> dict[str, float]:
    """Return the rates between two snapshots: frames per CPU second and per second, and updates."""

    def gained(name: str) -> float:
        return after.metrics.get(name, 0.0) - before.metrics.get(name, 0.0)

    learner = after.learner_cpu_s - before.learner_cpu_s
    workers = after.workers_cpu_s - before.workers_cpu_s
    frames = gained("env_steps_total")
    return {
        "frames_per_cpu_s": frames / (learner + workers),
        "frames_per_env_cpu_s": frames / workers,
        "frames_per_s": frames / (after.wall_s - before.wall_s),
        "learner_us_per_frame": learner / frames * 1e6,
        "env_us_per_frame": workers / frames * 1e6,
        "updates": gained("updates_total"),
    }


def run(effort: Effort = Effort.FULL) -> dict[str, Any]:
    """Measure the rates of the environment alone, then of whole loops."""
    import torch

    torch.set_num_threads(1)  # as workers have it
    steps, warm_up_s, seconds = effort.choose((5, 0.0, 0.2), (50, 2.0, 15.0), (200, 5.0, 60.0))
    small = effort is Effort.SMOKE
    cases = [("balance", 4, 120), ("navigation", 4, 120), ("navigation", 4, 1024)]
    alone = {
        f"{scenario}, {agents} agents, {copies} copies": {
            "vmas itself": own_rate(scenario, agents, copies, steps),
            "plug-in, resets included": plugin_rate(scenario, agents, copies, steps),
        }
        for scenario, agents, copies in ([("balance", 4, 8)] if small else cases)
    }
    loops = {
        "MAPPO on balance, as A6": balance(1),
        "MAPPO on balance, async, 2 sessions": balance(2),
        "delivered: navigation, 1024 copies": delivery(1024),
    }
    for config in loops.values():  # before minutes are spent
        validate(ExperimentConfig, config)
    if small:
        loops = {"delivered: navigation, 16 copies": delivery(16)}
    rates_of = {name: loop(config, warm_up_s, seconds) for name, config in loops.items()}
    load = psutil.getloadavg()[0]
    return {"frames per CPU-second": alone, "loops": rates_of, "load_average": load}
