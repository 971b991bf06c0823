"""Commands that take a run's record elsewhere: track."""

from pathlib import Path

from rich.console import Console

from murmur.cli.app import app
from murmur.cli.options import Set, Target
from murmur.text import print_plain
from shared.process.errors import ConfigError, ResourceError


@app.command(
    hidden=True, context_settings={"ignore_unknown_options": True, "allow_extra_args": True}
)
def csv() -> None:
    """Refuse a command that was removed."""
    raise ConfigError(
        "murmur csv was removed: murmur.Run(FOLDER).metrics().to_csv(FILE) and "
        ".evaluations().to_csv(FILE) write tables (docs/tracking.md#csv)"
    )


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
