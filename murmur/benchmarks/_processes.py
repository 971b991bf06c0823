"""A learner and an environment server as real child processes, measured from outside."""

import json
import re
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import psutil
from prometheus_client.parser import text_string_to_metric_families

from murmur.runs.child import child_environment, murmur_command
from murmur.shared.config.text import to_yaml
from murmur.shared.wire.credentials import Role

_START_S = 120.0
_STOP_S = 30.0


@dataclass
class Snapshot:
    """Counters at one moment.

    Attributes:
        wall_s: time in time.monotonic() seconds.
        learner_cpu_s: CPU seconds of the learner.
        workers_cpu_s: CPU seconds of the environment server and its workers.
        metrics: the learner's Prometheus samples; histograms as "<name>_bucket" -> le -> count.
        states: seconds of the learner's threads by (thread, state), see docs/idle-gpu.md.
        series: number of samples on the learner's metrics page.
    """

    wall_s: float
    learner_cpu_s: float
    workers_cpu_s: float
    metrics: dict[str, float]
    buckets: dict[str, dict[float, float]]
    states: dict[tuple[str, str], float]
    series: int


class Processes:
    """`murmur learner` and `murmur env-server` on this machine, in a temporary folder.

    Attributes:
        address: host:port of the learner, once it listens.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        credentials: Path | None = None,
        *,
        servers: Sequence[Role] = ("environment",),
        start_s: float = _START_S,
    ) -> None:
        """Prepare to run an experiment.

        Args:
            config: content of a configuration file.
            credentials: folder written by `murmur certs`; None: plain text.
            servers: environment servers to start: for training, for evaluations ("evaluator").
            start_s: longest time [s] until the learner listens.
        """
        self._start_s = start_s
        self._config = config
        self._credentials = credentials
        self._servers = servers
        self._folder = tempfile.TemporaryDirectory(prefix="murmur-bench-")
        self._children: list[subprocess.Popen[bytes]] = []
        self._workers_url: str | None = None

    def __enter__(self) -> Self:
        """Start them; return once the learner listens."""
        folder = Path(self._folder.name)
        file = folder / "bench.yaml"
        file.write_text(to_yaml(self._config))
        ports = ["--set", "learner.port=0", "--set", "learner.metrics_port=0"]
        try:
            self._start("learner", str(file), "--run", str(folder), *ports, *self._own("learner"))
            info = self._wait_for(folder / "learner.json")
            self._metrics_url = f"http://127.0.0.1:{info['metrics_port']}/metrics"
            self.address = f"127.0.0.1:{info['port']}"
            for role in self._servers:
                self._start_server(role)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop them."""
        self._stop()

    def add_server(self) -> None:
        """Start another environment server, with workers of its own."""
        number = len(self._children) - 1
        self._servers = [*self._servers, "environment"]
        self._start_server("environment", "--first-worker", str(number))

    def _start_server(self, role: Role, *arguments: str) -> None:
        what = ["--evaluate"] if role == "evaluator" else []
        connect = ["--set", f"env_server.learner={self.address}"]
        connect += ["--set", "env_server.metrics_port=0"]
        file = Path(self._folder.name) / "bench.yaml"
        self._start("env-server", str(file), *what, *arguments, *connect, *self._own(role))

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self._folder.name)

    @property
    def metrics_url(self) -> str:
        """The learner's metrics page."""
        return self._metrics_url

    @property
    def learner(self) -> psutil.Process:
        """The learner's process."""
        return psutil.Process(self._children[0].pid)

    @property
    def workers(self) -> list[psutil.Process]:
        """The workers' processes, without the parent that keeps them alive."""
        return _workers(self._children[1].pid)

    @property
    def all(self) -> dict[str, psutil.Process]:
        """Every process by what it is: the learner, then each server with its workers."""
        found = {"learner": self.learner}
        for role, child in zip(self._servers, self._children[1:], strict=True):
            name = "server" if role == "environment" else role
            found[name] = psutil.Process(child.pid)
            for i, worker in enumerate(_workers(child.pid)):
                found[f"{name}'s worker {i}"] = worker
        return found

    def wait_for_updates(self, updates: int, timeout_s: float = 300.0) -> None:
        """Return once the learner has made this number of updates.

        Raises:
            RuntimeError: if it does not come to that, with the last lines of the log.
        """
        self.wait_for("updates_total", updates, timeout_s)

    def wait_for(self, metric: str, value: float, timeout_s: float = 300.0) -> None:
        """Return once a metric of the learner has this value.

        Raises:
            RuntimeError: if it does not come to that, with the last lines of the log.
        """
        deadline = time.monotonic() + timeout_s
        while self.snapshot().metrics.get(metric, 0) < value:
            if time.monotonic() > deadline or any(c.poll() is not None for c in self._children):
                raise RuntimeError(f"no {metric}={value} within {timeout_s} s:\n{self.log()}")
            time.sleep(0.2)

    def window(self, seconds: float) -> tuple[Snapshot, Snapshot]:
        """Return counters before and after this time [s], extended until it contains an update."""
        before = self.snapshot()
        time.sleep(seconds)
        self.wait_for_updates(int(before.metrics.get("updates_total", 0)) + 1)
        return before, self.snapshot()

    def snapshot(self) -> Snapshot:
        """Read all counters now."""
        metrics, buckets, states, series, _ = scrape(self._metrics_url)
        server = psutil.Process(self._children[1].pid)
        return Snapshot(
            time.monotonic(),
            cpu_s(self.learner),
            sum(map(cpu_s, [server, *server.children(recursive=True)])),
            metrics,
            buckets,
            states,
            series,
        )

    def servers_cpu_s(self) -> float:
        """Return the CPU seconds of all environment servers and their workers."""
        servers = [psutil.Process(child.pid) for child in self._children[1:]]
        found = [p for server in servers for p in (server, *server.children(recursive=True))]
        return sum(map(cpu_s, found))

    def worker_seconds(self) -> float:
        """Return the seconds that the workers have spent in their states, all together."""
        if self._workers_url is None:
            log = (Path(self._folder.name) / "env-server-1.log").read_text()
            found = re.search(r"metrics and health on (http://\S+)", log)
            assert found is not None, log
            self._workers_url = f"{found[1]}/metrics"
        return scrape(self._workers_url).metrics["murmur_env_seconds_total"]

    def _own(self, role: str) -> list[str]:
        folder = self._credentials
        return ["--set", f"security.folder={folder / role}"] if folder else []

    def _start(self, *arguments: str) -> None:
        name = f"{arguments[0]}-{len(self._children)}.log"
        with (Path(self._folder.name) / name).open("wb") as log:
            self._children.append(
                subprocess.Popen(
                    murmur_command(*arguments),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=child_environment(),
                    start_new_session=True,
                )
            )

    def _wait_for(self, file: Path) -> dict[str, Any]:
        deadline = time.monotonic() + self._start_s
        while not file.exists():
            if time.monotonic() > deadline or self._children[0].poll() is not None:
                raise RuntimeError(f"the learner did not start:\n{self.log()}")
            time.sleep(0.1)
        info: dict[str, Any] = json.loads(file.read_text())
        return info

    def log(self) -> str:
        """Return the last lines of every process."""
        logs = sorted(Path(self._folder.name).glob("*.log"))
        return "\n".join(f"{log.name}: {log.read_text()[-2000:]}" for log in logs)

    def _stop(self) -> None:
        for child in reversed(self._children):  # the environments first: rows stop coming
            child.terminate()
            await_end(child)
        self._folder.cleanup()


