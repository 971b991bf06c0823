"""Needs of one rank's update, by the configuration and the measured pace."""

import math
from dataclasses import dataclass

from murmur.plan.storage import Replays, Rollouts
from shared.config import ExperimentConfig
from shared.errors import ConfigError

_PLANNED_LAG = 1  # until the first updates have chosen one


@dataclass(frozen=True)
class Task:
    """Properties of the environment that a forecast needs.

    Attributes:
        agents: agents of an environment.
        max_episode_steps: longest episode in steps; 0: no end.
        remembers: True if the policy has a recurrent state.
    """

    agents: int
    max_episode_steps: int
    remembers: bool = False


@dataclass(frozen=True)
class Pace:
    """Pace of a first simulation; see learner_service.storage.flight.Speed."""

    turn_s: float
    learn_s: float


def learning_of(
    config: ExperimentConfig,
    task: Task,
    ranks: int,
    environments: int,
    session: int,
    pace: Pace | None = None,
) -> Rollouts | Replays:
    """Return the storage of one rank; sizes in the configuration are of the whole group.

    Args:
        config: the experiment.
        task: its environment.
        ranks: number of ranks, N.
        environments: training environments of one rank.
        session: environments of a session.
        pace: measured pace; None: the values that hold before a measurement.

    Raises:
        ConfigError: if the batch size is not set.
    """
    from learner_service.algorithms.base import algorithm_config
    from learner_service.algorithms.options import OnPolicyConfig

    options = algorithm_config(config.algorithm)
    sync = config.learner.pipeline == "sync"
    lag = None if sync else config.learner.max_policy_lag
    if not isinstance(options, OnPolicyConfig):
        replay = options.replay  # type: ignore[attr-defined]
        _require_batch(replay.batch_size, "algorithm.replay.batch_size")
        return Replays(
            replay.unroll_steps,
            max(replay.start_rows, replay.batch_size) / ranks,
            replay.update_interval / ranks,
            replay.updates_per_interval,
            replay.batch_size / ranks,
            None if sync else config.learner.policy_lag,
        )
    _require_batch(options.batch_size, "algorithm.batch_size")
    options = options.for_environments(
        environments * ranks, task.agents, task.max_episode_steps, remembers=task.remembers
    )
    rows = math.ceil(options.batch_size * options.batch_number / task.agents / ranks)
    given = Rollouts(options.unroll_steps, math.ceil(options.unrolls_per_update / ranks), lag)
    if sync or pace is None:
        return _unmeasured(given, rows, environments, task, sync=sync)
    return _measured(given, rows, environments, task, session, pace)


def _require_batch(size: int, name: str) -> None:
    if not size:
        raise ConfigError(f"{name}=0 is found on the device that learns; set it to plan")


def _unmeasured(
    given: Rollouts, rows: int, environments: int, task: Task, *, sync: bool
) -> Rollouts:
    """Choose the rollout as RolloutStorage does before it has measured."""
    from learner_service.storage.flight import transitions_in, unroll_length

    steps = task.max_episode_steps
    length = given.unroll_steps or unroll_length(
        rows, given.unrolls_per_update or environments, steps, remembers=task.remembers
    )
    unrolls = math.ceil(rows / transitions_in(length, steps))
    if given.unrolls_per_update:
        unrolls = max(unrolls, given.unrolls_per_update)
    elif not given.unroll_steps:
        unrolls = max(unrolls, environments)
    lag = None if sync else _PLANNED_LAG if given.max_policy_lag is None else given.max_policy_lag
    return Rollouts(length, unrolls, lag)


def _measured(
    given: Rollouts, rows: int, environments: int, task: Task, session: int, pace: Pace
) -> Rollouts:
    """Choose the rollout as RolloutStorage does after it has measured."""
    from learner_service.storage.flight import Demand, Flight, Speed, plan

    flight = plan(
        Speed(pace.turn_s, max(pace.learn_s, 1e-9)),
        Demand(rows, environments, session, task.max_episode_steps, task.remembers),
        Flight(given.unroll_steps, given.unrolls_per_update, given.max_policy_lag),
    )
    return Rollouts(flight.unroll_steps, flight.unrolls_per_update, flight.max_policy_lag)
