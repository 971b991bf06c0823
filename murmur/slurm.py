"""`murmur slurm`: a job script for a cluster that Slurm manages.

slurm_job.sh is the script with gaps, written {{so}}: #SBATCH lines, settings of this run as shell
variables, and what is the same in every script.
"""

import math
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from murmur.runs.run_folder import RunFolder
from murmur.runs.settings import has_torch
from shared.config.experiment import ExperimentConfig
from shared.process.errors import ConfigError, ResourceError

_TEMPLATE = Path(__file__).with_name("slurm_job.sh")
_PLACES_KEPT = 2  # sessions that a rank has room for beyond its share


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
        sbatch: further options of sbatch, for all nodes.
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
    sbatch: tuple[str, ...] = ()

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
        for item in self.sbatch:
            if not item.startswith("-") or not item.isprintable():
                raise ConfigError(
                    f"--sbatch {item!r}: an option of sbatch begins with '-', as in "
                    "--sbatch=--constraint=a100"
                )
        if not str(self.run).isprintable() or not self.config.isprintable():
            raise ConfigError(f"{self.run}, {self.config}: control characters cannot be in a path")


def job_script(job: SlurmJob, config: ExperimentConfig) -> str:
    """Return the whole script of a job.

    Args:
        job: request of the job.
        config: the experiment that `job.config` and `job.overrides` name.

    Raises:
        ConfigError: for options that contradict each other, or what the ranks cannot share.
    """
    job.check()
    if job.size > 1 and has_torch():
        from learner_service.learning.base import algorithm_config

        algorithm_config(config.algorithm).for_rank(job.size)
    values = _values(job, config)
    return re.sub(r"\{\{(\w+)\}\}", lambda gap: str(values[gap[1]]), _TEMPLATE.read_text())


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


def _values(job: SlurmJob, config: ExperimentConfig) -> dict[str, object]:
    """Return what slurm_job.sh has gaps for, by name."""
    workers = _workers(job, config)
    overrides = [*job.overrides, *_needed_options(job, config, workers)]
    evaluates = config.evaluation.every_updates > 0 and not config.supervised
    file = Path(job.config)
    learner_step, server_step = _steps(job)
    return {
        "name": re.sub(r"[^\w.+@=-]", "-", f"murmur-{config.run.name}", flags=re.ASCII),
        "log": shlex.quote(str(job.run / "logs" / "job-").replace("%", "%%") + "%j.log"),
        "folder": shlex.quote(str(Path.cwd())),
        "components": "\n".join(_components(job)),
        "murmur": shlex.join([sys.executable, "-P", "-m", "murmur"]),
        "config": shlex.quote(str(file.resolve()) if file.is_file() else job.config),
        "options": shlex.join(part for item in overrides for part in ("--set", item)),
        "run": shlex.quote(str(job.run)),
        "ranks": job.size,
        "ranks_per_node": job.ranks_per_node,
        "workers": workers,
        "evaluates": "yes" if evaluates else "no",
        "learner_step": shlex.join(learner_step),
        "server_step": shlex.join(server_step),
    }


def _components(job: SlurmJob) -> Iterator[str]:
    """Yield the #SBATCH lines of the learner, and of environment servers with their own nodes."""
    gpus = job.ranks_per_node if job.gpus else 0
    if not job.env_nodes:
        yield "# The learner's ranks, with an environment server on each of their nodes."
        cpus = job.ranks_per_node * job.cpus_per_rank + job.cpus_per_node
        yield from _request(job, job.learner_nodes, 1, cpus, gpus)
        return
    yield "# Component 0, the learner. A line added here is for its nodes alone."
    yield from _request(job, job.learner_nodes, job.ranks_per_node, job.cpus_per_rank, gpus)
    yield "#SBATCH hetjob"
    yield "# Component 1, the environment servers: one on each node. A line added here is for them."
    yield from _request(job, job.env_nodes, 1, job.cpus_per_node, 0)


def _request(job: SlurmJob, nodes: int, tasks: int, cpus: int, gpus: int) -> Iterator[str]:
    """Yield the #SBATCH lines of one component."""
    sizes = [f"--nodes={nodes}", f"--ntasks-per-node={tasks}", f"--cpus-per-task={cpus}"]
    for option in (*sizes, *([f"--gres=gpu:{gpus}"] if gpus else []), *job.sbatch):
        yield f"#SBATCH {option}"


def _steps(job: SlurmJob) -> tuple[list[str], list[str]]:
    """Return the options of each component's srun: of the learner, of a server."""
    learner = [
        f"--nodes={job.learner_nodes}",
        f"--ntasks={job.size}",
        f"--ntasks-per-node={job.ranks_per_node}",
        "--distribution=block",  # rank r runs on node r / ranks_per_node
        "--cpu-bind=none",  # the ranks of a node share its CPUs, as under torchrun
    ]
    gpus = [f"--gres=gpu:{job.ranks_per_node}"] if job.gpus else []
    server = ["--nodes=1", "--ntasks=1", "--overlap", "--cpu-bind=none"]
    if not job.env_nodes:
        return [*learner, "--overlap", *gpus], server
    learner = ["--het-group=0", *learner, f"--cpus-per-task={job.cpus_per_rank}", *gpus]
    return learner, ["--het-group=1", *server]


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
