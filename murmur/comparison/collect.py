"""Collection of the runs to compare, with their settings and scores."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from murmur.runs import settings
from murmur.runs.run_folder import RunFolder
from murmur.runs.scores import Curve, Metric, last_progress, read_curve, state_of
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.config.text import plain_data
from murmur.shared.process.errors import ConfigError
from murmur.sweeps.folder import find_runs

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

    Of its environment only those that differ from what it is evaluated on.

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
