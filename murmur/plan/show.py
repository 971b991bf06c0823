"""Forecasts as text, within 80 columns."""

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from murmur.learner_service.storage.flight import Flight
from murmur.plan.forecast import Forecast
from murmur.text import number, plain

WORDS = {
    "cores": "processors: workers and learners take turns on them",
    "interpreter": "a learner's event loop and its inference thread, which share an interpreter",
    "acting": "acting: the inference thread works all the time",
    "device": "the GPU: acting and learning fill it",
    "learning": "learning: sessions wait until it has caught up",
    "eager updates": "updates that launch their kernels one by one: sessions wait for them",
    "all-reduce": "the exchange of gradients between learners",
    "network": "the network from environment servers to learners",
    "policy lag": "policy lag: sessions wait for an update's other unrolls",
    "workers": "the environments: workers step all the time",
    "ranks wait for each other": "learners wait for the slowest of them to gather rows",
    "round trips": "round trips: nothing is full; more sessions or environments would be served",
}
_CLOCKS = {"device": "kernels (NVML)"}  # whose clock a share is comparable to
_COLUMNS = ("learners", "cores", "workers", "agent-steps/s", "scales", "learn %", "core-h/M")
_SHORT = {"ranks wait for each other": "peers"}


def show(
    seen: Sequence[Forecast],
    gains: Mapping[str, float],
    sources: Sequence[str],
    console: Console,
    *,
    network: str,
) -> None:
    """Print a forecast, the last of `seen`, what would help, and the table of all.

    Args:
        seen: forecasts, the smallest system first.
        gains: speed-up by twice as much of each resource.
        sources: sources of the costs, a line each.
        console: console that prints the forecast.
        network: network between learners, as text.
    """
    last, out = seen[-1], seen[-1].outcome
    lines = [
        ("system", _system(last, network)),
        ("rate", f"{_count(last.rate)} agent-steps/s, {_count(last.env_rate)} environment steps/s"),
        ("updates", _updates(last)),
        ("limited by", WORDS[last.bottleneck]),
        (
            "busy",
            ", ".join(f"{_CLOCKS.get(k, k)} {100 * v:.0f} %" for k, v in out.busy.items()),
        ),
        (
            "a million",
            f"agent-steps: {number(last.device_hours)} learner-hours, "
            f"{number(last.core_hours)} core-hours",
        ),
    ]
    if out.blocked > 0.01:
        lines.append(("waiting", f"{100 * out.blocked:.0f} % of the sessions, for updates"))
    if out.peers > 0.001:
        lines.append(("peers", f"{100 * out.peers:.1f} % of the time, for each other"))
    lines += [("costs" if not i else "", text) for i, text in enumerate(sources)]
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, style="bold")
    grid.add_column()
    for name, text in lines:
        grid.add_row(name, plain(text))
    console.print(grid)
    if gains:
        console.print("\n[bold]with twice as much of[/]")
        for what, times in sorted(gains.items(), key=lambda item: -item[1]):
            console.print(f"  {what:20} {times:.2f} times as fast", highlight=False)
    console.print()
    console.print(table(seen))


def table(seen: Sequence[Forecast]) -> Table:
    """Return a table of the growth: a row for each size."""
    shown = Table(*_COLUMNS, "limited by", box=None, padding=(0, 1, 0, 0))
    for column in shown.columns[:-1]:
        column.justify = "right"
    first = seen[0]
    for s in seen:
        more = s.size.learners / first.size.learners
        if more == 1:
            more = s.size.cores / first.size.cores
        shown.add_row(
            str(s.size.learners),
            str(s.size.cores),
            str(s.size.workers),
            _count(s.rate),
            f"{s.rate / first.rate / more:.2f}",
            f"{100 * s.outcome.busy['learning']:.0f}",
            number(s.core_hours),
            _SHORT.get(s.bottleneck, s.bottleneck),
        )
    return shown


def _count(value: float) -> str:
    """Format a rate: 12,300 or 1.23 M."""
    return f"{value / 1e6:.3g} M" if value >= 1e6 else f"{float(f'{value:.3g}'):,.0f}"


def _system(seen: Forecast, network: str) -> str:
    size = seen.size
    kind = "learner" if size.learners == 1 else "learners"
    batch = f", batches {size.batch} times as large" if size.batch > 1 else ""
    by = f" over {network}" if size.learners > 1 else ""
    return f"{size.learners} {kind}{by}, {size.workers} workers on {size.cores} cores{batch}"


def _updates(seen: Forecast) -> str:
    out = seen.outcome
    made = f"{number(out.updates)} a second, {number(1e3 * out.update_s)} ms each"
    if not isinstance(seen.learning, Flight):
        return made
    flight = seen.learning
    return (
        f"{made}; unrolls of {flight.unroll_steps} steps, {flight.unrolls_per_update} an update "
        f"and learner, lag {out.lag:.1f}"
    )
