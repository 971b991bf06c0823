"""Commands that use a trained policy: evaluate, record, render, report, export, track."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from murmur.cli.app import RESULTS, command
from murmur.cli.options import (
    BaselineName,
    Checkpoint,
    EnvironmentConfig,
    FirstSeed,
    Set,
    Target,
    chosen_environment,
    find_run,
)
from murmur.shared.process.errors import ConfigError, ResourceError
from murmur.shared.process.files import write_json, write_output
from murmur.text import duration, print_plain, print_table, reserve_stdout

if TYPE_CHECKING:
    from murmur.runs.run_folder import RunFolder

_RECORDED = 100  # episodes

ServingLearner = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT", help="A learner that serves already (murmur learner --serve)."
    ),
]


@command(RESULTS)
def evaluate(
    target: Target = None,
    episodes: Annotated[int, typer.Option(min=1)] = 50,
    first_seed: FirstSeed = 1,
    checkpoint: Checkpoint = "best",
    baseline: BaselineName = None,
    learner: ServingLearner = None,
    config: EnvironmentConfig = None,
    set_: Set = None,
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
    folder: Path | None = None,
    out: Path | None = None,
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

    Options:
        episodes: Episodes to run.
        json_file: Write the result here; -: to standard output.
        folder: A run with a source: write masks of this folder's pictures.
        out: --folder: where to; default: masks-FOLDER in the run.
    """
    stdout = reserve_stdout() if str(json_file) == "-" else None
    console = Console(stderr=stdout is not None)
    if baseline and learner:
        raise ConfigError("--baseline and --learner: give one of them")
    run = None if baseline or learner else find_run(target, config)
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


