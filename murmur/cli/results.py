"""Commands about what a run learned: evaluate, render, report, export."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from murmur.cli.app import app
from murmur.cli.options import (
    BaselineName,
    Checkpoint,
    EnvironmentConfig,
    FirstSeed,
    Set,
    Target,
)
from murmur.text import plain
from shared.errors import ConfigError
from shared.files import write_json

if TYPE_CHECKING:
    from env_service.sessions.evaluation_result import EvaluationResult
    from murmur.run_folder import RunFolder
    from shared.config import ExperimentConfig


Episodes = Annotated[int, typer.Option(min=1, help="Episodes to run.")]
ServingLearner = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT", help="A learner that serves already (murmur learner --serve)."
    ),
]
JsonFile = Annotated[
    Path | None, typer.Option("--json", help="Write the result here; -: to standard output.")
]
PictureFolder = Annotated[
    Path | None, typer.Option(help="A run with a source: write masks of this folder's pictures.")
]
MaskFolder = Annotated[
    Path | None, typer.Option(help="--folder: where to; default: masks-FOLDER in the run.")
]


@app.command()
def evaluate(
    target: Target = None,
    episodes: Episodes = 50,
    first_seed: FirstSeed = 1,
    checkpoint: Checkpoint = "best",
    baseline: BaselineName = None,
    learner: ServingLearner = None,
    config: EnvironmentConfig = None,
    set_: Set = None,
    json_file: JsonFile = None,
    folder: PictureFolder = None,
    out: MaskFolder = None,
) -> None:
    """Measure a trained policy (over gRPC, as deployed) or a scripted baseline.

    Of a run with a source: measure its network on the validation split, or write the masks that it
    predicts for a folder of pictures.

    [bold]Examples[/]

      murmur evaluate

      murmur evaluate runs/terrain-demo-20260101-120000 --checkpoint latest --episodes 100

      murmur evaluate runs/snakes-greedy --set evaluation.environment.opponent=random

      murmur evaluate runs/faces-20260101-120000 --folder photos --out masks

      murmur evaluate --baseline random

      murmur evaluate --baseline random --config terrain-reference

      murmur evaluate --learner gpu-host:50051 --config terrain-reference \
        --set security.folder=certs/evaluator
    """
    from murmur.evaluation import result_table, to_record

    to_stdout = json_file is not None and str(json_file) == "-"
    console, note = Console(stderr=to_stdout), ""
    if not baseline and not learner and (run := _supervised(target, config)):
        _evaluate_masks(run, checkpoint, folder, out, json_file, console)
        return
    if folder or out:
        raise ConfigError("--folder and --out are for runs with a source, which predict masks")
    if baseline:
        title, result = _play_baseline(
            baseline, _environment(target, config, set_, console), episodes, first_seed
        )
    elif learner:
        title, result = _play_served(
            learner, _environment(target, config, set_, console), episodes, first_seed, console
        )
    else:
        run = _trained(target, config)
        title, result, note = _play_run(run, checkpoint, episodes, first_seed, set_, console)
    console.print(result_table(title, result))
    if note:
        _say(console, note)
    _write_record(to_record(title, result), json_file, console)


def _write_record(record: dict[str, Any], file: Path | None, console: Console) -> None:
    """Write a result as JSON to a file, or to standard output if its name is "-"."""
    if file is not None:
        write_json(file, record)
        if str(file) != "-":
            _say(console, f"written: {file}")


def _supervised(target: Path | None, config: str | None) -> "RunFolder | None":
    """The run that is meant, if it learned from a source."""
    run = _trained(target, config)
    return run if run.config().supervised else None


def _evaluate_masks(
    run: "RunFolder",
    checkpoint: str,
    folder: Path | None,
    out: Path | None,
    json_file: Path | None,
    console: Console,
) -> None:
    """Measure a segmentation network, or let it predict the masks of a folder."""
    from murmur.segmentation import (
        load_trained,
        measure,
        measured_table,
        open_source,
        segment_folder,
    )

    trained, file = load_trained(run, checkpoint)
    if folder is not None:
        to = out or run.path / f"masks-{folder.resolve().name}"
        count = segment_folder(trained, folder, to, partial(_say, console))
        _say(console, f"written: {count} masks of class indices to {to}")
        return
    if out is not None:
        raise ConfigError(f"--out {out} needs --folder: which pictures?")
    measured = measure(trained, open_source(trained))
    title = f"{run.path.name}, {file.name}"
    console.print(measured_table(title, measured))
    if measured.broken:
        _say(console, f"{measured.broken} broken samples are left out")
    _write_record(measured.record(title), json_file, console)


def _say(console: Console, line: str) -> None:
    """Print words that hold names from outside: no markup, no colours, no line breaks."""
    console.print(plain(line), soft_wrap=True)


def _play_baseline(
    name: str, settings: "ExperimentConfig", episodes: int, first_seed: int
) -> tuple[str, "EvaluationResult"]:
    """Title and result of a scripted baseline."""
    from murmur.evaluation import evaluate_baseline

    return f"baseline {name}", evaluate_baseline(settings, name, episodes, first_seed)


def _play_served(
    address: str, settings: "ExperimentConfig", episodes: int, first_seed: int, console: Console
) -> tuple[str, "EvaluationResult"]:
    """Title and result of the policy that a learner serves at `address`."""
    from murmur.evaluation import evaluate_served
    from murmur.text import duration

    patience = duration(settings.env_server.give_up_after_s)
    _say(console, f"waiting for the learner at {address}, at most {patience} …")
    result = evaluate_served(settings, address, episodes, first_seed)
    return f"policy of the learner at {address}", result


def _play_run(
    run: "RunFolder",
    checkpoint: str,
    episodes: int,
    first_seed: int,
    set_: list[str] | None,
    console: Console,
) -> tuple[str, "EvaluationResult", str]:
    """Title and result of a run's policy, and a note on how to read it."""
    from murmur.evaluation import evaluate_run, optimism

    file = run.checkpoint(checkpoint)
    say = partial(_say, console)
    result = evaluate_run(run, file, episodes, first_seed, say=say, overrides=set_ or [])
    title = f"{run.path.name}, {file.name}"
    return title, result, optimism(run, file.name, episodes, first_seed)


