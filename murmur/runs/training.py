"""`murmur train`: the display of a training while the supervisor runs it, and at the end."""

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from env_service.adapters.frames import DRAWING
from env_service.pictures import DRAWN
from murmur.runs.child import ChildError
from murmur.doctor.device_report import gpu_figures
from murmur.runs.drops import dropped_message, rollout_message
from murmur.runs.interrupts import stopped_by_signals
from murmur.runs.live_view import LiveView
from murmur.runs.preparing import Prepared
from murmur.runs.run_folder import RunFolder
from murmur.runs.supervisor import StopRequested, Supervisor
from murmur.text import duration, in_rows, number, plain, print_plain
from shared.config.experiment import ExperimentConfig, RunConfig
from shared.process.errors import ResourceError

TROUBLE_SHOWN = 240  # characters of a log's line; the log has it all
_RATE, _SAMPLE_RATE = "agent-steps/s", "samples/s"
METRICS_SHOWN = 4  # of the environment's
COLUMN = 10  # least width, so that columns stay where they are when figures grow


def completion(run: RunConfig, record: Mapping[str, Any]) -> float | None:
    """Return the completed share of the run, 0 to 1; None if it has no end."""
    shares = [
        record.get(key, 0) / limit
        for key, limit in (
            ("updates", run.max_updates),
            ("env_steps", run.max_env_steps),
            ("seconds", 60 * run.max_minutes),
        )
        if limit
    ]
    if samples := record.get("samples"):
        seen = max(1, samples["trained"] + samples["remaining"])
        shares.append((samples["epoch"] + samples["trained"] / seen) / samples["epochs"])
    return min(1.0, max(shares)) if shares else None


class TrainingView(LiveView):
    """Progress of a training: a live bar on a terminal, else a plain line every ten seconds."""

    def __init__(self, run: RunConfig, console: Console) -> None:
        """Show the progress of `run` on `console`."""
        self._run = run
        self._last: dict[str, Any] = {}
        self._first: tuple[float, float] | None = None  # (time, share) of this session
        self._troubles, self._newest = 0, ""
        self._untold = False  # the newest trouble
        self._told = -math.inf
        self._said: set[str] = set()
        self._bar = Progress(
            TextColumn("{task.description}", "bold", markup=False),
            BarColumn(None),
            TextColumn("{task.fields[eta]}"),
        )
        self._task = self._bar.add_task(run.name, total=1.0, eta="starting …")
        super().__init__(console, self._bar)

    def __exit__(self, *error: object) -> None:
        """Stop drawing."""
        super().__exit__(*error)
        self._tell_trouble()

    def update(self, record: dict[str, Any]) -> None:
        """Show a record of progress.jsonl."""
        if record.get("kind") == "evaluation":
            means = {name: m["mean"] for name, m in record.get("metrics", {}).items()}
            self._console.print(
                plain(f"evaluation after {record.get('updates', 0)} updates: {_pairs(means)}"),
                soft_wrap=True,
            )
            return
        self._last = record
        for message in (rollout_message(record), dropped_message(record)):
            if message and (key := message.rpartition(" %")[2]) not in self._said:
                self._said.add(key)  # once, whatever the share becomes
                self.say(message)
        share = completion(self._run, record)
        if self._first is None:
            self._first = (time.monotonic(), share or 0.0)
        if self._plain:
            if self._line_due():
                print_plain(self._console, self._line(share))
                self._tell_trouble()
            return
        self._bar.update(self._task, completed=share or 0.0, eta=self._eta(share))
        self._draw()

    def trouble(self, log: Path, line: str) -> None:
        """Note a warning or an error of a log; the newest is shown."""
        self._troubles += 1
        before = f" ({self._troubles - 1} before it)" if self._troubles > 1 else ""
        line = line if len(line) <= TROUBLE_SHOWN else line[: TROUBLE_SHOWN - 2] + " …"
        self._newest = f"{log}{before}: {line}"
        if not self._plain:
            self._draw()
            return
        self._untold = True
        if time.monotonic() - self._told >= self.line_every_s:
            self._tell_trouble()

    def _tell_trouble(self) -> None:
        """Print the newest trouble once if there is no terminal."""
        if self._untold:
            self._untold, self._told = False, time.monotonic()
            print_plain(self._console, self._newest, "yellow")

    def _draw(self) -> None:
        parts: list[RenderableType] = [self._bar, self._figures()] if self._last else [self._bar]
        if self._newest:
            parts.append(plain(self._newest, "yellow"))
        self._live.update(Group(*parts))

    def _eta(self, share: float | None) -> str:
        if self._last.get("rows_received") == 0 and "samples" not in self._last:
            return "environments start; compiling may take minutes"
        if share is None or self._first is None:
            return "no end set; Ctrl-C stops"
        since, done = time.monotonic() - self._first[0], share - self._first[1]
        left = f", {duration((1 - share) * since / done)} left" if done > 0 and since > 3 else ""
        return f"{100 * share:.0f} %{left}"

    def _line(self, share: float | None) -> str:
        """Return the figures as text, in lines of the console's width, indented by the time."""
        r = self._last
        at = f"{duration(r.get('seconds', 0))}  "
        figures = [item for part in self._shown() for item in part.items()]
        parts = [
            self._eta(share),
            *(f"{v} {k}" if k in (_RATE, _SAMPLE_RATE) else f"{k} {v}" for k, v in figures),
        ]
        lines = in_rows(parts, len, gap=2, limit=self._console.width - len(at))
        return at + ("\n" + " " * len(at)).join("  ".join(line) for line in lines)

    def _shown(self) -> tuple[dict[str, str], dict[str, str]]:
        """Return the figures of the training, and those of the environment."""
        r = self._last
        gpu = gpu_figures(r.get("device", {}))
        if samples := r.get("samples"):
            return _sample_figures(r, samples) | gpu, {}
        training = {
            "updates": number(r.get("updates", 0)),
            "env steps": number(r.get("env_steps", 0)),
            _RATE: number(r.get("agent_steps_per_s")),
            "policy lag": number(r.get("policy_lag")),
            "return": number(r.get("return")),
        }
        if skipped := r.get("updates_skipped"):
            training["skipped updates"] = number(skipped)
        training |= gpu
        metrics = list(r.get("metrics", {}).items())[:METRICS_SHOWN]
        return training, {name: number(value) for name, value in metrics}

    def _figures(self) -> Group:
        """Return the figures as tables: the training's, below them the environment's."""

        def rows(columns: Mapping[str, str]) -> list[list[tuple[str, str]]]:
            limit = self._console.width
            return in_rows(columns.items(), lambda c: max(COLUMN, *map(len, c)), gap=3, limit=limit)

        tables = []
        for row in [r for figures in self._shown() for r in rows(figures)]:
            table = Table(box=None, padding=(0, 3, 0, 0), pad_edge=False, header_style="dim")
            for name, _ in row:
                table.add_column(plain(name), min_width=COLUMN)
            table.add_row(*(plain(value) for _, value in row))
            tables.append(table)
        return Group(*tables)


