"""Job scripts for a cluster that Slurm manages: of a run, and of a sweep as a job array.

slurm_job.sh and slurm_array.sh are the scripts with gaps, written {{so}}: #SBATCH lines, settings
as shell variables, and what is the same in every script.
"""

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from murmur.runs.child import murmur_command
from murmur.runs.run_folder import RunFolder
from murmur.runs.settings import TASK, has_torch, with_plugin_defaults
from murmur.shared.config.files import load
from murmur.shared.process.errors import ConfigError, ResourceError

_TEMPLATE = Path(__file__).with_name("slurm_job.sh")
_ARRAY = Path(__file__).with_name("slurm_array.sh")
_CPUS_OF_A_RUN = 8  # of a sweep; another --sbatch=--cpus-per-task=N counts
_PLACES_KEPT = 2  # sessions that a rank has room for beyond its share


def job_script(
    config: str,
    overrides: Sequence[str],
    run: Path,
    *,
    gpus: int = 1,
    gpus_per_node: int = 8,
    ranks: int = 1,
    cpus_per_rank: int = 8,
    env_nodes: int = 1,
    cpus_per_node: int = 16,
    sbatch: Sequence[str] = (),
) -> str:
    """Return the whole script of a job.

    Args:
        config: name or file of the configuration.
        overrides: "key=value" items for it.
        run: the run's folder, on a file system that all nodes share.
        gpus: number of GPUs of the learner, which has one rank for each; 0: the learner uses CPUs.
        gpus_per_node: number of GPUs of a learner node.
        ranks: number of learner processes without GPUs.
        cpus_per_rank: CPUs of each learner process.
        env_nodes: number of nodes with an environment server each; 0: they run on the learner's
            nodes.
        cpus_per_node: CPUs of the environment server of one node.
        sbatch: further options of sbatch, for all nodes.

    Raises:
        ConfigError: for options that contradict each other, or what the ranks cannot share.
    """
    settings = with_plugin_defaults(load(config, overrides), TASK)
    if settings.run.offline:
        raise ConfigError(
            "run.offline=true: there are no environment servers to place; call `murmur train` in a "
            "script of one node"
        )
    if gpus and ranks > 1:
        raise ConfigError(
            f"--ranks {ranks} with --gpus {gpus}: the learner has one rank for each GPU; --ranks "
            "is for --gpus 0"
        )
    if gpus > gpus_per_node and gpus % gpus_per_node:
        raise ConfigError(
            f"--gpus {gpus} is no multiple of --gpus-per-node {gpus_per_node}: every learner node "
            "needs the same number"
        )
    _check(sbatch, str(run), config)
    ranks = gpus or ranks
    per_node = min(gpus_per_node, gpus) if gpus else ranks
    nodes = ranks // per_node
    servers = env_nodes or nodes
    if ranks > 1 and has_torch():
        from murmur.learner_service.learning.base import algorithm_config

        algorithm_config(settings.algorithm).for_rank(ranks)
    workers = settings.env_server.num_workers
    if not workers:  # worker i of a sync run belongs to rank i modulo their number
        sync = settings.learner.pipeline == "sync"
        workers = math.ceil(ranks / servers) if sync else cpus_per_node
    # What the configuration lacks for this job.
    overrides = list(overrides)
    if gpus and settings.learner.device == "auto":
        overrides.append("learner.device=cuda")  # a node without one is an error, not a slow run
    sessions = servers * workers * settings.env_server.sessions_per_worker
    places = math.ceil(sessions / ranks) + _PLACES_KEPT
    if places > settings.learner.max_sessions:
        overrides.append(f"learner.max_sessions={places}")
    evaluates = settings.evaluation.on and not settings.supervised
    # The #SBATCH lines of each component, and the options of its srun.
    gres = [f"--gres=gpu:{per_node}"] if gpus else []
    learner = [
        f"--nodes={nodes}",
        f"--ntasks={ranks}",
        f"--ntasks-per-node={per_node}",
        "--distribution=block",  # rank r runs on node r / ranks_per_node
        "--cpu-bind=none",  # the ranks of a node share its CPUs, as under torchrun
        *gres,
    ]
    server = ["--nodes=1", "--ntasks=1", "--overlap", "--cpu-bind=none"]
    if env_nodes:
        learner = ["--het-group=0", *learner, f"--cpus-per-task={cpus_per_rank}"]
        server = ["--het-group=1", *server]
        components = [
            "# Component 0, the learner. A line added here is for its nodes alone.",
            *_request(nodes, per_node, cpus_per_rank, *gres, *sbatch),
            "#SBATCH hetjob",
            "# Component 1, the environment servers, one on each node. A line added here is for "
            "them.",
            *_request(env_nodes, 1, cpus_per_node, *sbatch),
        ]
    else:
        learner.append("--overlap")
        components = [
            "# The learner's ranks, with an environment server on each of their nodes.",
            *_request(nodes, 1, per_node * cpus_per_rank + cpus_per_node, *gres, *sbatch),
        ]
    file = Path(config)
    values = {
        "log": _log(run, "%j"),
        "components": "\n".join(components),
        "config": shlex.quote(str(file.resolve()) if file.is_file() else config),
        "options": shlex.join(part for item in overrides for part in ("--set", item)),
        "run": shlex.quote(str(run)),
        "ranks": ranks,
        "ranks_per_node": per_node,
        "workers": workers,
        "evaluates": "yes" if evaluates else "no",
        "learner_step": shlex.join(learner),
        "server_step": shlex.join(server),
    }
    return _filled(_TEMPLATE, settings.run.name, values)


