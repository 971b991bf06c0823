"""`murmur train`: a training is prepared, shown while the supervisor runs it, and summed up."""

import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from murmur.doctor.machine import commit, describe_machine, versions
from murmur.env_service.adapters.frames import DRAWING
from murmur.env_service.pictures import DRAWN
from murmur.runs.child import ChildError
from murmur.runs.drops import dropped_message
from murmur.runs.interrupts import stopped_by_signals
from murmur.runs.live_view import TrainingView
from murmur.runs.run_folder import RunFolder
from murmur.runs.run_list import folder_size
from murmur.runs.scores import Metric, last_progress
from murmur.runs.settings import TASK, USUAL_PORTS, with_plugin_defaults
from murmur.runs.supervisor import StopRequested, Supervisor
from murmur.shared.config.cores import available_cores, choose
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.config.files import (
    Overrides,
    all_changes,
    changes_of,
    config_names,
    load,
    save,
)
from murmur.shared.config.text import without_secrets
from murmur.shared.process.errors import ConfigError, ResourceError
from murmur.shared.process.files import size_text, write_whole
from murmur.shared.process.process import process_began
from murmur.text import duration, number, plain, print_plain

Source = str | Mapping[str, Any]


@dataclass(frozen=True)
class Prepared:
    """A training that is ready to start.

    Attributes:
        config: the experiment, with workers and threads chosen for this machine.
        folder: folder of the run, locked by this process; the configuration is in it.
        resume: flag to continue from the last checkpoint.
        learners: number of learners that train together on this machine.
    """

    config: ExperimentConfig
    folder: RunFolder
    resume: bool
    learners: int


def prepare(
    config: Source | None,
    overrides: Overrides = (),
    *,
    run: Path | None,
    resume: bool,
    learners: int | None,
    command: str,
    environ: Mapping[str, str] | None = None,
) -> Prepared:
    """Check a training, then make and lock its folder; starts no process.

    Args:
        config: a path, a name, or sections; with `resume`: a name, a run's folder, or None.
        overrides: changes of the configuration, read more than once.
        run: folder of the run; None: a new folder, or with `resume` the newest run.
        resume: flag to continue a run.
        learners: number of learners; None: 1, or that of the resumed run.
        command: the user's command or call, for the run's command.json.
        environ: variables MURMUR__A__B=value; None: those of the process.

    Raises:
        MurmurError: for an error the user can fix.
    """
    if resume:
        if any(path == ["run", "start_from"] for path, _, _ in changes_of(overrides)):
            raise ConfigError(
                "run.start_from (--from) starts a new run, resuming continues one with its own "
                "weights; leave one out"
            )
        folder = run_to_resume(config, run, overrides)
        if not folder.has_checkpoint():
            raise ConfigError(
                f"run '{folder.path}' has no checkpoint to resume from; start it again: "
                f"{folder.again()}"
            )
        before = folder.read_json("command.json").get("learners")
        learners = learners or (before if isinstance(before, int) and before > 0 else 1)
        config = str(folder.path / "config.yaml")
    elif config is None:
        raise ConfigError("which configuration? `murmur config` lists those that come with murmur")
    learners = learners or 1
    settings = with_plugin_defaults(load(config, overrides, environ), TASK)
    if resume:
        paths = [path for path, _, _ in all_changes(overrides, environ)]
        settings = _with_auto_ports(settings, paths)
    settings = settings.changed(choose(settings, available_cores(), learners=learners))
    server = settings.env_server
    # A worker of a sync run has one learner, that of a source one session.
    one = settings.learner.pipeline == "sync" or settings.supervised
    sessions = server.num_workers * (1 if one else server.sessions_per_worker)
    if not settings.run.offline and sessions < learners:
        raise ConfigError(
            f"{learners} learners with env_server.num_workers={server.num_workers} leaves a "
            f"learner without a session; set env_server.num_workers={learners} or more"
        )
    if resume:
        folder.acquire()
    else:
        folder = RunFolder.create(settings, run)
    try:
        folder.logs.mkdir(exist_ok=True)
        save(settings, folder.config_file(resume=resume))
        if not resume:
            _write_command(folder, command, learners)
    except BaseException:
        folder.lock.release()
        raise
    return Prepared(settings, folder, resume, learners)


def _with_auto_ports(config: ExperimentConfig, changed: Sequence[list[Any]]) -> ExperimentConfig:
    """Return a resumed run's configuration with auto for usual ports that only its file sets.

    Args:
        config: configuration of the run, changed.
        changed: paths of keys that this command sets, of a whole section too.
    """
    usual: dict[str, None] = {}
    for key, port in USUAL_PORTS.items():
        section, name = key.split(".")
        is_set = [section] in changed or [section, name] in changed
        if getattr(getattr(config, section), name) == port and not is_set:
            usual[key] = None
    return config.changed(usual)


def run_to_resume(config: Source | None, run: Path | None, overrides: Overrides) -> RunFolder:
    """Find the run to resume: the given folder, else the configuration's newest run, or any."""
    if isinstance(config, Mapping):
        raise ConfigError(
            "a resumed run has its own config.yaml: name the run's folder, and give changes as "
            "overrides"
        )
    if run is None and config is not None and config not in config_names():
        run = Path(config) if Path(config).is_dir() else None
    if run is not None:
        return RunFolder.open(run)
    if config is None:
        return RunFolder.newest(Path("runs"))
    of_run = {".".join(p): value for p, value, _ in changes_of(overrides) if p[0] == "run"}
    wanted = load(config, of_run).run
    return RunFolder.newest(Path(wanted.directory), wanted.name)


