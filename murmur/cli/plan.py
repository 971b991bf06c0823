"""The command that forecasts a run on machines that are not here: plan."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from murmur.cli.app import app
from murmur.cli.completion import complete_run
from murmur.cli.options import Config, Set
from murmur.text import plain


@app.command()
def plan(
    config: Config,
    set_: Set = None,
    gpus: Annotated[
        int, typer.Option(min=0, help="GPUs, a learner each; 0: learners on processors.")
    ] = 0,
    cores: Annotated[int, typer.Option(min=1, help="Processors of all machines together.")] = 16,
    learners: Annotated[
        int, typer.Option(min=0, help="Learners; 0: one for each GPU, or one.")
    ] = 0,
    workers: Annotated[
        int, typer.Option(min=0, help="Worker processes; 0: as many as the cores leave.")
    ] = 0,
    run: Annotated[
        Path | None,
        typer.Option(
            help="Take the costs of this run; without it, train here for a moment and measure.",
            autocompletion=complete_run,
        ),
    ] = None,
    network: Annotated[
        str,
        typer.Option(
            help="Between learners: nvlink, pcie, infiniband, ethernet-100, ethernet-25, "
            "ethernet-10, loopback; default: nvlink with GPUs, else loopback."
        ),
    ] = "",
    link_gbit: Annotated[
        float,
        typer.Option(min=0, help="From environment servers to a learner, Gbit/s; 0: no limit."),
    ] = 0.0,
    scale_batch: Annotated[
        bool,
        typer.Option(
            "--scale-batch", help="N learners learn from batches N times as large; else the same."
        ),
    ] = False,
    seconds: Annotated[
        float, typer.Option(min=1, help="Of each of the two measurements without --run.")
    ] = 6.0,
    costs: Annotated[
        Path | None, typer.Option(help="Costs that --save-costs wrote; nothing is measured.")
    ] = None,
    save_costs: Annotated[
        Path | None, typer.Option(help="Write the costs here, for further forecasts.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Forecast a run's rate, utilisation and cost on other machines, by simulation.

    A model, not a measurement: what GPUs and networks take is stated unless the run was on them.

    [bold]Examples[/]

      murmur plan spread --gpus 8 --cores 512

      murmur plan formation --cores 64 --run runs/formation-20260101-120000

      murmur plan snakes-ddpg --gpus 8 --cores 256 --network ethernet-100 --scale-batch
    """
    from murmur.plan.costs import save
    from murmur.plan.forecast import Size, as_dict, gains, grow, sizes_up_to
    from murmur.plan.setup import basis_of
    from murmur.plan.show import show
    from murmur.plan.stated import network as network_of
    from murmur.run_folder import RunFolder
    from shared.config import load

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
    seen = grow(basis, sizes_up_to(size, scale_batch=scale_batch))
    better = gains(basis, seen[-1])
    if json_:
        data = {
            "forecasts": [as_dict(s) for s in seen],
            "twice": better,
            "costs": vars(basis.costs),
            "sources": sources,
        }
        print(json.dumps(data, indent=2))
        return
    show(seen, better, sources, Console(), network=network_of(network).what)