def _request(nodes: int, tasks: int, cpus: int, *options: str) -> list[str]:
    """Return the #SBATCH lines of one component."""
    sizes = f"--nodes={nodes}", f"--ntasks-per-node={tasks}", f"--cpus-per-task={cpus}"
    return [f"#SBATCH {option}" for option in (*sizes, *options)]


def _check(sbatch: Sequence[str], *paths: str) -> None:
    """Refuse what is no option of sbatch, and paths that a script cannot hold.

    Raises:
        ConfigError: naming them and the fix.
    """
    for item in sbatch:
        if not item.startswith("-") or not item.isprintable():
            raise ConfigError(
                f"--sbatch {item!r}: an option of sbatch begins with '-', as in "
                "--sbatch=--constraint=a100"
            )
    if not all(path.isprintable() for path in paths):
        raise ConfigError(f"{', '.join(paths)}: control characters cannot be in a path")


def array_script(
    sweep: Path, runs: Sequence[str], *, gpus: int, parallel: int = 0, sbatch: Sequence[str] = ()
) -> str:
    """Return the script of a job array that trains the runs of a sweep, each in a task of its own.

    Args:
        sweep: the sweep's folder, on a file system that all nodes share.
        runs: names of its runs.
        gpus: number of GPUs of a run.
        parallel: number of tasks at once; 0: as many as Slurm starts.
        sbatch: further options of sbatch.

    Raises:
        ConfigError: for an option that sbatch could not use.
    """
    _check(sbatch, str(sweep), *runs)
    gres = [f"--gres=gpu:{gpus}"] if gpus else []
    values = {
        "array": f"0-{len(runs) - 1}" + f"%{parallel}" * bool(parallel),
        "log": _log(sweep, "%A-%a"),
        "request": "\n".join(_request(1, 1, _CPUS_OF_A_RUN, *gres, *sbatch)),
        "sweep": shlex.quote(str(sweep)),
        "runs": shlex.join(runs),
    }
    return _filled(_ARRAY, sweep.name, values)


def _log(folder: Path, job: str) -> str:
    """Return the log of a job, by sbatch's pattern of its number, in a folder of logs."""
    return shlex.quote(str(folder / "logs" / "job-").replace("%", "%%") + f"{job}.log")


def _filled(template: Path, name: str, values: Mapping[str, object]) -> str:
    """Return a script with its gaps, {{so}}, filled; `name` is that of the run or sweep."""
    values = {
        "name": re.sub(r"[^\w.+@=-]", "-", f"murmur-{name}", flags=re.ASCII),
        "folder": shlex.quote(str(Path.cwd())),
        "murmur": shlex.join(murmur_command()),
        **values,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda gap: str(values[gap[1]]), template.read_text())


def write_script(script: str, run: Path, file: Path) -> None:
    """Write a script, and make the run's folder, where Slurm writes the job's log.

    Raises:
        ConfigError: if the file exists.
        ResourceError: if it cannot be written.
    """
    try:
        RunFolder(run).logs.mkdir(parents=True, exist_ok=True)
        with file.open("x") as new:
            new.write(script)
        file.chmod(0o755)
    except FileExistsError:
        raise ConfigError(
            f"'{file}' exists: remove it, or name another file with --output"
        ) from None
    except OSError as error:
        raise ResourceError(f"cannot write {error.filename or file}: {error.strerror}") from None
