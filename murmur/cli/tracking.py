"""Commands that take a run's record elsewhere: csv, track."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from murmur.cli.app import app
from murmur.cli.completion import complete_run
from murmur.cli.options import Set, Target
from murmur.text import print_plain
from shared.process.errors import ConfigError, ResourceError


@app.command()
def csv(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Folders of runs; without any, the newest under runs/.",
            autocompletion=complete_run,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the two files; default: the run's, of several runs '.'"),
    ] = None,
) -> None:
    """Write progress.csv and evaluations.csv, for spreadsheets, pandas and R.

    A row is a moment of a run (progress) or one metric of an evaluation (evaluations); the first
    column is the run.

    [bold]Examples[/]

      murmur csv

      murmur csv runs/spread-* --out results
    """
    from murmur.comparison.csv_export import write_csv
    from murmur.runs.run_folder import RunFolder

    folders = [RunFolder.open(path) for path in runs or []]
    folders = folders or [RunFolder.newest(Path("runs"), begun=True)]
    to = out or (folders[0].path if len(folders) == 1 else Path("."))
    for file, rows in write_csv(folders, to).items():
        print_plain(Console(), f"written: {file}, {rows} rows")


@app.command()
def track(target: Target = None, set_: Set = None) -> None:
    """Send a run to the W&B or MLflow of its configuration: what was not sent while it trained.

    Pictures that `murmur render` and `murmur report` wrote since then are sent too.

    [bold]Examples[/]

      murmur track

      murmur track runs/spread-20260101-120000 --set tracking.loggers=[wandb]
    """
    from learner_service.telemetry.tracking.forwarder import Forwarder, require_trackers
    from murmur.runs.run_folder import RunFolder

    run = RunFolder.open(target) if target else RunFolder.newest(Path("runs"), begun=True)
    config = run.config(set_ or []).tracking
    if not config.services:
        raise ConfigError(
            f"'{run.path}' has tracking.loggers={list(config.loggers)}: name one to send it to, "
            "such as --set tracking.loggers=[wandb]"
        )
    require_trackers(config.services)
    console = Console()
    for name in config.services:
        forwarder = Forwarder(run.path, name, config)
        with forwarder.holding(0.0):
            message = "nothing new"
            if forwarder.has_news:
                try:
                    forwarder.finish(complete=True)
                except Exception as error:  # whatever the tracker's client raises
                    forwarder.note(error)
                    raise ResourceError(f"{name}: {forwarder.state.trouble}") from None
                message = f"{forwarder.points} points and {forwarder.files} pictures sent"
            where = forwarder.state.where
            print_plain(console, f"{name}: {message}; {where}")
