"""Topics of whole runs: a learner and its environment servers as deployed, from three presets.

Environments are on all cores but one. The figures are the learner's own, from its metrics port,
with NVML's, beside the rate of the same environments where nothing else runs; then those of a
profile of a few updates, if there is time. What was measured so far is kept every few seconds.
"""

import gzip
import json
import math
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from murmur.benchmarks._processes import Processes, Scrape, Snapshot, scrape
from murmur.benchmarks.gpu_topics.alone import rate_alone
from murmur.benchmarks.gpu_topics.figures import CASES, OF_A_RUN, WORKERS, Figure, Value
from murmur.benchmarks.gpu_topics.topics import LAUNCHING, Context
from murmur.doctor import latency
from murmur.learner_service.telemetry.profile_files import FOLDER, METADATA, REQUEST, TRACE
from murmur.shared.config.cores import available_cores
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.config.files import load

_WINDOW_S, _SCRAPE_S, _KEPT_EVERY_S = 15.0, 0.5, 2.0
_ALONE_S, _WARM_UPDATES = 4.0, 12  # the first updates choose lengths of unrolls
_AFTER_WINDOW_S = 4.0  # to read and keep figures
_PROFILED_UPDATES, _PROFILE_S = 2, 18.0
_STREAMS_SHOWN, _KERNELS_SHOWN, _KERNEL_NAME = 4, 8, 90  # characters
_PHASES = ("idle", "update")  # of the learner, while it acts
_KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")
_BUSY, _DOCTOR = "device busy by NVML, share", "what the run waits for, by the doctor"
_RATE, _ALONE = "agent-steps a second", "agent-steps a second of these environments alone"
_SHARE = "agent-steps a second / those of the environments alone"
_OVERLAP = "acting's kernels that ran beside learning's, share"
_OUTSIDE = "launches outside graphs an update"
_ACTING_SHARE = 0.03  # of the device, as an H100 had it
_GRAPH_CALLS = ("eager_calls_total", "graph_captures_total", "graph_signatures_total")


@dataclass(frozen=True)
class WholeRun:
    """A run that is measured.

    Attributes:
        preset: its configuration.
        changes: changes to the preset, KEY=VALUE.
        most_workers: largest number of environment processes.
        case: name in CASES of the case with the same update.
        scale: multiple of the case's number of environments.
        agents: number of agents of an environment.
        goals: sense and value by figure.
        before: value of an H100 with the former code, by figure.
        old_goals: replaced goals by figure.
        expected: predictions by figure.
    """

    preset: str
    changes: tuple[str, ...]
    most_workers: int
    case: str
    scale: int
    agents: int
    goals: Mapping[str, tuple[str, float]]
    before: Mapping[str, Value]
    old_goals: Mapping[str, str]
    expected: Mapping[str, Value]

    @property
    def name(self) -> str:
        """Return the prefix of the run's figures."""
        return f"run of {self.preset}"


_P99 = "arrival to actions, update: p99, ms"
RUNS = {
    "terrain-reference": WholeRun(
        "terrain-reference",
        (),
        WORKERS,
        "coma, terrain-reference",
        1,
        4,
        {_SHARE: (">=", 0.9), _P99: ("<=", 5.0), "arrival to actions, idle: p99, ms": ("<=", 5.0)},
        {
            _RATE: 42_455.0,
            _ALONE: 44_436.0,  # on an H200's machine
            _P99: 242.0,
            _BUSY: 0.278,
            "update, ms, mean": 647.0,
            "arrival to actions, idle: p99, ms": 9.41,
            "arrival to actions, idle: p50, ms": 1.664,
            "arrival to actions, update: p50, ms": 4.796,
            "device busy by CUDA events, share": 0.492,
            "environment server, cores used": 9.799,
        },
        {_BUSY: ">= 0.9: 52 cores needed", "update, ms, mean": "<= 20 for 1,024 rows"},
        {_SHARE: 0.95, _ALONE: 65_000.0, _RATE: 61_750.0, _DOCTOR: "environments"},
    ),
    "terrain-published": WholeRun(
        "terrain-published",
        ("env_server.envs_per_worker=10",),
        10,
        "coma, terrain-published",
        1,
        4,
        {_RATE: (">=", 40_000.0), _BUSY: (">=", 0.85), _SHARE: (">=", 0.9)},
        {_RATE: 20_800.0, "update, ms, mean": 144.0},
        {},
        {_DOCTOR: "learning", _BUSY: 0.9},
    ),
    "spread": WholeRun(
        "spread",
        ("env_server.envs_per_worker=512",),
        WORKERS,
        "mappo, spread",
        8,
        3,
        {},
        {},
        {},
        {_DOCTOR: "learning", _BUSY: 0.95},
    ),
}


