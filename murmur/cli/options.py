"""Arguments and options that several commands share."""

from pathlib import Path
from typing import Annotated, Any

import typer

from murmur.cli.completion import complete_config, complete_run
from shared.process.errors import ConfigError

Config = Annotated[
    str,
    typer.Argument(
        help="A YAML file, or the name of a configuration that comes with murmur.",
        autocompletion=complete_config,
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Change one key, e.g. learner.device=cpu. Repeatable."
    ),
]
Target = Annotated[
    Path | None,
    typer.Argument(
        help="A run's folder; without it the newest under runs/, where needed with a checkpoint.",
        autocompletion=complete_run,
    ),
]
Checkpoint = Annotated[
    str, typer.Option(help="best (the latest where there is no best), latest, or a file.")
]
FirstSeed = Annotated[
    int,
    typer.Option(
        min=0,
        help="Seed of the first; the others follow. Take none that chose the best checkpoint "
        "(evaluation.first_seed).",
    ),
]
BaselineName = Annotated[
    str | None, typer.Option("--baseline", help="A scripted baseline instead of a run's policy.")
]
EnvironmentConfig = Annotated[
    str | None,
    typer.Option(
        "--config",
        help="A configuration: with --baseline or --learner its environment is played, else the "
        "policy of its newest run. Without it and a run's folder: the newest run.",
        autocompletion=complete_config,
    ),
]


def removed_option(name: str, instead: str) -> Any:  # noqa: ANN401 - as typer.Option
    """Return a flag that was removed: it is refused with what to do instead."""

    def refuse(given: bool) -> None:
        if given:
            raise ConfigError(f"{name} was removed: {instead}")

    return typer.Option(name, hidden=True, callback=refuse)
