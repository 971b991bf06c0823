"""The Python API: the commands of `murmur` as functions.

See docs/python.md. The names of `murmur.__all__` are stable.
"""

from collections.abc import Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path

from rich.console import Console

from env_service.environment import VectorEnvironment, make_environment
from murmur.runs.run import Callback, Run
from murmur.runs.settings import environment_factory, resolve, setting
from murmur.runs.training import Source, prepare
from shared.config.experiment import ExperimentConfig
from shared.config.extras import advising
from shared.config.files import Overrides, changes_of, code_of, config_names, load
from shared.config.plugin_folders import refused_code
from shared.config.plugins import plugin_names
from shared.config.text import plain_data, plain_value
from shared.process.errors import ConfigError

Configuration = str | PathLike[str] | Mapping[str, object] | ExperimentConfig


@advising()
def train(
    config: Configuration | None = None,
    overrides: Overrides = (),
    *,
    seed: int | None = None,
    start_from: str | PathLike[str] | None = None,
    run: str | PathLike[str] | None = None,
    resume: bool = False,
    learners: int | None = None,
    callbacks: Sequence[Callback] = (),
    wait: bool = True,
    progress: bool | None = None,
) -> Run:
    """Train on this machine, with the same processes and in the same folder as `murmur train`.

    Args:
        config: the name of a configuration, a file, its sections, or what murmur.config returned.
            With `resume`: the name of a configuration, the folder of a run, or None.
        overrides: changes of the configuration, see murmur.config.
        seed: value in place of run.seed.
        start_from: checkpoint, or run (its best one), whose weights the new run starts from; see
            docs/fine-tuning.md.
        run: folder of the run; None: a new folder under runs/, or with `resume` the newest run.
        resume: flag to continue a run from its last checkpoint.
        learners: number of learners that train together; None: 1, or that of the resumed run.
        callbacks: functions, called as callback(run, record) in this process with each record of
            progress.jsonl; its "kind" is "progress" or "evaluation". They may call run.stop().
        wait: flag to return when the training has ended. False: return at once and train in the
            background; a thread calls the callbacks, and the training ends with this process.
        progress: flag to show progress; None: if `wait`.

    Returns:
        the run.

    Raises:
        KeyboardInterrupt: on Ctrl-C, after an orderly stop with a checkpoint.
        MurmurError: for an error the user can fix.
        Exception: what a callback raised, after an orderly stop with a checkpoint.
    """
    if callable(callbacks) or not all(callable(callback) for callback in callbacks):
        raise ConfigError("callbacks: give a list of functions, each called with (run, record)")
    if learners is not None and learners < 1:
        raise ConfigError(f"learners={learners}: give 1 or more")
    origin = None if start_from is None else str(Path(start_from).resolve())
    overrides = _with(_with(overrides, "seed", seed), "start_from", origin)
    given, environ = _given(config)
    prepared = prepare(
        given,
        overrides,
        run=None if run is None else Path(run),
        resume=resume,
        learners=learners,
        command=_call(config, overrides, resume=resume),
        environ=environ,
    )
    started = Run(prepared.folder.path)
    shown = wait if progress is None else progress
    console = Console() if shown else Console(quiet=True, force_terminal=False)
    started._train(prepared, callbacks, console, wait=wait)
    return started


@advising()
def config(config: Configuration, overrides: Overrides = ()) -> ExperimentConfig:
    """Return a checked configuration with every default, those of its plug-ins included.

    Args:
        config: the name of a configuration, a file, or its sections as in a file.
        overrides: changes: {"run.max_minutes": 5, "environment": {"num_agents": 4}}, or one or
            several "run.max_minutes=5" as with --set. A section in a mapping is merged with that of
            the configuration; a section in text replaces it. Environment variables
            MURMUR__A__B=value apply as they do to the commands; overrides take precedence.

    Returns:
        the configuration, which murmur.train and murmur.make_env take.

    Raises:
        ConfigError: naming the key, the value and the fix.
    """
    given, environ = _given(config)
    if given is None:
        raise ConfigError("which configuration? `murmur config` lists those that come with murmur")
    return resolve(load(given, overrides, environ))


@advising()
def make_env(
    config: Configuration, num_envs: int = 1, overrides: Overrides = ()
) -> VectorEnvironment:
    """Build a vector of `num_envs` copies of an environment in this process.

    Args:
        config: a configuration, or the name of an environment, or package.module:factory.
        num_envs: number of copies.
        overrides: changes, see murmur.config: {"environment.num_agents": 4}.

    Returns:
        the environment: `reset(seeds)` and `step(action, restart, seeds)` return a TimeStep of
        [num_envs, ...] arrays; `spec` has their names and shapes.

    Raises:
        ConfigError: if there is no such environment or option.
    """
    if num_envs < 1:
        raise ConfigError(f"num_envs={num_envs}: give 1 or more")
    if isinstance(config, str) and config not in config_names():
        if ":" in config:
            return environment_factory(config, overrides)(num_envs)
        if config in plugin_names("environment"):
            config = {"environment": {"name": config}}
    given, environ = _given(config)
    assert given is not None
    settings = load(given, overrides, environ)
    if settings.supervised:
        raise ConfigError(f"configuration '{settings.run.name}' has a source, no environment")
    return make_environment(settings.environment, num_envs)


def _given(config: Configuration | None) -> tuple[Source | None, dict[str, str] | None]:
    """Return the configuration as a name or sections, and its environment variables.

    None for the variables: those of the process. A checked configuration already includes them.
    """
    if isinstance(config, ExperimentConfig):
        for named in code_of(config):
            if reason := refused_code(named, config.run.plugin_folders):
                raise ConfigError(f"the configuration names '{named}', {reason}")
        return plain_data(config), {}
    if config is None or isinstance(config, Mapping):
        return config, None
    return fspath(config), None


def _with(overrides: Overrides, option: str, value: int | str | None) -> Overrides:
    """Add an option of the section run to overrides, a list or mapping.

    Raises:
        ConfigError: if they set it as well.
    """
    if isinstance(overrides, str):
        overrides = [overrides]
    elif not isinstance(overrides, Mapping):
        overrides = list(overrides)
    if value is None:
        return overrides
    value = plain_value(value, f"{option}={value}")  # numpy counts seeds in numbers of its own
    if any(path == ["run", option] for path, _, _ in changes_of(overrides)):
        raise ConfigError(f"{option}={value} and an override of run.{option}: give one of them")
    if isinstance(overrides, Mapping):
        return {**overrides, f"run.{option}": value}
    return [*overrides, setting(f"run.{option}", value)]


def _call(config: Configuration | None, overrides: Overrides, *, resume: bool) -> str:
    """Return the call as text, for command.json."""
    parts = [repr(fspath(config))] if isinstance(config, str | PathLike) else []
    if isinstance(config, Mapping | ExperimentConfig):
        parts = ["configuration"]
    parts += [repr(overrides)] if overrides else []
    parts += ["resume=True"] if resume else []
    return f"murmur.train({', '.join(parts)})"
