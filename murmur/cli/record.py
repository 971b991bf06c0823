"""The command that writes what a policy does as a dataset: record."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from murmur.cli.app import RESULTS, app
from murmur.cli.evaluate import ServingLearner
from murmur.cli.options import (
    BaselineName,
    Checkpoint,
    EnvironmentConfig,
    FirstSeed,
    Set,
    Target,
)
from murmur.cli.target import chosen_environment, trained
from murmur.shared.process.errors import ConfigError
from murmur.text import print_plain, print_table

_EPISODES = 100


@app.command(rich_help_panel=RESULTS)
def record(
    target: Target = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The dataset's folder, a new one; default: datasets/POLICY-SEED."),
    ] = None,
    episodes: Annotated[
        int | None,
        typer.Option(min=1, help="Episodes to record; default: 100, of --minari all."),
    ] = None,
    first_seed: FirstSeed = 1,
    checkpoint: Checkpoint = "best",
    baseline: BaselineName = None,
    learner: ServingLearner = None,
    minari: Annotated[
        str | None,
        typer.Option(
            metavar="DATASET",
            help="Convert a Minari dataset instead, by its id or folder, for the environment of "
            "--config (extra minari).",
        ),
    ] = None,
    config: EnvironmentConfig = None,
    set_: Set = None,
) -> None:
    """Write the episodes of a trained policy or a scripted baseline as a dataset.

    Replays begin with it (algorithm.replay.dataset), and its actions are cloned
    (imitation.dataset).

    [bold]Examples[/]

      murmur record runs/spread-20260101-120000 --episodes 500 --out datasets/expert

      murmur record --baseline greedy --config snakes-greedy

      murmur record runs/spread-20260101-120000 --set evaluation.sample=true

      murmur record --minari mujoco/hopper/expert-v0 --config hopper --out datasets/hopper
    """
    from murmur.env_service.sessions.evaluate import run_baseline, run_policy
    from murmur.env_service.sessions.record_transitions import TransitionRecorder
    from murmur.runs.evaluation import evaluate_run, result_table
    from murmur.shared.config.text import plain_data
    from murmur.shared.wire.dataset import Dataset, DatasetWriter

    console = Console()
    say = partial(print_plain, console)
    run = None if baseline or learner or minari else trained(target, config)
    source: dict[str, str | int]
    if run is not None and run.config().supervised:
        raise ConfigError(f"run '{run.path}' learned from a source: it has no episodes to record")
    if run is not None:
        weights = run.checkpoint(checkpoint)
        settings = run.config(set_ or [])
        title, source = run.path.name, {"run": run.path.name, "checkpoint": weights.name}
    else:
        settings = chosen_environment(target, config, set_, console)
        named = {"baseline": baseline, "learner": learner, "minari": minari}
        source = {kind: name for kind, name in named.items() if name}
        if len(source) > 1:
            raise ConfigError(f"--{' and --'.join(source)}: give one of them")
        title = baseline or minari or "learner"
    played = settings
    if minari:
        from murmur.env_service.adapters.minari import POLICY, replaying

        played, total = replaying(settings, minari)
        baseline, first_seed = POLICY, 0
        if (episodes or 0) > total:
            say(f"--episodes {episodes}: {minari} has {total} episodes, all of which are taken")
        episodes = min(episodes or total, total)
    episodes = episodes or _EPISODES
    if not minari:
        source["first_seed"] = first_seed
    folder = out or Path("datasets") / f"{title.replace('/', '-')}-{first_seed}"
    writer = DatasetWriter(folder, source, plain_data(settings.for_evaluation().environment))
    bar = Progress(
        TextColumn("recording"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
    )
    with writer, bar:
        task = bar.add_task("", total=episodes)
        recorder = TransitionRecorder(writer, lambda done: bar.update(task, completed=done))
        if run is not None:
            result = evaluate_run(
                run,
                weights,
                episodes,
                first_seed,
                say=say,
                overrides=set_ or [],
                recorder=recorder,
            )
        elif baseline:
            result = run_baseline(played, baseline, episodes, first_seed, None, recorder)
        else:
            assert learner is not None
            result = run_policy(settings, learner, episodes, first_seed, None, recorder)
    print_table(console, result_table(title, result))
    say(f"written: {Dataset(folder, '--out').describe()}")
