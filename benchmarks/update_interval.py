"""Effect of `update_interval` on the learner's utilization, with and without overlap.

A learner and an environment server as real processes; MADDPG on mpe2's simple_spread behind a wait
that makes each step as slow as a simulator's (it waits, so that it takes no core from the learner).
One environment, unrolls of one row: a row is in the replay as soon as it has come. Utilization is
the share of wall time that the learner is busy: samples, updates, publishes, logs. Beside it stands
what docs/utilisation.md makes of the time of a row, taken from the same run before its first
update, and the busy time of an update.
"""

import time
from typing import Any

import psutil

from murmur.benchmarks._processes import Processes
from murmur.benchmarks.effort import Effort

DESCRIPTION = (
    "share of time in which the learner updates, for update_interval 1, 5, 10, 20, with acting and "
    "learning in turn or overlapping, against the arithmetic (docs/utilisation.md)"
)
NEEDS = ("pettingzoo", "mpe2")

INTERVALS = (1, 5, 10, 20)
WAIT_MS = 40.0
MODES: dict[str, dict[str, Any]] = {
    "in turn": {"pipeline": "sync"},
    "async, lag 0": {"pipeline": "async", "max_policy_lag": 0},
    "async, lag 1": {"pipeline": "async", "max_policy_lag": 1},
}
_FIRST_ROWS, _START_ROWS = 20, 120  # the first come slowly: all is used for the first time
_LEARNING = ("sample", "forward", "backward", "optimize", "synchronize", "publish", "log")


def slow_spread(wait_ms: float) -> Any:  # noqa: ANN401 - mpe2 has no types
    """Build a PettingZoo parallel environment: simple_spread, each step `wait_ms` longer."""
    from mpe2 import simple_spread_v3
    from pettingzoo.utils.wrappers import BaseParallelWrapper

    class Slow(BaseParallelWrapper):  # type: ignore[misc]
        def step(self, actions: Any) -> Any:  # noqa: ANN401
            time.sleep(wait_ms / 1000)
            return super().step(actions)

    return Slow(simple_spread_v3.parallel_env())


def experiment(interval: int, updates: int, mode: str, wait_ms: float) -> dict[str, Any]:
    """Return the configuration with `updates` updates for every `interval` rows."""
    return {
        "environment": {
            "name": "pettingzoo",
            "factory": f"{__name__}:slow_spread",
            "arguments": {"wait_ms": wait_ms},
        },
        "env_server": {"num_workers": 1, "envs_per_worker": 1, "sessions_per_worker": 1},
        "network": {"name": "mlp", "hidden": [256, 256], "agent_id": False},
        "algorithm": {
            "name": "maddpg",
            "replay": {
                "capacity_rows": 100_000,
                "start_rows": _START_ROWS,
                "batch_size": 64,
                "update_interval": interval,
                "updates_per_interval": updates,
                "unroll_steps": 1,
            },
        },
        "learner": {"device": "cpu", "checkpoint_every_updates": 1_000_000, **MODES[mode]},
    }


def measure(
    interval: int, updates: int, mode: str, seconds: float, wait_ms: float = WAIT_MS
) -> dict[str, float]:
    """Measure one run: its rows while it only acts, then utilization and rates of learning."""
    with Processes(experiment(interval, updates, mode, wait_ms)) as processes:
        first, last = _rows(processes, _FIRST_ROWS), _rows(processes, _START_ROWS * 3 // 4)
        processes.wait_for_updates(max(20, updates))
        before, after = processes.window(seconds)
    wall = after.wall_s - before.wall_s
    row_s = (last[0] - first[0]) / (last[1] - first[1])
    thread = "inference" if mode == "in turn" else "learner"
    busy = sum(
        after.states.get((thread, s), 0.0) - before.states.get((thread, s), 0.0) for s in _LEARNING
    )
    made, came = (
        after.metrics[name] - before.metrics[name]
        for name in ("updates_total", "rows_received_total")
    )
    return {
        "row_ms": row_s * 1e3,
        "update_ms": busy / made * 1e3,
        "expected": expected(interval, updates, mode, row_s, busy / made),
        "utilisation": busy / wall,
        "rows_per_s": came / wall,
        "updates_per_s": made / wall,
    }


def _rows(processes: Processes, rows: int) -> tuple[float, float]:
    """Return the time [s] at which this number of rows had come, and the exact number."""
    while True:
        now = processes.snapshot()
        come = now.metrics.get("rows_received_total", 0.0)
        if come >= rows:
            return now.wall_s, come
        time.sleep(0.1)


def expected(interval: int, updates: int, mode: str, row_s: float, update_s: float) -> float:
    """Return the expected busy share of the learner, by the arithmetic of docs/utilisation.md."""
    learning, acting = updates * update_s, interval * row_s
    if mode == "async, lag 1":
        return min(1.0, learning / acting)
    return learning / (acting + learning)  # with lag 0 acting waits for a burst's end, too


def run(effort: Effort = Effort.FULL) -> dict[str, Any]:
    """Measure times and rates by updates per rows and mode, beside the expected utilization."""
    if effort is Effort.SMOKE:
        mode = "async, lag 1"
        return {f"5 per 5, {mode}": measure(5, 5, mode, 0.2, wait_ms=20.0)}
    seconds = effort.choose(0.0, 4.0, 15.0)
    cases = [(n, n, mode) for n in INTERVALS for mode in MODES]
    cases += [(5, u, mode) for u in (1, 20) for mode in ("in turn", "async, lag 1")]
    result: dict[str, Any] = {
        "updates per rows": {
            f"{u} per {n}, {mode}": measure(n, u, mode, seconds) for n, u, mode in cases
        }
    }
    result["load_average"] = psutil.getloadavg()[0]
    return result
