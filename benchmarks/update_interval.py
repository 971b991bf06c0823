"""What `update_interval` does to the learner's utilisation, with and without overlap.

A learner and an environment server as real processes, one environment, unrolls of one row: a row is
in the replay as soon as it has come. Two tasks: MADDPG on mpe2's simple_spread behind a wait that
makes each step as slow as a simulator's (it waits, so that it takes no core from the learner); and
DDPG on 3v3 snakes, one game and batches of 64 as its authors train it. Utilisation is the share of
wall time that the learner spends in updates. Beside it stands what docs/utilisation.md makes of the
time of a row, taken from the same run before its first update, and of the time of an update.
"""

import time
from typing import Any

import psutil

from benchmarks._processes import Processes

DESCRIPTION = (
    "share of time in which the learner updates, for update_interval 1, 5, 10, 20, with acting and "
    "learning in turn or overlapping, against the arithmetic (docs/utilisation.md)"
)

INTERVALS = (1, 5, 10, 20)
WAIT_MS = 40.0
MODES: dict[str, dict[str, Any]] = {
    "in turn": {"pipeline": "sync"},
    "overlap, lag 0": {"pipeline": "async", "max_policy_lag": 0},
    "overlap, lag 1": {"pipeline": "async", "max_policy_lag": 1},
}
SNAKES: dict[str, Any] = {
    "name": "snakes",
    "observation": "vector35",
    "reward": "shaped",
    "mask": "none",
}
SLOW: dict[str, Any] = {
    "name": "pettingzoo",
    "factory": "benchmarks.update_interval:slow_spread",
    "arguments": {"wait_ms": WAIT_MS},
}
_FIRST_ROWS = 20  # come slowly: everything is used for the first time


def slow_spread(wait_ms: float) -> Any:  # noqa: ANN401 - mpe2 has no types
    """A PettingZoo parallel environment: simple_spread, each step `wait_ms` longer."""
    from mpe2 import simple_spread_v3
    from pettingzoo.utils.wrappers import BaseParallelWrapper

    class Slow(BaseParallelWrapper):  # type: ignore[misc]
        def step(self, actions: Any) -> Any:  # noqa: ANN401
            time.sleep(wait_ms / 1000)
            return super().step(actions)

    return Slow(simple_spread_v3.parallel_env())


def experiment(
    environment: dict[str, Any], interval: int, updates: int, mode: str, start_rows: int
) -> dict[str, Any]:
    """The configuration: `updates` updates for every `interval` rows."""
    return {
        "environment": environment,
        "env_server": {"num_workers": 1, "envs_per_worker": 1, "sessions_per_worker": 1},
        "network": {"name": "mlp", "hidden": [256, 256], "agent_id": False},
        "algorithm": {
            "name": "maddpg",
            "centralised": environment is SLOW,
            "replay": {
                "capacity_rows": 100_000,
                "start_rows": start_rows,
                "batch_size": 64,
                "update_interval": interval,
                "updates_per_interval": updates,
                "unroll_steps": 1,
            },
        },
        "learner": {"device": "cpu", "checkpoint_every_updates": 1_000_000, **MODES[mode]},
    }


def measure(
    environment: dict[str, Any], interval: int, updates: int, mode: str, seconds: float
) -> dict[str, float]:
    """One run: its rows while it only acts, then its utilisation and rates while it learns."""
    start_rows = 120 if environment is SLOW else 3000
    config = experiment(environment, interval, updates, mode, start_rows)
    with Processes(config) as processes:
        idle = _rows(processes, _FIRST_ROWS), _rows(processes, start_rows * 3 // 4)
        processes.wait_for_updates(max(20, 2 * updates))
        before = processes.snapshot()
        time.sleep(seconds)
        after = processes.snapshot()
    wall = after.wall_s - before.wall_s
    row_s = (idle[1][0] - idle[0][0]) / (idle[1][1] - idle[0][1])

    def gained(name: str) -> float:
        return after.metrics.get(name, 0.0) - before.metrics.get(name, 0.0)

    update_s = gained("update_seconds_sum") / gained("updates_total")
    return {
        "row_ms": row_s * 1e3,
        "update_ms": update_s * 1e3,
        "expected": expected(interval, updates, mode, row_s, update_s),
        "utilisation": gained("update_seconds_sum") / wall,
        "rows_per_s": gained("rows_received_total") / wall,
        "updates_per_s": gained("updates_total") / wall,
    }


def _rows(processes: Processes, rows: int) -> tuple[float, float]:
    """When so many rows had come, s, and how many it were by then."""
    while True:
        now = processes.snapshot()
        come = now.metrics.get("rows_received_total", 0.0)
        if come >= rows:
            return now.wall_s, come
        time.sleep(0.1)


def expected(interval: int, updates: int, mode: str, row_s: float, update_s: float) -> float:
    """The learner's share of time: the arithmetic of docs/utilisation.md."""
    learning, acting = updates * update_s, interval * row_s
    if mode == "in turn":
        return learning / (acting + learning)
    if mode == "overlap, lag 0":  # acting goes on during a burst's last update
        return learning / (max(acting, update_s) + learning - update_s)
    return min(1.0, learning / acting)


def sweep(
    environment: dict[str, Any], cases: list[tuple[int, int]], modes: list[str], seconds: float
) -> dict[str, dict[str, float]]:
    """(interval, updates) and mode -> what was measured, beside what is expected."""
    return {
        f"{updates} per {interval}, {mode}": measure(environment, interval, updates, mode, seconds)
        for interval, updates in cases
        for mode in modes
    }


def run(quick: bool = False) -> dict[str, Any]:
    """Both tasks, by updates per rows; `expected` and `utilisation` are to be compared."""
    slow = [*((n, n) for n in INTERVALS), (5, 20)]
    fast = [(n, 1) for n in INTERVALS]
    return {
        "slow simulator": sweep(SLOW, slow, list(MODES), 4.0 if quick else 20.0),
        "snakes": sweep(SNAKES, fast, ["in turn", "overlap, lag 1"], 2.0 if quick else 10.0),
        "load_average": psutil.getloadavg()[0],
    }
