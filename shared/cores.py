"""How many processors this process may use, and what murmur chooses to do with them.

`env_server.num_workers` and `learner.num_threads` are 0 (auto) by default. The services choose
when they start, each for its own machine; the sync pipeline takes SYNC_CHOICE on every machine,
since the same seed must give the same run.
"""

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from shared.addresses import is_loopback, learner_addresses
from shared.config import ExperimentConfig

_MOST_THREADS = 8  # networks of usual size gain nothing from more
_PLACES_KEPT = 2  # of learner.max_sessions: for evaluators


@dataclass(frozen=True)
class Choice:
    """What 0 stands for.

    Attributes:
        num_workers: of an environment server.
        num_threads: torch threads, for each of acting and learning.
    """

    num_workers: int
    num_threads: int


SYNC_CHOICE = Choice(num_workers=1, num_threads=1)


def available_cores(root: Path = Path("/")) -> float:
    """Processors that this process may use: by its affinity mask and its control groups' quotas.

    Args:
        root: where /proc and /sys are looked for.
    """
    try:
        cores = float(len(os.sched_getaffinity(0)))
    except AttributeError:  # not Linux
        cores = float(os.cpu_count() or 1)
    return min([cores, *_quotas(root)])


def _quotas(root: Path) -> list[float]:
    """Quotas of this process's control group and those above it, in processors."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    quotas = []
    mounts = _mounts(root)
    for line in lines:
        _, controllers, path = line.split(":", 2)
        # Version 2 has one hierarchy, whose controllers are not named; version 1 one for "cpu".
        if controllers and "cpu" not in controllers.split(","):
            continue
        read = _quota_v1 if controllers else _quota_v2
        mounted = root / "sys/fs/cgroup"
        folders = {mounted / controllers, mounted / "cpu"} if controllers else {mounted}
        usual = [(folder, "/") for folder in folders]
        for mount, of in mounts["v1" if controllers else "v2"] or usual:
            # In a container the mount may be the group that the host calls `of`, and its own path
            # may lead outside: then the mount itself is the group.
            inside = PurePosixPath(path)
            if inside.is_relative_to(of):
                inside = inside.relative_to(of)
            parts = [part for part in inside.parts if part != "/"]
            if ".." in parts:
                parts = []
            quotas += [read(mount.joinpath(*parts[:n])) for n in range(len(parts) + 1)]
    return [quota for quota in quotas if quota > 0]


def _mounts(root: Path) -> dict[str, list[tuple[Path, str]]]:
    """Where the hierarchies with processors' quotas are mounted, and which group is mounted there.

    proc_pid_mountinfo(5): "36 35 0:31 /group /mount/point rw - cgroup source rw,cpu,cpuacct".
    """
    found: dict[str, list[tuple[Path, str]]] = {"v1": [], "v2": []}
    try:
        lines = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        left, _, right = line.partition(" - ")
        (*_, of, point), kind = left.split()[:5], right.split()
        place = root / point.replace("\\040", " ").lstrip("/"), of.replace("\\040", " ")
        if kind[:1] == ["cgroup2"]:
            found["v2"].append(place)
        elif kind[:1] == ["cgroup"] and "cpu" in kind[-1].split(","):
            found["v1"].append(place)
    return found


def _quota_v2(group: Path) -> float:
    """Processors of a group of version 2; 0: it has no quota."""
    try:
        quota, period = (group / "cpu.max").read_text().split()
        return 0.0 if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return 0.0


def _quota_v1(group: Path) -> float:
    """The same of version 1."""
    try:
        quota = int((group / "cpu.cfs_quota_us").read_text())
        period = int((group / "cpu.cfs_period_us").read_text())
        return max(0.0, quota / period)
    except (OSError, ValueError, ZeroDivisionError):
        return 0.0


def choose(
    config: ExperimentConfig, cores: float, *, alone: bool = False, learners: int = 1
) -> Choice:
    """What 0 stands for on a machine.

    The learner has a quarter of the processors for learning, and one for acting and the network
    where there are more than two; every other one has a worker. Several learners share that
    quarter, and each has a worker at least.

    Args:
        config: the experiment.
        cores: processors that may be used.
        alone: the learner is on another machine, so that workers have all processors here.
        learners: of the run on this machine.
    """
    if config.learner.pipeline == "sync":  # a worker for each learner
        workers = max(learners, len(learner_addresses(config.env_server.learner)))
        return replace(SYNC_CHOICE, num_workers=workers)
    whole = max(1, math.floor(cores))
    threads = min(max(1, whole // (4 * learners)), _MOST_THREADS)
    acting = 1 if whole > 2 else 0
    workers = whole if alone else whole - learners * (threads + acting)
    places = learners * (config.learner.max_sessions - _PLACES_KEPT)
    most = places // config.env_server.sessions_per_worker
    return Choice(max(learners, min(workers, most)), threads)


def with_workers(config: ExperimentConfig, learners: int = 1) -> ExperimentConfig:
    """The configuration with as many workers as suit this machine, if it says 0.

    Args:
        config: the experiment.
        learners: see choose.
    """
    server = config.env_server
    if server.num_workers:
        return config
    alone = not _on_this_machine(server.learner)
    choice = choose(config, available_cores(), alone=alone, learners=learners)
    server = server.model_copy(update={"num_workers": choice.num_workers})
    return config.model_copy(update={"env_server": server})


def with_threads(config: ExperimentConfig, learners: int = 1) -> ExperimentConfig:
    """The configuration with as many of the learner's threads as suit this machine, if it says 0.

    In the sync pipeline also with the number of workers: the learner waits for all of them.

    Args:
        config: the experiment.
        learners: see choose.
    """
    learner, choice = config.learner, choose(config, available_cores(), learners=learners)
    if not learner.num_threads:
        learner = learner.model_copy(update={"num_threads": choice.num_threads})
        config = config.model_copy(update={"learner": learner})
    return with_workers(config, learners) if learner.pipeline == "sync" else config


def _on_this_machine(learners: str) -> bool:
    """Whether a learner has a loopback address."""
    return any(is_loopback(address) for address in learner_addresses(learners))