@command(RESULTS)
def record(
    target: Target = None,
    out: Path | None = None,
    episodes: Annotated[int | None, typer.Option(min=1)] = None,
    first_seed: FirstSeed = 1,
    checkpoint: Checkpoint = "best",
    baseline: BaselineName = None,
    learner: ServingLearner = None,
    minari: Annotated[str | None, typer.Option(metavar="DATASET")] = None,
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

    Options:
        out: The dataset's folder, a new one; default: datasets/POLICY-SEED.
        episodes: Episodes to record; default: 100, of --minari all.
        minari: Convert a Minari dataset instead, by its id or folder, for the environment of
            --config (extra minari).
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    from murmur.env_service.sessions.evaluate import run_baseline, run_policy
    from murmur.env_service.sessions.record_transitions import TransitionRecorder
    from murmur.runs.evaluation import evaluate_run, result_table
    from murmur.shared.config.text import plain_data
    from murmur.shared.wire.dataset import Dataset, DatasetWriter

    console = Console()
    say = partial(print_plain, console)
    run = None if baseline or learner or minari else find_run(target, config)
    source: dict[str, str | int]
    if run is not None and run.config().supervised:
        raise ConfigError(f"run '{run.path}' learned from a source: it has no episodes to record")
    if run is not None:
        weights = run.checkpoint(checkpoint)
        settings = run.config(set_ or [])
        title, source = run.path.name, {"run": run.path.name, "checkpoint": weights.name}
        play = partial(evaluate_run, run, weights, say=say, overrides=set_ or [])
    else:
        settings = chosen_environment(target, config, set_, console)
        named = {"baseline": baseline, "learner": learner, "minari": minari}
        source = {kind: name for kind, name in named.items() if name}
        if len(source) > 1:
            raise ConfigError(f"--{' and --'.join(source)}: give one of them")
        title = baseline or minari or "learner"
        if baseline:
            play = partial(run_baseline, settings, baseline)
        elif learner:
            play = partial(run_policy, settings, learner)
    if minari:
        from murmur.env_service.adapters.minari import POLICY, replaying

        played, total = replaying(settings, minari)
        play, first_seed = partial(run_baseline, played, POLICY), 0
        if (episodes or 0) > total:
            say(f"--episodes {episodes}: {minari} has {total} episodes, all of which are taken")
        episodes = min(episodes or total, total)
    else:
        source["first_seed"] = first_seed
    episodes = episodes or _RECORDED
    folder = out or Path("datasets") / f"{title.replace('/', '-')}-{first_seed}"
    writer = DatasetWriter(folder, source, plain_data(settings.for_evaluation().environment))
    counter, left = MofNCompleteColumn(), TimeRemainingColumn()
    bar = Progress("recording", BarColumn(), counter, left, console=console)
    with writer, bar:
        task = bar.add_task("", total=episodes)
        recorder = TransitionRecorder(writer, lambda done: bar.update(task, completed=done))
        result = play(episodes, first_seed, recorder=recorder)
    print_table(console, result_table(title, result))
    say(f"written: {Dataset(folder, '--out').describe()}")


@command(RESULTS)
def render(
    target: Target = None,
    out: Path | None = None,
    seed: Annotated[int, typer.Option(min=0)] = 1,
    checkpoint: Checkpoint = "best",
    baseline: BaselineName = None,
    config: EnvironmentConfig = None,
) -> None:
    """Draw one episode as a moving picture; PettingZoo, Gymnasium and VMAS draw themselves.

    Of a run with a source: draw validation images, their masks and the predicted ones.

    [bold]Examples[/]

      murmur render --out episode.mp4

      murmur render --baseline information-gain --config terrain-reference --seed 7

    Options:
        out: A .gif or .mp4 file, of masks a .png; default: beside the run.
        seed: Seed of the episode.
    """
    from murmur.env_service.adapters.frames import with_frames
    from murmur.env_service.sessions.evaluate import run_baseline
    from murmur.runs.evaluation import evaluate_run
    from murmur.runs.render import recorded_movie

    console = Console()
    if baseline:
        settings = chosen_environment(target, config, None, console)
        title, file = baseline, out or Path(f"{settings.environment.name}-{baseline}-{seed}.gif")
    else:
        run = find_run(target, config)
        settings = run.config()
        if settings.supervised:
            from murmur.comparison.segmentation_report import draw_samples

            file = out or run.path / "masks.png"
            draw_samples(run, file, checkpoint)
            print_plain(console, f"written: {file}")
            return
        title, file = settings.run.name, out or run.path / f"episode-{seed}.gif"
        weights = run.checkpoint(checkpoint)
    with recorded_movie(file, settings, title) as take:
        if baseline:
            run_baseline(with_frames(settings), baseline, 1, seed, take)
        else:
            say = partial(print_plain, console)
            evaluate_run(run, weights, 1, seed, say=say, on_row=take, drawn=True)
    print_plain(console, f"written: {file}")


@command(RESULTS)
def report(
    target: Target = None,
    out: Path | None = None,
    episodes: Annotated[int, typer.Option(min=1)] = 50,
    first_seed: FirstSeed = 1,
    checkpoint: Checkpoint = "best",
    fresh: bool = False,
) -> None:
    """Write one self-contained page about a run: curves, baselines, paths, settings.

    Of a run with a source: curves, scores of each class, the confusion matrix, and pictures.

    [bold]Examples[/]

      murmur report

      murmur report runs/terrain-demo-20260101-120000 --out demo.html --episodes 20

    Options:
        out: The page; default: report.html in the run.
        episodes: Episodes of each policy.
        fresh: Evaluate again, even what was evaluated before.
    """
    from murmur.comparison.report import evaluate_all, render_page

    say = partial(print_plain, Console())
    run = find_run(target)
    file = out or run.path / "report.html"
    if run.config().supervised:
        from murmur.comparison.segmentation_report import render_segmentation_page

        page = render_segmentation_page(run, checkpoint, say)
    else:
        results = evaluate_all(run, checkpoint, episodes, first_seed, fresh=fresh, say=say)
        page = render_page(run, results)
    write_output(file, page)
    say(f"written: {file}")


@command(RESULTS)
def export(
    target: Target = None,
    format_: Literal["onnx", "torch-export", "safetensors"] = "onnx",
    checkpoint: Checkpoint = "best",
    output: Path | None = None,
    agents: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Write a trained policy as one file that runs without murmur, and check that it does the same.

    A card beside it (.md) says what it is, how good, and how to use it.

    Inputs are the raw observations by name, for any number of environments; the output is the
    greedy action. Of a run with a source the input is a picture of any size, the output its mask.
    examples/run_exported.py runs one with NumPy and ONNX Runtime alone.

    [bold]Examples[/]

      murmur export

      murmur export runs/spread-20260101-120000 --format torch-export --output spread.pt2

    Options:
        format_: onnx; torch-export, a .pt2 file; safetensors, the weights alone.
        output: The file; default: policy.onnx or policy.pt2 in the run.
        agents: Agents to act for, if nothing observed depends on it; 0: as trained.
    """
    from murmur.learner_service.checkpoint.folder import CheckpointFolder
    from murmur.learner_service.checkpoint.resize import with_agents
    from murmur.learner_service.export.policy import SUFFIX, export_policy
    from murmur.runs.card import model_card

    run = find_run(target)
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


@command(RESULTS)
def track(
    target: Target = None,
    set_: Set = None,
) -> None:
    """Send a run to the W&B or MLflow of its configuration: what was not sent while it trained.

    Pictures that `murmur render` and `murmur report` wrote since then are sent too.

    [bold]Examples[/]

      murmur track

      murmur track runs/spread-20260101-120000 --set tracking.loggers=[wandb]
    """
    from murmur.learner_service.telemetry.tracking import Forwarder, require_trackers

    run = find_run(target, begun=True)
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
