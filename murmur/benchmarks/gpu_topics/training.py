"""Topics `training` and `profile`: a learner and its environment servers as deployed.

terrain-reference with environments on all cores but one; the figures are the learner's own, from
its metrics port, with NVML's, beside the rate of the same environments where nothing else runs; and
those of a profile of a few updates.
"""

import gzip
import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from learner_service.telemetry.profile_files import FOLDER, REQUEST, TRACE
from murmur import latency
from murmur.benchmarks._processes import Processes, Scrape, scrape
from murmur.benchmarks.gpu_topics.alone import rate_alone
from murmur.benchmarks.gpu_topics.figures import Figure, Value
from murmur.benchmarks.gpu_topics.topics import Context
from shared.config import ExperimentConfig, load
from shared.cores import available_cores

_WINDOW_S, _SCRAPE_S = 20.0, 0.5
_ALONE_S, _WARM_UPDATES = 4.0, 12  # the first updates choose lengths of unrolls
_PROFILED_UPDATES, _PROFILE_S = 5, 25.0
_STREAMS_SHOWN, _KERNELS_SHOWN, _KERNEL_NAME = 4, 8, 90  # characters
_PHASES = ("idle", "update")  # of the learner, while it acts
_KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
_BUSY, _DOCTOR = "device busy by NVML, share", "what the run waits for, by the doctor"
_ALONE = "agent-steps a second of these environments alone"
_SHARE = "agent-steps a second / those of the environments alone"
_OVERLAP = "acting's kernels that ran beside learning's, share"


def plan_training(context: Context) -> list[Figure]:
    """The learner's own figures over _WINDOW_S."""
    del context
    return [
        Figure(_BUSY, expected=0.26),
        Figure("device busy by CUDA events, share"),
        Figure("throttled, share of looks"),
        Figure("sm clock, MHz, mean"),
        Figure("power, W, mean"),
        Figure("GPU memory in use, GiB, most"),
        Figure("agent-steps a second", expected=60_000.0),
        Figure(_ALONE, expected=65_000.0),
        Figure(_SHARE, 0.9, ">=", 0.95),
        Figure("update, ms, mean", 300.0, expected=230.0),
        Figure("the first updates, with captures: ms, mean"),
        Figure("updates"),
        Figure("inference p50, ms"),
        Figure("inference p99, ms"),
        *(
            Figure(f"arrival to actions, {phase}: p{q}, ms", 5.0 if q == 99 else None)
            for phase in _PHASES
            for q in (50, 99)
        ),
        Figure("copied to the device, MB/s"),
        Figure("graph replays a second"),
        Figure("graph replays an update"),
        Figure("graphs captured before"),
        Figure("graphs captured meanwhile", 0.0, "=", 0.0),
        Figure("eager calls meanwhile", 0.0, "=", 0.0),
        Figure("environment server, cores used"),
    ]


def plan_profile(context: Context) -> list[Figure]:
    """What the run waits for, and its kernels."""
    del context
    return [
        Figure(_DOCTOR, expected="environments"),
        Figure("streams with kernels"),
        Figure("sum of streams' busy time / their union", expected=1.05),
        Figure(_OVERLAP, expected=0.5),
    ]


def training(context: Context) -> dict[str, Value]:
    """See the module."""
    window = context.effort.choose(0.5, 12.0, _WINDOW_S)
    config = _configuration(context)
    alone = rate_alone(config, context.share(_ALONE_S))
    context.save({_ALONE: alone})
    with Processes(config.model_dump(mode="json")) as processes:
        processes.wait_for_updates(context.effort.choose(1, _WARM_UPDATES, _WARM_UPDATES))
        before = processes.snapshot()
        looks = _watch(lambda: scrape(processes.metrics_url), window)
        after = processes.snapshot()
        values = figures(looks, after.wall_s - before.wall_s)
        counts = (s.buckets.get("inference_seconds", {}) for s in (before, after))
        p50, p99 = quantiles(*counts)
        values |= {"inference p50, ms": p50, "inference p99, ms": p99}
        values["environment server, cores used"] = (after.workers_cpu_s - before.workers_cpu_s) / (
            after.wall_s - before.wall_s
        )
        values |= waits(looks[0], looks[-1]) | graphs(looks[0], looks[-1])
        rate = values["agent-steps a second"]
        assert isinstance(rate, float)
        return values | {_ALONE: alone, _SHARE: rate / alone if alone else None}