def await_end(child: "subprocess.Popen[Any]") -> None:
    """Wait for a process that was told to end; kill it if it takes too long."""
    try:
        child.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


class Scrape(NamedTuple):
    """A metrics port's samples, summed over labels; see Snapshot.

    Attributes:
        metrics: values by name, without the learner's prefix, summed over labels; and of metrics
            with one label also name:label -> value.
        buckets: counts by histogram and upper bound.
        states: seconds by (thread, state).
        series: number of samples.
        phases: counts by (histogram, phase) and upper bound, of those with a label `phase`.
    """

    metrics: dict[str, float]
    buckets: dict[str, dict[float, float]]
    states: dict[tuple[str, str], float]
    series: int
    phases: dict[tuple[str, str], dict[float, float]]


def scrape(url: str) -> Scrape:
    """Return the present samples of a metrics port."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        text = answer.read().decode()
    metrics: dict[str, float] = {}
    buckets: dict[str, dict[float, float]] = {}
    states: dict[tuple[str, str], float] = {}
    series = 0
    phases: dict[tuple[str, str], dict[float, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            series += 1
            name = sample.name.removeprefix("murmur_learner_")
            if "le" in sample.labels:
                of = buckets.setdefault(name.removesuffix("_bucket"), {})
                le = float(sample.labels["le"])
                of[le] = of.get(le, 0.0) + sample.value
                if "phase" in sample.labels:
                    at = name.removesuffix("_bucket"), sample.labels["phase"]
                    phases.setdefault(at, {})[le] = sample.value
            else:
                if name == "state_seconds_total":
                    states[sample.labels["thread"], sample.labels["state"]] = sample.value
                metrics[name] = metrics.get(name, 0.0) + sample.value
                if len(sample.labels) == 1:
                    metrics[f"{name}:{next(iter(sample.labels.values()))}"] = sample.value
    return Scrape(metrics, buckets, states, series, phases)


def _workers(server: int) -> list[psutil.Process]:
    """Return the workers of the environment server with this process id."""
    children = psutil.Process(server).children()
    return [c for c in children if "resource_tracker" not in " ".join(c.cmdline())]


def cpu_s(process: psutil.Process) -> float:
    """Return the CPU seconds a process has used, all threads together."""
    times = process.cpu_times()
    return float(times.user + times.system)


def quantile(before: Snapshot, after: Snapshot, histogram: str, q: float) -> float:
    """Return a quantile of a histogram between two moments, linear within its bucket."""
    old = before.buckets.get(histogram, {})
    counts = {le: n - old.get(le, 0.0) for le, n in sorted(after.buckets[histogram].items())}
    wanted = q * counts[float("inf")]
    low, below = 0.0, 0.0
    for le, count in counts.items():
        if count >= wanted and count > below:
            if le == float("inf"):
                return low
            return low + (le - low) * (wanted - below) / (count - below)
        low, below = le, count
    return low
