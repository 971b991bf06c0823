"""`murmur slurm`: a job script for a cluster that Slurm manages.

The script has three parts: #SBATCH lines, settings of this run as shell variables, and
slurm_job.sh, which is the same in every script.
"""

import math
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from murmur.run_folder import RunFolder
from murmur.settings import has_torch
from shared.config.experiment import ExperimentConfig
from shared.errors import ConfigError, ResourceError

BODY = Path(__file__).with_name("slurm_job.sh")
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
_NAME = re.compile(r"[\w.,+@=-]+", re.ASCII)
_PLACES_KEPT = 2  # sessions that a rank has room for beyond its share
_SPARE_DAYS = 30  # that the certificates outlast the job; the services warn in the last 14
_NO_LIMIT_DAYS = 365


@dataclass(frozen=True)
class SlurmJob:
    """Request of a job to Slurm.

    Attributes:
        config: name or file of the configuration.
        overrides: "key=value" items for it.
        run: the run's folder, on a file system that all nodes share.
        gpus: number of GPUs of the learner, which has one rank for each; 0: the learner uses CPUs.
        gpus_per_node: number of GPUs of a learner node.
        ranks: number of learner processes without GPUs.
        env_nodes: number of nodes with an environment server each; 0: they run on the learner's
            nodes.
        cpus_per_node: CPUs of the environment server of one node.
        cpus_per_rank: CPUs of each learner process.
        time: time limit of the job as Slurm writes it; empty: the partition's.
        partition: partition of the learner's nodes; empty: the cluster's default.
        env_partition: partition of the environment servers' nodes; empty: `partition`.
        account: account to charge; empty: the user's default.
        mem_per_cpu: memory as Slurm writes it, 4G; empty: the partition's default.
        extra: further options of sbatch, for all nodes.
        requeue: flag to queue the job again before its time limit and when a node fails.
        save_before_s: time before the limit at which the learner is told to save [s].
        max_restarts: number of times that a component that fails is started again.
    """

    config: str
    overrides: tuple[str, ...]
    run: Path
    gpus: int = 1
    gpus_per_node: int = 8
    ranks: int = 1
    env_nodes: int = 1
    cpus_per_node: int = 16
    cpus_per_rank: int = 8
    time: str = ""
    partition: str = ""
    env_partition: str = ""
    account: str = ""
    mem_per_cpu: str = ""
    extra: tuple[str, ...] = ()
    requeue: bool = True
    save_before_s: int = 180
    max_restarts: int = 3

    @property
    def size(self) -> int:
        """Number of learner processes."""
        return self.gpus or self.ranks

    @property
    def ranks_per_node(self) -> int:
        """Number of learner processes on one node."""
        return min(self.gpus_per_node, self.gpus) if self.gpus else self.ranks

    @property
    def learner_nodes(self) -> int:
        """Number of nodes of the learner."""
        return self.size // self.ranks_per_node

    @property
    def servers(self) -> int:
        """Number of environment servers, evaluators not counted."""
        return self.env_nodes or self.learner_nodes

    def check(self) -> None:
        """Refuse options that sbatch or the script could not use.

        Raises:
            ConfigError: naming the option and the fix.
        """
        if self.gpus and self.ranks > 1:
            raise ConfigError(
                f"--ranks {self.ranks} with --gpus {self.gpus}: the learner has one rank for each "
                "GPU; --ranks is for --gpus 0"
            )
        if self.gpus > self.gpus_per_node and self.gpus % self.gpus_per_node:
            raise ConfigError(
                f"--gpus {self.gpus} is no multiple of --gpus-per-node {self.gpus_per_node}: every "
                "learner node needs the same number"
            )
        for option, value in (
            ("--partition", self.partition),
            ("--env-partition", self.env_partition),
            ("--account", self.account),
            ("--mem-per-cpu", self.mem_per_cpu),
        ):
            if value and not _NAME.fullmatch(value):
                raise ConfigError(f"{option} {value!r} is no name that Slurm knows")
        for item in self.extra:
            if not item.startswith("-") or not item.isprintable():
                raise ConfigError(
                    f"--sbatch {item!r}: an option of sbatch begins with '-', as in "
                    "--sbatch=--constraint=a100"
                )
        if not str(self.run).isprintable() or not self.config.isprintable():
            raise ConfigError(f"{self.run}, {self.config}: control characters cannot be in a path")
        limit = self.limit_s()
        if limit is not None and limit <= self.save_before_s:
            raise ConfigError(
                f"--time {self.time} is not longer than --save-before {self.save_before_s} s: "
                "raise --time, or lower --save-before"
            )

    def limit_s(self) -> int | None:
        """Return the time limit in seconds; None: the partition's.

        Raises:
            ConfigError: if it is not written as Slurm writes it.
        """
        if not self.time:
            return None
        found = _TIME.fullmatch(self.time)
        if not found:
            raise ConfigError(
                f"--time {self.time!r} is no time: write minutes, HOURS:MINUTES:SECONDS or "
                "DAYS-HOURS:MINUTES:SECONDS"
            )
        days, *parts = (None if part is None else int(part) for part in found.groups())
        numbers = [part for part in parts if part is not None]
        if days is not None:  # D-H, D-H:M, D-H:M:S
            units = [3600, 60, 1]
        else:  # M, M:S, H:M:S
            units = {1: [60], 2: [60, 1], 3: [3600, 60, 1]}[len(numbers)]
        return 86400 * (days or 0) + sum(n * u for n, u in zip(numbers, units, strict=False))


