"""Send a run to W&B and MLflow: a process beside the learner for each, and what it sends.

    python -m murmur.learner_service.telemetry.tracking TRACKER RUN TRACKING_CONFIG_AS_JSON

The process ends with its standard input, which the learner holds; "end" before it says: in order.
"""

import contextlib
import fcntl
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from murmur.learner_service.telemetry.tracker_clients import (
    MlflowClient,
    Point,
    TrackerClient,
    WandbClient,
)
from murmur.shared.config.experiment import TRACKERS, TrackingConfig
from murmur.shared.config.extras import missing_advice
from murmur.shared.config.plugins import plugin_failures
from murmur.shared.config.text import comparable, one_line, parse_yaml, without_secrets
from murmur.shared.process.errors import ConfigError, MurmurError, ResourceError
from murmur.shared.process.files import make_folder, read_json, write_whole
from murmur.shared.process.process import Backoff, configure_logging, logger

_BLOCK = 1 << 20  # bytes of progress.jsonl that are read at once
_KINDS = ("progress", "evaluation")
_PICTURES = (".gif", ".mp4", ".png")
_POLL_S = 2.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 15.0, 600.0  # between attempts while the tracker fails
_CLIENTS: dict[str, type[TrackerClient]] = {"wandb": WandbClient, "mlflow": MlflowClient}


def client_of(tracker: str) -> type[TrackerClient]:
    """Return the client of a tracker: murmur's, or that of an installed package.

    Raises:
        ConfigError: if there is none, or it lacks what a TrackerClient has.
    """
    if tracker in _CLIENTS:
        return _CLIENTS[tracker]
    for entry in entry_points(group=TRACKERS, name=tracker):
        with plugin_failures(f"tracker '{tracker}'"):
            client: type[TrackerClient] = entry.load()
        wanted = ("id_is_ours", "store", "configure", "log", "send_file", "finish")
        if missing := [name for name in wanted if not hasattr(client, name)]:
            raise ConfigError(
                f"tracker '{tracker}' ({entry.value}) lacks {', '.join(missing)}; docs/tracking.md "
                "says what a tracker has"
            )
        return client
    raise ConfigError(f"no tracker '{tracker}' is installed here")


