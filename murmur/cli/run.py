"""Commands that train: train, learner, env-server, slurm."""

import os
import time
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from murmur.cli.app import TRAIN, command, typed_command
from murmur.cli.options import (
    SHORT,
    Config,
    Device,
    Episodes,
    Minutes,
    Sbatch,
    Seed,
    Set,
    Steps,
    Updates,
    complete_config,
)
from murmur.live_page import PORT
from murmur.shared.process.errors import ConfigError
from murmur.shared.process.process import configure_logging, stop_on_signals
from murmur.text import print_plain

_MACHINE, _LIVE_PAGE = "Machine", "Live page"


@command(TRAIN)
def train(
    config: Annotated[str | None, typer.Argument(autocompletion=complete_config)] = None,
    set_: Set = None,
    resume: bool = False,
    run: Path | None = None,
    seed: Seed = None,
    minutes: Minutes = None,
    steps: Steps = None,
    updates: Updates = None,
    episodes: Episodes = None,
    device: Device = None,
    workers: Annotated[int | None, typer.Option(min=1, rich_help_panel=_MACHINE)] = None,
    learners: Annotated[int | None, typer.Option(min=1, rich_help_panel=_MACHINE)] = None,
    from_: Path | None = None,
    page: Annotated[bool, typer.Option("--page/--no-page", rich_help_panel=_LIVE_PAGE)] = True,
    page_port: Annotated[int, typer.Option(min=0, max=65535, rich_help_panel=_LIVE_PAGE)] = PORT,
) -> None:
    """Train on this machine: one learner and its environment servers, kept alive.

    Ctrl-C stops everything gracefully; --resume continues from there. The live page shows curves,
    the time ledger, the newest evaluated episode and alerts; `murmur watch` shows them of any run.

    [bold]Examples[/]

      murmur train terrain-demo

      murmur train spread --seed 3 --minutes 5 --set algorithm.name=qmix

      murmur train terrain-reference --workers 4 --minutes 60

      murmur train formation --learners 2

      murmur train --resume --run runs/terrain-demo-20260101-120000

      murmur train spread --from runs/one --set environment.num_agents=5

    Options:
        config: A YAML file or a name (see `murmur list`). Not needed to resume; then a run's folder
            will do too.
        resume: Continue with the newest run with a checkpoint, of CONFIG if given, or with --run.
        run: The run's folder; default: runs/<name>-<time>.
        workers: Worker processes of the environment server: env_server.num_workers.
        learners: Learners that learn together, each on a GPU or share of the cores of its own;
            default: 1, or as many as the run had. See docs/many-learners.md.
        from_: Fine-tune: a new run starts with the weights of this checkpoint, or of the best one
            of this run's folder. Optimisers, counters and schedules start fresh.
        page: Serve a live page of the run on 127.0.0.1.
        page_port: Port of the live page; another one if it is in use.
    """
    from murmur.runs.child import join_supervisor
    from murmur.runs.settings import with_options
    from murmur.runs.training import prepare
    from murmur.runs.training import train as train_here

    join_supervisor()  # a run of a sweep ends with the sweep
    given = {
        "run.seed": seed,
        "run.max_minutes": minutes,
        "run.max_env_steps": steps,
        "run.max_updates": updates,
        "run.max_episodes": episodes,
        "learner.device": device,
        "env_server.num_workers": workers,
        "run.start_from": from_ and str(from_.resolve()),
    }
    prepared = prepare(
        config,
        with_options(set_ or [], given, SHORT),
        run=run,
        resume=resume,
        learners=learners,
        command=typed_command(),
    )
    console = Console()
    if not page:
        train_here(prepared, console)
        return
    from murmur.live_page.server import served

    with served(prepared.folder, page_port, partial(print_plain, console)):
        train_here(prepared, console)


