"""`murmur doctor`: the bottleneck of a learner, and measured gains of remedies."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace

from rich.console import Console
from rich.table import Table

from murmur.doctor.causes import CAUSES
from murmur.doctor.device_report import busy_text, device_lines
from murmur.doctor.diagnosis import LEARNS_SLOWLY, Diagnosis, Speedup, diagnose, of_group
from murmur.doctor.group_diagnosis import RankFigures, pace_setter, rank_figures
from murmur.runs.run_folder import RunFolder
from murmur.runs.snapshots import (
    FEWEST_S,
    LOOK_S,
    SAY_EVERY_S,
    UPDATES,
    WINDOW_S,
    Look,
    Snapshot,
    from_metrics,
    from_prometheus,
    from_run,
    learners_of,
    with_servers,
)
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.config.files import load
from murmur.shared.config.text import one_line
from murmur.shared.process.errors import ConfigError, MurmurError
from murmur.text import duration, number, plain, print_plain

_LEARNS = 0.05  # share of time that learning takes, where its updates count
_WAIT_S = WINDOW_S - 5.0  # until a run that has just begun has logged enough
_RANK_COLUMNS = ("rank", "environments", "rows/s", "waits for rows", "for ranks", "ms an update")
_LAG_HINT = (
    "Policy lag: more environments than feed learner.max_policy_lag + 1 updates wait their turn. "
    "Let updates take in all of them (algorithm.unrolls_per_update=0), or allow more lag, which "
    "learns less per row."
)


def examine(
    run: RunFolder | None,
    metrics: str | None,
    prometheus: str | None,
    window_s: float | None,
    probe: bool,
    console: Console,
) -> Diagnosis:
    """Diagnose a run by its folder, a live learner by its metrics, or one that Prometheus scrapes.

    Args:
        run: folder of the run; may be given beside an address, for remedies that need its settings.
        metrics: address of a learner's metrics port; of several that share a run, with commas;
            those of its environment servers may be among them.
        prometheus: address of a Prometheus.
        window_s: length of the window [s]; None: several updates, within WINDOW_S.
        probe: flag for the long look: wait for several updates, and time updates with other
            settings (needs `run` and its checkpoint).
        console: console for messages on slow steps.

    Raises:
        MurmurError: if there is nothing to read, or nothing happens.
    """

    def say(line: str) -> None:
        console.print(plain(line), soft_wrap=True)

    if run is not None and run.config().run.offline:
        raise ConfigError(
            f"{run.path} learns from a dataset alone (run.offline): there are no environments, and "
            "the learner never waits; `murmur profile` shows what its updates do"
        )
    if metrics is None and prometheus is None and run is not None:
        metrics = learners_of(run) or None  # the run's folder tells of the first learner alone
    most_s = LOOK_S if probe else WINDOW_S
    if prometheus is not None:
        looks = from_prometheus(prometheus, window_s)
    elif metrics is not None:
        began = time.time()
        with _busy(console, f"watching {metrics} for {window_s or most_s:.0f} s at most"):
            looks = from_metrics(metrics, window_s, say, most_s)
        if run is not None:  # servers.jsonl has the time of day
            shift = began - looks[0][0].time
            looks = [with_servers(look, run, shift) for look in looks]
    else:
        assert run is not None
        looks = [_look_at(run, window_s, most_s, say)]
    if len(looks) > 1:  # to each of them the others are no strangers
        looks = _with_cpu_of_all(looks)
    ranks = [rank_figures(after.rank, before, after) for before, after in looks]
    pace = pace_setter(ranks)
    before, after = looks[ranks.index(pace)]
    seen = _diagnose(before, after, run, probe, console)
    too_few = _too_few(seen, before, after, window_s)
    seen = replace(
        seen, too_few=too_few, device=tuple(device_lines(before, after, seen.device_busy))
    )
    return of_group(seen, pace, ranks) if len(looks) > 1 else seen


def _with_cpu_of_all(looks: Sequence[Look]) -> list[Look]:
    """Return looks at learners that share a run, each with the CPU seconds of all of them."""

    def shared(end: int) -> list[Snapshot]:
        total = sum(look[end].cpu_s.get("", 0.0) for look in looks)
        return [replace(look[end], cpu_s={**look[end].cpu_s, "": total}) for look in looks]

    return list(zip(shared(0), shared(1), strict=True))


def _look_at(
    run: RunFolder, window_s: float | None, most_s: float, say: Callable[[str], None]
) -> Look:
    """Read the last seconds of a run; of one at work that has logged too little, wait for more.

    Args:
        run: folder of the run.
        window_s: length of the window [s]; None: several updates.
        most_s: the longest wait [s].
        say: function called with lines about the wait.
    """
    until, told = time.monotonic() + min(most_s, _WAIT_S if most_s == WINDOW_S else most_s), 0.0
    while True:
        working = run.process("learner.json") is not None and time.monotonic() < until
        made, long, look = 0, False, None
        try:
            look = from_run(run, window_s)
            made = round(look[1].updates - look[0].updates)
            long = look[1].time - look[0].time >= FEWEST_S
        except ConfigError:
            if not working:
                raise
        if look is not None and (window_s or not working or (made >= UPDATES and long)):
            return look
        if time.monotonic() - told >= SAY_EVERY_S:
            told = time.monotonic()
            say(f"{made} of {UPDATES} updates so far; looking for {until - told:.0f} s at most")
        time.sleep(1.0)


def _too_few(seen: Diagnosis, before: Snapshot, after: Snapshot, window_s: float | None) -> str:
    """Return a notice that a window holds too few updates to tell what limits the run; or ""."""
    made, span = round(after.updates - before.updates), after.time - before.time
    if made >= UPDATES or (made and seen.busy["learning"] <= _LEARNS):
        return ""
    updates = {0: "no update", 1: "only 1 update"}.get(made, f"only {made} updates")
    needed = UPDATES * span / max(made, 0.5)
    remedy = (
        f"look again in about {duration(needed)}, or with --probe, which waits; "
        f"it takes {UPDATES} updates"
    )
    if window_s is not None:
        remedy = f"leave --window out, or look at the time of {UPDATES} updates"
    return f"{updates} in these {span:.0f} s, too few to tell what limits the run; {remedy}"


def _diagnose(
    before: Snapshot, after: Snapshot, run: RunFolder | None, probe: bool, console: Console
) -> Diagnosis:
    """Diagnose the run between two snapshots, with remedies; see `examine`."""
    if run is None:
        return diagnose(before, after)
    config = run.config()
    seen = diagnose(before, after, config)
    if seen.bottleneck not in LEARNS_SLOWLY or config.supervised:
        return seen
    try:
        from murmur.learner_service.learning.base import algorithm_config
    except ModuleNotFoundError:  # no torch here: remedies without settings
        return seen
    speedup = None
    if probe:
        config, speedup = _prober(run, config, console)
    return diagnose(before, after, config, algorithm_config(config.algorithm).about, speedup)


@contextmanager
def _busy(console: Console, what: str) -> Iterator[None]:
    """Show a slow step: as a moving line on a terminal, else as a line."""
    if console.is_terminal:
        with console.status(plain(what)):
            yield
    else:
        console.print(plain(f"{what} …"))
        yield


def _prober(
    run: RunFolder, config: ExperimentConfig, console: Console
) -> tuple[ExperimentConfig, Speedup]:
    """Return the run's settings, a batch size of 0 resolved, and a function that times others."""
    from murmur.learner_service.tuning.probe import checkpoint_spec, seconds_per_row
    from murmur.learner_service.tuning.resolve import with_batch_size

    spec = checkpoint_spec(run.checkpoint("latest"))
    with _busy(console, "timing updates with the run's settings"):
        config = with_batch_size(config, spec, run.path)  # in the run's folder since it began
        now = seconds_per_row(config, spec)
    own = "algorithm=" + one_line({"name": config.algorithm.name, **config.algorithm.options})

    def speedup(settings: Sequence[str]) -> float | None:
        with _busy(console, f"timing updates with {' '.join(settings)}"):
            try:
                changed = load(str(run.path / "config.yaml"), [own, *settings], environ={})
                return now / seconds_per_row(changed, spec)
            except MurmurError:  # settings that do not fit each other are no remedy
                return None

    return config, speedup


