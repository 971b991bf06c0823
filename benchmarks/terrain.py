"""Terrain: CPU cost of a step, memory of a worker, baselines against published behavior."""

import time
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from murmur.benchmarks.effort import Effort
from murmur.env_service.environment import VectorEnvironment
from murmur.env_service.envs.terrain import BASELINES, Config, make
from murmur.env_service.envs.terrain.sensor import map_shape
from murmur.env_service.envs.terrain.world import world
from murmur.shared.wire.spec import ACTION_MASK
from murmur.shared.wire.timestep import StepType

DESCRIPTION = (
    "CPU time of a terrain step, memory of 32 environments, scripted baselines against the "
    "released system's"
)

TIMES = (1, 5, 10, 15)

REFERENCE: dict[str, tuple[tuple[float, float], ...]] = {
    "random": ((0.986, 0.246), (0.917, 0.379), (0.843, 0.472), (0.783, 0.535)),
    "lawnmower-5m": ((0.967, 0.066), (0.862, 0.245), (0.661, 0.524), (0.605, 0.578)),
    "lawnmower-10m": ((0.969, 0.169), (0.880, 0.329), (0.734, 0.595), (0.653, 0.652)),
    "lawnmower-15m": ((0.981, 0.261), (0.917, 0.402), (0.818, 0.619), (0.752, 0.665)),
    "information-gain": ((0.963, 0.321), (0.847, 0.453), (0.713, 0.604), (0.552, 0.738)),
    "information-gain, range 0": ((0.963, 0.321), (0.844, 0.437), (0.701, 0.588), (0.552, 0.705)),
}
"""(entropy, F1) at TIMES of the released system: 4 UAVs, 50 episodes each."""


