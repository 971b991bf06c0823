"""The command line."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape

from shared.errors import ConfigError, MurmurError

if TYPE_CHECKING:
    from murmur.run_folder import RunFolder

app = typer.Typer(
    name="murmur",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Trains teams of agents: CPU environment servers stream to one learner over gRPC.",
    epilog="First steps: [bold]murmur check[/], then [bold]murmur train terrain-demo[/].",
    context_settings={"help_option_names": ["-h", "--help"]},
)

_EXTRAS = {
    "torch": "learner",
    "kornia": "learner",
    "tensorboard": "learner",
    "grpc_health": "learner",
    "PIL": "env",
    "numba": "env",
    "gymnasium": "zoo",
    "pettingzoo": "zoo",
    "mpe2": "zoo",
    "onnx": "export",
    "onnxruntime": "export",
    "onnxscript": "export",
    "lbforaging": "zoo",
    "vmas": "vmas",
    "jinja2": "report",
    "matplotlib": "report",
    "imageio": "report",
}

Config = Annotated[
    str, typer.Argument(help="A YAML file, or the name of a configuration that comes with murmur.")
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Change one key, e.g. learner.device=cpu. Repeatable."
    ),
]
Target = Annotated[
    Path | None,
    typer.Argument(
        help="A run's folder; without it the newest under runs/, where needed with a checkpoint."
    ),
]
Checkpoint = Annotated[
    str, typer.Option(help="best (the latest where there is no best), latest, or a file.")
]
FirstSeed = Annotated[
    int,
    typer.Option(
        min=0,
        help="Seed of the first; the others follow. Take none that chose the best checkpoint "
        "(evaluation.first_seed).",
    ),
]
BaselineName = Annotated[
    str | None, typer.Option("--baseline", help="A scripted baseline instead of a run's policy.")
]
EnvironmentConfig = Annotated[
    str,
    typer.Option("--config", help="Without a run: the configuration with the environment."),
]


def main() -> None:
    """Run the command line; what a user can mend is said in one line and exits with 2."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # an environment given as module:factory may lie here
    try:
        app(prog_name="murmur")
    except MurmurError as error:
        _fail(str(error))
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _EXTRAS:
            raise
        _fail(
            f"this needs '{missing}', which is not installed: "
            f"pip install 'murmur-marl[{_EXTRAS[missing]}]'"
        )
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _fail(message: str) -> None:
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(f"[bold red]error:[/] [red]{escape(' '.join(message.split()))}[/]")
    raise SystemExit(2)


@app.command()
def train(
    config: Annotated[
        str | None,
        typer.Argument(
            help="A YAML file or a name (see `murmur config`). Not needed to resume; then a run's "
            "folder will do too."
        ),
    ] = None,
    set_: Set = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on with the newest run with a checkpoint, of CONFIG if given, or with --run.",
        ),
    ] = False,
    run: Annotated[
        Path | None, typer.Option(help="The run's folder; default: runs/<name>-<time>.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Worker processes of the environment server.")
    ] = None,
) -> None:
    """Train on this machine: one learner and its environment servers, kept alive.

    Ctrl-C stops everything gracefully; --resume goes on from there.

    [bold]Examples[/]

      murmur train terrain-demo

      murmur train terrain-reference --workers 4 --set run.max_minutes=60

      murmur train --resume --run runs/terrain-demo-20260101-120000
    """
    from murmur.run_folder import RunFolder
    from murmur.training import train as train_here
    from shared.config import load

    overrides = list(set_ or [])
    if workers is not None:
        overrides.append(f"env_server.num_workers={workers}")
    if resume:
        folder = _run_to_resume(config, run, overrides)
        if not folder.has_checkpoint():
            raise ConfigError(
                f"'{folder.path}' has no checkpoint to go on from; start it anew: {folder.again()}"
            )
        settings = load(str(folder.path / "config.yaml"), overrides)
    elif config is None:
        raise ConfigError("which configuration? `murmur config` lists those that come with murmur")
    else:
        settings = load(config, overrides)
        _check_plugins(settings)
        folder = RunFolder.create(settings, run)
    train_here(settings, folder, resume=resume, console=Console())


