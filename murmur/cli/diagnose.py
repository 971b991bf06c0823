"""Commands that examine a machine or a run: check, doctor, watch, profile, bench, plan."""

import json
import threading
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from murmur.cli.app import RESULTS, SPEED, command
from murmur.cli.options import Config, Set, Target, complete_run, find_run
from murmur.live_page import PORT
from murmur.shared.process.errors import ConfigError
from murmur.shared.process.files import write_json
from murmur.text import plain, print_plain, reserve_stdout


@command(SPEED)
def check(
    gpu: bool = False,
    json_: bool = False,
    quick: bool = False,
    config: Annotated[list[str] | None, typer.Option(metavar="NAME")] = None,
) -> None:
    """Check this machine: GPU and why not, speed, dependencies, cores, memory, disk, ports.

    Times the networks of spread and terrain-reference, or of --config, as murmur learns and acts
    with them. The exit code is 1 if something that murmur needs is missing.

    [bold]Examples[/]

      murmur check

      murmur check --gpu --json

      murmur check --config formation --config runs/one/config.yaml

    Options:
        gpu: Fail if no GPU can be used.
        json_: Print JSON instead of a table.
        quick: Leave out the speed measurements.
        config: Time the networks of this configuration; repeatable.
    """
    from murmur.kit.check import check_machine, findings_json, findings_table, has_both_services

    stdout = reserve_stdout() if json_ else None
    findings = check_machine(need_gpu=gpu, measure=not quick)
    if not json_:
        Console().print(findings_table(findings))
    speeds = []
    if config or (has_both_services() and not quick):
        from murmur.kit.check_networks import CONFIGS, network_speeds, speeds_table

        speeds = list(network_speeds(config or CONFIGS))
        if not json_:
            Console().print("", speeds_table(speeds))
    if json_:
        print(findings_json(findings, speeds), file=stdout, flush=True)
    raise SystemExit(1 if any(f.status == "fail" for f in findings) else 0)


@command(SPEED)
def doctor(
    run: Target = None,
    metrics: str | None = None,
    prometheus: str | None = None,
    window: Annotated[float | None, typer.Option(min=1)] = None,
    probe: Annotated[bool, typer.Option("--probe/--no-probe")] = False,
    target: Annotated[float, typer.Option(min=0, max=1)] = 0.7,
    json_: bool = False,
) -> None:
    """Say why the GPU is idle, and what each remedy would give.

    Reads the newest run under runs/, finished or under way, by default. Exits with 0 if
    the device works at least --target of the time, with 1 if not.

    [bold]Examples[/]

      murmur doctor

      murmur doctor runs/spread-20260101-120000 --window 60

      murmur doctor --metrics http://learner:9101

    Options:
        metrics: Watch a live learner instead: its metrics address, http://host:9101; of several
            that share a run, and of its environment servers, with commas between them.
        prometheus: Read from a Prometheus instead: http://host:9090.
        window: Seconds to look at; default: several updates, up to 30.
        probe: The long look: wait for several updates, up to 5 minutes, and time updates with other
            settings if learning is the bottleneck.
        target: Exit with 0 if the device is busy this share of the time.
        json_: Print JSON.
    """
    from murmur.doctor.learning import learning_lines
    from murmur.doctor.page import as_json, examine, show
    from murmur.runs.drops import dropped_message

    stdout = reserve_stdout() if json_ else None
    console = Console()
    folder = None if run is None and (metrics or prometheus) else find_run(run, begun=True)
    for line in learning_lines(folder) if folder and not json_ else ():
        console.print(plain(line), soft_wrap=True)
    seen = examine(folder, metrics, prometheus, window, probe, Console(stderr=True))
    if json_:
        print(as_json(seen), file=stdout, flush=True)
    else:
        show(seen, console)
        last = next(folder.newest_records("progress"), {}) if folder else {}
        if message := dropped_message(last):
            console.print(f"\n{message}", highlight=False, markup=False, soft_wrap=True)
    raise SystemExit(0 if seen.device_busy >= target else 1)


@command(RESULTS)
def watch(
    run: Target = None,
    port: Annotated[int, typer.Option(min=0, max=65535)] = PORT,
) -> None:
    """Show a run on a live page: curves, time ledger, newest evaluated episode, alerts.

    Reads the run's folder alone: the newest under runs/ by default, under way or ended. The page is
    on 127.0.0.1 until Ctrl-C.

    [bold]Examples[/]

      murmur watch

      murmur watch runs/spread-20260101-120000 --port 8080

    Options:
        port: Port; another one if it is in use.
    """
    from murmur.live_page.server import LivePage
    from murmur.runs.interrupts import stopped_by_signals

    folder = find_run(run, begun=True)
    folder.config()  # may refuse
    with closing(LivePage(folder, port)) as page, stopped_by_signals():
        print_plain(Console(), f"{folder.path}: {page.text}; Ctrl-C stops")
        threading.Event().wait()


@command(SPEED)
def profile(
    run: Target = None,
    updates: Annotated[int, typer.Option(min=1, max=1000)] = 5,
) -> None:
    """Record what a running learner does in its next updates, operation by operation.

    Training continues, slower while it is recorded. The trace lies in the run's folder and opens in
    Perfetto (ui.perfetto.dev), chrome://tracing or TensorBoard; all threads of the learner are in
    it, with the states of the ledger. What takes longest is said here.

    [bold]Examples[/]

      murmur profile

      murmur profile runs/spread-20260101-120000 --updates 20

    Options:
        updates: Updates to record, after one to warm up.
    """
    from murmur.doctor.profile import read, record, show

    folder = find_run(run, begun=True)
    trace = record(folder, updates, Console(stderr=True))
    console = Console()
    show(read(trace), console)
    print_plain(console, f"\nwritten: {trace}")


