"""Commands that hand a run to a cluster: slurm."""

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from murmur.cli.app import app
from murmur.cli.options import Config, Set
from murmur.text import plain


@app.command()
def slurm(
    config: Config,
    set_: Set = None,
    gpus: Annotated[
        int,
        typer.Option(min=0, help="GPUs of the learner, one rank on each; 0: it uses CPUs."),
    ] = 1,
    gpus_per_node: Annotated[
        int, typer.Option(min=1, help="GPUs of one learner node; more GPUs take more nodes.")
    ] = 8,
    ranks: Annotated[
        int, typer.Option(min=1, help="With --gpus 0: learner processes, all on one node.")
    ] = 1,
    cpus_per_rank: Annotated[int, typer.Option(min=1, help="CPUs of each learner process.")] = 8,
    env_nodes: Annotated[
        int,
        typer.Option(
            min=0,
            help="Nodes with an environment server each; 0: they share the learner's nodes, and "
            "the job is not heterogeneous.",
        ),
    ] = 1,
    cpus_per_node: Annotated[
        int,
        typer.Option(
            min=1,
            help="CPUs of each environment server; without env_server.num_workers also its "
            "workers.",
        ),
    ] = 16,
    time_: Annotated[
        str,
        typer.Option("--time", help="Time limit, D-HH:MM:SS; default: the partition's."),
    ] = "",
    partition: Annotated[
        str, typer.Option(help="Partition of the learner; default: the cluster's.")
    ] = "",
    env_partition: Annotated[
        str, typer.Option(help="Partition of the environment servers; default: --partition.")
    ] = "",
    account: Annotated[str, typer.Option(help="Account that is charged.")] = "",
    mem_per_cpu: Annotated[
        str, typer.Option(help="Memory for each CPU, e.g. 4G; default: the partition's.")
    ] = "",
    sbatch: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OPTION",
            help="A further option of sbatch, e.g. --sbatch=--constraint=a100. Repeatable.",
        ),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(
            help="The run's folder, which all nodes must see; default: runs/<name>-<time>. A run "
            "in it is resumed."
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="The script; default: job.sh in the run's folder.")
    ] = None,
    requeue: Annotated[
        bool,
        typer.Option(
            help="Queue the job again before its time limit and when a node fails, until the run "
            "is complete."
        ),
    ] = True,
    save_before: Annotated[
        int,
        typer.Option(min=30, help="Time before the limit at which the learner saves, s."),
    ] = 180,
    max_restarts: Annotated[
        int,
        typer.Option(min=0, help="Restarts of a component that fails, in one start of the job."),
    ] = 3,
) -> None:
    """Write a Slurm job script: a learner on GPU nodes, environment servers on CPU nodes.

    Read it, change it, submit it with sbatch. The job makes its own certificates, saves before
    its time limit, is queued again, and goes on until the run is complete. See docs/slurm.md.

    [bold]Examples[/]

      murmur slurm terrain-reference --gpus 1 --env-nodes 2 --time 12:00:00

      murmur slurm formation --gpus 2 --env-nodes 4 --cpus-per-node 32 \
        --partition gpu --env-partition cpu --account my-project

      murmur slurm spread --gpus 0 --env-nodes 0 --cpus-per-node 4 --output spread.sh
    """
    from murmur.settings import completed_here
    from murmur.slurm import SlurmJob, write_script
    from shared.config import load

    overrides = list(set_ or [])
    settings = completed_here(load(config, overrides))
    stamp = time.strftime("%Y%m%d-%H%M%S")
    folder = run or Path(settings.run.directory) / f"{settings.run.name}-{stamp}"
    job = SlurmJob(
        config=config,
        overrides=tuple(overrides),
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
    file = output or folder / "job.sh"
    write_script(job, settings, file)
    console = Console(soft_wrap=True, highlight=False)
    console.print(plain(f"written: {file}"))
    console.print(plain(f"next: read it, then  sbatch {file}"))
