"""The command that measures a trained policy: evaluate."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

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
from murmur.cli.target import chosen_environment, supervised, trained
from murmur.text import print_plain, reserve_stdout
from shared.process.errors import ConfigError
from shared.process.files import write_json

if TYPE_CHECKING:
    from env_service.sessions.evaluation_result import EvaluationResult
    from murmur.runs.run_folder import RunFolder
    from shared.config.experiment import ExperimentConfig

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
    out_alone = reserve_stdout() if str(json_file) == "-" else None
    console = Console(stderr=out_alone is not None)
    if not (baseline or learner) and (run := supervised(target, config)):
        _evaluate_masks(run, checkpoint, folder, out, json_file, console, out_alone)
        return
    if folder or out:
        raise ConfigError("--folder and --out are for runs with a source, which predict masks")
    if baseline or learner:
        settings, note = chosen_environment(target, config, set_, console), ""
        title, result = _play(settings, baseline, learner, episodes, first_seed, console)
    else:
        run = trained(target, config)
        title, result, note = _play_run(run, checkpoint, episodes, first_seed, set_, console)
    _show(title, result, note, json_file, console, out_alone)


def _show(
    title: str,
    result: "EvaluationResult",
    note: str,
    file: Path | None,
    console: Console,
    stdout: TextIO | None,
) -> None:
    """Print a result as a table with its note, and write it if a file is named."""
    from murmur.runs.evaluation import result_table, to_record

    console.print(result_table(title, result))
    if note:
        print_plain(console, note)
    _write_record(to_record(title, result), file, console, stdout)


def _write_record(
    record: dict[str, Any], file: Path | None, console: Console, stdout: TextIO | None
) -> None:
    """Write a result as JSON to a file, or to standard output if its name is "-"."""
    if file is not None:
        write_json(file, record, stdout)
        if str(file) != "-":
            print_plain(console, f"written: {file}")


def _evaluate_masks(
    run: "RunFolder",
    checkpoint: str,
    folder: Path | None,
    out: Path | None,
    json_file: Path | None,
    console: Console,
    stdout: TextIO | None,
) -> None:
    """Measure a segmentation network, or let it predict the masks of a folder."""
    from murmur.comparison.segmentation import (
        load_trained,
        measure,
        measured_table,
        open_source,
        segment_folder,
    )

    trained, file = load_trained(run, checkpoint)
    if folder is not None:
        to = out or run.path / f"masks-{folder.resolve().name}"
        count = segment_folder(trained, folder, to, partial(print_plain, console))
        print_plain(console, f"written: {count} masks of class indices to {to}")
        return
    if out is not None:
        raise ConfigError(f"--out {out} needs --folder: which pictures?")
    measured = measure(trained, open_source(trained))
    title = f"{run.path.name}, {file.name}"
    console.print(measured_table(title, measured))
    if measured.broken:
        print_plain(console, f"{measured.broken} broken samples are left out")
    _write_record(measured.record(title), json_file, console, stdout)


def _play(
    settings: "ExperimentConfig",
    baseline: str | None,
    address: str | None,
    episodes: int,
    first_seed: int,
    console: Console,
) -> tuple[str, "EvaluationResult"]:
    """Play a scripted baseline, or the policy that a learner serves; return title and result."""
    from murmur.runs.evaluation import evaluate_baseline, evaluate_served
    from murmur.text import duration

    if baseline:
        played = evaluate_baseline(settings, baseline, episodes, first_seed)
        return f"baseline {baseline}", played
    assert address is not None
    patience = duration(settings.env_server.give_up_after_s)
    print_plain(console, f"waiting for the learner at {address}, at most {patience} …")
    played = evaluate_served(settings, address, episodes, first_seed)
    return f"policy of the learner at {address}", played


def _play_run(
    run: "RunFolder",
    checkpoint: str,
    episodes: int,
    first_seed: int,
    set_: list[str] | None,
    console: Console,
) -> tuple[str, "EvaluationResult", str]:
    """Play a run's policy; return title, result, and a note on how to read it."""
    from murmur.runs.evaluation import evaluate_run, optimism

    file = run.checkpoint(checkpoint)
    say = partial(print_plain, console)
    result = evaluate_run(run, file, episodes, first_seed, say=say, overrides=set_ or [])
    title = f"{run.path.name}, {file.name}"
    return title, result, optimism(run, file.name, episodes, first_seed)
