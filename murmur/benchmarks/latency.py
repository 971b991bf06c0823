"""From a request's arrival to its actions, during updates and between them.

The learner is a real process that learns all the time, the sessions are those of the environment
server's own code, with a connection each, in another process. Figures are the learner's own
histograms.
"""

import asyncio
from typing import Any

import psutil

from murmur.benchmarks._processes import Processes, Scrape, scrape
from murmur.benchmarks.effort import Effort
from murmur.benchmarks.sessions import ENVS, Player, playing
from murmur.doctor.latency import quantile
from murmur.shared.process.ledger import since

DESCRIPTION = "p50 and p99 of acting during updates and between them, 32 sessions"

SESSIONS = 32


def experiment(sessions: int) -> dict[str, Any]:
    """Return `spread` with updates of some tenths of a second, and as long between them."""
    return {
        "environment": {"name": "spread"},
        "env_server": {"num_workers": 1, "envs_per_worker": ENVS, "sessions_per_worker": 1},
        "algorithm": {
            "name": "mappo",
            "unroll_steps": 26,
            "batch_size": 3 * 25 * sessions * ENVS,
            "batch_number": 1,
            "data_passes": 4,
        },
        "network": {"name": "mlp", "hidden": [64, 64]},
        "learner": {
            "device": "cpu",
            "num_threads": 1,
            "max_sessions": sessions,
            "max_policy_lag": 4,
            "checkpoint_every_updates": 100_000,
        },
    }


def seen_by_doctor(seen: Scrape) -> dict[str, dict[float, float]]:
    """Return buckets as the doctor takes them."""
    return {
        **{phase: seen.phases.get(("acting_seconds", phase), {}) for phase in ("update", "idle")},
        "inference": seen.buckets.get("inference_seconds", {}),
    }


async def measure(processes: Processes, sessions: int, warm_s: float, seconds: float) -> list[Any]:
    """Return the learner's metrics before and after `seconds`, and rows between them."""
    players = [Player(processes.address, i) for i in range(sessions)]
    async with playing(players):
        await asyncio.sleep(warm_s)
        before = await asyncio.to_thread(scrape, processes.metrics_url)
        rows = sum(p.rows for p in players)
        await asyncio.sleep(seconds)
        after = await asyncio.to_thread(scrape, processes.metrics_url)
        rows = sum(p.rows for p in players) - rows
    return [before, after, rows]


def one(sessions: int, warm_s: float, seconds: float) -> dict[str, Any]:
    """Measure once."""
    with Processes(experiment(sessions), servers=()) as processes:
        before, after, rows = asyncio.run(measure(processes, sessions, warm_s, seconds))
    seen = since(seen_by_doctor(before), seen_by_doctor(after))
    result: dict[str, Any] = {}
    for phase, name in (("update", "during updates"), ("idle", "between updates")):
        if count := max(seen[phase].values(), default=0.0):
            result[f"{name}: requests"] = int(count)
            result[f"{name}: p50, ms"] = 1e3 * quantile(seen[phase], 0.5)
            result[f"{name}: p99, ms"] = 1e3 * quantile(seen[phase], 0.99)
    result["environments in a batch"] = (
        after.metrics["batch_envs_sum"] - before.metrics["batch_envs_sum"]
    ) / max(1.0, after.metrics["batch_envs_count"] - before.metrics["batch_envs_count"])
    result["messages_per_s"] = rows / seconds
    result["updates"] = after.metrics["updates_total"] - before.metrics["updates_total"]
    return result


def run(effort: Effort = Effort.FULL) -> dict[str, Any]:
    """Measure latencies, twice if there is time."""
    sessions = effort.choose(4, SESSIONS, SESSIONS)
    warm_s, seconds = effort.choose((0.3, 0.4), (3.0, 8.0), (5.0, 30.0))
    result: dict[str, Any] = {
        f"turn {turn + 1}": one(sessions, warm_s, seconds) for turn in range(effort.choose(1, 1, 2))
    }
    result["load_average"] = psutil.getloadavg()[0]
    return result