def _run_to_resume(config: str | None, run: Path | None, overrides: list[str]) -> "RunFolder":
    """What to go on with: the folder that is given, else the newest run, of CONFIG or of all."""
    from murmur.run_folder import RunFolder
    from shared.config import config_names, load

    if run is None and config is not None and config not in config_names():
        run = Path(config) if Path(config).is_dir() else None
    if run is not None:
        return RunFolder.open(run)
    if config is None:
        return RunFolder.newest(Path("runs"))
    wanted = load(config, [item for item in overrides if item.startswith("run.")]).run
    return RunFolder.newest(Path(wanted.directory), wanted.name)


def _check_plugins(settings: object) -> None:
    """Find wrong plug-in names and options before any process is started."""
    from murmur.settings import resolve
    from shared.config import ExperimentConfig

    assert isinstance(settings, ExperimentConfig)
    resolve(settings)


@app.command()
def learner(
    config: Config,
    run: Annotated[Path, typer.Option(help="Where checkpoints and progress are written.")],
    set_: Set = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last checkpoint in --run.")
    ] = False,
    auto_resume: Annotated[
        bool,
        typer.Option(
            "--auto-resume",
            help="Go on if --run holds a checkpoint, else begin: for whatever starts containers.",
        ),
    ] = False,
    serve: Annotated[
        bool, typer.Option("--serve", help="Only act, with the weights of --checkpoint.")
    ] = False,
    checkpoint: Annotated[
        str, typer.Option(help="With --serve: best, latest or a file.")
    ] = "latest",
) -> None:
    """Run the learner service in the foreground; environment servers dial it.

    [bold]Examples[/]

      murmur learner terrain-reference --run runs/one --set learner.host=0.0.0.0 \
        --set security.folder=certs/learner

      murmur learner terrain-reference --run runs/one --resume
    """
    from murmur.run_folder import RunFolder
    from murmur.supervisor import join_supervisor

    join_supervisor()
    from learner_service.app import run_learner
    from shared.config import load
    from shared.process import configure_logging, stop_on_signals

    configure_logging("learner")
    stop = stop_on_signals()
    raise SystemExit(
        run_learner(
            load(config, set_ or []),
            run,
            resume=resume or (auto_resume and RunFolder(run).has_checkpoint()),
            serve_only=serve,
            checkpoint=checkpoint,
            stop=stop,
        )
    )


@app.command()
def env_server(
    config: Config,
    set_: Set = None,
    evaluate: Annotated[
        bool, typer.Option("--evaluate", help="Serve the learner's evaluations, not its training.")
    ] = False,
    first_worker: Annotated[
        int, typer.Option(min=0, help="Number of the first worker, unique over all servers.")
    ] = 0,
) -> None:
    """Run an environment server in the foreground; it dials the learner. Needs no torch.

    [bold]Examples[/]

      murmur env-server terrain-reference --set env_server.learner=gpu-host:50051 \
        --set security.folder=certs/environment

      murmur env-server terrain-reference --set env_server.num_workers=8 --first-worker 8
    """
    from murmur.supervisor import join_supervisor

    join_supervisor()
    from env_service.app import run_env_server
    from shared.config import load
    from shared.process import configure_logging, stop_on_signals

    configure_logging("evaluator" if evaluate else "env-server")
    stop = stop_on_signals()
    settings = load(config, set_ or [])
    raise SystemExit(
        run_env_server(settings, first_worker=first_worker, stop=stop, evaluate=evaluate)
    )


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


@app.command()
def check(
    gpu: Annotated[bool, typer.Option("--gpu", help="Fail if no GPU can be used.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Leave out the speed measurements.")
    ] = False,
) -> None:
    """Check this machine: GPU and why not, speed, dependencies, cores, memory, disk, ports.

    The exit code is 1 if something that murmur needs is missing.

    [bold]Examples[/]

      murmur check

      murmur check --gpu --json
    """
    from murmur.check import check_machine, findings_json, findings_table

    findings = check_machine(need_gpu=gpu, measure=not quick)
    if json_:
        print(findings_json(findings))
    else:
        Console().print(findings_table(findings))
    raise SystemExit(1 if any(f.status == "fail" for f in findings) else 0)


