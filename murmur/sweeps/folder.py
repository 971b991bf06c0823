"""A sweep's folder and its index.

runs/sweep-<name>-<timestamp>/
    sweep.yaml       what the sweep consists of
    sweep.json       the index: every run with its settings, its state and its scores
    configs/         <run>.yaml, the configuration that each run begins with
    logs/            <run>.log, what each run printed
    run.lock         locked by the process that runs the sweep
    <run>/           the folder of each run, like any that `murmur train` makes
"""

import contextlib
import glob
import itertools
import json
import logging
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from murmur.runs.run_folder import RunFolder
from murmur.shared.config.files import read_file
from murmur.shared.config.section import validate
from murmur.shared.config.text import comparable, one_line, plain_data, to_yaml
from murmur.shared.process.errors import ConfigError
from murmur.shared.process.files import make_folder, write_whole
from murmur.shared.process.run_lock import RunLock
from murmur.sweeps.spec import NO_SEARCH, SweepConfig, experiment

logger = logging.getLogger("murmur")

State = Literal["waiting", "running", "complete", "failed", "stopped", "pruned"]
ENDED = ("complete", "failed", "pruned")
INDEX = "sweep.json"
_LONGEST_NAME = 80  # characters of a run's folder


@dataclass
class SweepRun:
    """A run of a sweep, as the index has it.

    Attributes:
        name: name of its folder.
        config: configuration that it is made from.
        settings: settings of the sweep for it, run.seed among them.
        state: state of the run: waiting; running; complete; failed; stopped, before its end;
            pruned, in a search of 0.2.
        message: error of a failed run.
        env_steps: environment steps learned from.
        last, best: score of the last and of the best evaluation.
        minutes: minutes of training.
    """

    name: str
    config: str
    settings: dict[str, Any]
    state: State = "waiting"
    message: str = ""
    env_steps: int = 0
    last: float | None = None
    best: float | None = None
    minutes: float = 0.0


_RUNS = TypeAdapter(list[SweepRun])


@dataclass
class SweepFolder:
    """A sweep on the disk. Used by one thread.

    Attributes:
        path: folder of the sweep.
        parallel: number of runs at once; 0: as many as the machine holds.
        runs: all runs.
        lock: lock that this process holds while it runs the sweep.
    """

    path: Path
    parallel: int = 0
    runs: list[SweepRun] = field(default_factory=list)
    lock: RunLock = field(default_factory=lambda: RunLock(None))

    @classmethod
    def create(cls, spec: SweepConfig, path: Path | None = None) -> "SweepFolder":
        """Make the folder of a new sweep, with the configuration of every run.

        Nothing is written if one of them is wrong.

        Raises:
            ConfigError: for a mistake in a configuration, or if the folder holds a sweep already.
            ResourceError: if it cannot be written.
        """
        name = spec.name or Path(spec.configs[0]).stem
        stamp = time.strftime("%Y%m%d-%H%M%S")
        sweep = cls(path or Path(spec.directory) / f"sweep-{name}-{stamp}", spec.parallel)
        if (sweep.path / INDEX).exists():
            raise ConfigError(
                f"'{sweep.path}' holds a sweep already; continue it with `murmur sweep --resume "
                f"{sweep.path}`, or name another folder with --folder"
            )
        sweep.runs = _list_runs(spec)
        with _warnings_once():
            configs = [experiment(spec, r.config, r.settings, r.name) for r in sweep.runs]
        make_folder(sweep.path)
        sweep.lock = RunLock.acquire(sweep.path)
        for folder in (sweep.path / "configs", sweep.path / "logs"):
            make_folder(folder)
        write_whole(sweep.path / "sweep.yaml", to_yaml(plain_data(spec)))
        for run, config in zip(sweep.runs, configs, strict=True):
            write_whole(sweep.config_file(run), to_yaml(config))
        sweep.save()
        return sweep

    @classmethod
    def open(cls, path: Path, *, lock: bool = False) -> "SweepFolder":
        """Open the folder of a sweep that exists.

        Args:
            path: folder of the sweep.
            lock: flag to lock it, in order to run it.

        Raises:
            ConfigError: if there is no sweep in it, or to continue it needs Optuna.
            ResourceError: if another process runs it.
        """
        try:
            index = json.loads((path / INDEX).read_text())
            runs = _RUNS.validate_python(index["runs"])
        except OSError:
            raise ConfigError(
                f"'{path}' holds no sweep (no {INDEX}); `murmur sweep CONFIG --seeds 5` makes one"
            ) from None
        except (ValueError, KeyError, TypeError) as error:
            reason = " ".join(str(error).split())
            raise ConfigError(f"{path / INDEX} is no index of a sweep: {reason}") from None
        if lock and index.get("method") == "optuna":
            raise ConfigError(
                f"'{path}' is a search of murmur 0.2 by Optuna, which cannot be continued: "
                f"{NO_SEARCH}; `murmur compare` reads its runs"
            )
        data = read_file(path / "sweep.yaml", ())
        told = validate(SweepConfig, {k: data[k] for k in ("configs", "parallel") if k in data})
        return cls(path, told.parallel, runs, RunLock.acquire(path) if lock else RunLock(None))

    @classmethod
    def newest(cls, directory: Path) -> Path:
        """Find the folder of the newest sweep.

        Raises:
            ConfigError: if there is none.
        """
        found = list(directory.glob(f"*/{INDEX}"))
        if not found:
            raise ConfigError(f"no sweep under '{directory}'; give its folder")
        return max(found, key=lambda file: (file.parent / "sweep.yaml").stat().st_mtime).parent

    def save(self) -> None:
        """Write the index."""
        index = {
            "written": datetime.now(UTC).isoformat(timespec="seconds"),
            "method": "grid",
            "runs": [{**asdict(run), "settings": _shown(run.settings)} for run in self.runs],
        }
        write_whole(self.path / INDEX, json.dumps(index, indent=1))

    def folder_of(self, run: SweepRun) -> RunFolder:
        """Return the folder of a run."""
        return RunFolder(self.path / run.name)

    def config_file(self, run: SweepRun) -> Path:
        """Return the configuration that a run begins with."""
        return self.path / "configs" / f"{run.name}.yaml"

    def log_file(self, run: SweepRun) -> Path:
        """Return the file with a run's output."""
        return self.path / "logs" / f"{run.name}.log"