def _trained(target: Path | None, config: str | None) -> "RunFolder":
    """The run that is meant: the folder `target`, else the newest, of `config` if given."""
    from murmur.run_folder import RunFolder
    from shared.config import load

    _one_of(target, config)
    if target:
        return RunFolder.open(target)
    if config is None:
        return RunFolder.newest(Path("runs"))
    return RunFolder.newest(Path("runs"), load(config).run.name)


def _environment(
    target: Path | None, config: str | None, set_: list[str] | None, console: Console
) -> "ExperimentConfig":
    """The configuration with the environment to play, and says which.

    It is that of the run `target`, or `config`, or else of the newest run.
    """
    from murmur.run_folder import RunFolder
    from shared.config import load

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
    _say(console, f"environment: {name}, of {source}")
    return settings


def _one_of(target: Path | None, config: str | None) -> None:
    if target is not None and config is not None:
        raise ConfigError(f"a run's folder ('{target}') and --config {config}: give one of them")


@app.command()
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
    from env_service.adapters.frames import DRAWING, with_frames
    from env_service.pictures import Snapshot
    from murmur.evaluation import Recorder, evaluate_baseline, evaluate_run
    from murmur.render import FrameRecorder, draw_episode, require_movie, write_movie

    console = Console()
    if not baseline and (masks := _supervised(target, config)):
        from murmur.segmentation_report import SHOWN, draw_samples

        file = out or masks.path / "masks.png"
        draw_samples(masks, file, checkpoint=checkpoint, count=SHOWN)
        _say(console, f"written: {file}")
        return
    if baseline:
        settings = _environment(target, config, None, console)
        title, file = baseline, out or Path(f"{settings.environment.name}-{baseline}-{seed}.gif")
    else:
        run = _trained(target, config)
        settings = run.config()
        title, file = settings.run.name, out or run.path / f"episode-{seed}.gif"
        weights = run.checkpoint(checkpoint)
    require_movie(file)
    name = settings.environment.name
    drawn = name in DRAWING
    frames = FrameRecorder(settings.environment.options.get("factory", name))
    recorder = Recorder()
    take = frames.take if drawn else recorder.take
    if baseline:
        evaluate_baseline(with_frames(settings), baseline, 1, seed, take)
    else:
        say = partial(_say, console)
        evaluate_run(run, weights, 1, seed, say=say, on_row=take, drawn=drawn)
    if drawn:
        write_movie(file, frames.frames, frames.rate)
    else:
        snapshots = [Snapshot(state, metrics) for state, metrics in recorder.rows]
        write_movie(file, draw_episode(name, snapshots, title))
    _say(console, f"written: {file}")


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

    Of a run with a source: curves, scores of each class, the confusion matrix, and pictures.

    [bold]Examples[/]

      murmur report

      murmur report runs/terrain-demo-20260101-120000 --out demo.html --episodes 20
    """
    from murmur.report import write_report
    from murmur.run_folder import RunFolder

    console = Console()
    run = RunFolder.open(target) if target else RunFolder.newest(Path("runs"))
    file = out or run.path / "report.html"
    if run.config().supervised:
        from murmur.segmentation_report import write_segmentation_report

        write_segmentation_report(run, file, checkpoint=checkpoint, say=partial(_say, console))
        _say(console, f"written: {file}")
        return
    write_report(
        run,
        file,
        checkpoint=checkpoint,
        episodes=episodes,
        first_seed=first_seed,
        fresh=fresh,
        say=partial(_say, console),
    )
    _say(console, f"written: {file}")


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
    greedy action. Of a run with a source the input is a picture of any size, the output its mask.
    examples/run_exported.py runs one with NumPy and ONNX Runtime alone.

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
    if run.config().supervised:
        from learner_service.tools.export_segmentation import export_segmentation

        done = export_segmentation(state, format_, file, weights.name)
    else:
        done = export_policy(state, format_, file, weights.name)
    console = Console(highlight=False, soft_wrap=True)
    for array in done.about["inputs"]:
        shape = ", ".join(["rows", *map(str, array["shape"])])
        _say(console, f"takes {array['name']}: {array['dtype']} [{shape}]")
    _say(console, f"gives {', '.join(done.about['outputs'])}")
    console.print(f"checked: at most {done.difference:.1g} from what the policy itself gives")
    _say(console, f"written: {file}")
