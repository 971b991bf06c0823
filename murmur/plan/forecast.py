"""Forecasts: a simulation for each size of a system, what limits it, and how it grows."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from murmur.learner_service.learning.base import algorithm_config
from murmur.learner_service.learning.options import OnPolicyConfig
from murmur.learner_service.storage.flight import Demand, Flight, Speed, plan, unmeasured
from murmur.plan.model import Costs, Outcome, Replays, System
from murmur.plan.simulate import Limits, Simulation
from murmur.plan.stated import Network, exchange_s
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.process.errors import ConfigError
from murmur.shared.wire.spec import EnvSpec

_FULL = 0.9  # a resource that works more than this sets the rate
_WAITS = 0.3  # share of the sessions, or of the time, that wait: more of it is a limit
_WAITS_EAGER = 0.1  # the same, for updates that are eager and need not be
_FIRST = Limits(messages=4_000, warm=500, least=1_000, updates=4)
_RESERVED = 3  # processors that a rank keeps from the workers: event loop, acting, learning
_MILLION = 1e6
_PLANNED_LAG = 1  # until the first updates have chosen one


@dataclass(frozen=True)
class Size:
    """Size of a system.

    Attributes:
        learners: number of ranks; on GPUs one each.
        cores: processors of all machines together.
        workers: workers of all environment servers; 0: as many as the cores allow.
        batch: multiple of the configuration's batch size.
    """

    learners: int
    cores: int
    workers: int = 0
    batch: int = 1


@dataclass(frozen=True)
class Forecast:
    """Predicted performance of a system.

    Attributes:
        size: size of the system, with the chosen number of workers.
        rate: agent-steps per second.
        env_rate: environment steps per second.
        bottleneck: name of what limits the rate.
        device_hours: hours of all learners for a million agent-steps.
        core_hours: hours of all processors for a million agent-steps.
        learning: needs of one rank's update.
        outcome: result of the simulation.
    """

    size: Size
    rate: float
    env_rate: float
    bottleneck: str
    device_hours: float
    core_hours: float
    learning: Flight | Replays
    outcome: Outcome


@dataclass(frozen=True)
class Basis:
    """Parts that all forecasts of a table have in common.

    Attributes:
        config: the experiment.
        costs: costs, measured, or stated of a GPU.
        spec: spec of the environment.
        network: network between learners.
        link_bytes_per_s: bandwidth from the environment servers to a learner; 0: no limit.
        others: processors that other programs use.
    """

    config: ExperimentConfig
    costs: Costs
    spec: EnvSpec
    network: Network
    link_bytes_per_s: float = 0.0
    others: float = 0.0


def workers_for(size: Size, config: ExperimentConfig) -> int:
    """Return the workers of a system: as given, or one for each processor that the learners leave.

    No more than learner.max_sessions admits.
    """
    if size.workers:
        return size.workers
    server, ranks = config.env_server, size.learners
    left = max(ranks, size.cores - _RESERVED * ranks)
    most = max(1, config.learner.max_sessions // server.sessions_per_worker) * ranks
    return min(left, most)


def system_of(basis: Basis, size: Size, pace: Speed | None = None) -> System:
    """Build the system to simulate; `pace` as learning_of takes it."""
    config = scaled(basis.config, size.batch)
    server, ranks = config.env_server, size.learners
    workers = workers_for(size, config)
    envs = server.envs_per_worker // server.sessions_per_worker
    environments = workers * server.envs_per_worker // ranks
    return System(
        cores=size.cores,
        workers=workers,
        sessions=server.sessions_per_worker,
        envs=envs,
        learning=learning_of(config, basis.spec, ranks, environments, envs, pace),
        costs=replace(basis.costs, update_rows=basis.costs.update_rows * size.batch),
        ranks=ranks,
        exchange_s=exchange_s(config, basis.network, ranks, basis.costs.parameters),
        sync=config.learner.pipeline == "sync",
        max_batch_envs=config.learner.batcher.max_batch_envs,
        link_bytes_per_s=basis.link_bytes_per_s,
        others=basis.others,
    )


def learning_of(
    config: ExperimentConfig,
    spec: EnvSpec,
    ranks: int,
    environments: int,
    session: int,
    pace: Speed | None = None,
) -> Flight | Replays:
    """Return the storage of one rank; sizes in the configuration are of the whole group.

    Args:
        config: the experiment.
        spec: spec of its environment.
        ranks: number of ranks, N.
        environments: training environments of one rank.
        session: environments of a session.
        pace: measured pace; None: the values that hold before a measurement.

    Raises:
        ConfigError: if the batch size is not set.
    """
    options = algorithm_config(config.algorithm)
    if key := options.about.open_batch_size:
        raise ConfigError(f"algorithm.{key}=0 is found on the device that learns; set it to plan")
    sync = config.learner.pipeline == "sync"
    lag = None if sync else config.learner.max_policy_lag
    if not isinstance(options, OnPolicyConfig):
        replay = options.replay  # type: ignore[attr-defined]
        return Replays(
            replay.unroll_steps,
            math.ceil(max(replay.start_rows, replay.batch_size) / ranks),
            max(replay.update_interval // ranks, 1),  # a row of each learner at least
            replay.updates_per_interval,
            replay.batch_size / ranks,
            None if sync else config.learner.policy_lag,
        )
    agents, longest = spec.acting_agents, spec.max_episode_steps
    remembers = bool(config.network.options.get("recurrent"))
    options = options.for_environments(environments * ranks, agents, longest, remembers=remembers)
    rows = math.ceil(options.batch_size * options.batch_number / agents / ranks)
    demand = Demand(rows, environments, session, longest, remembers)
    given = Flight(options.unroll_steps, math.ceil(options.unrolls_per_update / ranks), lag)
    if not sync and pace is not None:
        return plan(Speed(pace.turn_s, max(pace.learn_s, 1e-9)), demand, given)
    chosen = unmeasured(demand, given, environments)
    return chosen if sync or lag is not None else replace(chosen, max_policy_lag=_PLANNED_LAG)


def scaled(config: ExperimentConfig, times: int) -> ExperimentConfig:
    """Return the configuration with all algorithm options and a batch this many times as large."""
    if times == 1:
        return config
    options = dict(config.algorithm.options)
    if "replay" in options:  # and as often learned from as before: the rows scaled alike
        replay = options["replay"]
        scaled = {name: replay[name] * times for name in ("batch_size", "update_interval")}
        options["replay"] = {**replay, **scaled}
    else:
        options["batch_size"] *= times
        options["unrolls_per_update"] = options.get("unrolls_per_update", 0) * times
    algorithm = type(config.algorithm)(name=config.algorithm.name, **options)
    return config.model_copy(update={"algorithm": algorithm})


def forecast(basis: Basis, size: Size, limits: Limits | None = None) -> Forecast:
    """Simulate a system: first as it begins, then with what its first updates make it choose."""
    system = system_of(basis, size)
    if isinstance(system.learning, Flight) and not system.sync:
        first = Simulation(system, _FIRST).run()
        if first.updates and first.turn_s:
            pace = Speed(first.turn_s, first.update_s / max(first.update_rows, 1))
            system = system_of(basis, size, pace)
    outcome = Simulation(system, limits).run()
    return of_outcome(system, outcome, basis.spec, replace(size, workers=system.workers))


def of_outcome(system: System, outcome: Outcome, spec: EnvSpec, size: Size) -> Forecast:
    """Return the forecast that follows from a simulation's outcome."""
    env_rate = outcome.rows * system.costs.steps_per_row
    rate = env_rate * spec.acting_agents
    hours = _MILLION / max(rate, 1e-9) / 3600
    return Forecast(
        size=size,
        rate=rate,
        env_rate=env_rate,
        bottleneck=bottleneck(outcome, eager=system.costs.device and system.costs.eager > 0),
        device_hours=hours * size.learners,
        core_hours=hours * size.cores,
        learning=system.learning,
        outcome=outcome,
    )


