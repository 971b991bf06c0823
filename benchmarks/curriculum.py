"""A curriculum on a task that is not learned without one: `benchmarks.combination_lock`."""

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

import murmur
from benchmarks._trainings import SYNC_LEARNER
from benchmarks.combination_lock import CELLS
from murmur.benchmarks.effort import Effort

DESCRIPTION = "a combination lock of 12 cells with a curriculum and without: 3 seeds, known best 1"
NEEDS = ("gymnasium",)

_STEPS = 60_000
_LEVELS = {
    "levels": list(range(1, CELLS + 1)),
    "when": {"metric": "opened", "above": 0.7, "over_episodes": 50},
}


def configuration(*, curriculum: bool, env_steps: int, seed: int) -> dict[str, Any]:
    """Return the configuration of a run with or without the curriculum."""
    environment: dict[str, Any] = {
        "name": "gymnasium",
        "factory": "benchmarks.combination_lock:Lock",
        "metrics": ["opened"],
    }
    if curriculum:
        environment["curriculum"] = {"distance": _LEVELS}
    return {
        "run": {"max_env_steps": env_steps, "seed": seed},
        "environment": environment,
        "env_server": {"num_workers": 1, "envs_per_worker": 16, "metrics_port": 0},
        "algorithm": {
            "name": "ppo",
            "unroll_steps": 32,
            "batch_size": 128,
            "batch_number": 4,
            "actor_lr": 0.003,
            "critic_lr": 0.003,
            "entropy_weight": 0.01,
        },
        "network": {"name": "mlp", "hidden": [64]},
        "learner": SYNC_LEARNER | {"log_every_s": 0.5},
    }


def train(*, curriculum: bool, env_steps: int, seed: int) -> dict[str, Any]:
    """Train once; return the result of greedy episodes over the whole lock."""
    started = time.monotonic()
    config = configuration(curriculum=curriculum, env_steps=env_steps, seed=seed)
    with tempfile.TemporaryDirectory(prefix="murmur-bench-") as folder:
        run = murmur.train(config, run=Path(folder) / "run", progress=False)
        seconds = time.monotonic() - started
        opened = run.evaluate(episodes=50).summary()["opened"].mean
        last = run.metrics().iloc[-1]
    return {
        "opened_greedily": opened,
        "opened_while_training": float(last["metrics.opened"]),
        "seconds": seconds,
    }


def run(effort: Effort = Effort.FULL) -> dict[str, Any]:
    """Train with the curriculum and without, with one seed or three."""
    env_steps = effort.choose(512, _STEPS, _STEPS)
    result: dict[str, Any] = {}
    for seed in range(1, effort.choose(1, 1, 3) + 1):
        for curriculum in (True, False)[: effort.choose(1, 2, 2)]:
            name = f"{'with' if curriculum else 'without'}, seed {seed}"
            result[name] = train(curriculum=curriculum, env_steps=env_steps, seed=seed)
            print(f"{name}: {result[name]}", file=sys.stderr, flush=True)
    result["load_average"] = psutil.getloadavg()[0]
    return result
