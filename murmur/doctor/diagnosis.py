"""Diagnosis of a run: its bottleneck, and the predicted gain of each remedy.

The arithmetic is operational analysis (Denning and Buzen 1978, "The Operational Analysis of
Queueing Network Models"): a row visits the environments, the inference thread and the learner
thread, which work side by side. A station that is busy b seconds for each row cannot let through
more than 1 / b rows a second, and the slowest station sets the rate, wherever it is. In the sync
pipeline they take turns, and the busy times add.

What the stations are busy with comes from the ledgers of the learner and of the environment
servers; murmur.doctor.causes ranks what that time goes to. Of the environments nothing is assumed
but that twice as many serve twice as many rows.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from murmur.doctor.causes import Finding, environments_side_by_side, find, side
from murmur.doctor.device_report import small_kernels
from murmur.doctor.gpu_waits import GpuWait, gpu_waits
from murmur.doctor.group_diagnosis import RankFigures, advice
from murmur.doctor.latency import latency_lines
from murmur.doctor.measured import Machine, Measured, measure, steps_per_row
from murmur.runs.snapshots import Snapshot
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.process.errors import ConfigError
from murmur.shared.process.ledger import since

if TYPE_CHECKING:  # a run is diagnosed where there is no torch, too
    from murmur.learner_service.learning.options import About

_FULL = 0.95  # of a station's capacity is all that can be had of it
_MOST_TIMES = 64  # as many environment servers is as far as advice goes
_WORTH = 1.02  # times as fast: less is no remedy
_LATE = 0.1  # share of the time that acts wait, where it sets the rate
_NEARLY = 0.85  # busier than this, a station sets the rate

_MORE_AT_ONCE = (
    "more environments act at once, so an update has fewer steps of each, or takes more rows and "
    "comes less often"
)
_ENVS_OF_MESSAGE = 16  # a message of more costs hardly less for each
_SLOW_UPDATES = ("shapes", "captures", "eager")  # waits on a GPU
LEARNS_SLOWLY = ("learning", "small batches", "large network", "kernels")

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
        cost: price of the change in learning, time or memory, as text.
        timed: False for a rate by arithmetic that --probe would measure.
    """

    what: str
    settings: tuple[str, ...]
    rate: float
    device_busy: float
    limit: str
    cost: str = ""
    timed: bool = True


