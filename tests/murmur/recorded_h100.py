"""The counters of terrain-reference on an H100 with 15 workers, as its saved figures give them.

Rates, shares and quantiles are those of benchmarks/results, the states of the threads are not
recorded: they are chosen so that sessions wait for learning more than for environments.
"""

import json
from collections.abc import Mapping
from typing import Any

from murmur.doctor.machine import RESULTS
from murmur.runs.snapshots import Snapshot, _snapshot

FILE = RESULTS / "gpu-20261126-nvidia-h100-80gb-hbm3.json"
SPAN_S, AGENTS, SESSIONS, ENVS = 45.4, 4, 30, 32
UPDATE_ROWS = 960 * 15  # without the LAST row of each episode of 15 steps
ABOUT = {"name": "NVIDIA H100", "driver": "580.159.04", "cuda": "13.0", "precision": "fp32"}
# Upper bounds in s, and share of the requests up to them: their median and 99th percentile are the
# recorded ones.
DURING_UPDATES = {0.003: 0.15, 0.005: 0.54, 0.01: 0.8, 0.02: 0.85, 0.1: 0.86, 0.25: 0.9976, 5: 1.0}
IDLE = {0.001: 0.1, 0.002: 0.7, 0.0075: 0.96, 0.01: 0.9993, 5: 1.0}


def recorded() -> dict[str, float]:
    """The figures by name."""
    figures = json.loads(FILE.read_text())["result"]["figures"]
    return {name: figure["measured"] for name, figure in figures.items()}


def counters(share: float, **changed: Mapping[tuple[str, ...], float]) -> dict[str, Any]:
    """What the learner of that commit served: metric -> labels -> value.

    Args:
        share: of the window that has passed, 0 or 1.
        changed: other values of a metric at the end of the window.
    """
    r = recorded()
    steps = SPAN_S * r["agent-steps a second"]
    updates = steps / AGENTS / UPDATE_ROWS
    learned = updates * r["update, ms, mean"] / 1e3
    eager = SPAN_S * r["eager calls a second"]
    acts = SPAN_S * r["graph replays a second"] - updates + eager
    requests = steps / AGENTS / ENVS
    values: dict[str, dict[tuple[str, ...], float]] = {
        "rows_received_total": {(): steps / AGENTS},
        "env_steps_total": {(): steps / AGENTS},
        "agent_steps_total": {(): steps},
        "updates_total": {(): updates},
        "device_busy_seconds_total": {(): SPAN_S * r["device busy by CUDA events, share"]},
        "state_seconds_total": {
            ("learner", "wait_rows"): SPAN_S - learned,
            ("learner", "forward"): learned,
            ("inference", "wait_learning"): 18.0,
            ("inference", "wait_environments"): 12.0,
            ("inference", "act"): 11.0,
            ("inference", "store"): SPAN_S - 41.0,
        },
        "eager_calls_total": {("update",): eager},
        "graph_replays_total": {("update",): updates - eager, ("act",): acts},
        "acting_seconds_bucket": {
            **_buckets("update", DURING_UPDATES, requests * learned / SPAN_S),
            **_buckets("idle", IDLE, requests * (1 - learned / SPAN_S)),
        },
    }
    values |= {name: dict(of) for name, of in changed.items()}
    return {name: {k: share * v for k, v in of.items()} for name, of in values.items()}


def _buckets(
    phase: str, shares: Mapping[float, float], requests: float
) -> dict[tuple[str, ...], float]:
    return {(phase, str(le)): share * requests for le, share in shares.items()}


_LABELS = {
    "state_seconds_total": ("thread", "state"),
    "acting_seconds_bucket": ("phase", "le"),
    "graph_fallbacks_total": ("graph", "reason"),
    "acts_waited_total": ("phase",),
    "acts_waited_seconds_total": ("phase",),
}


def look(
    *, cuda: bool = True, sessions: int = SESSIONS, **changed: Mapping[tuple[str, ...], float]
) -> tuple[Snapshot, Snapshot]:
    """Both ends of the window, as a metrics port gives them.

    Args:
        cuda: whether the learner is on the GPU.
        sessions: that train.
        changed: see `counters`.
    """
    found = []
    for share in (0.0, 1.0):
        samples: list[tuple[str, Mapping[str, str], float]] = [
            ("murmur_learner_sessions", {"mode": "train"}, sessions),
            ("murmur_learner_machine_busy_ratio", {}, 0.8),
        ]
        if cuda:
            nvml = recorded()["device busy by NVML, share"]
            samples.append(("murmur_learner_device_info", ABOUT, 1.0))
            samples.append(("murmur_learner_gpu_utilization_ratio", {}, nvml))
        for name, of in counters(share, **changed).items():
            keys = _LABELS.get(name, ("graph",))
            gauge = name == "graph_retry_calls"
            for labels, value in of.items():
                given = changed[name][labels] if gauge else value
                sample = dict(zip(keys, labels, strict=False)) if labels else {}
                samples.append((f"murmur_learner_{name}", sample, given))
        found.append(_snapshot(100.0 + share * SPAN_S, samples, "here"))
    return found[0], found[1]


def learner(busy_s: float) -> dict[str, Any]:
    """States in which the learner is busy so long, and sessions wait for it."""
    return {
        "state_seconds_total": {
            ("learner", "wait_rows"): SPAN_S - busy_s,
            ("learner", "forward"): busy_s,
            ("inference", "wait_learning"): 20.0,
            ("inference", "wait_environments"): 12.0,
            ("inference", "act"): 9.0,
            ("inference", "store"): SPAN_S - 41.0,
        }
    }


# Acting as it should be: as fast during updates as between them.
PROMPT = {
    "acting_seconds_bucket": {
        (phase, str(le)): share * 7000 for phase in ("update", "idle") for le, share in IDLE.items()
    }
}
REPLAYED = {
    "eager_calls_total": {("update",): 0.0, ("act",): 2.0},
    "graph_replays_total": {("update",): 33.0, ("act",): 7000.0},
}


def tiny_kernels() -> tuple[Snapshot, Snapshot]:
    """The recorded run as it is with updates that replay graphs and last nearly all the time."""
    return look(**learner(43.0), **REPLAYED, **PROMPT)
