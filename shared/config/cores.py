"""The processors that this process may use, and the default numbers of workers and threads.

`env_server.num_workers` and `learner.num_threads` are 0 (auto) by default. The services choose
when they start, each for its own machine; the sync pipeline takes SYNC_CHOICE on every machine,
since the same seed must give the same run.
"""

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path

from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.process.addresses import is_loopback, learner_addresses
from murmur.shared.process.control_groups import ControlGroup, own_groups

_MOST_THREADS = 8  # networks of usual size gain nothing from more
_PLACES_KEPT = 2  # of learner.max_sessions: for evaluators


@dataclass(frozen=True)
class Choice:
    """The numbers chosen for options that are 0 (auto).

    Attributes:
        num_workers: worker processes of an environment server.
        num_threads: torch threads, for each of acting and learning.
    """

    num_workers: int
    num_threads: int


SYNC_CHOICE = Choice(num_workers=1, num_threads=1)


def available_cores(root: Path = Path("/")) -> float:
    """Return the processors this process may use, by affinity mask and control-group quotas.

    Args:
        root: folder that contains proc and sys.
    """
    try:
        cores = float(len(os.sched_getaffinity(0)))
    except AttributeError:  # not Linux
        cores = float(os.cpu_count() or 1)
    quotas = map(_quota, own_groups("cpu", root))  # of this process's group and those above it
    return min([cores, *(quota for quota in quotas if quota > 0)])


def _quota(group: ControlGroup) -> float:
    """Return a control group's quota, in processors; 0 or less if it has none."""
    files = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if group.version == 1 else ("cpu.max",)
    try:
        quota, period = " ".join((group.folder / file).read_text() for file in files).split()
        return int(quota) / int(period)  # "max" is no number
    except (OSError, ValueError, ZeroDivisionError):
        return 0.0


def choose(
    config: ExperimentConfig, cores: float, *, alone: bool = False, learners: int = 1
) -> Choice:
    """Choose numbers of workers and threads for a machine.

    The learner gets a quarter of the processors for learning, and one for acting and the network
    if there are more than two; each other processor gets a worker. Several learners share that
    quarter, and each has at least one worker. An offline run has no workers: learning gets theirs.

    Args:
        config: configuration of the experiment.
        cores: number of processors that may be used.
        alone: true if the learner is on another machine, so that workers use all processors here.
        learners: number of the run's learners on this machine.
    """
    if config.learner.pipeline == "sync":  # a worker for each learner
        workers = max(learners, len(learner_addresses(config.env_server.learner)))
        return replace(SYNC_CHOICE, num_workers=workers)
    whole = max(1, math.floor(cores))
    acting = 1 if whole > 2 else 0
    if config.run.offline:
        return Choice(learners, min(max(1, whole // learners - acting), _MOST_THREADS))
    threads = min(max(1, whole // (4 * learners)), _MOST_THREADS)
    workers = whole if alone else whole - learners * (threads + acting)
    places = learners * (config.learner.max_sessions - _PLACES_KEPT)
    most = places // config.env_server.sessions_per_worker
    return Choice(max(learners, min(workers, most)), threads)


def with_workers(config: ExperimentConfig, learners: int = 1) -> ExperimentConfig:
    """Return the configuration with num_workers chosen for this machine if it is 0.

    Args:
        config: configuration of the experiment.
        learners: number of the run's learners on this machine.
    """
    server = config.env_server
    if server.num_workers:
        return config
    alone = not any(map(is_loopback, learner_addresses(server.learner)))
    choice = choose(config, available_cores(), alone=alone, learners=learners)
    return config.changed({"env_server.num_workers": choice.num_workers})


def with_threads(config: ExperimentConfig, learners: int = 1) -> ExperimentConfig:
    """Return the configuration with num_threads chosen for this machine if it is 0.

    In the sync pipeline num_workers is chosen too, because the learner waits for all workers.

    Args:
        config: configuration of the experiment.
        learners: number of the run's learners on this machine.
    """
    learner, choice = config.learner, choose(config, available_cores(), learners=learners)
    if not learner.num_threads:
        config = config.changed({"learner.num_threads": choice.num_threads})
    return with_workers(config, learners) if learner.pipeline == "sync" else config