def show(seen: Diagnosis, console: Console) -> None:
    """Print the verdict, then the evidence, then the remedies."""
    _show_causes(seen, console)
    console.print()
    _show_evidence(seen, console)
    _show_remedies(seen, console)


def _show_causes(seen: Diagnosis, console: Console) -> None:
    """Print the causes, the largest first, each with its measurements."""
    head = "waits for"
    if seen.too_few:
        print_plain(console, f"too few updates yet: {seen.too_few}", "bold")
        head = "so far"
    for i, cause in enumerate(seen.causes):
        begin = head if not i else "also" if i == 1 else ""
        _show_line(console, begin, CAUSES[cause.name].words, "" if i else "bold")
        if cause.evidence:
            _show_line(console, "", cause.evidence)


def _show_line(console: Console, head: str, text: str, style: str = "") -> None:
    """Print text in the column right of the heads."""
    console.print(plain(f"{head:12}", "bold"), plain(text, style), sep="", soft_wrap=True)


def _show_evidence(seen: Diagnosis, console: Console) -> None:
    """Print rates, stations, processors and the device."""
    agents, unit = max(seen.agents, 1), "samples" if seen.cache else "agent-steps"
    lines = [("rate", f"{number(round(seen.rate * agents))} {unit} a second")]
    if (m := seen.machine) is not None:
        use = f"this run uses {m.own:.1f} of {m.cores:g} cores, others {m.others:.1f}"
        lines.append(("processors", use))
    lines.append(("device", busy_text(seen.device_busy, seen.kernels_busy)))
    lines += [("", line) for line in seen.device]
    if seen.cache:
        kept = {
            "device": "on the device: each sample is sent once",
            "stream": "in a window: each sample is sent in every epoch",
        }[seen.cache]
        lines.append(("samples", f"{kept} (the learner's log says why)"))
    if seen.in_flight:
        lines.append(("in flight", seen.in_flight))
    lines += [("" if i else "acting", line) for i, line in enumerate(seen.latency)]
    for head, text in lines:
        _show_line(console, head, text)
    table = Table("station", "busy", "µs a row", box=None, padding=(0, 2, 0, 0))
    for name, busy in seen.busy.items():
        table.add_row(name, f"{100 * busy:.0f} %", number(1e6 * seen.seconds_per_row[name]))
    console.print(table)
    if seen.ranks:
        _show_ranks(seen.ranks, seen.advice, console)