def require_trackers(names: Iterable[str]) -> None:
    """Check that the libraries of trackers are installed.

    Args:
        names: names of the trackers, see TrackingConfig.services.

    Raises:
        ConfigError: naming the extra.
    """
    for name in names:
        if name not in _CLIENTS:
            client_of(name)
            continue
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
        torn: lines of progress.jsonl that are not whole, since a learner was killed in them.
        best: the best evaluation's score; None before the first.
        failures: attempts that failed.
        trouble: message of the latest failure; "" after a success.
        media: time at which each picture sent was written, by its path in the run's folder.
    """

    run_id: str = ""
    store: str = ""
    where: str = ""
    offset: int = 0
    torn: int = 0
    best: float | None = None
    failures: int = 0
    trouble: str = ""
    media: dict[str, float] = field(default_factory=dict)

    @classmethod
    def load(cls, file: Path) -> "State":
        """As it was saved; a new one if there is none."""
        data = read_json(file)
        return cls(**{f.name: data[f.name] for f in fields(cls) if f.name in data})


class Forwarder:
    """Sends what a run's folder has and its tracker has not. Used by one thread.

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
        self._progress, self._config_file = run_dir / "progress.jsonl", run_dir / "config.yaml"
        self._file = run_dir / "tracking" / f"{tracker}.json"
        self.state = State.load(self._file)
        self.points = self.files = 0
        self._client: TrackerClient | None = None
        self._sent_s = -float("inf")  # training time of the last progress point
        self._env_steps = 0
        self._best_metric = "return"

    @contextlib.contextmanager
    def holding(self, *, wait: bool) -> Iterator[None]:
        """Hold the tracker of this run: only one process may.

        Args:
            wait: whether to wait for another process that holds it.

        Raises:
            ResourceError: if another process holds it.
        """
        make_folder(self._file.parent)
        with self._file.with_suffix(".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                raise ResourceError(
                    f"another process sends {self._run_dir} to {self._tracker}; wait for the end "
                    "of its training"
                ) from None
            self.state = State.load(self._file)
            yield

    @property
    def unsent_bytes(self) -> int:
        """Bytes of progress.jsonl that the tracker lacks."""
        try:
            return max(0, self._progress.stat().st_size - self.state.offset)
        except OSError:
            return 0

    @property
    def has_news(self) -> bool:
        """Whether there is anything to send: lines, pictures, or all of it to another store."""
        store = client_of(self._tracker).store(self._run_dir, self._config)
        moved = self.state.offset > 0 and store != self.state.store
        return moved or bool(self.unsent_bytes or self._new_media())

    def send(self) -> None:
        """Send what is new. Raises whatever the tracker's client raises; then call it again."""
        if not self._config_file.is_file() or not self.has_news:
            return
        client = self._client or self._open()
        while lines := self._next_lines():
            records = [record for line in lines if (record := _record(line)) is not None]
            points = [point for record in records if (point := self._point(record)) is not None]
            if points:
                client.log(points)
            self.state.offset += sum(map(len, lines))
            self.state.torn += len(lines) - len(records)
            self.points += len(points)
            self._save()
        for name, written in self._new_media().items():
            client.send_file(self._run_dir / name, self._env_steps)
            self.state.media[name] = written
            self.files += 1
            self._save()
        if self.state.trouble:
            logger.info("%s: sends again", self._tracker)
            self.state.trouble = ""
            self._save()

    def finish(self, *, complete: bool) -> None:
        """Send the rest and close the run in the tracker. Raises as `send`."""
        self.send()
        if self._client is not None:
            client, self._client = self._client, None
            self._configure(client)  # the learner notes there what it chose
            client.finish(complete=complete)

    def note(self, error: Exception) -> None:
        """Count a failure of the tracker; say so if the last attempt succeeded."""
        message = " ".join(f"{type(error).__name__}: {error}".split())
        if not self.state.trouble:
            logger.warning(
                "%s: %s; training continues, and what is recorded meanwhile is sent later",
                self._tracker,
                message,
            )
        self._client = None  # opened again: a client may be of no use after an error
        self.state.failures, self.state.trouble = self.state.failures + 1, message
        with contextlib.suppress(ResourceError):
            self._save()

    def _open(self) -> TrackerClient:
        """Open the tracked run, or that of before; all is sent again to another store."""
        opened = client_of(self._tracker)
        store = opened.store(self._run_dir, self._config)
        known = self.state
        run_id = known.run_id if opened.id_is_ours or store == known.store else ""
        self._client = client = opened(self._run_dir, self._config, run_id)
        if not store or store != known.store:
            self.state = State(failures=known.failures, trouble=known.trouble)
            self._sent_s = -float("inf")
        self.state.run_id, self.state.store = client.run_id, store
        self.state.where = client.where
        self._save()
        self._configure(client)
        logger.info("%s: %s", self._tracker, client.where)
        return client

    def _configure(self, client: TrackerClient) -> None:
        config = parse_yaml(self._config_file.read_text(), str(self._config_file))
        self._best_metric = config.get("evaluation", {}).get("best_metric", "return")
        client.configure(flattened(without_secrets(config)))

    def _save(self) -> None:
        write_whole(self._file, json.dumps(asdict(self.state), indent=1))

    def _next_lines(self) -> list[bytes]:
        """Return the next whole lines of progress.jsonl, about a block of them; none at its end."""
        with self._progress.open("rb") as file:
            file.seek(self.state.offset)
            return [line for line in file.readlines(_BLOCK) if line.endswith(b"\n")]

    def _point(self, line: Mapping[str, Any]) -> Point | None:
        """Return the point to send of a line; None of a progress line that follows too soon."""
        if line.get("kind") not in _KINDS:
            return None
        self._env_steps = line["env_steps"]
        values = scalars_of(line) | {"updates": line["updates"], "seconds": line["seconds"]}
        if line["kind"] == "evaluation":
            values |= self._best(line["metrics"])
        elif 0 <= line["seconds"] - self._sent_s < self._config.every_s:
            return None
        else:
            self._sent_s = line["seconds"]
        return Point(line["time"], line["env_steps"], values)

    def _best(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        """Return the best score of the evaluations up to this one, as best/<metric>."""
        name = self._best_metric.removeprefix("-")
        if name not in metrics:
            return {}
        mean = float(metrics[name]["mean"])
        pick = min if self._best_metric.startswith("-") else max
        self.state.best = mean if self.state.best is None else pick(self.state.best, mean)
        return {f"best/{name}": self.state.best}

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


def _record(line: bytes) -> dict[str, Any] | None:
    """Parse a line of progress.jsonl; None if a crash tore it."""
    try:
        record: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    return record


def scalars_of(line: Mapping[str, Any]) -> dict[str, float]:
    """Figures of a line of progress.jsonl by name, such as episode/return or update/entropy.

    Args:
        line: line of kind "progress" or "evaluation".
    """
    if line["kind"] == "evaluation":
        return {f"evaluation/{name}": float(of["mean"]) for name, of in line["metrics"].items()}
    found = {"episode/return": line["return"]}
    found |= {f"episode/{name}": value for name, value in line["metrics"].items()}
    found |= {f"update/{name}": value for name, value in line["losses"].items()}
    found |= {f"curriculum/{name}": x["number"] for name, x in line.get("curriculum", {}).items()}
    found["rate/agent_steps_per_s"] = line["agent_steps_per_s"]
    found["rate/policy_lag"] = line["policy_lag"]
    found |= {f"device/{name}": value for name, value in line["device"].items()}
    return {name: float(value) for name, value in found.items() if value is not None}


def flattened(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A configuration by dotted names: {"run": {"seed": 1}} -> {"run.seed": 1}.

    Lists, and empty sections, become JSON, or YAML where they hold dates, sets or bytes.
    """
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= flattened(value, f"{prefix}{key}.")
        elif value is None or isinstance(value, str | int | float):
            flat[f"{prefix}{key}"] = value
        else:
            as_json = comparable(value) is value
            flat[f"{prefix}{key}"] = json.dumps(value) if as_json else one_line(value)
    return flat


class TrackerProcess:
    """Process that sends a run to one tracker. It cannot end, block or slow the learner.

    Used by the thread that writes the log.

    Attributes:
        name: name of the tracker.
    """

    def __init__(self, run_dir: Path, name: str, config: TrackingConfig) -> None:
        """Start the process, unless the machine refuses: then a warning is logged.

        Args:
            run_dir: run's folder.
            name: name of the tracker, one of TrackingConfig.services.
            config: destination of the run.
        """
        self.name = name
        self._run_dir, self._config = run_dir, config
        self._process: subprocess.Popen[bytes] | None = None
        self._deadline = float("inf")  # of `wait`, set by `end`; monotonic clock, s
        options = [name, str(run_dir), config.model_dump_json()]
        command = [sys.executable, "-P", "-m", __name__, *options]
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0)
        except OSError as error:
            logger.warning("%s: cannot start its process: %s", name, error)

    def look(self) -> None:
        """Log once that the process has died."""
        if self._process is not None and self._process.poll() is not None:
            code, rest = self._process.returncode, self._rest()
            logger.warning(
                "%s: its process ended with %d; training continues. %s", self.name, code, rest
            )
            self._process = None

    def forwarder(self) -> Forwarder:
        """Read from the run's folder what has been sent so far. Any thread may call it."""
        return Forwarder(self._run_dir, self.name, self._config)

    def end(self) -> None:
        """Ask the process to send the rest within tracking.finish_s from now, then to end."""
        self._deadline = time.monotonic() + self._config.finish_s
        if self._process is not None:
            assert self._process.stdin is not None
            with self._process.stdin, contextlib.suppress(OSError):
                self._process.stdin.write(b"end")

    def wait(self) -> None:
        """Wait after `end` until the process has ended, or kill it; log how much is not sent."""
        if self._process is None:
            return
        try:
            self._process.wait(max(0.0, self._deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if rest := self._rest():
            logger.warning("%s: %s", self.name, rest)
        self._process = None

    def _rest(self) -> str:
        """Say how much is not sent, and how to send it; "" if all is sent."""
        if not (unsent := self.forwarder().unsent_bytes):
            return ""
        return (
            f"{unsent} bytes of progress.jsonl are not sent; `murmur track {self._run_dir}` "
            "sends them"
        )


def main() -> int:
    """Send a run to one tracker until its learner ends; returns the exit code."""
    tracker, run_dir, settings = sys.argv[1:]
    configure_logging(f"tracker {tracker}")
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the learner too, which then says so
        signal.signal(number, signal.SIG_IGN)
    os.nice(10)  # training comes first
    forwarder = Forwarder(Path(run_dir), tracker, TrackingConfig.model_validate_json(settings))
    try:
        with forwarder.holding(wait=True):  # of a learner that died: its tracker may still send
            _follow(forwarder)
    except MurmurError as error:
        logger.warning("%s", error)
        return 1
    return 0


def _follow(forwarder: Forwarder) -> None:
    """Send what is new, every two seconds, until standard input ends."""
    backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S, lambda: 1.0)
    due, over = 0.0, False
    while not over:
        over = bool(select.select([sys.stdin], [], [], _POLL_S)[0])
        if not over and time.monotonic() < due:
            continue
        try:
            if over:
                forwarder.finish(complete=sys.stdin.read() == "end")
            else:
                forwarder.send()
            backoff.reset()
        except Exception as error:  # a tracker may raise anything: it must not end training
            forwarder.note(error)
            due = time.monotonic() + backoff.pause_s()


if __name__ == "__main__":
    raise SystemExit(main())
