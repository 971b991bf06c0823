"""Commands that train: train, learner, env-server."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from murmur.cli.app import app
from murmur.cli.completion import complete_config
from murmur.cli.options import Config, Set
from shared.errors import ConfigError

if TYPE_CHECKING:
    from murmur.run_folder import RunFolder
    from shared.config import ExperimentConfig


@app.command()
def train(
    config: Annotated[
        str | None,
        typer.Argument(
            help="A YAML file or a name (see `murmur config`). Not needed to resume; then a run's "
            "folder will do too.",
            autocompletion=complete_config,
        ),
    ] = None,
    set_: Set = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on with the newest run with a checkpoint, of CONFIG if given, or with --run.",
        ),
    ] = False,
    run: Annotated[
        Path | None, typer.Option(help="The run's folder; default: runs/<name>-<time>.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Worker processes of the environment server.")
    ] = None,
    learners: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Learners that learn together, each on a GPU or share of the cores of its own; "
            "default: 1, or as many as the run had. See docs/many-learners.md.",
        ),
    ] = None,
    from_: Annotated[
        Path | None,
        typer.Option(
            "--from",
            help="Fine-tune: a new run starts with the weights of this checkpoint, or of the best "
            "one of this run's folder. Optimisers, counters and schedules start fresh.",
        ),
    ] = None,
) -> None:
    """Train on this machine: one learner and its environment servers, kept alive.

    Ctrl-C stops everything gracefully; --resume goes on from there.

    [bold]Examples[/]

      murmur train terrain-demo

      murmur train terrain-reference --workers 4 --set run.max_minutes=60

      murmur train formation --learners 2

      murmur train --resume --run runs/terrain-demo-20260101-120000

      murmur train spread --from runs/spread-20260101-120000 --set environment.num_agents=5
    """
    from murmur.supervisor import join_supervisor
    from murmur.training import train as train_here

    join_supervisor()  # a run of a sweep ends with the sweep
    overrides = list(set_ or [])
    if workers is not None:
        overrides.append(f"env_server.num_workers={workers}")
    if from_ is not None:
        overrides.append(f"run.start_from={json.dumps(str(from_.resolve()))}")
    if resume and any(item.startswith("run.start_from") for item in overrides):
        raise ConfigError(
            "--from starts a new run, --resume continues one with its own weights; leave one out"
        )
    settings, folder = (_resumed if resume else _begun)(config, run, overrides)
    if learners is None:
        before = folder.read_json("command.json").get("learners") if resume else None
        learners = before if isinstance(before, int) and before > 0 else 1
    train_here(settings, folder, resume=resume, console=Console(), learners=learners)


def _begun(
    config: str | None, run: Path | None, overrides: list[str]
) -> "tuple[ExperimentConfig, RunFolder]":
    """A new run's configuration and folder.

    Raises:
        ConfigError: for a mistake, found before anything is written.
    """
    from murmur.run_folder import RunFolder
    from murmur.settings import completed_here
    from shared.config import load

    if config is None:
        raise ConfigError("which configuration? `murmur config` lists those that come with murmur")
    settings = completed_here(load(config, overrides))
    return settings, RunFolder.create(settings, run)


def _resumed(
    config: str | None, run: Path | None, overrides: list[str]
) -> "tuple[ExperimentConfig, RunFolder]":
    """The configuration and the folder of the run to go on with.

    Raises:
        ConfigError: if it has no checkpoint.
    """
    from murmur.settings import completed_here
    from shared.config import load

    folder = _run_to_resume(config, run, overrides)
    if not folder.has_checkpoint():
        raise ConfigError(
            f"'{folder.path}' has no checkpoint to go on from; start it anew: {folder.again()}"
        )
    return completed_here(load(str(folder.path / "config.yaml"), overrides)), folder


def _run_to_resume(config: str | None, run: Path | None, overrides: list[str]) -> "RunFolder":
    """What to go on with: the folder that is given, else the newest run, of CONFIG or of all."""
    from murmur.run_folder import RunFolder
    from shared.config import config_names, load

    if run is None and config is not None and config not in config_names():
        run = Path(config) if Path(config).is_dir() else None
    if run is not None:
        return RunFolder.open(run)
    if config is None:
        return RunFolder.newest(Path("runs"))
    wanted = load(config, [item for item in overrides if item.startswith("run.")]).run
    return RunFolder.newest(Path(wanted.directory), wanted.name)


@app.command()
def learner(
    config: Config,
    run: Annotated[Path, typer.Option(help="Where checkpoints and progress are written.")],
    set_: Set = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last checkpoint in --run.")
    ] = False,
    auto_resume: Annotated[
        bool,
        typer.Option(
            "--auto-resume",
            help="Go on if --run holds a checkpoint, else begin: for whatever starts containers.",
        ),
    ] = False,
    serve: Annotated[
        bool, typer.Option("--serve", help="Only act, with the weights of --checkpoint.")
    ] = False,
    checkpoint: Annotated[
        str, typer.Option(help="With --serve: best, latest or a file.")
    ] = "latest",
) -> None:
    """Run the learner service in the foreground; environment servers dial it.

    [bold]Examples[/]

      murmur learner terrain-reference --run runs/one --set learner.host=0.0.0.0 \
        --set security.folder=certs/learner

      murmur learner terrain-reference --run runs/one --resume

      torchrun --standalone --nproc-per-node 2 -m -- murmur learner terrain-reference \
        --run runs/two --auto-resume
    """
    from murmur.supervisor import join_supervisor

    join_supervisor()
    from learner_service.app import run_learner
    from shared.config import load
    from shared.process import configure_logging, stop_on_signals

    rank = os.environ.get("RANK", "0")  # of torchrun
    configure_logging("learner" if rank == "0" else f"learner-{rank}")
    stop = stop_on_signals()
    raise SystemExit(
        run_learner(
            load(config, set_ or []),
            run,
            resume=resume,
            auto_resume=auto_resume,
            serve_only=serve,
            checkpoint=checkpoint,
            stop=stop,
        )
    )


@app.command()
def env_server(
    config: Config,
    set_: Set = None,
    evaluate: Annotated[
        bool, typer.Option("--evaluate", help="Serve the learner's evaluations, not its training.")
    ] = False,
    first_worker: Annotated[
        int, typer.Option(min=0, help="Number of the first worker, unique over all servers.")
    ] = 0,
) -> None:
    """Run an environment server in the foreground; it dials the learner. Needs no torch.

    [bold]Examples[/]

      murmur env-server terrain-reference --set env_server.learner=gpu-host:50051 \
        --set security.folder=certs/environment

      murmur env-server terrain-reference --set env_server.num_workers=8 --first-worker 8
    """
    from murmur.supervisor import join_supervisor

    join_supervisor()
    from env_service.app import run_env_server
    from shared.config import load
    from shared.process import configure_logging, stop_on_signals

    configure_logging("evaluator" if evaluate else "env-server")
    stop = stop_on_signals()
    settings = load(config, set_ or [])
    raise SystemExit(
        run_env_server(settings, first_worker=first_worker, stop=stop, evaluate=evaluate)
    )