@command(TRAIN)
def learner(
    config: Config,
    run: Annotated[Path, typer.Option()],
    set_: Set = None,
    resume: bool = False,
    auto_resume: bool = False,
    serve: bool = False,
    checkpoint: str = "latest",
    learners: Annotated[int, typer.Option(min=1)] = 1,
) -> None:
    """Run the learner service in the foreground; environment servers connect to it.

    [bold]Examples[/]

      murmur learner terrain-reference --run runs/one --set learner.host=0.0.0.0 \
        --set security.folder=certs/learner

      murmur learner terrain-reference --run runs/one --resume

      murmur learner terrain-reference --run runs/two --auto-resume --learners 2

    Options:
        run: Where checkpoints and progress are written.
        resume: Continue from the last checkpoint in --run.
        auto_resume: Continue if --run holds a checkpoint, else begin: for whatever starts
            containers.
        serve: Only act, with the weights of --checkpoint.
        checkpoint: With --serve: best, latest or a file.
        learners: Learners of the run on this machine, which listen to each other on loopback alone.
    """
    from murmur.runs.child import join_supervisor
    from murmur.shared.config.files import load

    options = list(set_ or [])
    if not join_supervisor() and load(config, options).learner.port is None:
        from murmur.shared.config.learner import PORT

        options.append(f"learner.port={PORT}")  # servers started by hand know no other
    if learners > 1:
        from murmur.runs.ranks import run_ranks

        if serve:
            raise ConfigError(f"--serve takes one learner, not --learners {learners}: start one")

        flags = {"--resume": resume, "--auto-resume": auto_resume}
        chosen = [flag for flag, given in flags.items() if given]
        chosen += [part for setting in options for part in ("--set", setting)]
        raise SystemExit(run_ranks(learners, run, [config, "--run", str(run), *chosen]))
    from murmur.learner_service.app import run_learner

    rank = os.environ.get("RANK", "0")  # of torchrun
    configure_logging("learner" if rank == "0" else f"learner-{rank}")
    stop = stop_on_signals()
    raise SystemExit(
        run_learner(
            load(config, options),
            run,
            resume=resume,
            auto_resume=auto_resume,
            serve_only=serve,
            checkpoint=checkpoint,
            stop=stop,
        )
    )


@command(TRAIN)
def env_server(
    config: Config,
    set_: Set = None,
    evaluate: bool = False,
    first_worker: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Run an environment server in the foreground; it connects to the learner. Needs no torch.

    [bold]Examples[/]

      murmur env-server terrain-reference --set env_server.learner=gpu-host:50051 \
        --set security.folder=certs/environment

      murmur env-server terrain-reference --set env_server.num_workers=8 --first-worker 8

    Options:
        evaluate: Serve the learner's evaluations, not its training.
        first_worker: Number of the first worker, unique over all servers.
    """
    from murmur.runs.child import join_supervisor

    join_supervisor()
    from murmur.env_service.app import run_env_server
    from murmur.shared.config.files import load

    configure_logging("evaluator" if evaluate else "env-server")
    stop = stop_on_signals()
    settings = load(config, set_ or [])
    raise SystemExit(
        run_env_server(settings, first_worker=first_worker, stop=stop, evaluate=evaluate)
    )


@command(TRAIN)
def slurm(
    config: Config,
    set_: Set = None,
    gpus: Annotated[int, typer.Option(min=0)] = 1,
    gpus_per_node: Annotated[int, typer.Option(min=1)] = 8,
    ranks: Annotated[int, typer.Option(min=1)] = 1,
    cpus_per_rank: Annotated[int, typer.Option(min=1)] = 8,
    env_nodes: Annotated[int, typer.Option(min=0)] = 1,
    cpus_per_node: Annotated[int, typer.Option(min=1)] = 16,
    sbatch: Sbatch = None,
    run: Path | None = None,
    output: Path | None = None,
) -> None:
    """Write a Slurm job script: a learner on GPU nodes, environment servers on CPU nodes.

    Read it, change it, submit it with sbatch. The job makes its own certificates, saves before
    its time limit, is queued again, and continues until the run is complete. See docs/slurm.md.

    [bold]Examples[/]

      murmur slurm terrain-reference --gpus 1 --env-nodes 2 --sbatch=--time=12:00:00

      murmur slurm formation --gpus 2 --env-nodes 4 --cpus-per-node 32 \
        --sbatch=--partition=gpu --sbatch=--account=my-project

      murmur slurm spread --gpus 0 --env-nodes 0 --cpus-per-node 4 --output spread.sh

    Options:
        gpus: GPUs of the learner, one rank on each; 0: it uses CPUs.
        gpus_per_node: GPUs of one learner node; more GPUs take more nodes.
        ranks: With --gpus 0: learner processes, all on one node.
        cpus_per_rank: CPUs of each learner process.
        env_nodes: Nodes with an environment server each; 0: they share the learner's nodes, and the
            job is not heterogeneous.
        cpus_per_node: CPUs of each environment server; without env_server.num_workers also its
            workers.
        run: The run's folder, which all nodes must see; default: runs/<name>-<time>. A run in it is
            resumed.
        output: The script; default: job.sh in the run's folder.
    """
    from murmur.shared.config.files import load
    from murmur.slurm import job_script, write_script

    settings = load(config, set_ or []).run
    stamp = time.strftime("%Y%m%d-%H%M%S")
    folder = (run or Path(settings.directory) / f"{settings.name}-{stamp}").absolute()
    script = job_script(
        config,
        set_ or [],
        folder,
        gpus=gpus,
        gpus_per_node=gpus_per_node,
        ranks=ranks,
        cpus_per_rank=cpus_per_rank,
        env_nodes=env_nodes,
        cpus_per_node=cpus_per_node,
        sbatch=sbatch or [],
    )
    file = output or folder / "job.sh"
    write_script(script, folder, file)
    print_plain(Console(), f"written: {file}\nnext: read it, then  sbatch {file}")
