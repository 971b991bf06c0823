"""Diagnosis of a run: its bottleneck, and the predicted gain of each remedy.

The arithmetic is operational analysis (Denning and Buzen 1978, "The Operational Analysis of
Queueing Network Models"): a row visits the environments, the inference thread and the learner
thread, which work side by side. A station that is busy b seconds for each row cannot let through
more than 1 / b rows a second, and the slowest station sets the rate, wherever it is. In the sync
pipeline they take turns, and the busy times add.

What the stations are busy with comes from the learner's ledger; nothing is assumed of the
environments but that twice as many serve twice as many rows.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from murmur.doctor.gpu_waits import GpuWait, gpu_waits
from murmur.doctor.group_diagnosis import RankFigures, advice
from murmur.doctor.latency import latency_lines
from murmur.runs.snapshots import Snapshot
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.process.errors import ConfigError
from murmur.shared.process.ledger import since

if TYPE_CHECKING:  # a run is diagnosed where there is no torch, too
    from murmur.learner_service.learning.options import About

_WAITS = {
    "inference": ("wait_environments", "wait_learning", "start"),
    "learner": ("wait_rows", "start"),
}
_LEARNING = (
    *("sample", "forward", "backward", "optimize", "synchronize", "publish", "wait_rows"),
    "wait_ranks",  # of one of several learners: its exchange with the others is part of an update
)
_FULL = 0.95  # of a station's capacity is all that can be had of it
_MOST_TIMES = 64  # as many environment servers is as far as advice goes
_WORTH = 1.02  # times as fast: less is no remedy
_LATE = 0.1  # share of the time that acts wait, where it sets the rate
_NEARLY = 0.85  # busier than this, a station sets the rate

# How many times as fast a row is learned from with some settings; None: they do not fit.
Speedup = Callable[[Sequence[str]], float | None]


@dataclass(frozen=True)
class Remedy:
    """A change with its predicted effect.

    Attributes:
        what: description of the change.
        settings: KEY=VALUE items of --set.
        rate: predicted rate, environment rows per second.
        device_busy: predicted share of time the device works.
        limit: station that sets the rate after the change.
        cost: price of the change, as text; empty: none worth mentioning.
    """

    what: str
    settings: tuple[str, ...]
    rate: float
    device_busy: float
    limit: str
    cost: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """Bottleneck of a run, with the figures behind it and the remedies.

    Attributes:
        rate: environment rows per second.
        device_busy: share of time the device works, by CUDA events or the host's clock.
        kernels_busy: share of time in which kernels ran, by NVML at the end; None: unknown.
        bottleneck: "environments", "servers" (of samples), "acting", "learning", "processors" or
            "turns" (sync pipeline); on a GPU also a kind of GpuWait.
        waits: waits on a GPU, the most seconds first.
        busy: share of time each station works, by name.
        seconds_per_row: seconds per row of each station that was seen working.
        remedies: remedies, the best last.
        device: lines about the device.
        in_flight: description of an update's rows, as text; empty if unknown.
        latency: lines about the time from a request to its actions.
        cache: place of the samples of a run with a source; empty: it has an environment.
        ranks: figures of several learners that share the run; then `rate` and those of the remedies
            are the sums of all, and all else is about the one that the others wait for.
        advice: lines about the ranks.
    """

    rate: float
    device_busy: float
    bottleneck: str
    busy: Mapping[str, float]
    seconds_per_row: Mapping[str, float]
    agents: int
    remedies: tuple[Remedy, ...] = field(default=())
    device: tuple[str, ...] = field(default=())
    in_flight: str = ""
    latency: tuple[str, ...] = field(default=())
    cache: str = ""
    ranks: tuple[RankFigures, ...] = field(default=())
    advice: tuple[str, ...] = field(default=())
    kernels_busy: float | None = None
    waits: tuple[GpuWait, ...] = field(default=())


def _window(before: Snapshot, after: Snapshot) -> tuple[float, float]:
    """Return the seconds and rows between two snapshots.

    Raises:
        ConfigError: if nothing happened in between.
    """
    span, rows = after.time - before.time, after.rows - before.rows
    if span > 0 and rows > 0:
        return span, rows
    what = "sample was trained" if after.cache else "environment row came"
    who = "supply" if after.cache else "environment"
    raise ConfigError(
        f"no {what} in {max(span, 0):.0f} s: are {who} servers connected? See the learner's log, "
        "or look for longer with --window"
    )


def diagnose(
    before: Snapshot,
    after: Snapshot,
    config: ExperimentConfig | None = None,
    algorithm: "About | None" = None,
    speedup: Speedup | None = None,
) -> Diagnosis:
    """Diagnose a run between two snapshots of it.

    Args:
        before: earlier snapshot.
        after: later snapshot.
        config: the run's configuration, for remedies that name their settings.
        algorithm: options of its algorithm.
        speedup: function that measures the speed-up by changed settings of the learning.

    Raises:
        ConfigError: if nothing happened between the two.
    """
    span, rows = _window(before, after)
    spent = since(before.threads, after.threads)
    sync = "learner" not in spent
    act, learn = _working(spent, sync)
    device = (after.device_busy - before.device_busy) / span
    busy = {"acting": act / span, "learning": learn / span}
    per_row = {"acting": act / rows, "learning": learn / rows}
    waits = spent.get("inference", {})
    # The bottleneck: by the stations' busy shares, then by what keeps the GPU waiting.
    bottleneck = "turns" if sync else _bottleneck(busy, waits, after.machine_busy)
    if after.cache and bottleneck == "environments":
        bottleneck = "servers"
    gpu = tuple(gpu_waits(before, after, learn, config))
    bottleneck = _gpu_bottleneck(bottleneck, busy["learning"], gpu, span)
    seen = Diagnosis(
        rows / span,
        device,
        bottleneck,
        busy,
        per_row,
        after.agents,
        in_flight=after.in_flight,
        latency=latency_lines(since(before.latency, after.latency)),
        cache=after.cache,
        kernels_busy=after.device.get("utilization_ratio"),
        waits=gpu,
    )
    if after.cache:  # a run on samples has no acting
        del busy["acting"], per_row["acting"]
        seen = replace(seen, latency=())
    # Remedies of the bottleneck, and cures of GPU waits that are worth it, the best last.
    remedies = _remedies(seen, after, config, algorithm, speedup)
    made_to_wait = waits.get("wait_learning", 0.0)
    cures = [_without(seen, wait, span, learn, made_to_wait, sync=sync) for wait in gpu]
    remedies += [cure for cure in cures if cure.rate > _WORTH * seen.rate]
    return replace(seen, remedies=tuple(sorted(remedies, key=lambda r: r.rate)))


def _remedies(
    seen: Diagnosis,
    after: Snapshot,
    config: ExperimentConfig | None,
    algorithm: "About | None",
    speedup: Speedup | None,
) -> list[Remedy]:
    """Return the remedies for the bottleneck."""
    if seen.bottleneck in ("environments", "servers"):
        return _more_environments(seen, after, config, algorithm)
    if seen.bottleneck == "turns":
        return _overlap(seen, after)
    if seen.bottleneck == "learning" and config is not None and speedup is not None:
        return _faster_learning(seen, config, algorithm, speedup)
    return []


def of_group(seen: Diagnosis, pace: RankFigures, ranks: Sequence[RankFigures]) -> Diagnosis:
    """Extend the diagnosis of the learner that sets the pace to all that share its run.

    Args:
        seen: diagnosis of the learner that the others wait for.
        pace: figures of this learner.
        ranks: figures of all learners.
    """
    all_ = sum(r.rate for r in ranks) / max(pace.rate, 1e-12)  # times as many rows
    remedies = tuple(replace(r, rate=r.rate * all_) for r in seen.remedies)
    return replace(
        seen,
        rate=seen.rate * all_,
        remedies=remedies,
        ranks=tuple(ranks),
        advice=tuple(advice(ranks)),
    )


def _bottleneck(
    busy: Mapping[str, float], waits: Mapping[str, float], machine_busy: float | None
) -> str:
    """Return an async run's bottleneck; `waits` are the inference thread's seconds by state."""
    waits_for_learning = waits.get("wait_learning", 0.0) > waits.get("wait_environments", 0.0)
    if busy["learning"] > _NEARLY or waits_for_learning:
        return "learning"
    if busy["acting"] > _NEARLY:
        return "acting"
    if machine_busy is not None and machine_busy > _FULL:
        return "processors"
    return "environments"


def _gpu_bottleneck(bottleneck: str, learning: float, gpu: Sequence[GpuWait], span: float) -> str:
    """Return the kind of GPU wait behind a bottleneck, or the bottleneck itself.

    Eager updates explain slow learning. Late acts look like slow environments, and like slow
    learning if the learner has time left.

    Args:
        bottleneck: bottleneck by the stations.
        learning: share of time that the learner works.
        gpu: the waits, the most seconds first.
        span: length of the window [s].
    """
    for wait in gpu:
        long = wait.lost_s > _LATE * span
        if wait.kind == "acts":
            full = bottleneck == "learning" and learning > _NEARLY
            behind = bottleneck in ("learning", "acting", "environments") and long and not full
        elif wait.kind == "eager acts":
            behind = bottleneck == "acting"
        else:
            behind = bottleneck == "learning" or (bottleneck == "turns" and long)
        if behind:
            return wait.kind
    return bottleneck


def _without(
    seen: Diagnosis,
    wait: GpuWait,
    span: float,
    learn_s: float,
    made_to_wait_s: float,
    *,
    sync: bool,
) -> Remedy:
    """Predict the rate without a wait: the time that sessions waited goes to the environments.

    Args:
        seen: diagnosis of the run as it is.
        wait: wait to remove.
        span: length of the window [s].
        learn_s: seconds of learning in the window.
        made_to_wait_s: seconds in which sessions waited for learning.
        sync: True if acting and learning take turns.
    """
    saved, faster = wait.lost_s, 1.0
    if wait.kind in ("shapes", "captures", "eager"):
        share = min(wait.lost_s / learn_s, 0.99)
        faster = 1 / (1 - share)
        if not sync:  # else they take turns: all of it is saved
            saved = max(made_to_wait_s, learn_s - _NEARLY * span, 0.0) * share
    gained = 1 / max(1 - saved / span, 1 / _MOST_TIMES)
    rate, limit = _limit(seen, seen.rate * gained, faster)
    device = min(1.0, seen.device_busy * rate / (seen.rate * faster))
    return Remedy(wait.remedy, wait.settings, rate, device, limit, wait.cost)


def _working(spent: Mapping[str, Mapping[str, float]], sync: bool) -> tuple[float, float]:
    """Return seconds in which the inference thread acted, and seconds of learning."""
    inference = {
        s: v for s, v in spent.get("inference", {}).items() if s not in _WAITS["inference"]
    }
    if sync:
        learn = sum(v for s, v in inference.items() if s in _LEARNING)
        return sum(inference.values()) - learn, learn
    learner = sum(v for s, v in spent["learner"].items() if s not in _WAITS["learner"])
    return sum(inference.values()), learner


def _limit(
    seen: Diagnosis,
    environments: float,
    learning: float = 1.0,
    machine: float | None = None,
    admitted: float = math.inf,
) -> tuple[float, str]:
    """Return the rate that the stations allow, and the station that sets it.

    Args:
        seen: diagnosis of the run as it is.
        environments: rows per second that the environments could serve.
        learning: ratio of the rate of learning to the present one.
        machine: rows per second for which the machine's processors suffice.
        admitted: rows per second of as many environments as may act at once.
    """
    capacity = {
        "servers" if seen.cache else "environments": environments,
        "acting": _FULL / max(seen.seconds_per_row.get("acting", 0.0), 1e-12),
        "learning": _FULL * learning / max(seen.seconds_per_row["learning"], 1e-12),
    }
    if admitted < environments:
        capacity["policy lag"] = admitted
    if machine is not None:
        capacity["processors"] = machine
    limit = min(capacity, key=lambda name: capacity[name])
    return capacity[limit], limit


def _device_at(seen: Diagnosis, rate: float) -> float:
    """Return the share of time the device would work at another rate."""
    return min(1.0, seen.device_busy * rate / seen.rate)


def _more_environments(
    seen: Diagnosis, now: Snapshot, config: ExperimentConfig | None, algorithm: "About | None"
) -> list[Remedy]:
    # Work that needs the processor needs more of it; a wait for something else does not.
    machine = seen.rate / now.machine_busy if now.machine_busy else None
    most, _ = _limit(seen, math.inf, machine=machine)
    wanted = most / seen.rate
    remedies = []
    for factor in sorted({2, 4, min(_MOST_TIMES, max(2, math.ceil(wanted)))}):
        settings: tuple[str, ...] = ()
        what = f"{factor} times as many {'supply' if seen.cache else 'environment'} servers"
        if config is not None:
            there = config.env_server.num_workers or _workers(now, config)
            settings = (f"env_server.num_workers={there * factor}",)
            what = f"{there * factor} workers instead of {there}"
        admitted = seen.rate * _admitted(now, config, factor)
        rate, limit = _limit(seen, seen.rate * factor, 1.0, machine, admitted)
        remedies.append(Remedy(what, settings, rate, _device_at(seen, rate), limit))
        if limit == "policy lag" and config is not None and algorithm is not None:
            # An update of more rows takes in more environments, and a row costs the same in it.
            environments = _environments(now, config) * factor
            if algorithm.larger_updates is None:
                continue
            larger = algorithm.larger_updates(environments / _let_in(now, config))
            rate, limit = _limit(seen, seen.rate * factor, machine=machine)
            what = f"{what}, and {larger[0]}"
            settings = (*settings, *_settings(larger[1]))
            remedies.append(Remedy(what, settings, rate, _device_at(seen, rate), limit))
    return remedies


def _environments(now: Snapshot, config: ExperimentConfig) -> int:
    return now.environments or config.total_envs


def _workers(now: Snapshot, config: ExperimentConfig) -> int:
    return max(1, _environments(now, config) // config.env_server.envs_per_worker)


def _environments_of_an_update(now: Snapshot, config: ExperimentConfig) -> int:
    """Return the environments consumed per update, over `max_policy_lag + 1` updates."""
    return max(1, now.environments_limit // (config.learner.policy_lag + 1))


def _let_in(now: Snapshot, config: ExperimentConfig) -> float:
    """Return the mean number of environments that act at once, if there are more than may.

    Unrolls that are there and wait for the rest of an update's are half an update's on average.
    """
    return now.environments_limit - (_environments_of_an_update(now, config) - 1) / 2


def _admitted(now: Snapshot, config: ExperimentConfig | None, factor: int) -> float:
    """Return the expected speed-up of environment workers when their number is scaled by `factor`.

    Sessions are admitted whole, until `environments_limit` environments are under way. A worker
    steps its environments one after the other: one session keeps it as busy as two. So what
    counts are the workers that have a session among those admitted, which may be any.
    """
    if config is None or not now.environments_limit:
        return math.inf
    server = config.env_server
    of_a_session = server.envs_per_worker // server.sessions_per_worker

    def busy(workers: int) -> float:
        sessions, total = workers * server.sessions_per_worker, 0.0
        waiting = range(_environments_of_an_update(now, config))  # each as likely as the others
        for there in waiting:
            room = math.ceil((now.environments_limit - there) / of_a_session)
            taken = min(sessions, room)
            left_out = math.comb(sessions - server.sessions_per_worker, taken)
            total += workers * (1 - left_out / math.comb(sessions, taken))
        return total / len(waiting)

    workers = _workers(now, config)
    return busy(workers * factor) / busy(workers)


def _faster_learning(
    seen: Diagnosis, config: ExperimentConfig, algorithm: "About | None", speedup: Speedup
) -> list[Remedy]:
    remedies = []
    for what, settings in _learning_changes(config, algorithm):
        factor = speedup(settings)
        if factor is None or factor <= _WORTH:
            continue
        # How fast the environments are cannot be seen while they are made to wait.
        rate, limit = _limit(seen, math.inf, factor)
        rate = min(rate, seen.rate * factor)
        device = min(1.0, seen.device_busy * rate / (seen.rate * factor))
        remedies.append(Remedy(what, settings, rate, device, limit))
    return remedies


def _learning_changes(
    config: ExperimentConfig, algorithm: "About | None"
) -> list[tuple[str, tuple[str, ...]]]:
    """Return changes worth probing for the configured algorithm."""
    cheaper = algorithm.cheaper_learning if algorithm is not None else []
    changes = [(what, _settings(options)) for what, options in cheaper]
    if config.learner.precision != "bf16":
        changes.append(("bf16 arithmetic", ("learner.precision=bf16",)))
    return changes


def _settings(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return KEY=VALUE items of --set for an algorithm's options."""
    return tuple(f"algorithm.{name}={value}" for name, value in options.items())


def _overlap(seen: Diagnosis, now: Snapshot) -> list[Remedy]:
    # What is neither acting nor learning is waiting for the environments.
    working = seen.seconds_per_row["acting"] + seen.seconds_per_row["learning"]
    away = max(1 / seen.rate - working, 1e-9)
    machine = seen.rate / now.machine_busy if now.machine_busy else None
    rate, limit = _limit(seen, 1 / away, machine=machine)
    return [
        Remedy(
            "acting and learning side by side (not reproducible bit for bit)",
            ("learner.pipeline=async",),
            rate,
            _device_at(seen, rate),
            limit,
        )
    ]
