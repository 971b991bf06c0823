"""Snakes: CPU cost of a step, scripted baselines against the published game.

`murmur bench snakes` prints what `run()` returns.
"""

import time
from typing import Any

import numpy as np

from murmur.benchmarks.effort import Effort
from murmur.env_service.envs.snakes import BASELINES, Config, make
from murmur.shared.wire.timestep import StepType

DESCRIPTION = "snakes: game steps per second of CPU time, scripted sides against reference scores"

REFERENCE: dict[tuple[str, str], dict[str, Any]] = {
    ("random", "random"): {"score": (0.91, 0.81), "record": (68, 61, 71), "deaths": 81},
    ("greedy", "random"): {"score": (20.9, 0.5), "record": (199, 0, 1)},
    ("greedy", "greedy"): {"score": (10.8, 11.4), "record": (89, 99, 12), "deaths": 41},
}
"""(side, opponent) -> mean scores, episodes won, lost, drawn of 200, deaths of all six snakes."""

CASES: dict[str, dict[str, Any]] = {
    "vector26": {"observation": "vector26"},
    "vector35, shaped": {"observation": "vector35", "reward": "shaped"},
    "images": {"observation": "images"},
    "images, state, self-play": {
        "observation": "images",
        "state": True,
        "control": "both",
        "reward": "zero-sum",
    },
    "egocentric": {"observation": "egocentric"},
}


def play(side: str, opponent: str, episodes: int = 200) -> dict[str, Any]:
    """Play a scripted side against a script in the episodes of seeds 1, 2, ...

    Returns:
        mean scores of both sides, episodes won, lost, drawn, mean deaths of all six snakes.
    """
    environment = make(Config(opponent=opponent), episodes)
    policy = BASELINES[side](environment)
    seeds, ended = np.arange(1, episodes + 1, dtype=np.uint64), np.zeros(episodes, np.bool_)
    result = {name: np.zeros(episodes) for name in environment.spec.metrics}
    timestep = environment.reset(seeds)
    while not ended.all():
        # ended copies restart for nothing
        timestep = environment.step(policy.act(timestep), ended, seeds)
        last = timestep.step_type == StepType.LAST
        for name, values in timestep.metrics.items():
            result[name][last] = values[last]
        ended = ended | last
    mean = {name: float(values.mean()) for name, values in result.items()}
    return {
        "score": (round(mean["score"], 2), round(mean["opponent_score"], 2)),
        "record": tuple(int(result[name].sum()) for name in ("win", "loss", "draw")),
        "deaths": round(mean["deaths"] + mean["opponent_deaths"], 1),
    }


def speed(num_envs: int, steps: int, options: dict[str, Any]) -> dict[str, float]:
    """Measure the CPU time of steps under random moves, starts of episodes included.

    Returns:
        game steps per second, microseconds per game step.
    """
    environment = make(Config(**options), num_envs)
    actions = np.random.default_rng(0).integers(
        4, size=(64, num_envs, environment.spec.num_agents), dtype=np.int32
    )
    timestep = environment.reset(np.arange(num_envs, dtype=np.uint64))
    seeds = np.arange(num_envs, dtype=np.uint64)
    start = time.process_time()
    for step in range(steps):
        seeds += np.uint64(num_envs)
        timestep = environment.step(actions[step % 64], timestep.step_type == StepType.LAST, seeds)
    took = time.process_time() - start
    return {
        "game_steps_per_s": round(num_envs * steps / took),
        "us_per_game_step": round(took / (num_envs * steps) * 1e6, 2),
    }


def run(effort: Effort = Effort.FULL) -> dict[str, Any]:
    """Measure the speed for each kind of observation, and play the table of scripts."""
    steps, episodes = effort.choose((5, 5), (200, 200), (2000, 2000))
    result: dict[str, Any] = {
        f"{name}, {num_envs} games": speed(num_envs, steps, options)
        for name, options in CASES.items()
        for num_envs in effort.choose((4,), (64, 256), (64, 256))
    }
    for (side, opponent), reference in REFERENCE.items():
        ours = play(side, opponent, episodes)
        row = {"score": ours["score"], "score, reference": reference["score"]}
        row |= {"won, lost, drawn": ours["record"], "of 200, reference": reference["record"]}
        row |= {"deaths": ours["deaths"], "deaths, reference": reference.get("deaths", "")}
        result[f"{side} against {opponent}"] = row
    return result
