"""The command that measures a trained policy: evaluate."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from murmur.cli.app import RESULTS, app
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
from murmur.shared.process.files import write_json
from murmur.text import print_plain, print_table, reserve_stdout

if TYPE_CHECKING:
    from murmur.runs.run_folder import RunFolder

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


@app.command(rich_help_panel=RESULTS)
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
    stdout = reserve_stdout() if str(json_file) == "-" else None
    console = Console(stderr=stdout is not None)
    run = None if baseline or learner else trained(target, config)
    if run is not None and run.config().supervised:
        record = _evaluate_masks(run, checkpoint, folder, out, console)
    elif folder or out:
        raise ConfigError("--folder and --out are for runs with a source, which predict masks")
    else:
        from murmur.env_service.sessions.evaluate import run_baseline, run_policy
        from murmur.runs.evaluation import (
            caveat_of_best,
            evaluate_run,
            result_table,
            run_title,
            to_record,
        )
        from murmur.text import duration

        note, say = "", partial(print_plain, console)
        if run is not None:
            file = run.checkpoint(checkpoint)
            title = run_title(run, file, set_ or [])
            result = evaluate_run(run, file, episodes, first_seed, say=say, overrides=set_ or [])
            note = caveat_of_best(run, file.name, episodes, first_seed)
        else:
            settings = chosen_environment(target, config, set_, console)
            if baseline:
                title = f"baseline {baseline}"
                result = run_baseline(settings, baseline, episodes, first_seed)
            else:
                assert learner is not None
                patience = duration(settings.env_server.give_up_after_s)
                say(f"waiting for the learner at {learner}, at most {patience} …")
                title = f"policy of the learner at {learner}"
                result = run_policy(settings, learner, episodes, first_seed)
        print_table(console, result_table(title, result))
        if note:
            say(note)
        record = to_record(title, result)
    if json_file is not None and record is not None:
        write_json(json_file, record, stdout)
        if stdout is None:
            print_plain(console, f"written: {json_file}")


def _evaluate_masks(
    run: "RunFolder", checkpoint: str, folder: Path | None, out: Path | None, console: Console
) -> dict[str, Any] | None:
    """Measure a segmentation network, or let it predict the masks of a folder.

    Returns:
        the result as JSON values; None if it predicted masks.
    """
    from murmur.comparison import segmentation

    network, file = segmentation.load_trained(run, checkpoint)
    if folder is not None:
        to = out or run.path / f"masks-{folder.resolve().name}"
        count = segmentation.segment_folder(network, folder, to, partial(print_plain, console))
        print_plain(console, f"written: {count} masks of class indices to {to}")
        return None
    if out is not None:
        raise ConfigError(f"--out {out} needs --folder: which pictures?")
    measured = segmentation.measure(network, segmentation.open_source(network))
    title = f"{run.path.name}, {file.name}"
    print_table(console, segmentation.measured_table(title, measured))
    if measured.broken:
        print_plain(console, f"{measured.broken} broken samples are left out")
    return measured.record(title)