def plan_run(context: Context, *, run: WholeRun) -> list[Figure]:
    """Plan the learner's own figures over _WINDOW_S."""
    del context
    (case,) = (case for case in CASES if case.name == run.case)
    counted = case.counted(OF_A_RUN)
    expected: dict[str, Value] = {
        "graph captures meanwhile": 0.0,
        "eager calls meanwhile": 0.0,
        **run.expected,
    }
    goals: dict[str, tuple[str, float]] = {
        "graph captures meanwhile": ("=", 0.0),
        "eager calls meanwhile": ("=", 0.0),
        **run.goals,
    }
    update_ms = case.captured_ms
    if counted and update_ms:
        expected["update, ms, mean"] = run.scale * update_ms
        expected["graph replays an update"] = run.scale * counted.graphs
        expected[_OUTSIDE] = run.scale * (counted.launches - counted.graphs)
        learned = 1e3 * counted.rows * run.agents / update_ms  # agent-steps a second, at most
        rate = expected.setdefault(_RATE, learned)
        assert isinstance(rate, float)
        expected.setdefault(_BUSY, rate / learned + _ACTING_SHARE)
    names = [
        *(_RATE, _ALONE, _SHARE, "environment server, cores used", "cores used alone"),
        *(_BUSY, "device busy by CUDA events, share", "update, ms, mean", "update, ms, p99"),
        *(f"arrival to actions, {phase}: p{q}, ms" for phase in _PHASES for q in (50, 99)),
        *("inference p50, ms", "inference p99, ms", "updates", "graph replays an update"),
        *("eager calls before", "eager calls meanwhile", "graph captures before"),
        *("graph captures meanwhile", "seconds of captures", "graph signatures before"),
        *("graph signatures meanwhile", _DOCTOR, _OUTSIDE),
        *("the first updates, with captures: ms, mean", "throttled, share of looks"),
        *("sm clock, MHz, mean", "power, W, mean", "GPU memory in use, GiB, most"),
        *("copied to the device, MB/s", "graph replays a second"),
        *("streams with kernels", "sum of streams' busy time / their union", _OVERLAP),
    ]
    return [
        Figure(
            f"{run.name}: {name}",
            goals.get(name, ("", None))[1],
            goals.get(name, ("<=", None))[0],  # type: ignore[arg-type]
            expected.get(name),
            run.before.get(name),
            run.old_goals.get(name, ""),
        )
        for name in names
    ]


def measure_run(context: Context, *, run: WholeRun) -> dict[str, Value]:
    """Measure a whole run: a learner and its environment servers as deployed."""
    values: dict[str, Value] = {}

    def keep(found: Mapping[str, Value], *, whole: bool = False) -> None:
        values.update({f"{run.name}: {name}": value for name, value in found.items()})
        context.save(values, whole=whole)

    config = _configuration(context, run)
    alone = context.known.get(f"{run.name}: {_ALONE}")
    if not isinstance(alone, float):
        began = time.monotonic()
        measured = rate_alone(config, context.share(_ALONE_S))
        alone = measured.rate
        took = time.monotonic() - began
        keep({_ALONE: alone, "cores used alone": measured.cores, "seconds: alone": took})
    began = time.monotonic()
    most_s = max(context.left_s() - _WINDOW_S, 10.0)
    processes = Processes(config.model_dump(mode="json"), start_s=min(most_s, 120.0))
    with processes:
        keep({"seconds: until the learner listens": time.monotonic() - began})
        _warm_up(context, processes)
        keep({"seconds: until warm": time.monotonic() - began})
        window = context.effort.choose(0.5, 8.0, _WINDOW_S)
        window = max(min(window, context.left_s() - _AFTER_WINDOW_S), 0.5)
        with ThreadPoolExecutor(1) as pool:
            said = pool.submit(_bottleneck, processes.metrics_url, window)
            _watch_window(processes, window, alone, keep)
            keep({_DOCTOR: _answer(said)}, whole=True)
        if context.left_s() > _PROFILE_S:
            deadline = time.monotonic() + min(context.left_s() - _AFTER_WINDOW_S, _PROFILE_S)
            trace = _profile(processes, context.effort.choose(1, 2, _PROFILED_UPDATES), deadline)
            keep(streams(trace) if trace else {"profile": "not written in time"}, whole=True)
    return values


