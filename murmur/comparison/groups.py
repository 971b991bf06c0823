"""Runs to compare, with their settings and scores; their tasks, and groups named by differences."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from murmur.runs import settings
from murmur.runs.run_folder import RunFolder
from murmur.runs.scores import Curve, Metric, last_progress, read_curve, state_of
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.config.text import one_line, plain_data
from murmur.shared.process.errors import ConfigError
from murmur.sweeps.folder import find_runs, short_value

_FIRST = ("algorithm.name", "network.name")  # name groups before other keys do
_TOLERANCE = 0.05  # of environment steps: a run ends with a whole update
_SHOWN = 4  # differing keys in a message
_ABSENT = "–"
# Options that say where and how fast a run works, not what it learns.
_OF_THE_MACHINE = (
    *("run.name", "run.directory", "run.seed", "run.plugin_folders", "tracking.", "security."),
    "env_server.learner",
    *("learner.host", "learner.port", "learner.metrics_", "env_server.metrics_"),
    *("env_server.num_workers", "learner.num_threads", "learner.memory_", "learner.log_every_s"),
    *("learner.checkpoint_every_updates", "learner.keep_checkpoints", "learner.device"),
)


@dataclass(frozen=True)
class ComparedRun:
    """A run with its settings and its score.

    Attributes:
        path: folder of the run.
        config: values by dotted key, all keys with their defaults.
        task: configuration keys of the task, with their values.
        seed: value of run.seed.
        state: state of the run: running, complete, stopped or begun.
        env_steps: environment steps learned from.
        curve: curve of its score during training.
    """

    path: Path
    config: dict[str, Any]
    task: dict[str, Any]
    seed: int
    state: str
    env_steps: int
    curve: Curve

    @property
    def name(self) -> str:
        """Name of its folder."""
        return self.path.name


def read_run(folder: RunFolder, metric: str | None) -> ComparedRun:
    """Read a run's score and settings.

    Args:
        folder: folder of the run.
        metric: metric that judges the run, written as evaluation.best_metric; None: its own.

    Raises:
        ConfigError: if its configuration cannot be read.
    """
    config = folder.config()
    last = last_progress(folder)
    curve = read_curve(folder, Metric.parse(metric or config.evaluation.best_metric))
    return ComparedRun(
        folder.path,
        learning_settings(config, folder.measured()),
        task_of(config),
        config.run.seed,
        state_of(folder, config, last),
        int(last.get("env_steps", 0)),
        curve,
    )


def learning_settings(config: ExperimentConfig, measured: Mapping[str, Any]) -> dict[str, Any]:
    """Return all options with influence on learning, by dotted key, without seed and task.

    Options of the environment are among them only where evaluations have other values.

    Args:
        config: configuration of the run.
        measured: options that the learner chose by its speed; they stand as "auto".
    """
    task = task_of(config)
    flat = dict(settings.flatten(settings.resolved_data(config)))
    return {
        key: "auto" if key in measured and measured[key] == value else value
        for key, value in flat.items()
        if not key.startswith(_OF_THE_MACHINE) and (key not in task or task[key] != value)
    }


def task_of(config: ExperimentConfig) -> dict[str, Any]:
    """Return the options that say what a run is evaluated on, by dotted key."""
    kind = "source" if config.supervised else "environment"
    evaluated = config if config.supervised else config.for_evaluation()
    plugin = getattr(settings.with_plugin_defaults(evaluated, settings.TASK), kind)
    task = dict(settings.flatten({kind: plain_data(plugin)}))
    if not config.supervised:
        task["evaluation.sample"] = config.evaluation.sample
    return task


def collect(
    targets: Iterable[str], metric: str | None, say: Callable[[str], None]
) -> list[ComparedRun]:
    """Read all runs that paths mean; those without any score are named and left out.

    Raises:
        ConfigError: if no run is left, or they are judged by different metrics.
    """
    folders, missing = find_runs(targets)
    for line in missing:
        say(f"left out: {line}")
    runs = []
    for folder in folders:
        run = read_run(folder, metric)
        if run.curve.values:
            runs.append(run)
            continue
        name = run.curve.metric.name
        say(f"left out: {run.name}: no score of '{name}' yet ({run.state})")
    if not runs:
        raise ConfigError("no run that is named has a score; train them first")
    _require_one_metric(runs)
    return runs


def _require_one_metric(runs: list[ComparedRun]) -> None:
    """Refuse runs that are judged in different ways.

    Raises:
        ConfigError: naming two of them.
    """
    first = runs[0]
    for run in runs:
        if run.curve.metric != first.curve.metric:
            raise ConfigError(
                f"the runs are judged by different metrics: {first.name} by "
                f"'{first.curve.metric}', {run.name} by '{run.curve.metric}' "
                "(evaluation.best_metric); name one with --metric"
            )
        if run.curve.evaluated != first.curve.evaluated:
            ways = {
                True: "was evaluated",
                False: "was not evaluated (evaluation.every_updates and others are 0)",
            }
            raise ConfigError(
                f"{first.name} {ways[first.curve.evaluated]}, {run.name} "
                f"{ways[run.curve.evaluated]}: scores of training episodes, in which the policy "
                "explores, do not compare with evaluations; leave one kind out"
            )


@dataclass(frozen=True)
class Group:
    """Runs that, on one task, differ in nothing but their seeds.

    Attributes:
        name: difference from the other groups.
        runs: runs on all tasks.
        settings: values of every key that differs between runs.
    """

    name: str
    runs: list[ComparedRun]
    settings: dict[str, str]


@dataclass(frozen=True)
class Task:
    """Environment and settings that runs are evaluated on.

    Attributes:
        name: difference from the other tasks; the environment if there is one task.
        groups: runs of each group on this task, by the group's name.
    """

    name: str
    groups: dict[str, list[ComparedRun]]


def differing(configs: Sequence[dict[str, Any]]) -> list[str]:
    """Return keys with different values in some of the flat configurations, in their order."""
    keys = dict.fromkeys(key for config in configs for key in config)
    return [key for key in keys if len({_text(c, key) for c in configs}) > 1]


def naming_keys(
    configs: Sequence[dict[str, Any]], keys: Iterable[str], strata: Sequence[str] = ()
) -> list[str]:
    """Return the fewest of these keys, taken in order, that tell the configurations apart.

    A key is left out if those before it tell apart all that it does: an algorithm's own options
    if the algorithm differs.

    Args:
        configs: flat configurations.
        keys: keys to choose from.
        strata: stratum of each configuration; only those of one stratum are distinguished. Empty:
            all are.
    """
    chosen: list[str] = []
    strata = strata or [""] * len(configs)
    classes = len(set(strata))
    for key in sorted(keys, key=lambda key: _FIRST.index(key) if key in _FIRST else len(_FIRST)):
        told = {
            (stratum, *(_text(c, k) for k in (*chosen, key)))
            for stratum, c in zip(strata, configs, strict=True)
        }
        if len(told) > classes:
            chosen.append(key)
            classes = len(told)
    return chosen


def make_groups(runs: Sequence[ComparedRun], by: Sequence[str] = ()) -> list[Group]:
    """Return groups of runs, in the order of their first run.

    What differs between tasks alone, as the size of networks that suits each, sets no groups apart.

    Args:
        runs: all runs.
        by: keys that tell groups apart; none: all that differ between runs of a task.

    Raises:
        ConfigError: for a key in `by` that no run has.
    """
    configs = [run.config | run.task for run in runs]
    for key in by:
        if not any(key in config for config in configs):
            raise ConfigError(f"--by {key}: no run has this key; `murmur config` shows them")
    tasks = [_comparable_text(run.task) for run in runs]
    differ = differing([run.config for run in runs])
    naming = list(by) or naming_keys([run.config for run in runs], differ, tasks)
    found: dict[tuple[str, ...], list[ComparedRun]] = {}
    for run, config in zip(runs, configs, strict=True):
        found.setdefault(tuple(_text(config, key) for key in naming), []).append(run)
    return [
        Group(
            _name(members[0].config | members[0].task, naming),
            members,
            {
                key: "; ".join(dict.fromkeys(_shown(run.config, key) for run in members))
                for key in differ
            },
        )
        for members in found.values()
    ]


def make_tasks(groups: Sequence[Group]) -> list[Task]:
    """Return the tasks of all groups, in the order of their first run."""
    runs = [run for group in groups for run in group.runs]
    tasks = [run.task for run in runs]
    differ = differing(tasks)
    keys = naming_keys(tasks, sorted(differ, key=lambda key: not key.endswith(".name")))
    found: dict[str, dict[str, list[ComparedRun]]] = {}
    for group in groups:
        for run in group.runs:
            name = _name(run.task, keys) if keys else environment_name(run.task)
            found.setdefault(name, {}).setdefault(group.name, []).append(run)
    return [Task(name, members) for name, members in found.items()]


def environment_name(task: dict[str, Any]) -> str:
    """Return the environment or source of a task."""
    keys = ("environment.arguments.id", "environment.factory", "environment.name", "source.name")
    return next((str(task[key]) for key in keys if task.get(key)), "task")


def require_same_task(runs: Sequence[ComparedRun]) -> None:
    """Refuse runs of different tasks.

    Raises:
        ConfigError: naming what differs and how to compare them all the same.
    """
    keys = differing([run.task for run in runs])
    if keys:
        shown = {k: dict.fromkeys(_shown(run.task, k) for run in runs) for k in keys[:_SHOWN]}
        values = [f"{key}: {', '.join(texts)}" for key, texts in shown.items()]
        more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
        raise ConfigError(
            f"the runs are of different tasks, of which scores do not compare ({'; '.join(values)}"
            f"{more}); name runs of one task, or add --across-tasks: each task has a table of its "
            "own, and scores are scaled to [0, 1] by task before they are joined"
        )


def require_same_steps(runs: Sequence[ComparedRun]) -> None:
    """Refuse runs of one task that learned from different numbers of environment steps.

    Raises:
        ConfigError: naming the extremes and how to compare them all the same.
    """
    least = min(runs, key=lambda run: run.env_steps)
    most = max(runs, key=lambda run: run.env_steps)
    if least.env_steps < (1 - _TOLERANCE) * most.env_steps:
        raise ConfigError(
            f"the runs used different numbers of environment steps: {least.name} "
            f"{least.env_steps} ({least.state}), {most.name} {most.env_steps} ({most.state}); "
            f"--at-steps {least.env_steps} compares the scores that they had at that number, "
            "--any-steps their last ones"
        )


def _name(config: dict[str, Any], keys: Sequence[str]) -> str:
    """Name a group or task: plug-ins by their names, other keys by key=value."""
    parts = []
    for key in keys:
        section, _, last = key.rpartition(".")
        value = _shown(config, key)
        parts.append(value if last in ("name", "factory") and section else f"{last}={value}")
    return ", ".join(parts) or "all runs"


def _shown(config: dict[str, Any], key: str) -> str:
    return short_value(config[key]) if key in config else _ABSENT


def _text(config: dict[str, Any], key: str) -> str:
    """Return a value that can be compared."""
    return _comparable_text(config[key]) if key in config else _ABSENT


def _comparable_text(value: object) -> str:
    """Return text that is the same for equal values of a configuration."""
    try:
        return json.dumps(value, sort_keys=True)
    except TypeError:  # JSON has no dates, sets, bytes and keys of several types
        return one_line(value)
