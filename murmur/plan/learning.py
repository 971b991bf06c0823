"""Needs of one rank's update, by the configuration and the measured pace."""

import math
from dataclasses import dataclass, replace

from learner_service.storage.flight import Demand, Flight, Speed, plan, unmeasured
from murmur.plan.storage import Replays
from shared.config.experiment import ExperimentConfig
from shared.process.errors import ConfigError

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


def learning_of(
    config: ExperimentConfig,
    task: Task,
    ranks: int,
    environments: int,
    session: int,
    pace: Speed | None = None,
) -> Flight | Replays:
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
    from learner_service.learning.base import algorithm_config
    from learner_service.learning.options import OnPolicyConfig

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
    demand = Demand(rows, environments, session, task.max_episode_steps, task.remembers)
    given = Flight(options.unroll_steps, math.ceil(options.unrolls_per_update / ranks), lag)
    if not sync and pace is not None:
        return plan(Speed(pace.turn_s, max(pace.learn_s, 1e-9)), demand, given)
    chosen = unmeasured(demand, given, environments)
    return chosen if sync or lag is not None else replace(chosen, max_policy_lag=_PLANNED_LAG)


def _require_batch(size: int, name: str) -> None:
    if not size:
        raise ConfigError(f"{name}=0 is found on the device that learns; set it to plan")