def bottleneck(outcome: Outcome, *, eager: bool = False) -> str:
    """Return the fullest resource or, if none is full, the reason why sessions wait.

    Args:
        outcome: result of a simulation.
        eager: True if some updates launch their kernels one by one.
    """
    busy = outcome.busy
    if busy["cores"] > _FULL:
        return "cores"
    if eager and outcome.blocked > _WAITS_EAGER:
        return "eager updates"
    full = {k: v for k, v in busy.items() if k not in ("cores", "workers") and v > _FULL}
    if full:
        first = max(full, key=lambda name: full[name])
        return "all-reduce" if first == "learning" and outcome.peers > _WAITS else first
    if outcome.blocked > _WAITS:
        return "policy lag"
    if busy["workers"] > _FULL:
        return "workers"
    if outcome.peers > _WAITS:
        return "ranks wait for each other"
    return "round trips"


def sizes_up_to(size: Size, *, scale_batch: bool = False) -> list[Size]:
    """Return halves of a system down to one learner; of one learner, halves of its cores."""
    many = size.learners > 1
    whole, least = (size.learners, 1) if many else (size.cores, 4)
    parts = [whole]
    while parts[-1] > least:
        parts.append(parts[-1] // 2)
    return [
        Size(
            learners=part if many else 1,
            cores=max(1, size.cores * part // whole),
            workers=max(1, size.workers * part // whole) if size.workers else 0,
            batch=part if many and scale_batch else 1,
        )
        for part in reversed(parts)
    ]


# What twice as much of a resource is.
_TWICE: dict[str, Callable[[Basis, Size], tuple[Basis, Size]]] = {
    "cores and workers": lambda b, s: (b, replace(s, cores=2 * s.cores, workers=2 * s.workers)),
    "acting speed": lambda b, s: (replace(b, costs=_faster(b.costs, "act")), s),
    "learning speed": lambda b, s: (replace(b, costs=_faster(b.costs, "update")), s),
    "event loop speed": lambda b, s: (replace(b, costs=_faster(b.costs, "batch", "message")), s),
}


def _faster(costs: Costs, *prefixes: str) -> Costs:
    """Halve the costs with a name that begins with this prefix."""
    halved = {
        name: value / 2
        for name, value in asdict(costs).items()
        if name.startswith(prefixes) and name.endswith("_s")
    }
    return replace(costs, **halved)


def gains(basis: Basis, now: Forecast) -> dict[str, float]:
    """Return the speed-up by twice as much of each resource, by resource."""
    found = {}
    for what, double in _TWICE.items():
        twice, size = double(basis, now.size)
        found[what] = forecast(twice, size, _FIRST).rate / max(now.rate, 1e-9)
    return found


def as_dict(seen: Forecast) -> dict[str, Any]:
    """Return the forecast as JSON values."""
    data = asdict(seen)
    data["learning"] |= {"kind": type(seen.learning).__name__.lower()}
    shown = ("updates", "busy", "blocked", "peers", "lag")
    return data | {name: data["outcome"][name] for name in shown}