def reference_world(seed: int, shape: tuple[int, int]) -> NDArray[np.uint8]:
    """Draw the half-plane of the released system's episode `seed`; high sides get 1 % less."""
    generator = np.random.RandomState(seed)
    side, percent = generator.randint(4), generator.randint(30, 61)
    truth = np.zeros(shape, np.uint8)
    view = truth if side < 2 else truth.T
    if side % 2 == 0:
        view[: len(view) * percent // 100] = 1
    else:
        view[len(view) - len(view) * (percent - 1) // 100 :] = 1
    return truth


def curves(
    baseline: str,
    trials: int = 50,
    config: Config | None = None,
    reference_worlds: bool = True,
) -> dict[str, NDArray[np.float32]]:
    """Play a baseline; return every metric over mission time, episodes 1 .. trials.

    Args:
        baseline: a name in BASELINES.
        trials: number of episodes.
        config: configuration of the mission; None: the default one.
        reference_worlds: flag to fly over the ground truths of the released system's episodes.

    Returns:
        metrics by name, [trials, budget + 2].
    """
    config = config or Config()
    environment = make(config, trials)
    if reference_worlds:
        worlds = (reference_world(seed, map_shape(config)) for seed in range(1, trials + 1))
        environment.draw_world = lambda _: next(worlds)
    policy = BASELINES[baseline](environment)
    seeds = np.arange(1, trials + 1, dtype=np.uint64)
    restart = np.zeros(trials, np.bool_)
    timestep = environment.reset(seeds)
    rows = [timestep.metrics]
    for _ in range(config.budget + 1):
        timestep = environment.step(policy.act(timestep), restart, seeds)
        rows.append(timestep.metrics)
    return {name: np.stack([row[name] for row in rows], axis=1) for name in rows[0]}


def baseline_table(
    trials: int = 50, reference_worlds: bool = True
) -> dict[str, dict[str, list[float]]]:
    """Return entropy and F1 of all baselines at TIMES, with the reference and the difference."""
    table = {}
    for name, reference in REFERENCE.items():
        baseline, _, silent = name.partition(", ")
        config = Config(communication_range_m=0.0) if silent else Config()
        result = curves(baseline, trials, config, reference_worlds)
        row: dict[str, list[float]] = {}
        for k, metric in enumerate(("entropy", "f1")):
            ours = result[metric][:, TIMES].mean(axis=0)
            row[metric] = np.round(ours.astype(float), 3).tolist()
            row[f"{metric}_reference"] = [point[k] for point in reference]
            row[f"{metric}_difference"] = np.round(
                ours.astype(float) - row[f"{metric}_reference"], 3
            ).tolist()
            row[f"{metric}_end_std"] = [round(float(result[metric][:, -1].std()), 3)]
        row["altitude_shares"] = [
            round(float(values[:, -1].mean()), 3)
            for metric, values in result.items()
            if metric.startswith("altitude_share_")
        ]
        table[name] = row
    return table


def step_benchmark(num_envs: int, episodes: int, truths: int) -> dict[str, float]:
    """Measure CPU time and memory of a worker's environments under random legal actions.

    Args:
        num_envs: number of environments of the worker.
        episodes: number of episodes of each environment.
        truths: number of ground truths drawn from each generator.

    Returns:
        milliseconds of CPU time per agent-step (steps alone, and with the starts of episodes),
        per start, and per ground truth of every generator; resident MiB of the whole process
        and of the environments alone.
    """
    config = Config()
    process = psutil.Process()
    result: dict[str, float] = {}
    shape = map_shape(config)
    for name in ("half-plane", "corner", "band", "corners-2", "corners-4", "gaussian", "raster"):
        draw = world(config.model_copy(update={"world": name}), shape)
        draw(np.random.default_rng(0))
        start = time.process_time()
        for seed in range(truths):
            draw(np.random.default_rng(seed))
        result[f"truth_{name}_ms"] = (time.process_time() - start) / truths * 1e3

    make(config, 1).reset(np.ones(1, np.uint64))  # compile, or load what was compiled
    before = process.memory_info().rss
    environment = make(config, num_envs)
    starts, steps = random_flight(environment, num_envs, episodes)
    agent_steps = episodes * num_envs * (config.budget + 1) * config.num_agents
    result["step_ms_per_agent"] = steps / agent_steps * 1e3
    result["step_ms_per_agent_with_starts"] = (steps + starts) / agent_steps * 1e3
    result["start_ms"] = starts / (episodes * num_envs) * 1e3
    result["resident_mib"] = process.memory_info().rss / 2**20
    result["environments_mib"] = (process.memory_info().rss - before) / 2**20

    observing = config.model_copy(update={"expected_gain": True})
    make(observing, 1).reset(np.ones(1, np.uint64))
    _, steps = random_flight(make(observing, num_envs), num_envs, episodes)
    result["step_ms_per_agent_expected_gain"] = steps / agent_steps * 1e3
    return {name: round(value, 4) for name, value in result.items()}


def random_flight(
    environment: VectorEnvironment, num_envs: int, episodes: int
) -> tuple[float, float]:
    """Measure CPU-seconds of episodes' starts and of their steps under random legal actions."""
    generator = np.random.default_rng(0)
    restart = np.zeros(num_envs, np.bool_)
    starting = stepping = 0.0
    seeds = np.arange(num_envs, dtype=np.uint64)
    environment.reset(seeds)
    for episode in range(1, episodes + 1):
        start = time.process_time()
        timestep = environment.reset(seeds + np.uint64(episode * num_envs))
        starting += time.process_time() - start
        while timestep.step_type[0] != StepType.LAST:
            mask = np.asarray(timestep.observation[ACTION_MASK], np.float64)
            action = (mask * generator.random(mask.shape)).argmax(axis=-1).astype(np.int32)
            start = time.process_time()
            timestep = environment.step(action, restart, seeds)
            stepping += time.process_time() - start
    return starting, stepping


def run(effort: Effort = Effort.FULL) -> dict[str, Any]:
    """Measure the cost of a step, then play every baseline beside its reference."""
    return {
        "step": step_benchmark(*effort.choose((2, 1, 1), (32, 1, 20), (32, 5, 20))),
        "baselines": baseline_table(trials=effort.choose(1, 5, 50)),
        "load_average": psutil.getloadavg()[0],
    }
