"""Checks of a training before it starts: its configuration, its folder, this machine."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from murmur.doctor.machine import commit, describe_machine, versions
from murmur.runs.run_folder import RunFolder
from murmur.runs.settings import TASK, resolve
from shared.config.cores import with_threads, with_workers
from shared.config.experiment import ExperimentConfig
from shared.config.files import Overrides, changes_of, config_names, load
from shared.config.text import without_secrets
from shared.process.errors import ConfigError
from shared.process.files import write_whole
from shared.process.process import process_began

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
        overrides: changes of the configuration.
        run: folder of the run; None: a new folder, or with `resume` the newest run.
        resume: flag to continue a run.
        learners: number of learners; None: 1, or that of the resumed run.
        command: the user's command or call, for the run's command.json.
        environ: variables MURMUR__A__B=value; None: those of the process.

    Raises:
        MurmurError: for an error the user can fix.
    """
    if not isinstance(overrides, str | Mapping):
        overrides = list(overrides)  # it is read more than once
    if not resume:
        if config is None:
            raise ConfigError(
                "which configuration? `murmur config` lists those that come with murmur"
            )
        learners = learners or 1
        settings = _for_this_machine(load(config, overrides, environ), learners)
        folder = RunFolder.create(settings, run)
    else:
        _refuse_other_weights(overrides)
        folder = run_to_resume(config, run, overrides)
        learners = _learners_of(folder, learners)
        whole = load(str(folder.path / "config.yaml"), overrides, environ)
        settings = _for_this_machine(whole, learners)
        folder.acquire()
    try:
        folder.logs.mkdir(exist_ok=True)
        folder.write_config(settings, resume=resume)
        if not resume:
            _write_command(folder, command, learners)
    except BaseException:
        folder.lock.release()
        raise
    return Prepared(settings, folder, resume, learners)


def _refuse_other_weights(overrides: Overrides) -> None:
    """Refuse other initial weights for a run that is resumed.

    Raises:
        ConfigError: if it is to start from others.
    """
    if any(path == ["run", "start_from"] for path, _, _ in changes_of(overrides)):
        raise ConfigError(
            "run.start_from (--from) starts a new run, resuming continues one with its own "
            "weights; leave one out"
        )


def _learners_of(folder: RunFolder, wanted: int | None) -> int:
    """Return the number of learners of a resumed run: as wanted, else as before.

    Raises:
        ConfigError: if it has no checkpoint.
    """
    if not folder.has_checkpoint():
        raise ConfigError(
            f"run '{folder.path}' has no checkpoint to resume from; start it again: "
            f"{folder.again()}"
        )
    before = folder.read_json("command.json").get("learners")
    return wanted or (before if isinstance(before, int) and before > 0 else 1)


def _for_this_machine(config: ExperimentConfig, learners: int) -> ExperimentConfig:
    """Complete the configuration: its environment's defaults, workers and threads for this machine.

    Raises:
        ConfigError: for an invalid option, or if a learner would have no session.
    """
    config = with_workers(with_threads(resolve(config, TASK), learners), learners)
    server = config.env_server
    # A worker of a sync run has one learner, that of a source one session.
    one = config.learner.pipeline == "sync" or config.supervised
    each = 1 if one else server.sessions_per_worker
    if server.num_workers * each < learners:
        raise ConfigError(
            f"{learners} learners with env_server.num_workers={server.num_workers} leaves a "
            f"learner without a session; set env_server.num_workers={learners} or more"
        )
    return config


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