def _show_remedies(seen: Diagnosis, console: Console) -> None:
    """Print what would help, each with its price."""
    agents, unit = max(seen.agents, 1), "samples" if seen.cache else "agent-steps"
    first = CAUSES[seen.bottleneck]
    if seen.remedies or first.advice:
        console.print("\n[bold]remedies[/]")
    for r in seen.remedies:  # a table would cut off what is to be copied
        about = "" if r.timed else "about "
        print_plain(
            console,
            f"{about}{r.rate / seen.rate:.2f} times as fast: {r.what}; then "
            f"{number(round(r.rate * agents))} {unit} a second, the device works "
            f"{100 * r.device_busy:.0f} %, limited by {r.limit}"
            + (f"; {r.cost}" if r.cost else ""),
        )
        if r.settings:
            settings = " ".join(f"--set {s}" for s in r.settings)
            print_plain(console, f"    {settings}", "bold")
    if any(not r.timed for r in seen.remedies):
        console.print("(by arithmetic: --probe times updates with these settings, for minutes)")
    if first.advice:
        print_plain(console, f"{first.advice[:1].upper()}{first.advice[1:]}. Costs: {first.cost}.")
    if any(r.limit == "policy lag" for r in seen.remedies):
        console.print(f"\n{_LAG_HINT}", soft_wrap=True)


def _show_ranks(ranks: Sequence[RankFigures], advice: Sequence[str], console: Console) -> None:
    """Print how the learners differ; the lines above are of the one that sets the pace."""
    table = Table(*_RANK_COLUMNS, box=None, padding=(0, 2, 0, 0))
    for r in ranks:
        table.add_row(
            str(r.rank),
            str(r.environments),
            number(round(r.rate)),
            f"{100 * r.waits_rows:.0f} %",
            f"{100 * r.waits_ranks:.0f} %",
            number(1e3 * r.work_s),
        )
    console.print()
    console.print(table)
    for line in advice:
        print_plain(console, line)


def as_json(seen: Diagnosis) -> str:
    """Return the diagnosis as JSON values, for scripts."""
    return json.dumps(asdict(seen) | {"bottleneck": seen.bottleneck}, indent=2)
