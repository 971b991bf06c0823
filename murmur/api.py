"""The Python API: the commands of `murmur` as functions.

See docs/python.md. The names of `murmur.__all__` are stable.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from murmur.env_service.environment import VectorEnvironment, make_environment
from murmur.runs.run import Callback, Run
from murmur.runs.settings import environment_factory, with_options, with_plugin_defaults
from murmur.runs.training import Source, prepare
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.config.extras import advising
from murmur.shared.config.files import Overrides, code_of, config_names, load
from murmur.shared.config.plugin_folders import refused_code
from murmur.shared.config.plugins import plugin_names
from murmur.shared.config.text import plain_data
from murmur.shared.process.errors import ConfigError, ResourceError
from murmur.shared.process.files import write_output
from murmur.text import print_plain

if TYPE_CHECKING:
    import pandas as pd

Names = str | PathLike[str] | Iterable[str | PathLike[str]]
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
    options = {"run.seed": seed, "run.start_from": origin}
    names = {"run.seed": "seed", "run.start_from": "start_from"}
    overrides = with_options(overrides, options, names)
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
    return with_plugin_defaults(load(given, overrides, environ))


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
    return make_environment(settings.environment, num_envs, settings.algorithm.name)


@advising()
def sweep(
    configs: Names = (),
    *,
    seeds: int | Sequence[int] | None = None,
    vary: Mapping[str, object] | None = None,
    overrides: Overrides = (),
    parallel: int | None = None,
    folder: str | PathLike[str] | None = None,
    resume: bool = False,
    progress: bool = True,
) -> list[Run]:
    """Train many runs on this machine, like `murmur sweep`.

    Args:
        configs: one or several names or files of configurations, or the file of a sweep.
        seeds: number of seeds or the seeds; 5 stands for the seeds 1 to 5; None: 1, or those of the
            sweep's file.
        vary: values by key: {"algorithm.name": ["mappo", "coma"]}; all combinations are trained.
        overrides: changes of all runs, see murmur.config.
        parallel: number of runs at once; None or 0: as many as the machine holds.
        folder: the sweep's folder; None: a new folder under runs/, or with `resume` the newest.
        resume: flag to continue a sweep: complete runs are kept, others resume from their
            checkpoints.
        progress: flag to show progress.

    Returns:
        the runs that were trained to their end.

    Raises:
        KeyboardInterrupt: on Ctrl-C, after every run was stopped with a checkpoint.
        ResourceError: if runs failed; the others were trained all the same.
        MurmurError: for another error the user can fix.
    """
    from murmur.sweeps.folder import ENDED
    from murmur.sweeps.run import open_sweep, run_sweep

    given = {"seeds": seeds, "vary": vary}
    path = None if folder is None else Path(folder)
    found = open_sweep(_paths(configs), given, overrides, path, resume=resume)
    console = Console() if progress else Console(quiet=True, force_terminal=False)
    with found.lock:
        failed = run_sweep(found, console=console, parallel=parallel)
    if failed:
        named = [f"{run.name}: {run.message}" for run in found.runs if run.state == "failed"]
        raise ResourceError(
            f"{len(named)} of {len(found.runs)} runs failed ({'; '.join(named)}); "
            f"murmur.sweep(folder={str(found.path)!r}, resume=True) tries them again"
        )
    return [Run(found.folder_of(run).path) for run in found.runs if run.state in ENDED]


@advising()
def compare(
    runs: Names,
    *,
    metric: str | None = None,
    by: str | Sequence[str] = (),
    best: bool = False,
    at_steps: int | None = None,
    any_steps: bool = False,
    across_tasks: bool = False,
    page: str | PathLike[str] | None = None,
) -> "pd.DataFrame":
    """Compare groups of runs that differ in more than their seed, like `murmur compare`.

    Prints which runs are left out and what to keep in mind when reading the result.

    Args:
        runs: runs, their folders, folders of sweeps, or patterns.
        metric: metric to judge by, "-" before it if less is better; None: that of the runs'
            evaluation.best_metric.
        by: configuration keys that tell groups apart; none: all that differ.
        best: flag to take each run's best evaluation, not its last.
        at_steps: environment steps at which scores are taken; None: at the end.
        any_steps: flag to compare runs of different numbers of environment steps.
        across_tasks: flag to compare runs of different tasks.
        page: file for the page with curves and profiles; None: no page.

    Returns:
        a DataFrame with a row for each task and group and the columns task, group, runs, iqm
        (interquartile mean of the scores), low and high (its 95 % bootstrap interval, NaN of a
        single run), min and max (of the scores).

    Raises:
        ConfigError: if the runs do not compare, naming what differs.
    """
    import pandas as pd

    from murmur.comparison.analysis import compare as compare_runs
    from murmur.comparison.page import render

    say = partial(print_plain, Console(), style="yellow")
    targets = _paths(runs)
    found = compare_runs(
        targets,
        metric=metric,
        by=_paths(by),
        best=best,
        at_steps=at_steps,
        any_steps=any_steps,
        across_tasks=across_tasks,
        say=say,
    )
    for note in found.notes:
        say(note)
    if page is not None:
        command = f"murmur.compare({', '.join(map(repr, targets))})"
        write_output(Path(page), render(found, command))
    rows: list[dict[str, Any]] = []
    for task in found.results:
        for group, (value, low, high) in task.iqm.items():
            scores = task.scores[group]
            row = {"task": task.name, "group": group, "runs": len(scores), "iqm": value}
            rows.append({**row, "low": low, "high": high, "min": scores.min(), "max": scores.max()})
    return pd.DataFrame(rows).astype({"low": float, "high": float})


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


def _call(config: Configuration | None, overrides: Overrides, *, resume: bool) -> str:
    """Return the call as text, for command.json."""
    parts = [repr(fspath(config))] if isinstance(config, str | PathLike) else []
    if isinstance(config, Mapping | ExperimentConfig):
        parts = ["configuration"]
    parts += [repr(overrides)] if overrides else []
    parts += ["resume=True"] if resume else []
    return f"murmur.train({', '.join(parts)})"


def _paths(names: Names) -> list[str]:
    """Return one or several names as a list of text."""
    return [fspath(name) for name in ([names] if isinstance(names, str | PathLike) else names)]
