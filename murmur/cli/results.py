"""Commands that show a trained policy and its results: render, report, export, track."""

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from murmur.cli.app import RESULTS, app
from murmur.cli.options import BaselineName, Checkpoint, EnvironmentConfig, FirstSeed, Set, Target
from murmur.cli.target import begun, chosen_environment, trained
from murmur.shared.process.errors import ConfigError, ResourceError
from murmur.text import print_plain


@app.command(rich_help_panel=RESULTS)
def render(
    target: Target = None,
    out: Annotated[
        Path | None,
        typer.Option(help="A .gif or .mp4 file, of masks a .png; default: beside the run."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the episode.")] = 1,
    checkpoint: Checkpoint = "best",
    baseline: BaselineName = None,
    config: EnvironmentConfig = None,
) -> None:
    """Draw one episode as a moving picture; PettingZoo, Gymnasium and VMAS draw themselves.

    Of a run with a source: draw validation images, their masks and the predicted ones.

    [bold]Examples[/]

      murmur render --out episode.mp4

      murmur render --baseline information-gain --config terrain-reference --seed 7
    """
    from murmur.env_service.adapters.frames import DRAWING, with_frames
    from murmur.env_service.sessions.evaluate import run_baseline
    from murmur.runs.evaluation import evaluate_run
    from murmur.runs.render import recorded_movie

    console = Console()
    if baseline:
        settings = chosen_environment(target, config, None, console)
        title, file = baseline, out or Path(f"{settings.environment.name}-{baseline}-{seed}.gif")
    else:
        run = trained(target, config)
        settings = run.config()
        if settings.supervised:
            from murmur.comparison.segmentation_report import SHOWN, draw_samples

            file = out or run.path / "masks.png"
            draw_samples(run, file, checkpoint=checkpoint, count=SHOWN)
            print_plain(console, f"written: {file}")
            return
        title, file = settings.run.name, out or run.path / f"episode-{seed}.gif"
        weights = run.checkpoint(checkpoint)
    with recorded_movie(file, settings, title) as take:
        if baseline:
            run_baseline(with_frames(settings), baseline, 1, seed, take)
        else:
            say = partial(print_plain, console)
            drawn = settings.environment.name in DRAWING
            evaluate_run(run, weights, 1, seed, say=say, on_row=take, drawn=drawn)
    print_plain(console, f"written: {file}")


@app.command(rich_help_panel=RESULTS)
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

    Of a run with a source: curves, scores of each class, the confusion matrix, and pictures.

    [bold]Examples[/]

      murmur report

      murmur report runs/terrain-demo-20260101-120000 --out demo.html --episodes 20
    """
    from murmur.comparison.report import write_report

    console = Console()
    run = trained(target)
    file = out or run.path / "report.html"
    if run.config().supervised:
        from murmur.comparison.segmentation_report import write_segmentation_report

        write_segmentation_report(
            run, file, checkpoint=checkpoint, say=partial(print_plain, console)
        )
        print_plain(console, f"written: {file}")
        return
    write_report(
        run,
        file,
        checkpoint=checkpoint,
        episodes=episodes,
        first_seed=first_seed,
        fresh=fresh,
        say=partial(print_plain, console),
    )
    print_plain(console, f"written: {file}")


@app.command(rich_help_panel=RESULTS)
def export(
    target: Target = None,
    format_: Annotated[
        Literal["onnx", "torch-export", "safetensors"],
        typer.Option(
            "--format", help="onnx; torch-export, a .pt2 file; safetensors, the weights alone."
        ),
    ] = "onnx",
    checkpoint: Checkpoint = "best",
    output: Annotated[
        Path | None, typer.Option(help="The file; default: policy.onnx or policy.pt2 in the run.")
    ] = None,
    agents: Annotated[
        int,
        typer.Option(
            min=0, help="Agents to act for, if nothing observed depends on it; 0: as trained."
        ),
    ] = 0,
) -> None:
    """Write a trained policy as one file that runs without murmur, and check that it does the same.

    A card beside it (.md) says what it is, how good, and how to use it.

    Inputs are the raw observations by name, for any number of environments; the output is the
    greedy action. Of a run with a source the input is a picture of any size, the output its mask.
    examples/run_exported.py runs one with NumPy and ONNX Runtime alone.

    [bold]Examples[/]

      murmur export

      murmur export runs/spread-20260101-120000 --format torch-export --output spread.pt2
    """
    from murmur.learner_service.checkpoint.folder import CheckpointFolder
    from murmur.learner_service.checkpoint.resize import with_agents
    from murmur.learner_service.export.policy import SUFFIX, export_policy
    from murmur.runs.card import model_card
    from murmur.shared.process.files import write_output

    run = trained(target)
    weights = run.checkpoint(checkpoint)
    file = output or run.path / f"policy{SUFFIX[format_]}"
    if file.suffix != SUFFIX[format_]:
        raise ConfigError(f"--output {file}: a {format_} file ends in {SUFFIX[format_]}")
    state = CheckpointFolder(run.path, 1).load(weights)
    if run.config().supervised:
        if agents:
            raise ConfigError(f"--agents {agents}: a run with a source has no agents")
        from murmur.learner_service.export.segmentation import export_segmentation

        done = export_segmentation(state, format_, file, weights.name)
    else:
        state = with_agents(state, weights.name, agents)
        done = export_policy(state, format_, file, weights.name)
    console = Console(highlight=False, soft_wrap=True)
    for array in done.about["inputs"]:
        shape = ", ".join(["rows", *map(str, array["shape"])])
        print_plain(console, f"takes {array['name']}: {array['dtype']} [{shape}]")
    print_plain(console, f"gives {', '.join(done.about['outputs'])}")
    if format_ == "safetensors":
        console.print("checked: the file's weights are the policy's")
    else:
        console.print(f"checked: at most {done.difference:.1g} from what the policy itself gives")
    card = file.with_suffix(".md")
    write_output(card, model_card(run, file.name, done.about))
    print_plain(console, f"written: {file}, {card}")


@app.command(rich_help_panel=RESULTS)
def track(target: Target = None, set_: Set = None) -> None:
    """Send a run to the W&B or MLflow of its configuration: what was not sent while it trained.

    Pictures that `murmur render` and `murmur report` wrote since then are sent too.

    [bold]Examples[/]

      murmur track

      murmur track runs/spread-20260101-120000 --set tracking.loggers=[wandb]
    """
    from murmur.learner_service.telemetry.tracking import Forwarder, require_trackers

    run = begun(target)
    config = run.config(set_ or []).tracking
    if not config.services:
        raise ConfigError(
            f"'{run.path}' has tracking.loggers={list(config.loggers)}: name one to send it to, "
            "such as --set tracking.loggers=[wandb]"
        )
    require_trackers(config.services)
    console = Console()
    for name in config.services:
        forwarder = Forwarder(run.path, name, config)
        with forwarder.holding(wait=False):
            message = "nothing new"
            if forwarder.has_news:
                try:
                    forwarder.finish(complete=True)
                except Exception as error:  # whatever the tracker's client raises
                    forwarder.note(error)
                    raise ResourceError(f"{name}: {forwarder.state.trouble}") from None
                message = f"{forwarder.points} points and {forwarder.files} pictures sent"
            where = forwarder.state.where
            print_plain(console, f"{name}: {message}; {where}")