def graphs(before: Scrape, after: Scrape) -> dict[str, Value]:
    """What ran as graphs between two looks, and what was captured for that.

    Args:
        before: the window.
        after: it.
    """
    first, last = before.metrics, after.metrics

    def fresh(name: str) -> float:
        return last.get(name, 0.0) - first.get(name, 0.0)

    updates, made = fresh("update_seconds_count"), first.get("update_seconds_count", 0.0)
    replays = fresh("graph_replays_total") - fresh("graph_replays_total:act")
    return {
        "updates": updates,
        "the first updates, with captures: ms, mean": (
            1e3 * first.get("update_seconds_sum", 0.0) / made if made else None
        ),
        "graph replays an update": replays / updates if updates else None,
        "graphs captured before": first.get("graph_captures_total", 0.0),
        "graphs captured meanwhile": fresh("graph_captures_total"),
        "eager calls meanwhile": fresh("eager_calls_total"),
    }


def profile(context: Context) -> dict[str, Value]:
    """See the module."""
    with Processes(_configuration(context).model_dump(mode="json")) as processes:
        processes.wait_for_updates(context.effort.choose(1, _WARM_UPDATES, _WARM_UPDATES))
        seconds = context.effort.choose(0.5, 8.0, 8.0)
        values: dict[str, Value] = {_DOCTOR: _bottleneck(processes.metrics_url, seconds)}
        context.save(values)
        trace = _profile(processes, context.effort.choose(1, 3, _PROFILED_UPDATES))
        return values | (streams(trace) if trace else {})


def _configuration(context: Context) -> ExperimentConfig:
    """terrain-reference on all cores but one; in smoke a small spread on the CPU."""
    cores = max(int(available_cores()) - 1, 1)
    name, changes = context.effort.choose(
        (
            "spread",
            (
                "network.name=mlp",
                "network.hidden=[8]",
                "algorithm.batch_size=4800",
                "env_server.num_workers=1",
            ),
        ),
        ("terrain-reference", (f"env_server.num_workers={cores}",)),
        ("terrain-reference", (f"env_server.num_workers={cores}",)),
    )
    fixed = (f"learner.device={context.device}", "evaluation.every_updates=0", "run.max_minutes=0")
    return load(name, [*changes, *fixed, "run.max_updates=0"], {})


def _watch(look: Callable[[], Scrape], window_s: float) -> list[Scrape]:
    """Metrics every half second."""
    end = time.monotonic() + window_s
    looks = [look()]
    while time.monotonic() < end:
        time.sleep(min(_SCRAPE_S, window_s / 2))
        looks.append(look())
    return looks


def figures(looks: Sequence[Scrape], seconds: float) -> dict[str, Value]:
    """Means over the looks, and rates between the first and the last."""
    first, last = looks[0].metrics, looks[-1].metrics

    def mean(name: str) -> float | None:
        seen = [look.metrics[name] for look in looks if name in look.metrics]
        return sum(seen) / len(seen) if seen else None

    def rate(name: str) -> float:
        return (last.get(name, 0.0) - first.get(name, 0.0)) / seconds

    def scaled(value: float | None, by: float) -> float | None:
        return None if value is None else value * by

    updates = last.get("update_seconds_count", 0.0) - first.get("update_seconds_count", 0.0)
    spent = last.get("update_seconds_sum", 0.0) - first.get("update_seconds_sum", 0.0)
    most = [look.metrics.get("gpu_memory_used_bytes", 0.0) for look in looks]
    # A GPU at its power limit is fully used: power_cap does not count.
    throttled = [
        m["gpu_throttled"] > m.get("gpu_throttled:power_cap", 0.0)
        for m in (look.metrics for look in looks)
        if "gpu_throttled" in m
    ]
    return {
        _BUSY: mean("gpu_utilization_ratio"),
        "device busy by CUDA events, share": rate("device_busy_seconds_total"),
        "throttled, share of looks": sum(throttled) / len(throttled) if throttled else None,
        "sm clock, MHz, mean": scaled(mean("gpu_clock_hertz:sm"), 1e-6),
        "power, W, mean": mean("gpu_power_watts"),
        "GPU memory in use, GiB, most": max(most) / 2**30 if any(most) else None,
        "agent-steps a second": rate("agent_steps_total"),
        "update, ms, mean": 1e3 * spent / updates if updates else None,
        "copied to the device, MB/s": rate("device_copied_bytes_total:to_device") / 1e6,
        "graph replays a second": rate("graph_replays_total"),
    }


