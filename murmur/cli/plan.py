"""The command that forecasts a run on machines that are not here: plan."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from murmur.cli.app import SPEED, app
from murmur.cli.completion import complete_run
from murmur.cli.options import Config, Set
from murmur.text import plain, reserve_stdout

Gpus = Annotated[int, typer.Option(min=0, help="GPUs, a learner each; 0: learners on processors.")]
Cores = Annotated[int, typer.Option(min=1, help="Processors of all machines together.")]
Learners = Annotated[int, typer.Option(min=0, help="Learners; 0: one for each GPU, or one.")]
Workers = Annotated[
    int, typer.Option(min=0, help="Worker processes; 0: as many as the cores leave.")
]
CostsOfRun = Annotated[
    Path | None,
    typer.Option(
        help="Take the costs of this run; without it, train here for a moment and measure.",
        autocompletion=complete_run,
    ),
]
Network = Annotated[
    str,
    typer.Option(
        help="Between learners: nvlink, pcie, infiniband, ethernet-100, ethernet-25, "
        "ethernet-10, loopback; default: nvlink with GPUs, else loopback."
    ),
]
LinkGbit = Annotated[
    float,
    typer.Option(min=0, help="From environment servers to a learner, Gbit/s; 0: no limit."),
]
ScaleBatch = Annotated[
    bool,
    typer.Option(
        "--scale-batch", help="N learners learn from batches N times as large; else the same."
    ),
]
Seconds = Annotated[
    float, typer.Option(min=1, help="Duration of each of the two measurements without --run.")
]
Costs = Annotated[
    Path | None, typer.Option(help="Costs that --save-costs wrote; nothing is measured.")
]
SaveCosts = Annotated[
    Path | None, typer.Option(help="Write the costs here, for further forecasts.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command(rich_help_panel=SPEED)
def plan(
    config: Config,
    set_: Set = None,
    gpus: Gpus = 0,
    cores: Cores = 16,
    learners: Learners = 0,
    workers: Workers = 0,
    run: CostsOfRun = None,
    network: Network = "",
    link_gbit: LinkGbit = 0.0,
    scale_batch: ScaleBatch = False,
    seconds: Seconds = 6.0,
    costs: Costs = None,
    save_costs: SaveCosts = None,
    json_: Json = False,
) -> None:
    """Forecast a run's rate, utilization and cost on other machines, by simulation.

    A model, not a measurement: what GPUs and networks take is stated unless the run was on them.

    [bold]Examples[/]

      murmur plan spread --gpus 8 --cores 512

      murmur plan formation --cores 64 --run runs/formation-20260101-120000

      murmur plan snakes-ddpg --gpus 8 --cores 256 --network ethernet-100 --scale-batch
    """
    from murmur.plan.costs import save
    from murmur.plan.forecast import Size, as_dict, forecast, gains, sizes_up_to
    from murmur.plan.setup import basis_of
    from murmur.plan.show import show
    from murmur.plan.stated import network as network_of
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
        save(basis.costs, save_costs)
    size = Size(ranks, cores, workers, ranks if scale_batch else 1)
    seen = [forecast(basis, part) for part in sizes_up_to(size, scale_batch=scale_batch)]
    better = gains(basis, seen[-1])
    if json_:
        forecasts = [as_dict(s) for s in seen]
        rest = {"twice": better, "costs": vars(basis.costs), "sources": sources}
        print(json.dumps({"forecasts": forecasts, **rest}, indent=2), file=stdout, flush=True)
        return
    show(seen, better, sources, Console(), network=network_of(network).what)