def _sample_figures(record: Mapping[str, Any], samples: Mapping[str, Any]) -> dict[str, str]:
    """Return the figures of a run that learns from a source."""
    seen = samples["trained"] + samples["remaining"]
    figures = {
        "updates": number(record.get("updates", 0)),
        "epoch": f"{samples['epoch']} of {samples['epochs']}",
        "of this epoch": f"{samples['trained']} of {seen}",
        _SAMPLE_RATE: number(record.get("agent_steps_per_s")),
        "loss": number(record.get("losses", {}).get("loss")),
    }
    if samples["broken"]:
        figures["broken samples"] = number(samples["broken"])
    return figures


def _pairs(values: Mapping[str, Any]) -> str:
    shown = list(values.items())[:METRICS_SHOWN]
    return ", ".join(f"{name} {number(value)}" for name, value in shown)


def train(
    prepared: Prepared,
    console: Console,
    *,
    stop: threading.Event | None = None,
    on_record: Callable[[dict[str, Any]], None] = lambda record: None,
) -> None:
    """Train until the run is complete or told to stop, showing progress.

    Args:
        prepared: the training; its folder is unlocked at the end.
        console: console for the progress.
        stop: event that ends the run in order when it is set, by any thread.
        on_record: function called with each record of progress.jsonl.

    Raises:
        KeyboardInterrupt: after a graceful stop, by Ctrl-C or another signal.
        MurmurError: for an error the user can fix, a last checkpoint that fails among them.
    """
    config, run, resume = prepared.config, prepared.folder, prepared.resume
    _announce(config, run, prepared.learners, console)
    view = TrainingView(config.run, console)

    def take(record: dict[str, Any]) -> None:
        view.update(record)
        on_record(record)

    supervisor = Supervisor(
        run,
        config,
        resume=resume,
        say=view.say,
        on_progress=take,
        on_trouble=view.trouble,
        learners=prepared.learners,
        stop=stop,
    )
    try:
        with stopped_by_signals(), view:
            supervisor.run()
    except (KeyboardInterrupt, StopRequested) as error:
        if supervisor.stop_failure:
            raise _no_last_checkpoint(run, supervisor.stop_failure) from None
        how = "; resume" if run.has_checkpoint() else " before its first checkpoint; restart"
        print_plain(console, f"\nstopped{how} with:  {run.again()}")
        if isinstance(error, KeyboardInterrupt):
            raise
        return
    except ChildError:
        if not resume and not supervisor.listened and not _traceback_in(supervisor.learner.log):
            run.discard()  # a wrong option of algorithm or network: nothing began
        raise
    finally:
        if resume:
            run.config_file(resume=True).unlink(missing_ok=True)
        run.lock.release()
    print_end(run, supervisor.deaths, console)


