"""Commands about what a run learned: evaluate, render, report, export."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape

from murmur.cli.app import app
from murmur.cli.options import (
    BaselineName,
    Checkpoint,
    EnvironmentConfig,
    FirstSeed,
    Set,
    Target,
)
from shared.errors import ConfigError


@app.command()
def evaluate(
    target: Target = None,
    episodes: Annotated[int, typer.Option(min=1, help="Episodes to run.")] = 50,
    first_seed: FirstSeed = 1,
    checkpoint: Checkpoint = "best",
    baseline: BaselineName = None,
    learner: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="A learner that serves already (murmur learner --serve)."
        ),
    ] = None,
    config: EnvironmentConfig = "terrain-reference",
    set_: Set = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result here.")] = None,
) -> None:
    """Measure a trained policy (over gRPC, as deployed) or a scripted baseline.

    [bold]Examples[/]

      murmur evaluate

      murmur evaluate runs/terrain-demo-20260101-120000 --checkpoint latest --episodes 100

      murmur evaluate runs/snakes-greedy --set evaluation.environment.opponent=random

      murmur evaluate --baseline random --config terrain-reference

      murmur evaluate --learner gpu-host:50051 --config terrain-reference \
        --set security.folder=certs/evaluator
    """
    from murmur.evaluation import (
        evaluate_baseline,
        evaluate_run,
        evaluate_served,
        optimism,
        result_table,
        to_record,
        write_json,
    )
    from murmur.run_folder import RunFolder
    from murmur.text import duration
    from shared.config import load

    console = Console()
    overrides, note = set_ or [], ""
    if baseline:
        settings = RunFolder.open(target).config(overrides) if target else load(config, overrides)
        title = f"baseline {baseline}"
        result = evaluate_baseline(settings, baseline, episodes, first_seed)
    elif learner:
        settings = RunFolder.open(target).config(overrides) if target else load(config, overrides)
        title = f"policy of the learner at {learner}"
        patience = duration(settings.env_server.give_up_after_s)
        console.print(
            f"waiting for the learner at {learner}, at most {patience} …",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
        result = evaluate_served(settings, learner, episodes, first_seed)
    else:
        run = RunFolder.open(target) if target else RunFolder.newest(Path("runs"))
        file = run.checkpoint(checkpoint)
        title = f"{run.path.name}, {file.name}"
        result = evaluate_run(
            run, file, episodes, first_seed, say=console.print, overrides=overrides
        )
        note = optimism(run, file.name, episodes, first_seed)
    console.print(result_table(title, result))
    if note:
        console.print(note, highlight=False, markup=False, soft_wrap=True)
    if json_file:
        write_json(json_file, to_record(title, result))
        console.print(f"written: {json_file}")


@app.command()
def render(
    target: Target = None,
    out: Annotated[
        Path | None, typer.Option(help="A .gif or .mp4 file; default: beside the run.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the episode.")] = 1,
    checkpoint: Checkpoint = "best",
    baseline: BaselineName = None,
    config: EnvironmentConfig = "terrain-reference",
) -> None:
    """Draw one episode as a moving picture: terrain, formation, snakes or spread.

    [bold]Examples[/]

      murmur render --out episode.mp4

      murmur render --baseline information-gain --config terrain-reference --seed 7
    """
    from env_service.pictures import Snapshot
    from murmur.evaluation import Recorder, evaluate_baseline, evaluate_run
    from murmur.render import draw_episode, write_movie
    from murmur.run_folder import RunFolder
    from shared.config import load

    console = Console()
    recorder = Recorder()
    if baseline:
        settings = RunFolder.open(target).config() if target else load(config)
        file = out or Path(f"{settings.environment.name}-{baseline}-{seed}.gif")
        evaluate_baseline(settings, baseline, 1, seed, recorder.take)
        title = baseline
    else:
        run = RunFolder.open(target) if target else RunFolder.newest(Path("runs"))
        settings = run.config()
        file = out or run.path / f"episode-{seed}.gif"
        weights = run.checkpoint(checkpoint)
        evaluate_run(run, weights, 1, seed, say=console.print, on_row=recorder.take)
        title = settings.run.name
    snapshots = [Snapshot(state, metrics) for state, metrics in recorder.rows]
    write_movie(file, draw_episode(settings.environment.name, snapshots, title))
    console.print(f"written: {file}")


@app.command()
def report(
    target: Target = None,
    out: Annotated[
        Path | None, typer.Option(help="The page; default: report.html in the run.")
    ] = None,
    episodes: Annotated[int, typer.Option(min=1, help="Episodes of each policy.")] = 50,
    first_seed: FirstSeed = 1,
    checkpoint: Checkpoint = "best",
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Evaluate again, even what was evaluated before.")
    ] = False,
) -> None:
    """Write one self-contained page about a run: curves, baselines, paths, settings.

    [bold]Examples[/]

      murmur report

      murmur report runs/terrain-demo-20260101-120000 --out demo.html --episodes 20
    """
    from murmur.report import write_report
    from murmur.run_folder import RunFolder

    console = Console()
    run = RunFolder.open(target) if target else RunFolder.newest(Path("runs"))
    file = out or run.path / "report.html"
    write_report(
        run,
        file,
        checkpoint=checkpoint,
        episodes=episodes,
        first_seed=first_seed,
        fresh=fresh,
        say=lambda line: console.print(line, highlight=False),
    )
    console.print(f"written: {file}")


@app.command()
def export(
    target: Target = None,
    format_: Annotated[
        Literal["onnx", "torch-export"],
        typer.Option("--format", help="onnx, or torch-export, a .pt2 file."),
    ] = "onnx",
    checkpoint: Checkpoint = "best",
    output: Annotated[
        Path | None, typer.Option(help="The file; default: policy.onnx or policy.pt2 in the run.")
    ] = None,
) -> None:
    """Write a trained policy as one file that runs without murmur, and check that it does the same.

    Inputs are the raw observations by name, for any number of environments; the output is the
    greedy action. examples/run_exported.py runs one with NumPy and ONNX Runtime alone.

    [bold]Examples[/]

      murmur export

      murmur export runs/spread-20260101-120000 --format torch-export --output spread.pt2
    """
    from learner_service.checkpoint import CheckpointFolder
    from learner_service.tools.export import SUFFIX, export_policy
    from murmur.run_folder import RunFolder

    run = RunFolder.open(target) if target else RunFolder.newest(Path("runs"))
    weights = run.checkpoint(checkpoint)
    file = output or run.path / f"policy{SUFFIX[format_]}"
    if file.suffix != SUFFIX[format_]:
        raise ConfigError(f"--output {file}: a {format_} file ends in {SUFFIX[format_]}")
    state = CheckpointFolder(run.path, 1).load(weights)
    done = export_policy(state, format_, file, weights.name)
    console = Console(highlight=False, soft_wrap=True)
    for array in done.about["inputs"]:
        shape = ", ".join(["rows", *map(str, array["shape"])])
        console.print(escape(f"takes {array['name']}: {array['dtype']} [{shape}]"))
    console.print(escape(f"gives {', '.join(done.about['outputs'])}"))
    console.print(f"checked: at most {done.difference:.1g} from what the policy itself gives")
    console.print(f"written: {escape(str(file))}")
