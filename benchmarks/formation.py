"""Formation: CPU cost of a step, scores of its scripted teams, and a bound for any team.

The bound says how many rows a follower must be out of formation at least, from where it starts.
"""

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from murmur.benchmarks.effort import Effort
from murmur.env_service.envs.formation import BASELINES, Config, make
from murmur.env_service.sessions.evaluate import run_baseline
from murmur.shared.config.files import load
from murmur.shared.config.section import validate
from murmur.shared.wire.timestep import StepType

DESCRIPTION = (
    "CPU time of a step of leader and followers (target ≥ 200 k agent-steps/s on a core); scripted "
    "teams, and a bound on any team"
)

CONFIGS = ("formation-reference", "formation")
FOLLOWERS = (1, 2, 3, 4)


def run(effort: Effort = Effort.FULL) -> dict[str, Any]:
    """Measure speed by task and size, metrics of the baselines, and the bound."""
    sizes = effort.choose(
        [(2, 64)], [(2, 64), (2, 256)], [(n, e) for n in (1, 2, 4, 16) for e in (64, 256)]
    )
    seconds, episodes = effort.choose(0.01, 0.2, 0.2), effort.choose(2, 20, 100)
    followers = effort.choose(FOLLOWERS[-1:], FOLLOWERS, FOLLOWERS)
    speed = {
        f"{name}, {n} followers, {num_envs} envs": step_speed(name, n, num_envs, seconds)
        for name in CONFIGS
        for n, num_envs in sizes
    }
    teams = {
        f"{name}, {n} followers, {baseline}": team(name, n, baseline, episodes)
        for name in CONFIGS
        for n in followers
        for baseline in BASELINES
    }
    starts = effort.choose(20, 200, 2000)
    bounds = {f"{n} followers": bound(n, starts) for n in followers}
    return {"step": speed, "teams": teams, "bound": bounds}


def step_speed(name: str, num_followers: int, num_envs: int, seconds: float) -> dict[str, float]:
    """Measure the CPU time of steps under random actions, starts of episodes included."""
    options = {**load(name).environment.options, "num_followers": num_followers}
    environment = make(validate(Config, options), num_envs)
    seeds = np.arange(num_envs, dtype=np.uint64)
    random = np.random.default_rng(0)
    shape = (32, num_envs, num_followers + 1, 2)
    actions = random.uniform(-1, 1, shape).astype(np.float32)
    timestep = environment.reset(seeds)
    steps, start = 0, time.process_time()
    while time.process_time() - start < seconds:
        for action in actions:
            timestep = environment.step(action, timestep.step_type == StepType.LAST, seeds)
        steps += len(actions)
    spent = time.process_time() - start
    return {
        "agent_steps_per_s": round(steps * num_envs * (num_followers + 1) / spent),
        "us_per_step_of_all": spent / steps * 1e6,
    }


def team(name: str, num_followers: int, baseline: str, episodes: int) -> dict[str, float]:
    """Play a baseline in the episodes of seeds 1, 2, ...; return its mean metrics."""
    config = load(name, [f"environment.num_followers={num_followers}"])
    result = run_baseline(config, baseline, episodes, 1)
    return {metric: float(values.mean()) for metric, values in result.metrics.items()}


def bound(num_followers: int, episodes: int) -> dict[str, float]:
    """Return the rows out of formation that no follower can avoid, and their share by T rows.

    In row t each of the two has flown at most its (highest possible) speed times the cosine of
    what it cannot yet have turned towards the other, along the line that joined them at the start.
    Their distance is at least what is left of that line. So this holds for every policy; that the
    leader cannot fly towards all followers at once, nor anyone while it passes the obstacle, is
    left out.
    """
    environment = make(Config(num_followers=num_followers), episodes)
    environment.reset(np.arange(1, episodes + 1, dtype=np.uint64))
    x, y, speed, heading = environment.body.astype(np.float64)
    dx, dy = x[:1] - x[1:], y[:1] - y[1:]  # from follower to leader
    left = np.hypot(dx, dy)
    turn_follower = np.abs(_wrapped(np.arctan2(-dy, dx) - heading[1:]))
    turn_leader = np.abs(_wrapped(np.arctan2(dy, -dx) - heading[:1]))
    rows, out = 40, np.zeros(left.shape)
    for row in range(1, rows + 1):
        left -= _gain(speed[1:], 0.6, 40.0, 1.2, turn_follower, row)
        left -= _gain(speed[:1], 0.3, 20.0, 0.6, turn_leader, row)
        out += (left >= 50) & (out == row - 1)
    lost = float(out.mean())
    return {"rows_lost": lost} | {f"share_of_{t}_rows": 1 - lost / t for t in (20, 25, 30, 35)}


def _gain(
    speed: NDArray[np.float64],
    acceleration: float,
    top: float,
    turn: float,
    off: NDArray[np.float64],
    row: int,
) -> NDArray[np.float64]:
    """Return the largest gain along the line in this row, or the least loss while it looks away."""
    cosine = np.cos(np.maximum(off - turn * row, 0))
    fast = np.minimum(speed + acceleration * row, top)
    slow = np.maximum(speed - acceleration * row, 10.0)
    return np.where(cosine > 0, fast, slow) * cosine


def _wrapped(angle: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.mod(angle + np.pi, 2 * np.pi) - np.pi
