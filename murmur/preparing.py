"""What is to be trained, and where: checked, and the run's folder made and locked."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from murmur.machine import commit, describe_machine, versions
from murmur.run_folder import RunFolder
from murmur.settings import completed_here
from shared.config import ExperimentConfig, Overrides, config_names, load
from shared.config_files import changes_of
from shared.cores import with_threads, with_workers
from shared.errors import ConfigError
from shared.files import write_whole

Source = str | Mapping[str, Any]


@dataclass(frozen=True)
class Prepared:
    """A training that can start.

    Attributes:
        config: the experiment, with what was chosen for this machine.
        folder: of the run, locked by this process; its configuration is written.
        resume: whether to go on from the last checkpoint.
        learners: that learn together on this machine.
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
    """Check a training and make or lock its folder; nothing is started.

    Args:
        config: a path, a name, or sections; to resume: a name or a run's folder, or nothing.
        overrides: change it.
        run: the run's folder; None: a new one, or to resume the newest.
        resume: go on with a run.
        learners: that learn together; None: 1, or as many as the resumed run had.
        command: how the user started it, for the run's command.json.
        environ: variables MURMUR__A__B=value; None: the process's.

    Raises:
        MurmurError: for a mistake of the user's; before anything is written, if it can be found.
    """
    if not isinstance(overrides, str | Mapping):
        overrides = list(overrides)  # it is read more than once
    if resume and any(path == ["run", "start_from"] for path, _, _ in changes_of(overrides)):
        raise ConfigError(
            "run.start_from (--from) starts a new run, resuming continues one with its own "
            "weights; leave one out"
        )
    if not resume:
        if config is None:
            raise ConfigError(
                "which configuration? `murmur config` lists those that come with murmur"
            )
        learners = learners or 1
        settings = _for_this_machine(load(config, overrides, environ), learners)
        folder = RunFolder.create(settings, run)
    else:
        folder = run_to_resume(config, run, overrides)
        if not folder.has_checkpoint():
            raise ConfigError(
                f"'{folder.path}' has no checkpoint to go on from; start it anew: {folder.again()}"
            )
        before = folder.read_json("command.json").get("learners")
        learners = learners or (before if isinstance(before, int) and before > 0 else 1)
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


def _for_this_machine(config: ExperimentConfig, learners: int) -> ExperimentConfig:
    """The configuration with its environment's defaults, and this machine's workers and threads.

    Raises:
        ConfigError: for a mistake in it, or if a learner would have no session: all would wait.
    """
    config = with_workers(with_threads(completed_here(config), learners), learners)
    server = config.env_server
    each = 1 if config.learner.pipeline == "sync" else server.sessions_per_worker
    if server.num_workers * each < learners:
        raise ConfigError(
            f"{learners} learners with env_server.num_workers={server.num_workers} leaves a "
            f"learner without environments; set env_server.num_workers={learners} or more"
        )
    return config


def run_to_resume(config: Source | None, run: Path | None, overrides: Overrides) -> RunFolder:
    """What to go on with: the folder that is given, else the newest run, of CONFIG or of all."""
    if isinstance(config, Mapping):
        raise ConfigError(
            "a resumed run has its own config.yaml: name the run's folder, and give what changes "
            "as overrides"
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
    """Record how, where, when and by which process the run was started."""
    start = {
        "command": command,
        "pid": os.getpid(),
        "learners": learners,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": describe_machine(),
        "versions": versions(),
    }
    write_whole(run.path / "command.json", json.dumps(start, indent=1))