def waits(before: Scrape, after: Scrape) -> dict[str, Value]:
    """Quantiles of acting, by what the learner thread did meanwhile."""
    values: dict[str, Value] = {}
    for phase in _PHASES:
        histogram = "acting_seconds", phase
        both = quantiles(before.phases.get(histogram, {}), after.phases.get(histogram, {}))
        for q, ms in zip((50, 99), both, strict=True):
            values[f"arrival to actions, {phase}: p{q}, ms"] = ms
    return values


def quantiles(before: Mapping[float, float], after: Mapping[float, float]) -> list[float | None]:
    """Median and 99th percentile between two states of a histogram, in ms; None of nothing."""
    counts = {le: count - before.get(le, 0.0) for le, count in after.items()}
    seconds = (latency.quantile(counts, q) for q in (0.5, 0.99))
    return [None if math.isnan(s) else 1e3 * s for s in seconds]


def _bottleneck(url: str, window_s: float) -> str:
    """What `murmur doctor` says that the run waits for."""
    from murmur.diagnosis import diagnose
    from murmur.snapshots import from_metrics

    return diagnose(*from_metrics(url, window_s)[0]).bottleneck


def _profile(processes: Processes, updates: int) -> Path | None:
    """Have the learner trace its next updates; None if it does not in time."""
    folder = processes.folder / FOLDER
    folder.mkdir(exist_ok=True)
    request = folder / f"bench-{os.getpid()}{REQUEST}"
    unfinished = request.with_suffix(".tmp")
    unfinished.write_text(str(updates))
    unfinished.rename(request)
    trace, deadline = request.with_suffix(TRACE), time.monotonic() + _PROFILE_S
    while not trace.exists():
        if time.monotonic() > deadline:
            return None
        time.sleep(0.2)
    return trace


def streams(trace: Path) -> dict[str, Value]:
    """How busy each stream was, how much ran beside each other, and which kernels took longest."""
    with gzip.open(trace, "rt") as file:
        events = json.load(file)["traceEvents"]
    spans = [e for e in events if e.get("ph") == "X" and e.get("cat") in _KERNELS]
    return overlap(spans) | longest(spans)


def longest(spans: Sequence[Mapping[str, Any]]) -> dict[str, Value]:
    """The kernels that took longest in all, with their shares of the time of all and their counts.

    Args:
        spans: kernels and copies: "name", and "dur" in µs.
    """
    took, count = Counter[str](), Counter[str]()
    for span in spans:
        took[span["name"]] += span["dur"]
        count[span["name"]] += 1
    return {
        f"kernel {i + 1}": f"{us / took.total():.1%}, {count[name]} times: {name[:_KERNEL_NAME]}"
        for i, (name, us) in enumerate(took.most_common(_KERNELS_SHOWN))
    }


def overlap(spans: Sequence[Mapping[str, Any]]) -> dict[str, Value]:
    """Busy time by stream against its union.

    Args:
        spans: kernels and copies: "ts" and "dur" in µs, the stream in "args" or "tid".

    Returns:
        The busiest streams' shares of the union; the number of streams; the sum of their busy times
        over their union (1: nothing overlaps); of all but the busiest stream, the share of time in
        which the busiest one worked, too.
    """
    by_stream: dict[Any, list[tuple[float, float]]] = {}
    for span in spans:
        stream = span.get("args", {}).get("stream", span.get("tid"))
        by_stream.setdefault(stream, []).append((span["ts"], span["ts"] + span["dur"]))
    busy = {stream: _length(_union(of)) for stream, of in by_stream.items()}
    if not busy:
        return {"streams with kernels": 0}
    whole = _length(_union([span for of in by_stream.values() for span in of]))
    busiest = max(busy, key=lambda stream: busy[stream])
    others = _union([span for stream, of in by_stream.items() if stream != busiest for span in of])
    beside = _length(others) + busy[busiest] - whole
    ordered = sorted(busy.values(), reverse=True)[:_STREAMS_SHOWN]
    return {
        **{f"stream {i + 1}: busy of the union, share": b / whole for i, b in enumerate(ordered)},
        "streams with kernels": len(busy),
        "sum of streams' busy time / their union": sum(busy.values()) / whole if whole else None,
        _OVERLAP: beside / _length(others) if others else None,
    }


def _union(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same time without overlaps, in order."""
    joined: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((begin, end))
    return joined


def _length(spans: Sequence[tuple[float, float]]) -> float:
    return sum(end - begin for begin, end in spans)