def _warm_up(context: Context, processes: Processes) -> None:
    """Wait for _WARM_UPDATES, or for fewer where the time of the topic is short.

    Raises:
        RuntimeError: if there is no update in time, with the ends of the logs.
    """
    updates = context.effort.choose(1, _WARM_UPDATES, _WARM_UPDATES)
    processes.wait_for_updates(1, max(min(context.left_s() - _AFTER_WINDOW_S, 300.0), 1.0))
    spare = context.left_s() - _WINDOW_S - _AFTER_WINDOW_S
    deadline = time.monotonic() + min(spare, 300.0)
    while time.monotonic() < deadline:
        if processes.snapshot().metrics.get("updates_total", 0) >= updates:
            return
        time.sleep(0.2)


def _answer(said: "Future[str]") -> str:
    try:
        return said.result()
    except Exception as error:  # the other figures count
        return f"{type(error).__name__}: {error}"


def _watch_window(
    processes: Processes,
    window_s: float,
    alone: float,
    keep: Callable[[Mapping[str, Value]], None],
) -> None:
    """Look at the metrics every half second; keep the figures so far every few seconds."""
    before = processes.snapshot()
    looks, begun = [scrape(processes.metrics_url)], time.monotonic()
    kept = begun
    while True:
        time.sleep(min(_SCRAPE_S, window_s / 2))
        looks.append(scrape(processes.metrics_url))
        now = time.monotonic()
        over = now - begun >= window_s
        if over or now - kept >= _KEPT_EVERY_S:
            kept = now
            keep(_so_far(before, processes.snapshot(), looks, now - begun, alone))
        if over:
            return


def _so_far(
    before: Snapshot, after: Snapshot, looks: Sequence[Scrape], seconds: float, alone: float
) -> dict[str, Value]:
    """Return the figures of a window."""
    first, last = looks[0], looks[-1]
    values = figures(looks, seconds)
    for histogram, what in (("inference_seconds", "inference p"), ("update_seconds", "update, ms")):
        both = quantiles(first.buckets.get(histogram, {}), last.buckets.get(histogram, {}))
        if what == "update, ms":
            values["update, ms, p99"] = both[1]
        else:
            values["inference p50, ms"], values["inference p99, ms"] = both
    used = after.workers_cpu_s - before.workers_cpu_s
    values["environment server, cores used"] = used / (after.wall_s - before.wall_s)
    rate = values[_RATE]
    assert isinstance(rate, float)
    values["seconds: window"] = seconds
    return (
        values
        | waits(first, last)
        | graphs(first, last)
        | {_SHARE: rate / alone if alone else None}
    )


def graphs(before: Scrape, after: Scrape) -> dict[str, Value]:
    """Return counts of graph replays, captures and eager calls between two scrapes, by function.

    Args:
        before: metrics before the window.
        after: metrics after the window.
    """
    first, last = before.metrics, after.metrics

    def fresh(name: str) -> float:
        return last.get(name, 0.0) - first.get(name, 0.0)

    updates, made = fresh("update_seconds_count"), first.get("update_seconds_count", 0.0)
    replays = fresh("graph_replays_total") - fresh("graph_replays_total:act")
    values: dict[str, Value] = {
        "updates": updates,
        "the first updates, with captures: ms, mean": (
            1e3 * first.get("update_seconds_sum", 0.0) / made if made else None
        ),
        "graph replays an update": replays / updates if updates else None,
        "seconds of captures": last.get("graph_capture_seconds_total", 0.0),
    }
    for metric in _GRAPH_CALLS:
        what = metric.removesuffix("_total").replace("_", " ")
        values |= {f"{what} before": first.get(metric, 0.0), f"{what} meanwhile": fresh(metric)}
        for name in (name for name in last if name.startswith(f"{metric}:")):
            kind = name.partition(":")[2]
            values[f"{what} before, {kind}"] = first.get(name, 0.0)
            values[f"{what} meanwhile, {kind}"] = fresh(name)
    return values


