"""Sends what a run's folder has and its tracker has not."""

import contextlib
import fcntl
import importlib.util
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from learner_service.telemetry.scalars import scalars_of
from learner_service.telemetry.tracking.mlflow_sink import MlflowSink
from learner_service.telemetry.tracking.sink import Point
from learner_service.telemetry.tracking.wandb_sink import WandbSink
from shared.config.experiment import TrackingConfig
from shared.config.extras import missing_advice
from shared.config.text import comparable, one_line, parse_yaml, without_secrets
from shared.process.errors import ConfigError, ResourceError
from shared.process.files import make_folder, read_json, write_whole
from shared.process.process import logger

_BLOCK = 1 << 20  # bytes of progress.jsonl that are read at once
_KINDS = ("progress", "evaluation")
_PICTURES = (".gif", ".mp4", ".png")
_SINKS: dict[str, type[WandbSink | MlflowSink]] = {"wandb": WandbSink, "mlflow": MlflowSink}


def require_trackers(names: Iterable[str]) -> None:
    """Check that the libraries of trackers are installed.

    Args:
        names: names of the trackers, see TrackingConfig.services.

    Raises:
        ConfigError: naming the extra.
    """
    for name in names:
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:  # a folder of that name is no library
            raise ConfigError(f"tracking.loggers: {name}: {missing_advice(name, name)}")


@dataclass
class State:
    """Progress of a tracker; tracking/<tracker>.json in the run's folder.

    Attributes:
        run_id: the tracked run's id in the tracker; "" before it is opened.
        store: name of the store that holds its points.
        where: an address or folder at which people find it.
        offset: bytes of progress.jsonl that were sent.
        points: points sent.
        torn: lines of progress.jsonl that are not whole, since a learner was killed in them.
        failures: attempts that failed.
        trouble: message of the latest failure; "" after a success.
        media: time at which each picture sent was written, by its path in the run's folder.
    """

    run_id: str = ""
    store: str = ""
    where: str = ""
    offset: int = 0
    points: int = 0
    torn: int = 0
    failures: int = 0
    trouble: str = ""
    media: dict[str, float] = field(default_factory=dict)

    @classmethod
    def load(cls, file: Path) -> "State":
        """As it was saved; a new one if there is none."""
        data = read_json(file)
        return cls(**{f.name: data[f.name] for f in fields(cls) if f.name in data})