@command(SPEED)
def bench(
    name: Annotated[str | None, typer.Argument()] = None,
    quick: bool = False,
    smoke: bool = False,
    save: bool = False,
    dirty: bool = False,
    everything: Annotated[bool, typer.Option("--all")] = False,
    dry_run: bool = False,
    chosen: Annotated[str, typer.Option("--topics")] = "",
) -> None:
    """Run benchmarks; results carry the command, the machine, the date and the commit.

    [bold]Examples[/]

      murmur bench

      murmur bench terrain --quick

      murmur bench --all --save

      murmur bench gpu --dry-run

      murmur bench gpu --topics terrain-reference,acting

    Options:
        name: One benchmark; without it, list them.
        quick: Fewer repetitions, rougher.
        smoke: Seconds: only show that it runs; figures say nothing.
        save: Keep the result under benchmarks/results/.
        dirty: Save even if the source differs from its commit.
        everything: Run every benchmark.
        dry_run: gpu: print what it measures and what to expect of it.
        chosen: gpu: only these topics, by commas, in this order.
    """
    from murmur.bench import list_benchmarks, run_benchmark, topics
    from murmur.benchmarks.effort import Effort

    console = Console()
    if name is None and not everything:
        console.print(list_benchmarks())
        return
    if save and smoke:
        raise ConfigError("--save keeps measurements; what --smoke prints is none: leave one out")
    wanted = [part.strip() for part in chosen.split(",") if part.strip()]
    effort = Effort.SMOKE if smoke else Effort.QUICK if quick else Effort.FULL
    keep = partial(run_benchmark, effort=effort, console=console, save=save, dirty=dirty)
    if not everything or dry_run:
        keep(name or "", chosen=wanted, dry_run=dry_run)
        return
    for topic in topics():
        try:
            keep(topic)
        except ConfigError as error:  # it needs what this machine does not have
            console.print(plain(f"{topic} is left out: {error}"))


@command(SPEED)
def plan(
    config: Config,
    set_: Set = None,
    gpus: Annotated[int, typer.Option(min=0)] = 0,
    cores: Annotated[int, typer.Option(min=1)] = 16,
    learners: Annotated[int, typer.Option(min=0)] = 0,
    workers: Annotated[int, typer.Option(min=0)] = 0,
    run: Annotated[Path | None, typer.Option(autocompletion=complete_run)] = None,
    network: str = "",
    link_gbit: Annotated[float, typer.Option(min=0)] = 0.0,
    scale_batch: bool = False,
    seconds: Annotated[float, typer.Option(min=1)] = 6.0,
    costs: Path | None = None,
    save_costs: Path | None = None,
    json_: bool = False,
) -> None:
    """Forecast a run's rate, utilization and cost on other machines, by simulation.

    A model, not a measurement: what GPUs and networks take is stated unless the run was on them.

    [bold]Examples[/]

      murmur plan spread --gpus 8 --cores 512

      murmur plan formation --cores 64 --run runs/formation-20260101-120000

      murmur plan snakes-ddpg --gpus 8 --cores 256 --network ethernet-100 --scale-batch

    Options:
        gpus: GPUs, a learner each; 0: learners on processors.
        cores: Processors of all machines together.
        learners: Learners; 0: one for each GPU, or one.
        workers: Worker processes; 0: as many as the cores leave.
        run: Take the costs of this run; without it, train here for a moment and measure.
        network: Between learners: nvlink, pcie, infiniband, ethernet-100, ethernet-25, ethernet-10,
            loopback; default: nvlink with GPUs, else loopback.
        link_gbit: From environment servers to a learner, Gbit/s; 0: no limit.
        scale_batch: N learners learn from batches N times as large; else the same.
        seconds: Duration of each of the two measurements without --run.
        costs: Costs that --save-costs wrote; nothing is measured.
        save_costs: Write the costs here, for further forecasts.
        json_: Print JSON.
    """
    from murmur.plan.forecast import Size, as_dict, forecast, gains, sizes_up_to
    from murmur.plan.setup import basis_of
    from murmur.plan.show import show
    from murmur.runs.run_folder import RunFolder
    from murmur.shared.config.files import load

    stdout = reserve_stdout() if json_ else None  # the environment is played
    aside = Console(stderr=True)
    ranks, network = learners or max(1, gpus), network or ("nvlink" if gpus else "loopback")
    basis, sources = basis_of(
        load(config, list(set_ or [])),
        RunFolder.open(run) if run is not None else None,
        gpu=gpus > 0,
        network=network,
        costs_file=costs,
        seconds=seconds,
        link_gbit=link_gbit,
        learners=ranks,
        say=lambda line: aside.print(plain(f"{line} …")),
    )
    if save_costs is not None:
        write_json(save_costs, vars(basis.costs))
    size = Size(ranks, cores, workers, ranks if scale_batch else 1)
    seen = [forecast(basis, part) for part in sizes_up_to(size, scale_batch=scale_batch)]
    better = gains(basis, seen[-1])
    if json_:
        forecasts = [as_dict(s) for s in seen]
        rest = {"twice": better, "costs": vars(basis.costs), "sources": sources}
        print(json.dumps({"forecasts": forecasts, **rest}, indent=2), file=stdout, flush=True)
        return
    show(seen, better, sources, Console(), network=basis.network.what)