def _no_last_checkpoint(run: RunFolder, failure: str) -> ResourceError:
    """Return the error of a run that stopped without the checkpoint that the end writes."""
    lost = "what came since its last checkpoint" if run.has_checkpoint() else "all of it"
    how = "Resume" if run.has_checkpoint() else "Restart"
    return ResourceError(
        f"the run stopped without a last checkpoint, {lost} is lost: {failure}. {how} with: "
        f"{run.again()}"
    )


def _announce(config: ExperimentConfig, run: RunFolder, learners: int, console: Console) -> None:
    """Print what is trained, where, and by how many processes."""
    name = plain(config.run.name, "bold")
    console.print("training", name, plain(f"in {run.path}"), soft_wrap=True)
    server = config.env_server
    inside = "" if config.supervised else f", environments in each: {server.envs_per_worker}"
    several = f"learners: {learners}, " if learners > 1 else ""
    console.print(
        f"{several}workers: {server.num_workers}{inside}, "
        f"torch threads of the learner: {config.learner.num_threads}",
        highlight=False,
        soft_wrap=True,
    )


def _traceback_in(log: Path) -> bool:
    return "\nTraceback (" in f"\n{log.read_text(errors='replace')}"


def _evaluations_table(first: Mapping[str, Any], last: Mapping[str, Any]) -> Table:
    headings = (f"evaluated after {number(record['updates'])} updates" for record in (first, last))
    table = Table("metric", *headings, box=None, padding=(0, 3, 0, 0))
    for name, result in last["metrics"].items():
        before = first["metrics"].get(name, {}).get("mean")
        table.add_row(plain(name), plain(number(before)), plain(number(result["mean"])))
    return table


def best_message(evaluations: Sequence[Mapping[str, Any]], metric: str) -> str:
    """Return which evaluation chose best.pt; "" if none has the metric, as in supervised runs.

    Args:
        evaluations: lines of progress.jsonl.
        metric: value of evaluation.best_metric.
    """
    name = metric.removeprefix("-")
    pick = min if metric.startswith("-") else max
    having = [record for record in evaluations if name in record["metrics"]]
    if not having:
        return ""
    best = pick(having, key=lambda record: record["metrics"][name]["mean"])
    value = number(best["metrics"][name]["mean"])
    return f"best.pt: {name} {value}, after {number(best['updates'])} updates"


def print_end(run: RunFolder, deaths: int, console: Console) -> None:
    """Print the results of a complete run and the commands to continue with.

    Args:
        run: the run's folder.
        deaths: number of times that a process was started again.
        console: console that prints the text.
    """
    progress, evaluations = run.records("progress"), run.records("evaluation")
    last = progress[-1] if progress else {}
    if samples := last.get("samples"):
        made = f"{samples['epoch']} epochs, {number(last.get('env_steps', 0))} samples trained"
    else:
        made = (
            f"{number(last.get('env_steps', 0))} environment steps, "
            f"{number(last.get('agent_steps', 0))} agent steps"
        )
    console.print(
        f"\n[bold green]done[/] after {duration(last.get('seconds', 0))}: "
        f"{number(last.get('updates', 0))} updates, {made}",
        highlight=False,
    )
    if evaluations and evaluations[0]["updates"] != evaluations[-1]["updates"]:
        console.print(_evaluations_table(evaluations[0], evaluations[-1]))
        if message := best_message(evaluations, run.config().evaluation.best_metric):
            console.print(plain(message))
    elif last.get("return") is not None:
        console.print(plain(f"return of the last episodes: {number(last['return'])}"))
    for tracker in run.config().tracking.services:
        state = run.read_json(f"tracking/{tracker}.json")
        where = state.get("trouble") or state.get("where") or "nothing was sent"
        print_plain(console, f"{tracker}: {where}")
    if message := dropped_message(last):
        print_plain(console, message, "yellow")
    if deaths:
        console.print(plain(f"processes restarted: {deaths}; see {run.logs}", "yellow"))
    console.print(_next_steps(run), soft_wrap=True)


def _next_steps(run: RunFolder) -> Text:
    """Return commands for a complete run, with a word on each."""
    config = run.config()
    name = config.environment.name
    page = "curves, confusion and pictures" if config.supervised else "curves, baselines and paths"
    if_drawn = "" if name in DRAWN else ", if the environment can render itself"
    movie = (f"murmur render {run.path}", f"one episode as a moving picture{if_drawn}")
    next_steps = Text("\nnext:\n")
    for command, what in (
        (f"murmur report {run.path}", f"{page} on one page"),
        *([movie] if name in (*DRAWN, *DRAWING) else []),
        (f"murmur evaluate {run.path}", "metrics with confidence intervals"),
        (f"tensorboard --logdir {run.path}/tensorboard", "the same curves, interactively"),
    ):
        next_steps.append(f"  {command}", style="bold")
        next_steps.append(f"\n      {what}\n", style="dim")
    return next_steps
