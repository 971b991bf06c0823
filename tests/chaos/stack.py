"""A learner and environment servers that are killed and started again, and what was counted."""

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
import yaml
from prometheus_client.parser import text_string_to_metric_families

from murmur.runs.child import child_environment, murmur_command
from tests.waiting import wait_until

_START_S, _STOP_S = 120.0, 60.0


def free_port(count: int = 1) -> int:
    """A port that is free, below those that the system gives to outgoing connections.

    A service that is killed and restarted finds it free again: no connection takes it meanwhile.

    Args:
        count: of ports in a row that must be free; the first one is returned.
    """
    while True:
        first = random.randint(20_000, 32_000)  # noqa: S311 - no secret
        with contextlib.ExitStack() as probes, contextlib.suppress(OSError):
            for port in range(first, first + count):
                probes.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first


def scrape(host: str, port: int) -> dict[str, float]:
    """Prometheus samples, as name{label="value"} -> value; none if there is no answer."""
    try:
        with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=5) as answer:
            text = answer.read().decode()
    except OSError:
        return {}
    samples = {}
    for family in text_string_to_metric_families(text):
        for s in family.samples:
            labels = ",".join(f'{k}="{v}"' for k, v in sorted(s.labels.items()))
            samples[s.name + (f"{{{labels}}}" if labels else "")] = s.value
    return samples