@dataclass(frozen=True)
class Diagnosis:
    """Bottleneck of a run, with the figures behind it and the remedies.

    Attributes:
        rate: environment rows per second.
        device_busy: share of time the device works, by CUDA events or the host's clock.
        kernels_busy: share of time in which kernels ran, by NVML at the end; None: unknown.
        causes: causes by their share of the time, the largest first.
        too_few: notice that the window holds too few updates to tell; empty if it does not.
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
    causes: tuple[Finding, ...]
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
    machine: Machine | None = None
    too_few: str = ""

    @property
    def bottleneck(self) -> str:
        """Name of the first cause, a key of murmur.doctor.causes.CAUSES."""
        return self.causes[0].name


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
    steps = None if config is None else steps_per_row(config, after.agents)
    m = measure(before, after, steps)
    busy = {"acting": m.act, "learning": m.learn}
    if after.cache:  # a run on samples has no acting
        del busy["acting"]
    device = (after.device_busy - before.device_busy) / span
    gpu = tuple(gpu_waits(before, after, m.learn * span, config))
    causes = tuple(_causes(m, after, device, gpu))
    seen = Diagnosis(
        rows / span,
        device,
        causes,
        busy,
        {name: share * span / rows for name, share in busy.items()},
        after.agents,
        in_flight=after.in_flight,
        latency=() if after.cache else latency_lines(since(before.latency, after.latency)),
        cache=after.cache,
        kernels_busy=after.device.get("utilization_ratio"),
        waits=gpu,
        machine=m.machine,
    )
    # Remedies of the bottleneck, and cures of GPU waits that are worth it, the best last.
    remedies = _remedies(seen, m, after, config, algorithm, speedup)
    cures = [_without(seen, wait, m) for wait in gpu]
    remedies += [cure for cure in cures if cure.rate > _WORTH * seen.rate]
    return replace(seen, remedies=tuple(sorted(remedies, key=lambda r: r.rate)))


def _causes(m: Measured, after: Snapshot, device: float, gpu: Sequence[GpuWait]) -> list[Finding]:
    """Return the causes, the largest first: by shares of time, and what keeps a GPU waiting.

    Args:
        m: measurements of the window.
        after: later snapshot.
        device: share of time in which the device works, by the learner's clock.
        gpu: waits for the GPU, the most seconds first.
    """
    found = find(m)
    if after.cache:  # its servers are environment servers by another name
        of_servers = {
            "environments", "environments wait", "environments compute", "network", "messages",
        }  # fmt: skip
        found = [replace(f, name="servers") if f.name in of_servers else f for f in found]
        found = list({f.name: f for f in reversed(found)}.values())
    limit = "turns" if m.sync else side(m)
    behind = _gpu_wait_behind(limit, m, gpu)
    waits = [
        Finding(w.kind, 1.0 if w.kind == behind else min(0.9, w.lost_s / m.span), w.found)
        for w in gpu
    ]
    used = after.device.get("utilization_ratio")
    if used is not None and behind is None and (evidence := small_kernels(device, used)):
        share = m.learn * (1 - used / device)
        if limit == "learning":  # it is what the learning waits for
            share = max(share, 1.0 if m.learn > _NEARLY else m.wait_learning)
        waits.append(Finding("kernels", share, evidence))
    if any(w.name in (*_SLOW_UPDATES, "kernels") for w in waits):  # why updates take long
        found = [f for f in found if f.name != "learning"]
    return sorted([*waits, *found], key=lambda finding: -finding.score)


def _remedies(
    seen: Diagnosis,
    m: Measured,
    after: Snapshot,
    config: ExperimentConfig | None,
    algorithm: "About | None",
    speedup: Speedup | None,
) -> list[Remedy]:
    """Return the remedies, with their predicted rates, for the bottleneck."""
    name = seen.bottleneck
    if name in ("environments", "servers", "environments wait", "environments compute"):
        return _more_environments(seen, after, config, algorithm)
    if name == "network" and config is not None:
        return [_more_sessions(seen, config)]
    if name == "messages" and config is not None:
        return [_larger_messages(seen, m, config)]
    if name == "turns":
        return [_overlap(seen, m, after)]
    if name in LEARNS_SLOWLY and config is not None:
        return _faster_learning(seen, m, config, algorithm, speedup)
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


def _gpu_wait_behind(limit: str, m: Measured, gpu: Sequence[GpuWait]) -> str | None:
    """Return the kind of GPU wait behind the side that sets the rate; None if it is none.

    Eager updates explain slow learning. Late acts look like slow environments, and like slow
    learning if the learner has time left.

    Args:
        limit: side that sets the rate; "turns" in the sync pipeline.
        m: measurements of the window.
        gpu: the waits, the most seconds first.
    """
    for wait in gpu:
        long = wait.lost_s > _LATE * m.span
        if wait.kind == "acts":
            full = limit == "learning" and m.learn > _NEARLY
            behind = limit != "turns" and long and not full
        elif wait.kind == "eager acts":
            behind = limit == "acting"
        else:
            behind = limit == "learning" or (limit == "turns" and long)
        if behind:
            return wait.kind
    return None


def _without(seen: Diagnosis, wait: GpuWait, m: Measured) -> Remedy:
    """Predict the rate without a wait: the time that sessions waited goes to the environments.

    Args:
        seen: diagnosis of the run as it is.
        wait: wait to remove.
        m: measurements of the window.
    """
    saved, faster = wait.lost_s / m.span, 1.0
    if wait.kind in _SLOW_UPDATES:
        share = min(saved / m.learn, 0.99)
        faster = 1 / (1 - share)
        if not m.sync:  # else they take turns: all of it is saved
            saved = max(m.wait_learning, m.learn - _NEARLY, 0.0) * share
    gained = 1 / max(1 - saved, 1 / _MOST_TIMES)
    limited = _limit(seen, seen.rate * gained, faster)
    return _remedy(seen, wait.remedy, wait.settings, limited, wait.cost, faster)


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


def _remedy(
    seen: Diagnosis,
    what: str,
    settings: tuple[str, ...],
    limited: tuple[float, str],
    cost: str,
    learning: float = 1.0,
    *,
    timed: bool = True,
) -> Remedy:
    """Return a remedy with the share of time that the device would work.

    Args:
        seen: diagnosis of the run as it is.
        what: description of the change, an attribute of Remedy as settings, cost and timed are.
        settings: KEY=VALUE items of --set.
        limited: rate with the remedy, and the station that sets it.
        cost: price of the change.
        learning: ratio of the rate of learning to the present one.
        timed: False for a rate by arithmetic.
    """
    rate, limit = limited
    device = min(1.0, seen.device_busy * rate / (seen.rate * learning))
    return Remedy(what, settings, rate, device, limit, cost, timed)


def _more_environments(
    seen: Diagnosis, now: Snapshot, config: ExperimentConfig | None, algorithm: "About | None"
) -> list[Remedy]:
    # Work that needs the processor needs more of it; a wait for something else does not.
    machine = _of_processors(seen, now)
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
        limited = _limit(seen, seen.rate * factor, 1.0, machine, admitted)
        cost = "costs memory" if seen.cache else f"costs memory; {_MORE_AT_ONCE}"
        remedies.append(_remedy(seen, what, settings, limited, cost))
        larger_updates = algorithm.larger_updates if algorithm is not None else None
        if limited[1] == "policy lag" and config is not None and larger_updates is not None:
            # An update of more rows takes in more environments, and a row costs the same in it.
            environments = _environments(now, config) * factor
            larger = larger_updates(environments / _let_in(now, config))
            limited = _limit(seen, seen.rate * factor, machine=machine)
            what = f"{what}, and {larger.what}"
            settings = (*settings, *_settings(larger.options))
            remedies.append(_remedy(seen, what, settings, limited, larger.cost))
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
    seen: Diagnosis,
    m: Measured,
    config: ExperimentConfig,
    algorithm: "About | None",
    speedup: Speedup | None,
) -> list[Remedy]:
    """Return changes that make learning from a row cheaper, as timed or by arithmetic."""
    changes = [
        (c.what, _settings(c.options), f"costs: {c.cost}" if c.cost else "", c.calls, c.arithmetic)
        for c in (algorithm.cheaper_learning if algorithm is not None else ())
    ]
    if speedup is not None and config.learner.precision != "bf16":  # no arithmetic tells its gain
        settings: tuple[str, ...] = ("learner.precision=bf16",)
        changes.append(("bf16 arithmetic", settings, "costs: gradients are rounded", 1.0, 1.0))
    remedies = []
    for what, settings, cost, calls, arithmetic in changes:
        factor: float | None
        if speedup is not None:
            factor = speedup(settings)
        else:
            computes = 0.5 if m.learn_computes is None else m.learn_computes
            factor = 1 / (arithmetic * computes + calls * (1 - computes))
        if factor is None or factor <= _WORTH:
            continue
        # How fast the environments are cannot be seen while they are made to wait.
        rate, limit = _limit(seen, math.inf, factor)
        limited = min(rate, seen.rate * factor), limit
        timed = speedup is not None
        remedies.append(_remedy(seen, what, settings, limited, cost, factor, timed=timed))
    return remedies


def _settings(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return KEY=VALUE items of --set for an algorithm's options."""
    return tuple(f"algorithm.{name}={value}" for name, value in options.items())