def _write_command(run: RunFolder, command: str, learners: int) -> None:
    """Write command.json: how, where, when and by which process the run was started."""
    start = {
        "command": without_secrets(command),
        "pid": os.getpid(),
        "began": process_began(os.getpid()),
        "learners": learners,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": describe_machine(),
        "versions": versions(),
    }
    write_whole(run.path / "command.json", json.dumps(start, indent=1))


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
    name = plain(config.run.name, "bold")
    console.print("training", name, plain(f"in {run.path}"), soft_wrap=True)
    server = config.env_server
    inside = "" if config.supervised else f", environments in each: {server.envs_per_worker}"
    several = f"learners: {prepared.learners}, " if prepared.learners > 1 else ""
    source = f"workers: {server.num_workers}{inside}"
    if config.run.offline:
        source = f"no environments: learns from {config.dataset}"
    print_plain(
        console, f"{several}{source}, torch threads of the learner: {config.learner.num_threads}"
    )
    servers = [] if config.run.offline else ["env-server"]
    if config.evaluation.on and not config.supervised:
        servers.append("evaluator")
    view = TrainingView(config.run, console, Metric.parse(config.evaluation.best_metric).name)

    def take(record: dict[str, Any]) -> None:
        view.update(record)
        on_record(record)

    supervisor = Supervisor(
        run,
        resume=resume,
        host=config.learner.host,
        servers=servers,
        draws_itself=config.environment.name in DRAWING,
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
        saved = run.has_checkpoint()
        if failure := supervisor.stop_failure:
            lost = "what came since its last checkpoint" if saved else "all of it"
            raise ResourceError(
                f"the run stopped without a last checkpoint, {lost} is lost: {failure}. "
                f"{'Resume' if saved else 'Restart'} with: {run.again()}"
            ) from None
        began = "its first checkpoint" if supervisor.progressed else "it learned anything"
        how = "; resume" if saved else f" before {began}; restart"
        print_plain(console, f"\nstopped{how} with:  {run.again()}")
        if isinstance(error, KeyboardInterrupt):
            raise
        return
    except ChildError as error:
        logs = "\n".join(log.read_text(errors="replace") for log in run.logs.glob("*.log"))
        needed = "\nTraceback (" in f"\n{logs}" or str(run.logs) in str(error)
        if not (resume or needed or supervisor.progressed or run.has_checkpoint()):
            run.discard()  # a wrong option, of which the error says all: nothing began
        raise
    finally:
        if resume:
            run.config_file(resume=True).unlink(missing_ok=True)
        run.lock.release()
    print_end(run, supervisor.deaths, console)


def print_end(run: RunFolder, deaths: int, console: Console) -> None:
    """Print the results of a complete run and the commands to continue with.

    Args:
        run: the run's folder.
        deaths: number of times that a process was started again.
        console: console that prints the text.
    """
    config = run.config()
    last, evaluations = last_progress(run), run.records("evaluation")
    if samples := last.get("samples"):
        made = f"{samples['epoch']} epochs, {number(last.get('env_steps', 0))} samples trained"
    elif config.run.offline:
        made = f"{number(last.get('env_steps', 0))} rows of {config.dataset}"
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
        first, newest = evaluations[0], evaluations[-1]
        table = Table("metric", box=None, padding=(0, 3, 0, 0))
        for evaluation in (first, newest):
            table.add_column(f"evaluated after {number(evaluation['updates'])} updates")
        for name, result in newest["metrics"].items():
            before = first["metrics"].get(name, {}).get("mean")
            table.add_row(plain(name), plain(number(before)), plain(number(result["mean"])))
        console.print(table)
        metric = Metric.parse(config.evaluation.best_metric)
        values = {
            number(e["updates"]): e["metrics"][metric.name]["mean"]
            for e in evaluations
            if metric.name in e["metrics"]
        }
        if best := metric.best_name(values):  # of a supervised run another metric chose it
            found = number(values[best])
            console.print(plain(f"best.pt: {metric.name} {found}, after {best} updates"))
    elif last.get("return") is not None:
        console.print(plain(f"return of the last episodes: {number(last['return'])}"))
    for tracker in config.tracking.services:
        state = run.read_json(f"tracking/{tracker}.json")
        where = state.get("trouble") or state.get("where") or "nothing was sent"
        print_plain(console, f"{tracker}: {where}")
    if message := dropped_message(last):
        print_plain(console, message, "yellow")
    if deaths:
        console.print(plain(f"processes restarted: {deaths}; see {run.logs}", "yellow"))
    size = f"{run.path} takes {size_text(folder_size(run.path))}; `murmur runs` lists runs"
    print_plain(console, size, "dim")
    console.print(_next_steps(run, config), soft_wrap=True)


def _next_steps(run: RunFolder, config: ExperimentConfig) -> Text:
    """Return commands for a complete run, with a word on each."""
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