def job_script(job: SlurmJob, config: ExperimentConfig) -> str:
    """Return the whole script of a job.

    Args:
        job: request of the job.
        config: the experiment that `job.config` and `job.overrides` name.

    Raises:
        ConfigError: for options that contradict each other.
    """
    job.check()
    _check_shares(job, config)
    parts = [_introduction(job), *_sbatch_lines(job, config), "", *_settings(job, config), ""]
    return "\n".join(parts) + BODY.read_text()


def _check_shares(job: SlurmJob, config: ExperimentConfig) -> None:
    """Refuse what cannot be divided among the ranks, if the learner is installed here.

    Raises:
        ConfigError: naming the option and the nearest value that can be divided.
    """
    if job.size > 1 and has_torch():
        from learner_service.algorithms.base import algorithm_config

        algorithm_config(config.algorithm).for_rank(job.size)


def write_script(job: SlurmJob, config: ExperimentConfig, file: Path) -> None:
    """Write the script, and make the run's folder, where Slurm writes the job's log.

    Raises:
        ConfigError: for options that contradict each other, or if the file exists.
        ResourceError: if it cannot be written.
    """
    script = job_script(job, config)
    try:
        RunFolder(job.run).logs.mkdir(parents=True, exist_ok=True)
        with file.open("x") as new:
            new.write(script)
        file.chmod(0o755)
    except FileExistsError:
        raise ConfigError(
            f"'{file}' exists: remove it, or name another file with --output"
        ) from None
    except OSError as error:
        raise ResourceError(f"cannot write {error.filename or file}: {error.strerror}") from None


def _introduction(job: SlurmJob) -> str:
    where = (
        "Component 0 is the learner, component 1 the environment servers."
        if job.env_nodes
        else "Learner and environment servers share its nodes."
    )
    return f"""#!/bin/bash
# A murmur training as a Slurm job, written by `murmur slurm`. Change it as you like.
#
#   sbatch FILE                                  start it; again: continue from the last checkpoint
#   tail -F RUN/logs/*.log                       watch it
#   scancel --batch --signal=USR1 JOB            save, and queue it again
#   scancel JOB                                  end it
#
# {where}
# `man sbatch` explains the #SBATCH lines."""


def _sbatch_lines(job: SlurmJob, config: ExperimentConfig) -> Iterator[str]:
    """Yield the #SBATCH lines: of the whole job, of the learner, of the environment servers."""
    log = str(job.run / "logs" / "job-").replace("%", "%%") + "%j.log"
    common = [
        *([f"--time={job.time}"] if job.time else []),
        *([f"--account={job.account}"] if job.account else []),
        *([f"--mem-per-cpu={job.mem_per_cpu}"] if job.mem_per_cpu else []),
        *job.extra,
    ]
    yield f"#SBATCH --job-name={_job_name(config)}"
    yield f"#SBATCH --output={shlex.quote(log)}"
    yield "#SBATCH --open-mode=append"
    yield f"#SBATCH --chdir={shlex.quote(str(Path.cwd()))}"
    yield f"#SBATCH --{'' if job.requeue else 'no-'}requeue"
    yield f"#SBATCH --signal=B:USR1@{job.save_before_s}"
    yield ""
    if job.env_nodes:
        ranks = _plural(job.size, "rank")
        yield f"# Component 0, the learner: {ranks} on {_plural(job.learner_nodes, 'node')}."
        tasks, cpus = job.ranks_per_node, job.cpus_per_rank
    else:
        yield (
            f"# On each node {_plural(job.ranks_per_node, 'rank')} of the learner, with "
            f"{_plural(job.cpus_per_rank, 'CPU')} each, and an environment server with "
            f"{job.cpus_per_node}."
        )
        tasks, cpus = 1, job.ranks_per_node * job.cpus_per_rank + job.cpus_per_node
    lines = [
        f"--nodes={job.learner_nodes}",
        f"--ntasks-per-node={tasks}",
        f"--cpus-per-task={cpus}",
    ]
    gpus = [f"--gres=gpu:{job.ranks_per_node}"] if job.gpus else []
    partition = [f"--partition={job.partition}"] if job.partition else []
    yield from (f"#SBATCH {item}" for item in [*lines, *gpus, *partition, *common])
    if not job.env_nodes:
        return
    yield "#SBATCH hetjob"
    nodes = _plural(job.env_nodes, "node")
    yield f"# Component 1, the environment servers: one on each of {nodes}."
    lines = [
        f"--nodes={job.env_nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={job.cpus_per_node}",
    ]
    name = job.env_partition or job.partition
    partition = [f"--partition={name}"] if name else []
    yield from (f"#SBATCH {item}" for item in [*lines, *partition, *common])