@contextlib.contextmanager
def _warnings_once() -> Iterator[None]:
    """Log a warning about the configuration once, not for each run."""
    seen: set[str] = set()

    def is_new(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        new = message not in seen
        seen.add(message)
        return new

    logger.addFilter(is_new)
    try:
        yield
    finally:
        logger.removeFilter(is_new)


def _shown(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as JSON values; those that JSON cannot say as in --set."""
    return {
        key: value if comparable(value) is value else one_line(value)
        for key, value in settings.items()
    }


def _list_runs(spec: SweepConfig) -> list[SweepRun]:
    """Return the runs of a sweep: all with the first seed, then the second."""
    points = [
        dict(zip(spec.vary, point, strict=True)) for point in itertools.product(*spec.vary.values())
    ]
    runs: dict[str, SweepRun] = {}
    for seed in spec.seeds:
        for config in spec.configs:
            for number, settings in enumerate(points):
                words = [config] if len(spec.configs) > 1 or not settings else []
                name = run_name([*words, *map(short_value, settings.values())], seed)
                if name in runs:  # cut, or two values of the same words
                    name = f"{number:03d}-{name}"[:_LONGEST_NAME]
                run = SweepRun(name, config, {**settings, "run.seed": seed})
                if runs.setdefault(name, run) is not run:
                    raise ConfigError(
                        f"two runs would both be called '{name}'; give configurations different "
                        "names and no value twice"
                    )
    return list(runs.values())


def run_name(words: list[str], seed: int) -> str:
    """Return a run folder's name: its varied values and its seed, safe in shells."""
    stems = [Path(word).stem if word.endswith((".yaml", ".yml")) else word for word in words]
    text = re.sub(r"[^A-Za-z0-9.+_-]+", "-", "-".join(stems)).strip("-.")
    return f"{text[:_LONGEST_NAME]}-seed-{seed}".lstrip("-")


def short_value(value: object) -> str:
    """Shorten a varied value to a few characters: of a plug-in its name."""
    if isinstance(value, Mapping):
        return str(value.get("name") or "-".join(f"{k}-{short_value(v)}" for k, v in value.items()))
    if isinstance(value, list | tuple):
        return "x".join(map(short_value, value))
    return f"{value:g}" if isinstance(value, float) else str(value).lower()


def find_runs(targets: Iterable[str]) -> tuple[list[RunFolder], list[str]]:
    """Return the runs at these paths, and notices.

    Args:
        targets: folders of runs or of sweeps, folders that hold them, or patterns with *, ? or [.

    Returns:
        runs, each once; a line for each run of a sweep that has no folder: it failed, or waits.

    Raises:
        ConfigError: if a path means no run.
    """
    found: dict[Path, RunFolder] = {}
    missing: list[str] = []
    for target in targets:
        paths = [Path(target)]
        if not paths[0].exists() and glob.has_magic(target):
            paths = sorted(map(Path, glob.glob(target)))
        runs = [run for path in paths for run in _runs_in(path, missing)]
        if not runs and not missing:
            raise ConfigError(
                f"'{target}' holds no runs; give folders of runs or of sweeps (`murmur runs` lists "
                "them)"
            )
        found |= {run.path.resolve(): run for run in runs}
    return list(found.values()), missing


def _runs_in(path: Path, missing: list[str]) -> list[RunFolder]:
    """Return the runs in a folder; `missing` takes a line for each run without a folder."""
    if (path / INDEX).is_file():
        sweep = SweepFolder.open(path)
        runs = []
        for run in sweep.runs:
            folder = sweep.folder_of(run)
            if (folder.path / "config.yaml").is_file():
                runs.append(folder)
            else:
                missing.append(f"{run.name}: {run.message or run.state}")
        return runs
    if (path / "config.yaml").is_file():
        return [RunFolder(path)]
    inside = sorted([*path.glob("*/config.yaml"), *path.glob(f"*/{INDEX}")])
    return [run for file in inside for run in _runs_in(file.parent, missing)]
