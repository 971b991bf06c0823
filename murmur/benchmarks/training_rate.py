"""Training rate: learner, environment server and the wire between them, as deployed on one machine.

`spread` with 3 agents, 18 floats, 5 actions and 25 steps; shared perceptrons of 2 x 64; COMA with
one pass over each rollout, and IPPO with actor and critic apart and on one trunk. Rates are taken
from the learner's counters between two moments well after the first update; CPU seconds are those
of all processes.
"""

import time
from pathlib import Path
from typing import Any

import psutil

from murmur.benchmarks._processes import Processes, Snapshot, quantile
from murmur.benchmarks.effort import Effort
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.config.section import validate

DESCRIPTION = (
    "agent-steps/s of training on spread over gRPC, wall and per CPU-second (targets 66 k, 35 k), "
    "against environments per message; inference latency (targets p50 0.5 ms, p99 3 ms)"
)

NUM_AGENTS, EPISODE_STEPS = 3, 25
SWEEP = ((1, 2), (1, 16), (8, 2), (32, 2), (128, 2))
"""(environments of a session, and so of a message; sessions). 2 sessions: double buffering."""


IPPO_SWEEP = ((128, 2), (256, 2), (512, 2))
"""The same, for each of ARMS but the first."""

_IPPO = {"name": "mappo", "centralized": False}
ARMS: dict[str, dict[str, Any]] = {
    "COMA": {
        "name": "coma",
        "advantage": "critic",
        "clip_ratio": 0.0,
        "normalize_advantage": False,
    },
    "IPPO": _IPPO,
    "IPPO, shared trunk": {**_IPPO, "share_trunk": True},
}


def experiment(envs_per_session: int, sessions: int, arm: str = "COMA") -> dict[str, Any]:
    """Return the configuration: an update per episode of all environments, at least 2400 rows."""
    envs = envs_per_session * sessions
    rows = max(2400, envs * EPISODE_STEPS * NUM_AGENTS)
    return {
        "environment": {"name": "spread"},
        "env_server": {
            "num_workers": 1,
            "envs_per_worker": envs,
            "sessions_per_worker": sessions,
        },
        "network": {"name": "mlp", "hidden": [64, 64]},
        "algorithm": {
            **ARMS[arm],
            "unroll_steps": EPISODE_STEPS,
            "data_passes": 1,
            "batch_number": 4,
            "batch_size": rows // 4,
        },
        "learner": {"device": "cpu", "num_threads": 1, "checkpoint_every_updates": 1_000_000},
    }


def measure(
    envs_per_session: int,
    sessions: int,
    warm_up_s: float,
    seconds: float,
    credentials: Path | None = None,
    arm: str = "COMA",
) -> dict[str, float]:
    """Train for some seconds; with a folder of `murmur certs` over TLS, else in plain text."""
    with Processes(experiment(envs_per_session, sessions, arm), credentials) as processes:
        processes.wait_for_updates(3 if warm_up_s else 1)
        time.sleep(warm_up_s)
        return rates(*processes.window(seconds))


def rates(before: Snapshot, after: Snapshot) -> dict[str, float]:
    """Return the rates, latencies and CPU times between two snapshots."""

    def gained(name: str) -> float:
        return after.metrics.get(name, 0.0) - before.metrics.get(name, 0.0)

    wall = after.wall_s - before.wall_s
    learner = after.learner_cpu_s - before.learner_cpu_s
    workers = after.workers_cpu_s - before.workers_cpu_s
    steps = gained("agent_steps_total")
    wait_p50, wait_p99, work_p50, work_p99 = (
        quantile(before, after, histogram, q) * 1e3
        for histogram in ("queue_wait_seconds", "inference_seconds")
        for q in (0.5, 0.99)
    )
    return {
        "agent_steps_per_s": steps / wall,
        "agent_steps_per_cpu_s": steps / (learner + workers),
        "env_steps_per_s": gained("env_steps_total") / wall,
        "learner_cpu_us_per_env_step": learner / gained("env_steps_total") * 1e6,
        "workers_cpu_us_per_env_step": workers / gained("env_steps_total") * 1e6,
        "cores_used": (learner + workers) / wall,
        "updates_per_s": gained("updates_total") / wall,
        "update_ms": gained("update_seconds_sum") / max(gained("updates_total"), 1) * 1e3,
        "policy_lag": gained("policy_lag_sum") / max(gained("policy_lag_count"), 1),
        "rows_trained_share": gained("rows_trained_total") / max(gained("rows_received_total"), 1),
        "rows_dropped": gained("rows_dropped_total"),
        "batch_envs": gained("batch_envs_sum") / max(gained("batch_envs_count"), 1),
        "queue_wait_p50_ms": wait_p50,
        "queue_wait_p99_ms": wait_p99,
        "inference_p50_ms": work_p50,
        "inference_p99_ms": work_p99,
    }


def run(effort: Effort = Effort.FULL) -> dict[str, Any]:
    """Measure rates by environments of a message; the last is the main figure."""
    warm_up_s, seconds = effort.choose((0.0, 0.2), (2.0, 6.0), (10.0, 30.0))
    cases = [(arm, case) for arm in list(ARMS)[1:] for case in IPPO_SWEEP]
    cases = [*cases, *(("COMA", case) for case in SWEEP)]
    for arm, case in cases:  # before minutes are spent
        validate(ExperimentConfig, experiment(*case, arm))
    measured = effort.choose([("COMA", SWEEP[1])], cases, cases)
    result: dict[str, Any] = {}
    for arm, (envs, sessions) in measured:
        prefix = "" if arm == "COMA" else f"{arm}, "
        result[f"{prefix}{envs} environments a message, {sessions} sessions"] = measure(
            envs, sessions, warm_up_s, seconds, arm=arm
        )
    result["load_average"] = psutil.getloadavg()[0]
    return result