def _settings(job: SlurmJob, config: ExperimentConfig) -> Iterator[str]:
    """Yield the run's settings as shell variables."""
    limit = job.limit_s()
    days = _NO_LIMIT_DAYS if limit is None else math.ceil(limit / 86400) + _SPARE_DAYS
    workers = _workers(job, config)
    overrides = [*job.overrides, *_needed_options(job, config, workers)]
    file = Path(job.config)
    source = str(file.resolve()) if file.is_file() else job.config
    evaluates = config.evaluation.every_updates > 0 and not config.supervised
    yield "# How a node runs murmur. In a container: murmur=(apptainer exec --nv IMAGE murmur)."
    yield f"murmur=({shlex.join([sys.executable, '-P', '-m', 'murmur'])})"
    yield "# What it trains: `murmur config` lists configurations."
    yield f"config={shlex.quote(source)}"
    yield f"options=({shlex.join(part for item in overrides for part in ('--set', item))})"
    yield "# The run's folder, on a file system that all nodes share."
    yield f"run={shlex.quote(str(job.run))}"
    for setting, meaning in (
        (f"ranks={job.size}", "learner processes"),
        (f"ranks_per_node={job.ranks_per_node}", "of these on one node"),
        (f"workers={workers}", "worker processes of each environment server"),
        (f"evaluates={_yes(evaluates)}", "yes: one more server plays the run's evaluations"),
        (f"requeue={_yes(job.requeue)}", "yes: once saved before the time limit"),
        (f"max_restarts={job.max_restarts}", "of each component, in one start of the job"),
        ("look_every_s=2", "pause between two looks at the components"),
        (f"days={days}", "until the job's certificates end"),
    ):
        yield f"{setting:<20} # {meaning}"
    yield from _steps(job)


def _steps(job: SlurmJob) -> Iterator[str]:
    """Yield the options of each component's srun."""
    learner = [
        f"--nodes={job.learner_nodes}",
        f"--ntasks={job.size}",
        f"--ntasks-per-node={job.ranks_per_node}",
        "--distribution=block",  # rank r runs on node r / ranks_per_node
        "--cpu-bind=none",  # the ranks of a node share its CPUs, as under torchrun
    ]
    gpus = [f"--gres=gpu:{job.ranks_per_node}"] if job.gpus else []
    server = ["--nodes=1", "--ntasks=1", "--overlap", "--cpu-bind=none"]
    if job.env_nodes:
        learner = ["--het-group=0", *learner, f"--cpus-per-task={job.cpus_per_rank}", *gpus]
        server = ["--het-group=1", *server]
    else:
        learner += ["--overlap", *gpus]
    yield "# The options of each component's srun."
    yield f"learner_step=({shlex.join(learner)})"
    yield f"server_step=({shlex.join(server)})"


def _workers(job: SlurmJob, config: ExperimentConfig) -> int:
    """Return the number of worker processes of each environment server."""
    if config.env_server.num_workers:
        return config.env_server.num_workers
    if config.learner.pipeline == "sync":  # worker i belongs to rank i modulo their number
        return math.ceil(job.size / job.servers)
    return job.cpus_per_node


def _needed_options(job: SlurmJob, config: ExperimentConfig, workers: int) -> list[str]:
    """Return settings that the configuration lacks for this job: a device, enough sessions."""
    needed = []
    if job.gpus and config.learner.device == "auto":
        needed.append("learner.device=cuda")  # a node without one is an error, not a slow run
    sessions = job.servers * workers * config.env_server.sessions_per_worker
    places = math.ceil(sessions / job.size) + _PLACES_KEPT
    if places > config.learner.max_sessions:
        needed.append(f"learner.max_sessions={places}")
    return needed


def _job_name(config: ExperimentConfig) -> str:
    return re.sub(r"[^\w.+@=-]", "-", f"murmur-{config.run.name}", flags=re.ASCII)


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _yes(value: bool) -> str:
    return "yes" if value else "no"
