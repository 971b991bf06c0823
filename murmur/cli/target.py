"""The run, or the environment, that a command's folder and --config mean."""

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from murmur.shared.process.errors import ConfigError
from murmur.text import print_plain

if TYPE_CHECKING:
    from murmur.runs.run_folder import RunFolder
    from murmur.shared.config.experiment import ExperimentConfig


def trained(target: Path | None, config: str | None = None) -> "RunFolder":
    """Return the run that is meant: the folder `target`, else the newest, of `config` if given."""
    from murmur.runs.run_folder import RunFolder
    from murmur.shared.config.files import load

    _one_of(target, config)
    if target:
        return RunFolder.open(target)
    if config is None:
        return RunFolder.newest(Path("runs"))
    return RunFolder.newest(Path("runs"), load(config).run.name)


def begun(target: Path | None) -> "RunFolder":
    """Return the run that is meant, also one without a checkpoint: `target`, or the newest."""
    from murmur.runs.run_folder import RunFolder

    return RunFolder.open(target) if target else RunFolder.newest(Path("runs"), begun=True)


def chosen_environment(
    target: Path | None, config: str | None, set_: list[str] | None, console: Console
) -> "ExperimentConfig":
    """Return the configuration with the environment to play, and print it.

    It is that of the run `target`, or `config`, or else of the newest run.
    """
    from murmur.runs.run_folder import RunFolder
    from murmur.shared.config.files import load

    _one_of(target, config)
    if config is not None:
        settings, source = load(config, set_ or []), f"configuration {config}"
    elif target is not None:
        settings, source = RunFolder.open(target).config(set_ or []), f"run {target}"
    else:
        try:
            run = RunFolder.newest(Path("runs"), begun=True)
        except ConfigError:
            raise ConfigError(
                "which environment? There is no run under 'runs'; give --config NAME (see "
                "`murmur config`) or a run's folder"
            ) from None
        settings = run.config(set_ or [])
        source = f"{run.path}, the newest run (--config NAME plays another)"
    name = settings.environment.options.get("factory", settings.environment.name)
    print_plain(console, f"environment: {name}, of {source}")
    return settings


def _one_of(target: Path | None, config: str | None) -> None:
    if target is not None and config is not None:
        raise ConfigError(f"a run's folder ('{target}') and --config {config}: give one of them")