@app.command()
def doctor(
    run: Target = None,
    metrics: Annotated[
        str | None,
        typer.Option(help="Watch a live learner instead: its metrics address, http://host:9101."),
    ] = None,
    prometheus: Annotated[
        str | None, typer.Option(help="Read from a Prometheus instead: http://host:9090.")
    ] = None,
    window: Annotated[float, typer.Option(min=1, help="Seconds to look at.")] = 30.0,
    probe: Annotated[
        bool,
        typer.Option(help="Where learning is the bottleneck: time updates with other settings."),
    ] = True,
    target: Annotated[
        float, typer.Option(min=0, max=1, help="Exit with 0 if the device works at least so much.")
    ] = 0.7,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say why the GPU is idle, and what each remedy would give.

    Reads the newest run under runs/, finished or under way, unless told otherwise. Exits with 0 if
    the device works at least --target of the time, with 1 if not.

    [bold]Examples[/]

      murmur doctor

      murmur doctor runs/spread-20260101-120000 --window 60

      murmur doctor --metrics http://learner:9101
    """
    from murmur.doctor import as_json, examine, find_run, show

    console = Console()
    folder = find_run(run, needed=metrics is None and prometheus is None)
    seen = examine(folder, metrics, prometheus, window, probe, Console(stderr=True))
    if json_:
        print(as_json(seen))
    else:
        show(seen, console)
    raise SystemExit(0 if seen.device_busy >= target else 1)


@app.command()
def profile(
    run: Target = None,
    updates: Annotated[
        int, typer.Option(min=1, max=1000, help="Updates to record, after one to warm up.")
    ] = 5,
) -> None:
    """Record what a running learner does in its next updates, operation by operation.

    Training goes on, slower while it is recorded. The trace lies in the run's folder and opens in
    Perfetto (ui.perfetto.dev), chrome://tracing or TensorBoard; all threads of the learner are in
    it, with the states of the ledger. What takes longest is said here.

    [bold]Examples[/]

      murmur profile

      murmur profile runs/spread-20260101-120000 --updates 20
    """
    from murmur.doctor import find_run
    from murmur.profile import read, record, show

    folder = find_run(run, needed=True)
    assert folder is not None
    trace = record(folder, updates, Console(stderr=True))
    console = Console()
    show(read(trace), console)
    console.print(f"\nwritten: {trace}", highlight=False, soft_wrap=True)


@app.command()
def bench(
    name: Annotated[
        str | None, typer.Argument(help="One benchmark; without it, list them.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer repetitions, rougher.")] = False,
    save: Annotated[
        bool, typer.Option("--save", help="Keep the result under benchmarks/results/.")
    ] = False,
    everything: Annotated[bool, typer.Option("--all", help="Run every benchmark.")] = False,
) -> None:
    """Run benchmarks; results carry the machine, the date and the commit.

    [bold]Examples[/]

      murmur bench

      murmur bench terrain --quick

      murmur bench --all --save
    """
    from murmur.bench import benchmark_names, list_benchmarks, run_benchmark

    console = Console()
    if name is None and not everything:
        console.print(list_benchmarks())
        return
    for topic in benchmark_names() if everything else [name or ""]:
        run_benchmark(topic, quick=quick, save=save, console=console)


@app.command()
def config(
    name: Annotated[
        str | None, typer.Argument(help="A YAML file or a name; without it, list what there is.")
    ] = None,
    set_: Set = None,
    explain_: Annotated[
        bool, typer.Option("--explain", help="Every key: value, default if another, meaning.")
    ] = False,
) -> None:
    """Show a configuration with every default, or list everything that can be configured.

    [bold]Examples[/]

      murmur config

      murmur config terrain-demo --set learner.device=cpu

      murmur config terrain-demo --explain
    """
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    from murmur.settings import explain, list_everything, to_yaml
    from shared.config import load

    console = Console()
    if name is not None and not explain_:
        print(to_yaml(load(name, set_ or [])), end="")
        return
    if name is not None:
        rows = explain(load(name, set_ or []))
        longest = max(len(key) for key, *_ in rows)
        for key, value, default, meaning in rows:
            shown, usual = _short(value), _short(default)
            changed = value != default and shown != usual
            head = f"{key:<{longest}}  {shown}" + (f"  (default {usual})" if changed else "")
            if not console.is_terminal:  # a line for each key, to search in
                print(f"{head}  {meaning}")
                continue
            console.print(Text(head, "bold" if changed else "", overflow="fold"))
            console.print(Padding(Text(meaning, "dim"), (0, 0, 0, 4)))
        return
    for kind, names in list_everything().items():
        table = Table(
            kind, "", box=None, padding=(0, 2, 0, 2), title_justify="left", header_style="bold cyan"
        )
        for item, sentence in names.items():
            table.add_row(escape(item), escape(sentence))
        console.print(table, "")
    console.print("`murmur config NAME` shows a configuration, --explain what its keys mean")


def _short(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "–"
    return str(value) if value != "" else "''"


@app.command()
def certs(
    folder: Annotated[Path, typer.Argument(help="Where to write; one folder for each role in it.")],
    host: Annotated[
        list[str] | None,
        typer.Option(
            help="A name or address under which the learner is dialled, beside localhost, learner "
            "and this machine's name. Repeatable."
        ),
    ] = None,
    days: Annotated[int, typer.Option(min=1, help="Days until the certificates end.")] = 365,
    renew: Annotated[
        bool,
        typer.Option(
            "--renew",
            help="New certificates from the authority that is there, with the names of the old "
            "ones, and new tokens; the newest old tokens stay valid.",
        ),
    ] = False,
    force: Annotated[
        bool,
        typer.Option("--force", help="Replace everything: what was made before gets in no more."),
    ] = False,
    keep: Annotated[
        bool, typer.Option("--keep", help="Where all is there already, check it and do nothing.")
    ] = False,
) -> None:
    """Make certificates and tokens, so that learner and environment servers trust each other.

    Services that run read the new files by themselves. See docs/security.md.

    [bold]Examples[/]

      murmur certs certs --host gpu-host

      murmur certs certs --renew
    """
    from murmur.certs import are_there, default_hosts, make_certificates

    if renew + force + keep > 1:
        raise ConfigError("--renew, --force and --keep contradict each other: choose one")
    hosts = [*default_hosts(), *(host or [])]
    console = Console(soft_wrap=True, highlight=False)
    if keep and are_there(folder):
        console.print(f"kept: {folder}", markup=False)
        return
    for made in make_certificates(folder, hosts, days, renew=renew, force=force):
        console.print(f"written: {made}  (--set security.folder={made})", markup=False)
    console.print(
        f"Give each machine the folder of its role, keep {folder / 'ca.key'} to yourself.",
        markup=False,
    )


@app.command()
def check_env(
    name: Annotated[
        str,
        typer.Argument(
            help="An environment's name, or package.module:factory of a PettingZoo, Gymnasium or "
            "vectorised environment."
        ),
    ],
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="One of its options, e.g. arguments.max_cycles=50 for a factory. Repeatable.",
        ),
    ] = None,
    step_limit: Annotated[
        float, typer.Option(min=0.1, help="Longest time that a step may take, s.")
    ] = 20.0,
) -> None:
    """Test an environment against the contract and say in plain words what is wrong.

    It plays in a process of its own, so that a step that hangs or ends its process is told too.

    [bold]Examples[/]

      murmur check-env terrain

      murmur check-env mpe2.simple_spread_v3:parallel_env --set arguments.N=3

      murmur check-env gymnasium:make --set arguments.id=CartPole-v1

      murmur check-env my_package.my_env:make_env
    """
    print(f"checking '{name}' ...", flush=True)
    from murmur.check_env import check_apart

    checked = check_apart(name, set_ or [], step_limit)
    console = Console(soft_wrap=True)
    for problem in checked.problems:
        console.print(f"[red]✗[/] {escape(problem)}", highlight=False)
    if checked.problems:
        raise SystemExit(1)
    console.print(f"[green]✓[/] '{escape(name)}' keeps the contract of an environment")
    for line in checked.description:
        console.print(f"  {escape(line)}", highlight=False)


@app.command()
def conformance(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Where to listen.")],
    command: Annotated[
        list[str] | None,
        typer.Argument(
            help="Starts the environment server, after --; then its exit codes and its stop are "
            "examined too."
        ),
    ] = None,
    security: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="A learner's credentials, to examine with TLS and tokens."
        ),
    ] = None,
    patience: Annotated[
        float, typer.Option(min=1, help="Longest time that a step or a replay may take, s.")
    ] = 60.0,
) -> None:
    """Examine an environment server, in whatever language, against the contract of docs/wire.md.

    Plays the learner, with good answers and bad ones, cuts connections and goes away. Start your
    environment server and let it dial HOST:PORT, or give the command that starts it. Exits with 0
    if the contract is kept, with 1 if not.

    [bold]Examples[/]

      murmur conformance 127.0.0.1:50051

      murmur conformance 127.0.0.1:50051 -- murmur env-server spread --set env_server.metrics_port=0

      murmur conformance 0.0.0.0:50051 --security certs/learner
    """
    from murmur.conformance.report import examine_and_show

    kept = examine_and_show(address, command or [], security, patience, Console(soft_wrap=True))
    raise SystemExit(0 if kept else 1)
