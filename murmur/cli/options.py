"""Arguments and options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

Config = Annotated[
    str, typer.Argument(help="A YAML file, or the name of a configuration that comes with murmur.")
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
        help="A run's folder; without it the newest under runs/, where needed with a checkpoint."
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
    str,
    typer.Option("--config", help="Without a run: the configuration with the environment."),
]
