"""Waits of a run for its GPU: updates that run eagerly, and acts that wait for them.

Read from counters of CUDA graphs and of acting. A learner from before `eager_seconds` counts calls
alone; then an eager call is taken to last _EAGER_TIMES as long as a replay.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from murmur.doctor.latency import middles, quantile
from murmur.runs.snapshots import Snapshot
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.process.ledger import since
from murmur.text import number

_ACT = "act"  # the captured function of the inference thread
_EAGER_TIMES = 7.0  # of an H100: 4 to 12, COMA's updates 7.2
_FIRST_CAPTURES = 4  # of a function: those of a run that begins
_NOTABLE = 0.2  # share of the learning time, above which launches are what it waits for
_WAITING = 0.1  # the same of the run's time that acting waits
_LATE_S, _LATE_TIMES = 0.05, 5.0  # 99th percentile of acting during updates, and times the idle one
_RESTART = "costs a restart, and captures of some seconds"


@dataclass(frozen=True)
class GpuWait:
    """A reason why a run on a GPU waits.

    Attributes:
        kind: "shapes", "captures" or "eager" of updates, "eager acts" or "acts" of acting;
            murmur.doctor.page has the text of each.
        found: description of what was counted.
        remedy: description of the remedy.
        cost: price of the remedy, as text.
        settings: KEY=VALUE items of --set.
        lost_s: seconds of the learner thread, or of acting, that would be saved.
    """

    kind: str
    found: str
    remedy: str
    cost: str
    settings: tuple[str, ...]
    lost_s: float


def on_gpu(seen: Snapshot) -> bool:
    """Return whether a learner works on a GPU, as far as its counters tell."""
    return bool(seen.about.get("cuda") or "utilization_ratio" in seen.device)


def grown(before: Snapshot, after: Snapshot, metric: str) -> dict[str, float]:
    """Return a metric's increase between two snapshots, by function; see Snapshot.graphs."""
    return since(before.graphs, after.graphs).get(metric, {})


def failed_captures(seen: Snapshot) -> list[str]:
    """Return each function that could not be captured: reason, count, time of the next attempt."""
    lines = []
    for key, count in seen.graphs.get("graph_fallbacks", {}).items():
        name, _, reason = key.partition("/")
        if not count:
            continue
        left = seen.graphs.get("graph_retry_calls", {}).get(name)
        again = f"it is tried again after {number(left)} more calls"
        if left is None:
            again = "the learner's log says when it is tried again"
        elif left == 0:
            again = "it was captured since"
        elif left < 0:
            again = "it is not tried again before the learner restarts"
        why = "the device is out of memory" if reason == "memory" else "the learner's log has why"
        times = "" if count == 1 else f" {count:.0f} times"
        lines.append(f"the CUDA graph of '{name}' could not be captured{times}: {why}; {again}")
    return lines


def gpu_waits(
    before: Snapshot, after: Snapshot, learn_s: float, config: ExperimentConfig | None = None
) -> list[GpuWait]:
    """Return the waits of a run on a GPU between two snapshots, the most seconds first.

    Args:
        before: earlier snapshot.
        after: later snapshot.
        learn_s: seconds of learning in between.
        config: configuration of the run, for the number of sessions if the snapshot lacks it.
    """
    if not on_gpu(after):
        return []
    inference = since(before.threads, after.threads).get("inference", {})
    waits = (
        _eager(before, after, learn_s),
        _eager(before, after, inference.get("act", 0.0), acting=True),
        _acts(before, after, config),
    )
    found = [wait for wait in waits if wait is not None]
    return sorted(found, key=lambda wait: -wait.lost_s)


def _eager(
    before: Snapshot, after: Snapshot, busy_s: float, *, acting: bool = False
) -> GpuWait | None:
    """Return the wait for updates, or acts, with kernels that were launched one by one.

    Args:
        before: earlier snapshot.
        after: later snapshot.
        busy_s: seconds of learning, or of acting, in between.
        acting: flag to look at acts.
    """
    first = _first_captured(before, after)

    def counted(metric: str) -> dict[str, float]:
        both = grown(before, after, metric).items()
        return {n: count for n, count in both if (n == _ACT) == acting and n not in first}

    calls, captured = counted("eager_calls"), counted("graph_captures")
    eager, captures = sum(calls.values()), sum(captured.values())
    replays = sum(counted("graph_replays").values())
    timed = "eager_seconds" in after.graphs
    if not (eager or captures) or not busy_s or (acting and not timed):
        return None
    # Lost: time of eager calls and captures beyond that of the same number of replays. Without
    # counted seconds an eager call is taken to last _EAGER_TIMES as long as a replay.
    if timed:
        launched = sum(counted("eager_seconds").values())
        launched += sum(counted("graph_capture_seconds").values())
        replayed = max(busy_s - launched, 0.0)
        alone = replayed / replays if replays else launched / (eager + captures) / _EAGER_TIMES
        lost_s = launched - (eager + captures) * alone
    else:
        lost_s = busy_s * (1 - (eager + replays) / (_EAGER_TIMES * eager + replays))
    if lost_s < _NOTABLE * busy_s:
        return None
    names = ", ".join(f"'{name}'" for name in {**calls, **captured})
    found = (
        f"{eager:.0f} of {eager + replays:.0f} calls of {names} launched their kernels one by one, "
        f"{'' if timed else 'about '}{100 * lost_s / busy_s:.0f} % of the time of "
        f"{'acting' if acting else 'learning'}"
    )
    if captures:
        found += f"; {captures:.0f} captures meanwhile"
    # The cause, from the most to the least specific: failed captures, no graphs at all, shapes.
    if reasons := _not_captured(after, calls):
        kind, cure = "captures", _after_failures(reasons)
    elif not replays and not any(n for name, n in _total(after, "graph_captures").items()):
        kind = "eager"
        cure = (
            "capture updates and acts as CUDA graphs",
            f"{_RESTART}, and device memory for inputs of graphs",
            ("learner.cuda_graph=true",),
        )
    elif acting:
        kind = "shapes"
        cure = (
            "answer at most 1,024 environments at once: larger batches have no graph",
            "costs more batches, each of one replay",
            ("learner.batcher.max_batch_envs=1024",),
        )
    else:
        kind, cure = "shapes", (*_one_shape(after, timed=timed), ())
    return GpuWait("eager acts" if acting else kind, found, *cure, lost_s)