class Forwarder:
    """Sends one run to one tracker. Used by one thread; only one process may hold a tracker.

    Attributes:
        state: progress of the tracker.
        points: number of points sent by this forwarder.
        files: number of files sent by this forwarder.
    """

    def __init__(self, run_dir: Path, tracker: str, config: TrackingConfig) -> None:
        """Continue where the last forwarder of this run and tracker stopped."""
        self._run_dir = run_dir
        self._tracker = tracker
        self._config = config
        self._progress = run_dir / "progress.jsonl"
        self._file = run_dir / "tracking" / f"{tracker}.json"
        self.state = State.load(self._file)
        self.points = self.files = 0
        self._sink: WandbSink | MlflowSink | None = None
        self._configured = 0.0  # when the configuration that was sent was written
        self._sent_s = -float("inf")  # training time of the last progress point
        self._held: Point | None = None  # came too soon after it
        self._env_steps = 0

    @contextlib.contextmanager
    def holding(self, patience_s: float) -> Iterator[None]:
        """Hold the tracker of this run.

        Args:
            patience_s: seconds to wait for another process that holds it.

        Raises:
            ResourceError: if it still does.
        """
        make_folder(self._file.parent)
        deadline = time.monotonic() + patience_s
        with self._file.with_suffix(".lock").open("w") as lock:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise ResourceError(
                            f"another process sends {self._run_dir} to {self._tracker}; wait for "
                            "the end of its training"
                        ) from None
                    time.sleep(0.1)
            self.state = State.load(self._file)
            yield

    @property
    def unsent_lines(self) -> int:
        """Lines of progress.jsonl that the tracker lacks."""
        count = 0
        with contextlib.suppress(OSError), self._progress.open("rb") as file:
            file.seek(self.state.offset)
            while block := file.read(_BLOCK):
                count += block.count(b"\n")
        return count

    @property
    def unsent_bytes(self) -> int:
        """Bytes of progress.jsonl that the tracker lacks."""
        try:
            return max(0, self._progress.stat().st_size - self.state.offset)
        except OSError:
            return 0

    @property
    def has_news(self) -> bool:
        """Whether there is anything to send."""
        if self._sink is not None or self.unsent_lines or self._new_media():
            return True
        return self.state.points > 0 and self._moved

    @property
    def _moved(self) -> bool:
        """Whether the points that were sent are not where the configuration says."""
        return _SINKS[self._tracker].store(self._run_dir, self._config) != self.state.store

    def send(self) -> None:
        """Send what is new. Raises whatever the tracker's client raises; then call it again."""
        config = self._run_dir / "config.yaml"
        if not config.is_file() or not self.has_news:
            return
        sink = self._sink or self._open()
        if (written := config.stat().st_mtime) != self._configured:
            sink.configure(flattened(without_secrets(_configuration(config))))
            self._configured = written
        while records := self._read():
            end, lines, torn = records
            points = [point for line in lines if (point := self._point(line))]
            if points:
                sink.log(points)
            self.state.offset, self.state.torn = end, self.state.torn + torn
            self._count(len(points))
        for name, written in self._new_media().items():
            sink.send_file(self._run_dir / name, self._env_steps)
            self.state.media[name], self.files = written, self.files + 1
            self._save()
        if self.state.trouble:
            logger.info("%s: sends again", self._tracker)
            self.state.trouble = ""
            self._save()

    def finish(self, *, complete: bool) -> None:
        """Send the rest and close the run in the tracker. Raises as `send`."""
        self.send()
        if self._sink is None:
            return
        if self._held is not None:
            self._sink.log([self._held])
            self._held = None
            self._count(1)
        sink, self._sink = self._sink, None
        sink.finish(self._best(), complete=complete)

    def note(self, error: Exception) -> None:
        """Count a failure of the tracker; say so if the last attempt succeeded."""
        message = " ".join(f"{type(error).__name__}: {error}".split())
        if not self.state.trouble:
            logger.warning(
                "%s: %s; training continues, and what is recorded meanwhile is sent later",
                self._tracker,
                message,
            )
        self._sink = None  # opened again: a client may be of no use after an error
        self.state.failures, self.state.trouble = self.state.failures + 1, message
        with contextlib.suppress(ResourceError):
            self._save()

    def _open(self) -> WandbSink | MlflowSink:
        state, opened = self.state, _SINKS[self._tracker]
        store = opened.store(self._run_dir, self._config)
        run_id = state.run_id if opened.id_is_ours or store == state.store else ""
        self._sink = sink = opened(self._run_dir, self._config, run_id)
        if not store or store != state.store:
            state.offset = 0
            state.points = 0
            state.torn = 0
            state.media = {}
            self._sent_s, self._held = -float("inf"), None
        state.run_id = sink.run_id
        state.where = sink.where
        state.store = store
        self._configured = 0.0
        self._save()
        logger.info("%s: %s", self._tracker, state.where)
        return sink

    def _count(self, points: int) -> None:
        self.state.points, self.points = self.state.points + points, self.points + points
        self._save()

    def _save(self) -> None:
        write_whole(self._file, json.dumps(asdict(self.state), indent=1))

    def _read(self) -> tuple[int, list[dict[str, Any]], int] | None:
        """The offset behind the next lines, the whole ones, and how many a crash tore.

        None if there are none.
        """
        with self._progress.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(min(self.state.offset, size))
            block = file.read(_BLOCK)
        whole = block[: block.rfind(b"\n") + 1]
        if not whole:
            return None
        texts, lines = whole.splitlines(), []
        for text in texts:
            with contextlib.suppress(ValueError):  # torn by a crash: the rest is whole
                lines.append(json.loads(text))
        return self.state.offset + len(whole), lines, len(texts) - len(lines)

    def _point(self, line: Mapping[str, Any]) -> Point | None:
        """Return the point to send of a line; None of a progress line that follows too soon."""
        if line.get("kind") not in _KINDS:
            return None
        self._env_steps = line["env_steps"]
        clocks = {"updates": line["updates"], "seconds": line["seconds"]}
        point = Point(line["time"], line["env_steps"], scalars_of(line) | clocks)
        if line["kind"] == "evaluation":
            return point
        if 0 <= line["seconds"] - self._sent_s < self._config.every_s:
            self._held = point
            return None
        self._sent_s, self._held = line["seconds"], None
        return point

    def _new_media(self) -> dict[str, float]:
        """Pictures that were written since they were sent, and when."""
        if not self._config.media:
            return {}
        patterns = "*.*", "evaluations/*.png", "figures/*.png"
        found = [path for pattern in patterns for path in self._run_dir.glob(pattern)]
        times = {
            str(path.relative_to(self._run_dir)): path.stat().st_mtime
            for path in sorted(found)
            if path.suffix in _PICTURES
        }
        return {name: at for name, at in times.items() if self.state.media.get(name) != at}

    def _best(self) -> dict[str, float]:
        """The best evaluation's score, as best/<metric>; empty without evaluations."""
        config = _configuration(self._run_dir / "config.yaml")
        wanted = config.get("evaluation", {}).get("best_metric", "return")
        name = wanted.removeprefix("-")
        means = []
        with self._progress.open() as file:
            for text in file:
                if '"kind": "evaluation"' not in text:
                    continue
                with contextlib.suppress(ValueError, KeyError):
                    means.append(json.loads(text)["metrics"][name]["mean"])
        pick = min if wanted.startswith("-") else max
        return {f"best/{name}": pick(means)} if means else {}


def _configuration(file: Path) -> dict[str, Any]:
    """The sections of a run's config.yaml."""
    data: dict[str, Any] = parse_yaml(file.read_text(), str(file))
    return data


def _list_text(value: object) -> str:
    """JSON, or YAML in one line for what JSON cannot say."""
    return json.dumps(value) if comparable(value) is value else one_line(value)


def flattened(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A configuration by dotted names: {"run": {"seed": 1}} -> {"run.seed": 1}.

    Lists, and empty sections, become JSON, or YAML where they hold dates, sets or bytes.
    """
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= flattened(value, f"{prefix}{key}.")
        else:
            plain = value is None or isinstance(value, str | int | float)
            flat[f"{prefix}{key}"] = value if plain else _list_text(value)
    return flat
