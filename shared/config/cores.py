"""The processors that this process may use, and the default numbers of workers and threads.

`env_server.num_workers` and `learner.num_threads` are 0 (auto) by default. The services choose
when they start, each for its own machine; the sync pipeline takes one thread, and a worker for each
learner, on every machine, since the same seed must give the same run.
"""

import math
import os
from pathlib import Path

from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.process.addresses import learner_addresses
from murmur.shared.process.control_groups import ControlGroup, own_groups

_MOST_THREADS = 8  # networks of usual size gain nothing from more
_PLACES_KEPT = 2  # of learner.max_sessions: for evaluators


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
) -> dict[str, int]:
    """Choose the numbers of workers and threads that are 0 (auto), for a machine.

    The learner gets a quarter of the processors for learning, and one for acting and the network
    if there are more than two; each other processor gets a worker. Several learners share that
    quarter, and each has at least one worker. An offline run has no workers: learning gets theirs.

    Args:
        config: configuration of the experiment.
        cores: number of processors that may be used.
        alone: true if the learner is on another machine, so that workers use all processors here.
        learners: number of the run's learners on this machine.

    Returns:
        dotted key -> number: `num_workers`, worker processes of an environment server, and
        `num_threads`, torch threads for each of acting and learning.
    """
    learner, server = config.learner, config.env_server
    whole = max(1, math.floor(cores))
    acting = 1 if whole > 2 else 0
    if learner.pipeline == "sync":  # the same on every machine: a worker for each learner
        workers, threads = max(learners, len(learner_addresses(server.learner))), 1
    elif config.run.offline:
        workers, threads = learners, min(max(1, whole // learners - acting), _MOST_THREADS)
    else:
        threads = min(max(1, whole // (4 * learners)), _MOST_THREADS)
        free = whole if alone else whole - learners * (threads + acting)
        places = learners * (learner.max_sessions - _PLACES_KEPT)
        workers = max(learners, min(free, places // server.sessions_per_worker))
    chosen = {}
    if not server.num_workers:
        chosen["env_server.num_workers"] = workers
    if not learner.num_threads:
        chosen["learner.num_threads"] = threads
    return chosen