class Service:
    """One `murmur` process."""

    def __init__(
        self, arguments: Sequence[str], log: Path, prefix: Sequence[str], more: Mapping[str, str]
    ) -> None:
        """Start it; its log is appended to."""
        self.log = log
        self._offset = log.stat().st_size if log.exists() else 0
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                [*prefix, *murmur_command(*arguments)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=child_environment() | dict(more),
            )
        self.pid = self.process.pid

    def text(self) -> str:
        """What it has logged."""
        with self.log.open() as file:
            file.seek(self._offset)
            return file.read()

    def send(self, number: int) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and wait for its end; returns the exit code."""
        self.send(number)
        return self.process.wait(_STOP_S)

    def close(self) -> None:
        """Kill it if it still runs."""
        if self.process.poll() is None:
            self.send(signal.SIGCONT)
            self.process.kill()
        self.process.wait()


class Server(Service):
    """An environment server."""

    def __init__(
        self,
        arguments: Sequence[str],
        log: Path,
        prefix: Sequence[str],
        more: Mapping[str, str],
        metrics_host: str,
    ) -> None:
        """Start it."""
        super().__init__(arguments, log, prefix, more)
        self._host, self._port = metrics_host, 0

    def metrics(self) -> dict[str, float]:
        """Its Prometheus samples; none if it does not answer."""
        if not self._port:
            found = re.search(r"metrics and health on http://\S+:(\d+)", self.text())
            if not found:
                return {}
            self._port = int(found[1])
        return scrape(self._host, self._port)

    def workers(self) -> list[psutil.Process]:
        """The processes that step environments."""
        try:
            children = psutil.Process(self.pid).children(recursive=True)
            return [c for c in children if "spawn_main" in " ".join(c.cmdline())]
        except psutil.Error:  # one of them ended while we looked
            return []

    def sent(self) -> int:
        """Rows it has sent, as it says at its end."""
        found = re.search(r"stopped: (\d+) rows sent", self.text())
        if not found:
            raise RuntimeError(f"the environment server did not say what it sent:\n{self.text()}")
        return int(found[1])


@dataclass
class Counts:
    """Environment rows by their fate, over all processes of the run so far."""

    received: int = 0
    learned: int = 0
    stored: int = 0
    undone: int = 0
    dropped: dict[str, int] = field(default_factory=dict)

    def since(self, before: "Counts") -> "Counts":
        """The difference."""
        return Counts(
            self.received - before.received,
            self.learned - before.learned,
            self.stored - before.stored,
            self.undone - before.undone,
            {
                reason: rows - before.dropped.get(reason, 0)
                for reason, rows in self.dropped.items()
                if rows != before.dropped.get(reason, 0)
            },
        )

    @property
    def balanced(self) -> bool:
        """Whether every row that came was learned from, is stored, or was dropped for a reason."""
        return self.received == self.learned + self.stored + sum(self.dropped.values())


class Stack:
    """One run: its learner at one port, its environment servers; `with` ends them all.

    Attributes:
        port, metrics_port: the learner's.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        """Prepare to run an experiment, given as a configuration file's content."""
        self.folder, self.run = folder, folder / "run"
        self.port, self.metrics_port = self._free_port(), self._free_port()
        learner = {**config.get("learner", {}), "port": self.port}
        learner["metrics_port"] = self.metrics_port
        whole = {**config, "learner": learner}
        whole["env_server"] = {**config.get("env_server", {}), "metrics_port": 0}
        self.config = folder / "faults.yaml"
        self.config.write_text(yaml.safe_dump(whole))
        self.learner: Service | None = None
        self.servers: list[Server] = []
        self._started = 0

    def _free_port(self) -> int:
        """A free port for the learner."""
        return free_port()

    def __enter__(self) -> Self:
        """Nothing is started yet."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Kill what runs."""
        for service in [self.learner, *self.servers]:
            if service is not None:
                service.close()

    def start_learner(
        self, *settings: str, more: Mapping[str, str] | None = None, wait: bool = True
    ) -> Service:
        """Start the learner, from its latest checkpoint if there is one, until it listens."""
        arguments = ["learner", str(self.config), "--run", str(self.run), "--auto-resume"]
        arguments += [part for setting in settings for part in ("--set", setting)]
        learner = self.learner = Service(arguments, self.folder / "learner.log", (), more or {})
        if wait:
            self.wait_for_learner()
        return learner

    def wait_for_learner(self) -> None:
        """Return once it listens.

        Raises:
            RuntimeError: with its log, if it ends instead.
        """
        learner = self.learner
        assert learner is not None

        def listens() -> bool:
            if learner.process.poll() is not None:
                raise RuntimeError(f"the learner ended:\n{learner.text()}")
            return "listening on" in learner.text()

        wait_until(listens, "the learner listens", _START_S)

    def log_end(self) -> str:
        """The last lines that the learner has logged."""
        return self.learner.text()[-4000:] if self.learner is not None else ""

    def start_server(
        self,
        *settings: str,
        address: str = "",
        first_worker: int = 0,
        prefix: Sequence[str] = (),
        metrics_host: str = "127.0.0.1",
        more: Mapping[str, str] | None = None,
    ) -> Server:
        """Start an environment server."""
        arguments = ["env-server", str(self.config), "--first-worker", str(first_worker)]
        connect = f"env_server.learner={address or f'127.0.0.1:{self.port}'}"
        served = f"env_server.metrics_host={metrics_host}"
        for setting in (connect, served, *settings):
            arguments += ["--set", setting]
        self._started += 1
        log = self.folder / f"server-{self._started}.log"
        self.servers.append(Server(arguments, log, prefix, more or {}, metrics_host))
        return self.servers[-1]

    def metrics(self) -> dict[str, float]:
        """The learner's Prometheus samples, without the prefix; none if it does not answer."""
        samples = scrape("127.0.0.1", self.metrics_port)
        return {name.removeprefix("murmur_learner_"): value for name, value in samples.items()}

    def metric(self, name: str) -> float:
        """One of them; 0 if it is not there."""
        return self.metrics().get(name, 0.0)

    def sessions(self) -> int:
        """Training sessions that are connected."""
        return int(self.metric('sessions{mode="train"}'))

    def wait_for_rows(self, rows: int, timeout_s: float = 60.0) -> float:
        """Wait for this number of further rows; returns how long it took, in seconds."""
        before = self.metric("rows_received_total")
        return wait_until(
            lambda: self.metric("rows_received_total") >= before + rows,
            f"{rows} rows come",
            timeout_s,
        )

    def settle(self) -> int:
        """Let all environment servers end in order; returns the rows they sent."""
        for server in self.servers:
            server.send(signal.SIGTERM)
        sent = 0
        for server in self.servers:
            code = server.process.wait(_STOP_S)
            if code != 0:
                raise RuntimeError(f"an environment server ended with {code}:\n{server.text()}")
            sent += server.sent()
        self.servers = []
        wait_until(lambda: not self.sessions(), "all sessions end", 30)
        return sent

    def counts(self) -> Counts:
        """The fate of the rows; exact only while no environment server runs."""
        deadline, last = time.monotonic() + 20, Counts()
        while True:  # an update may be under way, and the gauge is set now and then
            now = self._counts()
            if now == last and (now.balanced or time.monotonic() > deadline):
                return now
            last = now
            time.sleep(0.3)

    def _counts(self) -> Counts:
        return self._counts_of(self.metrics())

    def _counts_of(self, samples: Mapping[str, float]) -> Counts:
        prefix = 'rows_dropped_total{reason="'
        inserted = int(samples.get("rows_inserted_total", 0))  # into a replay, if there is one
        return Counts(
            int(samples.get("rows_received_total", 0)),
            inserted or int(samples.get("rows_trained_total", 0)),
            0 if inserted else int(samples.get("rows_stored", 0)),
            int(samples.get("rows_undone_total", 0)),
            {
                name.removeprefix(prefix).removesuffix('"}'): int(value)
                for name, value in samples.items()
                if name.startswith(prefix)
            },
        )


def prepare_folder(folder: Path) -> Path:
    """An empty folder for control files."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        file.unlink()
    return folder


def read_json(path: Path) -> dict[str, Any]:
    """A result so far; empty if there is none."""
    if not path.is_file():
        return {}
    data: dict[str, Any] = json.loads(path.read_text())
    return data


def alive(pid: int) -> bool:
    """Whether a process is there."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