def _overlap(seen: Diagnosis, m: Measured, now: Snapshot) -> Remedy:
    environments = max(environments_side_by_side(m), 1e-9)
    return _remedy(
        seen,
        "acting and learning side by side",
        ("learner.pipeline=async",),
        _limit(seen, seen.rate / environments, machine=_of_processors(seen, now)),
        "costs: rows are up to learner.max_policy_lag updates old, and a run is not repeated bit "
        "for bit",
    )


def _more_sessions(seen: Diagnosis, config: ExperimentConfig) -> Remedy:
    """Return the remedy of twice the sessions: while one is on its way another one acts."""
    server = config.env_server
    sessions = 2 * server.sessions_per_worker
    each = max(server.envs_per_worker, sessions)
    envs = 2 * each if each == server.envs_per_worker else each
    return _remedy(
        seen,
        f"{sessions} sessions of a worker instead of {server.sessions_per_worker}, of as many "
        "environments each",
        (f"env_server.sessions_per_worker={sessions}", f"env_server.envs_per_worker={envs}"),
        _limit(seen, 2 * seen.rate),
        f"costs: {_MORE_AT_ONCE}",
    )


def _larger_messages(seen: Diagnosis, m: Measured, config: ExperimentConfig) -> Remedy:
    """Return the remedy of messages of 16 environments, as far as their cost is per message."""
    server = config.env_server
    now = max(1, server.envs_per_worker // server.sessions_per_worker)
    times = max(2, math.ceil(_ENVS_OF_MESSAGE / now))
    # What computing an environment costs stays; the rest of a worker's time is shared by more.
    same = m.workers.compute + m.workers.sleep if m.workers else 0.0
    rate = seen.rate / (same + (1 - same) / times)
    learning = _FULL / max(seen.seconds_per_row["learning"], 1e-12)
    envs = server.envs_per_worker * times
    return _remedy(
        seen,
        f"{envs} environments of a worker instead of {server.envs_per_worker}",
        (f"env_server.envs_per_worker={envs}",),
        min((learning, "learning"), (rate, "environments")),
        f"costs: {_MORE_AT_ONCE}",
    )


def _of_processors(seen: Diagnosis, now: Snapshot) -> float | None:
    """Return rows per second for which the processors suffice; None if unknown."""
    machine = seen.machine
    if machine is not None and machine.own > 0:
        # Beside programs that take all processors a run still gets its turns, about half.
        free = max(machine.cores - machine.others, machine.cores / 2, machine.own)
        return seen.rate * free / machine.own
    return seen.rate / now.machine_busy if now.machine_busy else None
