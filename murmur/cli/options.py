"""Arguments and options that several commands share, their completion, and what they mean.

Typer calls the completions with what was typed so far. A name that cannot be listed is not offered.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from murmur.shared.process.errors import ConfigError
from murmur.text import print_plain

if TYPE_CHECKING:
    from murmur.runs.run_folder import RunFolder
    from murmur.shared.config.experiment import ExperimentConfig


def complete_config(incomplete: str) -> list[str]:
    """Return configurations that come with murmur; if none fits, YAML files and folders here."""
    from murmur.shared.config.files import config_names

    files = Path(incomplete).parent.glob("*.y*ml")
    names = _starting(incomplete, config_names())
    return names or _starting(incomplete, [*map(str, files), *_folders(incomplete)])


def complete_run(incomplete: str) -> list[str]:
    """Return runs and sweeps under runs/, the newest first; if none fits, folders here."""
    inside = [*Path("runs").glob("*/config.yaml"), *Path("runs").glob("*/sweep.yaml")]
    found = sorted(inside, key=lambda p: p.stat().st_mtime)
    names = _starting(incomplete, [str(path.parent) for path in reversed(found)])
    return names or _starting(incomplete, _folders(incomplete))


def complete_environment(incomplete: str) -> list[str]:
    """Return names of environments."""
    from murmur.shared.config.plugins import plugin_names

    return _starting(incomplete, plugin_names("environment"))


def complete_source(incomplete: str) -> list[str]:
    """Return names of sources; if none fits, YAML files here."""
    from murmur.shared.config.plugins import plugin_names

    files = Path(incomplete).parent.glob("*.y*ml")
    names = _starting(incomplete, plugin_names("source"))
    return names or _starting(incomplete, [*map(str, files)])


def _folders(incomplete: str) -> list[str]:
    return [str(p) for p in Path(incomplete).parent.glob("*") if p.is_dir()]


def _starting(incomplete: str, names: list[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


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
    "run.start_from": "--from",
}


def _limit(text: str) -> Any:  # noqa: ANN401 - of typer
    """Return an option for a limit of the run: a number of at least 0."""
    return typer.Option(min=0, help=text, rich_help_panel=_END)


Seed = Annotated[int | None, _limit("The same as --set run.seed=.")]
Minutes = Annotated[float | None, _limit("End after this many minutes: run.max_minutes.")]
Steps = Annotated[
    int | None,
    _limit("End after this many environment steps, in which all agents act: run.max_env_steps."),
]
Updates = Annotated[int | None, _limit("End after this many updates: run.max_updates.")]
Episodes = Annotated[int | None, _limit("End after this many training episodes: run.max_episodes.")]
Device = Annotated[
    str | None,
    typer.Option(help="auto, cpu or cuda: learner.device.", rich_help_panel=_END),
]


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


def find_run(target: Path | None, config: str | None = None, *, begun: bool = False) -> "RunFolder":
    """Return the run that is meant.

    Args:
        target: folder of the run; None: the newest one.
        config: configuration of the newest run; None: any.
        begun: flag to accept a run without a checkpoint, where the newest is meant.

    Raises:
        ConfigError: if there is none, or if both a folder and a configuration are given.
    """
    from murmur.runs.run_folder import RunFolder
    from murmur.shared.config.files import load

    _one_of(target, config)
    if target:
        return RunFolder.open(target)
    return RunFolder.newest(Path("runs"), config and load(config).run.name, begun=begun)


def chosen_environment(
    target: Path | None, config: str | None, set_: list[str] | None, console: Console
) -> "ExperimentConfig":
    """Return the configuration with the environment to play, and print it.

    It is that of the run `target`, or `config`, or else of the newest run.
    """
    from murmur.shared.config.files import load

    _one_of(target, config)
    if config is not None:
        settings, source = load(config, set_ or []), f"configuration {config}"
    elif target is None and not any(Path("runs").glob("*/config.yaml")):
        raise ConfigError(
            "which environment? There is no run under 'runs'; give --config NAME (see "
            "`murmur config`) or a run's folder"
        )
    else:
        run = find_run(target, begun=True)
        settings, source = run.config(set_ or []), f"run {target}"
        if target is None:
            source = f"{run.path}, the newest run (--config NAME plays another)"
    name = settings.environment.options.get("factory", settings.environment.name)
    print_plain(console, f"environment: {name}, of {source}")
    return settings


def _one_of(target: Path | None, config: str | None) -> None:
    if target is not None and config is not None:
        raise ConfigError(f"a run's folder ('{target}') and --config {config}: give one of them")