def _configuration(context: Context, run: WholeRun) -> ExperimentConfig:
    """Return the preset with environments on all cores but one; in smoke a small spread."""
    cores = max(min(int(available_cores()) - 1, run.most_workers), 1)
    of_cores = run.preset, (*run.changes, f"env_server.num_workers={cores}")
    small = (
        *("network.name=mlp", "network.hidden=[8]", "algorithm.batch_size=4800"),
        "env_server.num_workers=1",
    )
    name, changes = context.effort.choose(("spread", small), of_cores, of_cores)
    fixed = (f"learner.device={context.device}", "evaluation.every_updates=0", "run.max_minutes=0")
    return load(name, [*changes, *fixed, "run.max_updates=0"], {})


def figures(looks: Sequence[Scrape], seconds: float) -> dict[str, Value]:
    """Return means over the looks, and rates between the first and the last."""
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
    """Return quantiles of acting, by what the learner thread did meanwhile."""
    values: dict[str, Value] = {}
    for phase in _PHASES:
        histogram = "acting_seconds", phase
        both = quantiles(before.phases.get(histogram, {}), after.phases.get(histogram, {}))
        for q, ms in zip((50, 99), both, strict=True):
            values[f"arrival to actions, {phase}: p{q}, ms"] = ms
    return values


def quantiles(before: Mapping[float, float], after: Mapping[float, float]) -> list[float | None]:
    """Return median and 99th percentile between two states of a histogram [ms]; None of nothing."""
    counts = {le: count - before.get(le, 0.0) for le, count in after.items()}
    seconds = (latency.quantile(counts, q) for q in (0.5, 0.99))
    return [None if math.isnan(s) else 1e3 * s for s in seconds]


def _bottleneck(url: str, window_s: float) -> str:
    """Return the bottleneck that `murmur doctor` names."""
    from murmur.doctor.diagnosis import diagnose
    from murmur.runs.snapshots import from_metrics

    return diagnose(*from_metrics(url, window_s)[0]).bottleneck


def _profile(processes: Processes, updates: int, deadline: float) -> Path | None:
    """Trace the learner's next updates; None if it does not answer by then."""
    folder = processes.folder / FOLDER
    folder.mkdir(exist_ok=True)
    request = folder / f"bench-{os.getpid()}{REQUEST}"
    unfinished = request.with_suffix(".tmp")
    unfinished.write_text(str(updates))
    unfinished.rename(request)
    trace = request.with_suffix(TRACE)
    while not trace.exists():
        if time.monotonic() > deadline:
            return None
        time.sleep(0.2)
    return trace


def streams(trace: Path) -> dict[str, Value]:
    """Return busy shares of streams, their overlap, launches, and the kernels that took longest."""
    with gzip.open(trace, "rt") as file:
        recorded = json.load(file)
    events = recorded["traceEvents"]
    spans = [e for e in events if e.get("ph") == "X" and e.get("cat") in _KERNELS]
    updates = int(recorded.get(METADATA, {}).get("updates", 1))
    return overlap(spans) | launched(events, updates) | longest(spans)


def launched(events: Sequence[Mapping[str, Any]], updates: int) -> dict[str, Value]:
    """Return the launches of the learner's thread per update; none if the trace does not name it.

    Args:
        events: events of the trace.
        updates: number of updates in the trace.
    """
    learners = {
        event["tid"]
        for event in events
        if event.get("name") == "thread_name" and event["args"]["name"].startswith("learner")
    }
    calls = Counter(
        event["name"]
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and event["tid"] in learners
    )
    if not calls:
        return {}
    replays = sum(n for name, n in calls.items() if "GraphLaunch" in name)
    every = sum(n for name, n in calls.items() if re.fullmatch(LAUNCHING, name))
    return {
        _OUTSIDE: (every - replays) / updates,
        "graph launches an update, by the trace": replays / updates,
    }


def longest(spans: Sequence[Mapping[str, Any]]) -> dict[str, Value]:
    """Return the kernels with the longest total times, with their shares and counts.

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
    """Compare the busy time by stream with its union.

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
    """Return the same spans without overlaps, in order."""
    joined: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((begin, end))
    return joined


def _length(spans: Sequence[tuple[float, float]]) -> float:
    return sum(end - begin for begin, end in spans)
