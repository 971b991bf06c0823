"""Arguments and options that several commands share."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from murmur.cli.completion import complete_config, complete_run
from murmur.shared.process.errors import ConfigError

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
_END = "When the run ends, and its seed and device"
# Keys of the configuration that have an option of their own.
SHORT = {
    "run.seed": "--seed",
    "run.max_minutes": "--minutes",
    "run.max_env_steps": "--steps",
    "run.max_updates": "--updates",
    "run.max_episodes": "--episodes",
    "learner.device": "--device",
    "env_server.num_workers": "--workers",
}
Seed = Annotated[
    int | None, typer.Option(min=0, help="The same as --set run.seed=.", rich_help_panel=_END)
]
Minutes = Annotated[
    float | None,
    typer.Option(min=0, help="End after this many minutes: run.max_minutes.", rich_help_panel=_END),
]
Steps = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="End after this many environment steps, in which all agents act: run.max_env_steps.",
        rich_help_panel=_END,
    ),
]
Updates = Annotated[
    int | None,
    typer.Option(min=0, help="End after this many updates: run.max_updates.", rich_help_panel=_END),
]
Episodes = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="End after this many training episodes: run.max_episodes.",
        rich_help_panel=_END,
    ),
]
Device = Annotated[
    str | None,
    typer.Option(help="auto, cpu or cuda: learner.device.", rich_help_panel=_END),
]


def with_short(set_: list[str] | None, given: Mapping[str, object]) -> list[str]:
    """Return the items of --set and, after them, those of the short options.

    Args:
        set_: items of --set.
        given: values of short options by key of the configuration; None: not given.

    Raises:
        ConfigError: if a key is given in both ways.
    """
    from murmur.runs.settings import setting
    from murmur.shared.config.files import changes_of

    items = list(set_ or [])
    keys = {".".join(map(str, path)): value for path, value, _ in changes_of(items)}
    for key, value in given.items():
        if value is None:
            continue
        if key in keys:
            raise ConfigError(
                f"{SHORT[key]} {value} and --set {key}={keys[key]} are the same key: give one"
            )
        items.append(setting(key, value))
    return items


Sbatch = Annotated[
    list[str] | None,
    typer.Option(
        metavar="OPTION",
        help="An option of sbatch for all nodes, e.g. --sbatch=--partition=gpu. Repeatable.",
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