def _first_captured(before: Snapshot, after: Snapshot) -> set[str]:
    """Return functions that the run has begun to capture: their eager calls are the first."""
    already = _total(before, "graph_captures")
    now = _total(after, "graph_captures")
    return {n for n, count in now.items() if not already.get(n) and 0 < count <= _FIRST_CAPTURES}


def _one_shape(seen: Snapshot, *, timed: bool) -> tuple[str, str]:
    """Return how to give updates one shape, and the price of it.

    Args:
        seen: snapshot of the run.
        timed: True if its learner counts the seconds of eager calls.
    """
    if not timed:
        return (
            "resume the run with this version of murmur: it captures steps on minibatches, whose "
            "shape does not depend on environments, unrolls or their number",
            _RESTART,
        )
    if seen.cache:
        return "give all images one size, in files of one size or by the source's option", _RESTART
    return (
        "give updates one shape: set algorithm.unroll_steps and unrolls_per_update to what "
        "config.yaml holds, and let all workers have as many environments",
        f"{_RESTART}; updates then wait for the slowest sessions. Report it, too: steps on "
        "minibatches should have one shape",
    )


def _not_captured(seen: Snapshot, calls: Mapping[str, float]) -> list[str]:
    """Return reasons of failed captures, of functions whose calls still run eagerly."""
    failed = [key.partition("/") for key, n in _total(seen, "graph_fallbacks").items() if n]
    left = _total(seen, "graph_retry_calls")
    return [reason for name, _, reason in failed if calls.get(name) and left.get(name) != 0]


def _after_failures(reasons: list[str]) -> tuple[str, str, tuple[str, ...]]:
    """Return the remedy, its cost and settings, after captures that failed."""
    if "memory" in reasons:
        return (
            "leave graphs more device memory: smaller minibatches (algorithm.batch_size), a "
            "smaller replay, or no other program on the GPU",
            f"{_RESTART}; smaller minibatches are more steps of noisier gradients",
            (),
        )
    return (
        "report the learner's log; restart to try the captures again",
        _RESTART,
        (),
    )


def _acts(before: Snapshot, after: Snapshot, config: ExperimentConfig | None) -> GpuWait | None:
    """Return the wait of acts for an update's kernels, its captures, or the driver."""
    span = after.time - before.time
    timed = "acts_waited_seconds" in after.device
    p99 = {phase: _p99(before, after, phase) for phase in ("update", "idle")}
    late = p99["update"] >= max(_LATE_S, _LATE_TIMES * p99["idle"])
    if timed:

        def counted(name: str) -> float:
            return after.device.get(name, 0.0) - before.device.get(name, 0.0)

        lost_s, acts = counted("acts_waited_seconds"), counted("acts_waited")
        found = f"{acts:.0f} acts waited, {100 * lost_s / span:.0f} % of the time"
    else:
        if not late:
            return None
        sessions = _sessions(after, config)
        lost_s = _late_seconds(before, after) / sessions if sessions else 0.0
        found = "acts are late"
        if sessions:
            found = f"sessions wait about {100 * lost_s / span:.0f} % of the time for late acts"
    if lost_s < _WAITING * span and not late:
        return None
    if not math.isnan(p99["update"]):
        found += f"; 99 % of acts take up to {1e3 * p99['update']:.3g} ms while updates run"
        if not math.isnan(p99["idle"]):
            found += f", {1e3 * p99['idle']:.3g} ms between them"
    if timed:
        remedy = (
            "see what acts wait for: `murmur profile`, and `py-spy dump` of the learner; eager "
            "updates and captures hold acting up, so cure these first",
            "costs a few traced updates",
        )
    else:
        remedy = (
            "resume the run with this version of murmur: it makes events and pinned memory of "
            "acting beforehand, and its updates are many small graphs",
            _RESTART,
        )
    return GpuWait("acts", found, *remedy, (), lost_s)


def _p99(before: Snapshot, after: Snapshot, phase: str) -> float:
    """Return the 99th percentile of the seconds to actions; NaN if there were too few."""
    counts = since(before.latency, after.latency).get(phase, {})
    return quantile(counts, 0.99) if max(counts.values(), default=0.0) >= 100 else math.nan


def _late_seconds(before: Snapshot, after: Snapshot) -> float:
    """Return the seconds of requests beyond the idle 99th percentile, while updates ran."""
    usual = _p99(before, after, "idle")
    usual = 0.0 if math.isnan(usual) else usual
    late = middles(since(before.latency, after.latency).get("update", {}))
    return sum(max(middle - usual, 0.0) * count for middle, count in late)


def _sessions(seen: Snapshot, config: ExperimentConfig | None) -> int:
    """Return the number of sessions that train; 0 if unknown."""
    if seen.sessions or config is None:
        return seen.sessions
    server = config.env_server
    environments = seen.environments or config.total_envs
    return environments * server.sessions_per_worker // server.envs_per_worker


def _total(seen: Snapshot, metric: str) -> Mapping[str, float]:
    return seen.graphs.get(metric, {})
