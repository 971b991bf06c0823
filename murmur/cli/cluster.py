"""Commands that hand a run to a cluster: slurm."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from murmur.cli.app import app
from murmur.cli.options import Config, Set
from murmur.text import plain

if TYPE_CHECKING:
    from murmur.slurm import SlurmJob
    from shared.config.experiment import ExperimentConfig

Gpus = Annotated[
    int,
    typer.Option(min=0, help="GPUs of the learner, one rank on each; 0: it uses CPUs."),
]
GpusPerNode = Annotated[
    int, typer.Option(min=1, help="GPUs of one learner node; more GPUs take more nodes.")
]
Ranks = Annotated[
    int, typer.Option(min=1, help="With --gpus 0: learner processes, all on one node.")
]
CpusPerRank = Annotated[int, typer.Option(min=1, help="CPUs of each learner process.")]
EnvNodes = Annotated[
    int,
    typer.Option(
        min=0,
        help="Nodes with an environment server each; 0: they share the learner's nodes, and "
        "the job is not heterogeneous.",
    ),
]
CpusPerNode = Annotated[
    int,
    typer.Option(
        min=1,
        help="CPUs of each environment server; without env_server.num_workers also its workers.",
    ),
]
TimeLimit = Annotated[
    str,
    typer.Option("--time", help="Time limit, D-HH:MM:SS; default: the partition's."),
]
Partition = Annotated[str, typer.Option(help="Partition of the learner; default: the cluster's.")]
EnvPartition = Annotated[
    str, typer.Option(help="Partition of the environment servers; default: --partition.")
]
Account = Annotated[str, typer.Option(help="Account that is charged.")]
MemPerCpu = Annotated[
    str, typer.Option(help="Memory for each CPU, e.g. 4G; default: the partition's.")
]
Sbatch = Annotated[
    list[str] | None,
    typer.Option(
        metavar="OPTION",
        help="A further option of sbatch, e.g. --sbatch=--constraint=a100. Repeatable.",
    ),
]
SharedRun = Annotated[
    Path | None,
    typer.Option(
        help="The run's folder, which all nodes must see; default: runs/<name>-<time>. A run "
        "in it is resumed."
    ),
]
Output = Annotated[
    Path | None, typer.Option(help="The script; default: job.sh in the run's folder.")
]
Requeue = Annotated[
    bool,
    typer.Option(
        help="Queue the job again before its time limit and when a node fails, until the run "
        "is complete."
    ),
]
SaveBefore = Annotated[
    int,
    typer.Option(min=30, help="Time before the limit at which the learner saves, s."),
]
MaxRestarts = Annotated[
    int,
    typer.Option(min=0, help="Restarts of a component that fails, in one start of the job."),
]


@app.command()
def slurm(
    config: Config,
    set_: Set = None,
    gpus: Gpus = 1,
    gpus_per_node: GpusPerNode = 8,
    ranks: Ranks = 1,
    cpus_per_rank: CpusPerRank = 8,
    env_nodes: EnvNodes = 1,
    cpus_per_node: CpusPerNode = 16,
    time_: TimeLimit = "",
    partition: Partition = "",
    env_partition: EnvPartition = "",
    account: Account = "",
    mem_per_cpu: MemPerCpu = "",
    sbatch: Sbatch = None,
    run: SharedRun = None,
    output: Output = None,
    requeue: Requeue = True,
    save_before: SaveBefore = 180,
    max_restarts: MaxRestarts = 3,
) -> None:
    """Write a Slurm job script: a learner on GPU nodes, environment servers on CPU nodes.

    Read it, change it, submit it with sbatch. The job makes its own certificates, saves before
    its time limit, is queued again, and continues until the run is complete. See docs/slurm.md.

    [bold]Examples[/]

      murmur slurm terrain-reference --gpus 1 --env-nodes 2 --time 12:00:00

      murmur slurm formation --gpus 2 --env-nodes 4 --cpus-per-node 32 \
        --partition gpu --env-partition cpu --account my-project

      murmur slurm spread --gpus 0 --env-nodes 0 --cpus-per-node 4 --output spread.sh
    """
    from murmur.slurm import SlurmJob

    settings = _settings(config, set_)
    folder = run or _new_folder(settings)
    job = SlurmJob(
        config=config,
        overrides=tuple(set_ or ()),
        run=folder.absolute(),
        gpus=gpus,
        gpus_per_node=gpus_per_node,
        ranks=ranks,
        env_nodes=env_nodes,
        cpus_per_node=cpus_per_node,
        cpus_per_rank=cpus_per_rank,
        time=time_,
        partition=partition,
        env_partition=env_partition,
        account=account,
        mem_per_cpu=mem_per_cpu,
        extra=tuple(sbatch or []),
        requeue=requeue,
        save_before_s=save_before,
        max_restarts=max_restarts,
    )
    _write(job, settings, output or folder / "job.sh")


def _settings(config: str, overrides: list[str] | None) -> "ExperimentConfig":
    """Load and check the configuration here."""
    from murmur.runs.settings import TASK, resolve
    from shared.config.files import load

    return resolve(load(config, list(overrides or [])), TASK)


def _new_folder(settings: "ExperimentConfig") -> Path:
    """Return the run's default folder: name and time below run.directory."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    return Path(settings.run.directory) / f"{settings.run.name}-{stamp}"


def _write(job: "SlurmJob", settings: "ExperimentConfig", file: Path) -> None:
    """Write the script, and say what is next."""
    from murmur.slurm import write_script

    write_script(job, settings, file)
    console = Console(soft_wrap=True, highlight=False)
    console.print(plain(f"written: {file}"))
    console.print(plain(f"next: read it, then  sbatch {file}"))
