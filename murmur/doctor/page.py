"""`murmur doctor`: the bottleneck of a learner, and measured gains of remedies."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace

import psutil
from rich.console import Console
from rich.table import Table

from murmur.doctor.device_report import busy_text, device_lines
from murmur.doctor.diagnosis import Diagnosis, Speedup, diagnose, of_group
from murmur.doctor.group_diagnosis import RankFigures, pace_setter, rank_figures
from murmur.runs.run_folder import RunFolder
from murmur.runs.snapshots import (
    UPDATES,
    WINDOW_S,
    Snapshot,
    from_metrics,
    from_prometheus,
    from_run,
    learners_of,
)
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.config.files import load
from murmur.shared.config.text import one_line
from murmur.shared.process.errors import MurmurError
from murmur.shared.process.host_memory import available_bytes
from murmur.text import number, plain, print_plain

WORDS = {
    "environments": "the environments: the learner waits for rows",
    "servers": "the supply servers: the learner waits for samples",
    "acting": "acting: the inference thread is busy all the time",
    "learning": "learning: environments wait until the learner has caught up",
    "processors": "this machine's processors: environments and learner take turns on them",
    "turns": "the sync pipeline: environments, acting and learning wait for each other",
}
GPU_WORDS = {  # of a GpuWait
    "shapes": "updates run eagerly because shapes of their inputs change",
    "captures": "updates run eagerly because a CUDA graph could not be captured",
    "eager": "updates run eagerly: their kernels are launched one by one",
    "eager acts": "acting runs eagerly: its kernels are launched one by one",
    "acts": "acting waits for updates",
}
HINTS = {
    "environments": "Faster environments do the same as more of them, as far as their machines "
    "have free processors.",
    "servers": "Where samples are read more than once, a cache helps more than servers do: see "
    "supply.cache, smaller images, more memory.",
    "acting": "Answer more environments at once (env_server.envs_per_worker); use a smaller "
    "network, a faster device or lower precision.",
    "learning": "What helps: a faster device, a smaller network, torch threads "
    "(learner.num_threads) where processors are free; a second learner on a device of its own "
    "(docs/many-learners.md).",
    "processors": "Put the environment servers on other machines: `murmur env-server "
    "--set env_server.learner=HOST:PORT`.",
    "turns": "",
    **dict.fromkeys(GPU_WORDS, ""),
}
PROBE_S = 60.0  # the longest that settings are timed without a request
_PROBED_UPDATES = 16  # of a probe: four settings, four bursts each
_LEARNS = 0.05  # share of time that learning takes, where its updates count
_LAG_HINT = (
    "Policy lag: more environments than feed learner.max_policy_lag + 1 updates wait their turn. "
    "Let updates take in all of them (algorithm.unrolls_per_update=0), or allow more lag."
)


def examine(
    run: RunFolder | None,
    metrics: str | None,
    prometheus: str | None,
    window_s: float | None,
    probe: bool | None,
    console: Console,
) -> Diagnosis:
    """Diagnose a run by its folder, a live learner by its metrics, or one that Prometheus scrapes.

    Args:
        run: folder of the run; may be given beside an address, for remedies that need its settings.
        metrics: address of a learner's metrics port; of several that share a run, with commas.
        prometheus: address of a Prometheus.
        window_s: length of the window [s]; None: several updates.
        probe: flag to measure the gain of changed settings of the learning (needs `run` and its
            checkpoint); None: if that takes less than PROBE_S and the memory suffices.
        console: console for messages on slow steps.

    Raises:
        MurmurError: if there is nothing to read, or nothing happens.
    """
    if metrics is None and prometheus is None and run is not None:
        metrics = learners_of(run) or None  # the run's folder tells of the first learner alone
    if prometheus is not None:
        looks = from_prometheus(prometheus, window_s)
    elif metrics is not None:
        with _busy(console, f"watching {metrics} for {window_s or WINDOW_S:.0f} s"):
            looks = from_metrics(metrics, window_s, lambda line: console.print(plain(line)))
    else:
        assert run is not None
        looks = [from_run(run, window_s)]
    ranks = [rank_figures(after.rank, before, after) for before, after in looks]
    pace = pace_setter(ranks)
    before, after = looks[ranks.index(pace)]
    seen = _diagnose(before, after, run, probe, console, window_s)
    seen = replace(seen, device=tuple(device_lines(before, after, seen.device_busy)))
    return of_group(seen, pace, ranks) if len(looks) > 1 else seen


def _too_few(made: int, span_s: float, window_s: float | None) -> str:
    """Return a notice that a window holds too few updates to tell what limits the run."""
    updates = {0: "no update", 1: "only 1 update"}.get(made, f"only {made} updates")
    remedy = f"look again when the run has made {UPDATES} updates"
    if window_s is not None:
        remedy = f"leave --window out, or look at the time of {UPDATES} updates"
    return f"{updates} in these {span_s:.0f} s, too few to tell what limits the run; {remedy}"


def _diagnose(
    before: Snapshot,
    after: Snapshot,
    run: RunFolder | None,
    probe: bool | None,
    console: Console,
    window_s: float | None,
) -> Diagnosis:
    """Diagnose the run between two snapshots, with remedies; see `examine`."""
    seen = diagnose(before, after)
    made = round(after.updates - before.updates)
    if made == 0 or (made < UPDATES and seen.busy["learning"] > _LEARNS):
        console.print(plain(_too_few(made, after.time - before.time, window_s)))
    if run is None:
        return seen
    config = run.config()
    if seen.bottleneck != "learning" or config.supervised:
        return diagnose(before, after, config)
    from murmur.learner_service.learning.base import algorithm_config

    speedup = None
    if _worth_probing(run, seen, before, after, probe, console):
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


def _worth_probing(
    run: RunFolder,
    seen: Diagnosis,
    before: Snapshot,
    after: Snapshot,
    wanted: bool | None,
    console: Console,
) -> bool:
    """Return whether to time updates with other settings: if requested, or if it is cheap."""
    if wanted is not None:
        return wanted
    made = max(after.updates - before.updates, 1.0)
    seconds = seen.busy["learning"] * (after.time - before.time) / made * _PROBED_UPDATES
    pid = run.process("learner.json")
    needed = psutil.Process(pid).memory_info().rss if pid else 0
    if seconds <= PROBE_S and 2 * needed <= available_bytes():
        return True
    console.print(
        plain(
            f"not timed: updates with other settings, about {seconds / 60:.0f} minutes and as much "
            "memory as the learner has; --probe does it"
        ),
        soft_wrap=True,
    )
    return False


def _prober(
    run: RunFolder, config: ExperimentConfig, console: Console
) -> tuple[ExperimentConfig, Speedup]:
    """Return the run's settings, a batch size of 0 resolved, and a function that times others."""
    from murmur.learner_service.tuning.batch_size import with_batch_size
    from murmur.learner_service.tuning.probe import checkpoint_spec, seconds_per_row

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
    """Print the diagnosis."""
    agents, unit = max(seen.agents, 1), "samples" if seen.cache else "agent-steps"
    if seen.bottleneck not in GPU_WORDS:
        message = WORDS[seen.bottleneck]
        if seen.cache and seen.bottleneck == "learning":
            message = "learning: samples wait until the learner has caught up"
        console.print(f"[bold]waits for[/]   {message}", soft_wrap=True)
    for wait in sorted(seen.waits, key=lambda wait: wait.kind != seen.bottleneck):
        head = "[bold]found[/]       " if wait.kind == seen.bottleneck else "            "
        console.print(head, plain(f"{GPU_WORDS[wait.kind]}: {wait.found}"), sep="", soft_wrap=True)
    nvml = {} if seen.kernels_busy is None else {"utilization_ratio": seen.kernels_busy}
    console.print(f"[bold]device[/]      {busy_text(seen.device_busy, nvml)}", highlight=False)
    for line in seen.device:
        print_plain(console, f"            {line}")
    console.print(
        f"[bold]rate[/]        {number(round(seen.rate * agents))} {unit} a second",
        highlight=False,
    )
    if seen.cache:
        kept = {
            "device": "on the device: each sample is sent once",
            "stream": "in a window: each sample is sent in every epoch",
        }[seen.cache]
        console.print(f"[bold]samples[/]     {kept} (the learner's log says why)", soft_wrap=True)
    if seen.in_flight:
        console.print(f"[bold]in flight[/]   {seen.in_flight}", highlight=False, soft_wrap=True)
    for i, line in enumerate(seen.latency):
        head = "[bold]acting[/]      " if not i else "            "
        console.print(head + line, highlight=False, soft_wrap=True)
    table = Table("station", "busy", "µs a row", box=None, padding=(0, 2, 0, 0))
    for name, busy in seen.busy.items():
        table.add_row(name, f"{100 * busy:.0f} %", number(1e6 * seen.seconds_per_row[name]))
    console.print(table)
    if seen.ranks:
        _show_ranks(seen.ranks, seen.advice, console)
    if seen.remedies:
        console.print()
        for r in seen.remedies:  # a table would cut off what is to be copied
            console.print(
                plain(
                    f"{r.rate / seen.rate:.2f} times as fast: {r.what}; then "
                    f"{number(round(r.rate * agents))} {unit} a second, the device works "
                    f"{100 * r.device_busy:.0f} %, limited by {r.limit}"
                    + (f"; {r.cost}" if r.cost else "")
                ),
                soft_wrap=bool(r.cost),
            )
            if r.settings:
                settings = " ".join(f"--set {s}" for s in r.settings)
                print_plain(console, f"    {settings}", "bold")
    if any(r.limit == "policy lag" for r in seen.remedies):
        console.print(f"\n{_LAG_HINT}", soft_wrap=True)
    if hint := HINTS[seen.bottleneck]:
        console.print(f"\n{hint}", soft_wrap=True)


def _show_ranks(ranks: Sequence[RankFigures], advice: Sequence[str], console: Console) -> None:
    """Print how the learners differ; the lines above are of the one that sets the pace."""
    columns = ("rank", "environments", "rows/s", "waits for rows", "for ranks", "ms an update")
    table = Table(*columns, box=None, padding=(0, 2, 0, 0))
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
    return json.dumps(asdict(seen), indent=2)
