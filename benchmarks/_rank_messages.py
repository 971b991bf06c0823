"""Runs of one learner and of two, with as much work for each: messages a second."""

import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import psutil
import yaml

from benchmarks._cores import started_on
from murmur.benchmarks._processes import await_end, cpu_s, scrape
from murmur.learner_service.ranks.meeting import kept_store
from murmur.runs.child import child_environment, murmur_command
from murmur.shared.config.files import load

ROWS = 800  # of an update, on each rank
_START_S, _SETTLE_S = 120.0, 0.5


def one_environment_a_message(learners: int) -> dict[str, Any]:
    """Return `spread` with an environment a message; each rank has the same work, however many."""
    agents = 3
    return {
        "environment": {"name": "spread"},
        "env_server": {"num_workers": 1, "envs_per_worker": 4, "sessions_per_worker": 4},
        "network": {"name": "mlp", "hidden": [64, 64]},
        "algorithm": {
            "name": "mappo",
            "unroll_steps": 25,
            "unrolls_per_update": ROWS // 25 * learners,
            "batch_number": 1,
            "batch_size": ROWS * agents * learners,
            "data_passes": 1,
        },
        "learner": {"max_policy_lag": 2},
    }


def snakes_ddpg(learners: int) -> dict[str, Any]:
    """Return the published baseline: each rank updates once a row, with 64 rows."""
    data = load("snakes-ddpg").model_dump(mode="json")
    replay = data["algorithm"]["replay"]
    for name in ("capacity_rows", "start_rows", "batch_size", "update_interval"):
        replay[name] *= learners
    data["evaluation"]["every_updates"] = 0
    return data


def on_any_ports(content: Mapping[str, Any]) -> dict[str, Any]:
    """Change a configuration's content to the CPU with one thread, without checkpoints."""
    learner = {
        **content.get("learner", {}),
        "device": "cpu",
        "num_threads": 1,
        "port": 0,
        "metrics_port": 0,
        "checkpoint_every_updates": 1_000_000_000,
    }
    return {**content, "learner": learner}


@dataclass
class Counts:
    """Counters of all ranks together, up to one moment.

    Attributes:
        wall_s: time in time.monotonic() seconds.
        messages: number of messages that learners answered.
        updates: number of updates of rank 0.
        learners_s: processor seconds of the learners.
        servers_s: processor seconds of the environment servers with their workers.
    """

    wall_s: float
    messages: float
    updates: float
    learners_s: float
    servers_s: float


class Learners:
    """A run of one learner or more, with an environment server beside each, on the same cores.

    Environment servers are paused, save within `window`.
    """

    def __init__(self, content: Mapping[str, Any], cores: Sequence[Sequence[int]]) -> None:
        """Prepare to start a run.

        Args:
            content: content of a configuration file.
            cores: processor cores of each rank.
        """
        self._content, self._cores = on_any_ports(content), cores
        self._folder = tempfile.TemporaryDirectory(prefix="murmur-bench-")
        meeting = socket.create_server(("127.0.0.1", 0))
        self._store = kept_store(meeting, timedelta(seconds=_START_S))
        self._learners: list[subprocess.Popen[bytes]] = []
        self._servers: list[subprocess.Popen[bytes]] = []
        self._urls: list[str] = []

    def __enter__(self) -> Self:
        """Start them; return after some updates, with the environment servers paused."""
        path = Path(self._folder.name)
        file = path / "bench.yaml"
        file.write_text(yaml.safe_dump(self._content))
        try:
            for rank, cores in enumerate(self._cores):
                learn = ["learner", str(file), "--run", str(path / "run")]
                self._learners.append(self._start(cores, learn, self._of_rank(rank)))
            for rank, cores in enumerate(self._cores):
                name = f"learner-{rank}.json" if rank else "learner.json"
                info = self._wait_for(path / "run" / name)
                self._urls.append(f"http://127.0.0.1:{info['metrics_port']}/metrics")
                connect = f"env_server.learner=127.0.0.1:{info['port']}"
                serve = ["env-server", str(file), "--first-worker", str(rank)]
                serve += ["--set", connect, "--set", "env_server.metrics_port=0"]
                self._servers.append(self._start(cores, serve, {}))
            self._await_updates(3)
            self._signal(signal.SIGSTOP)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Stop them."""
        self._stop()

    def window(self, seconds: float) -> tuple[Counts, Counts]:
        """Run the environment servers for a while; return counts at its beginning and its end."""
        self._signal(signal.SIGCONT)
        try:
            time.sleep(_SETTLE_S)
            before = self._counts()
            time.sleep(seconds)
            return before, self._counts()
        finally:
            self._signal(signal.SIGSTOP)

    def _counts(self) -> Counts:
        pages = [scrape(url).metrics for url in self._urls]
        servers = [psutil.Process(server.pid) for server in self._servers]
        all_servers = [p for s in servers for p in (s, *s.children(recursive=True))]
        return Counts(
            time.monotonic(),
            sum(page.get("requests_total", 0.0) for page in pages),
            pages[0].get("updates_total", 0.0),
            sum(cpu_s(psutil.Process(learner.pid)) for learner in self._learners),
            sum(map(cpu_s, all_servers)),
        )

    def _of_rank(self, rank: int) -> dict[str, str]:
        """Return the environment variables that torchrun would set; the store is this process's."""
        size = str(len(self._cores))
        return {
            **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
            **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }

    def _start(
        self, cores: Sequence[int], arguments: Sequence[str], more: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        count = len(self._learners) + len(self._servers)
        log = Path(self._folder.name) / f"{arguments[0]}-{count}.log"
        with started_on(cores), log.open("wb") as out:
            return subprocess.Popen(
                murmur_command(*arguments),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=child_environment() | dict(more),
                start_new_session=True,
            )

    def _signal(self, number: int) -> None:
        for server in self._servers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, number)

    def _wait_for(self, file: Path) -> dict[str, Any]:
        deadline = time.monotonic() + _START_S
        while not file.exists():
            self._require_alive(deadline)
        info: dict[str, Any] = json.loads(file.read_text())
        return info

    def _await_updates(self, updates: int) -> None:
        deadline = time.monotonic() + _START_S
        while self._counts().updates < updates:
            self._require_alive(deadline)

    def _require_alive(self, deadline: float) -> None:
        ended = any(p.poll() is not None for p in [*self._learners, *self._servers])
        if ended or time.monotonic() > deadline:
            logs = sorted(Path(self._folder.name).glob("*.log"))
            words = "\n".join(f"{log.name}: {log.read_text()[-2000:]}" for log in logs)
            raise RuntimeError(f"{len(self._cores)} learners do not train:\n{words}")
        time.sleep(0.1)

    def _stop(self) -> None:
        self._signal(signal.SIGCONT)
        for child in [*self._servers, *self._learners]:
            child.terminate()
        for child in [*self._servers, *self._learners]:
            await_end(child)
        self._folder.cleanup()


def compare(
    content: Callable[[int], Mapping[str, Any]], cores: tuple[int, int], turns: int, seconds: float
) -> dict[str, Any]:
    """Measure a run of one learner on one core and of two on two, in windows that take turns.

    Args:
        content: function from a number of learners to the content of a configuration file.
        cores: processor cores of both learners; the single one runs on the first.
        turns: number of windows of each run.
        seconds: length of a window [s].

    Returns:
        medians over the turns.
    """
    figures: dict[str, list[dict[str, float]]] = {"one learner": [], "two learners": []}
    single, both = [cores[:1]], [cores[:1], cores[1:]]
    with Learners(content(1), single) as one, Learners(content(2), both) as two:
        for turn in range(turns):
            runs = [("one learner", one, 1), ("two learners", two, 2)]
            for name, run, size in runs if turn % 2 else reversed(runs):
                figures[name].append(_figures(*run.window(seconds), size))
    names = figures["one learner"][0]
    ratios = [
        b["messages/s"] / a["messages/s"]
        for a, b in zip(figures["one learner"], figures["two learners"], strict=True)
    ]
    return {
        "by run": {
            name: {f: statistics.median(turn[f] for turn in of) for f in names}
            for name, of in figures.items()
        },
        "two / one, messages/s": statistics.median(ratios),
        "lowest turn": min(ratios),
        "highest turn": max(ratios),
        "turns": turns,
    }


def _figures(before: Counts, after: Counts, cores: int) -> dict[str, float]:
    """Return the rates of a window, all ranks together."""
    wall_s = after.wall_s - before.wall_s
    messages = max(1.0, after.messages - before.messages)
    learners = after.learners_s - before.learners_s
    servers = after.servers_s - before.servers_s
    return {
        "messages/s": messages / wall_s,
        "updates/s": (after.updates - before.updates) / wall_s,
        "learner, CPU-µs a message": learners / messages * 1e6,
        "environment server, CPU-µs a message": servers / messages * 1e6,
        "cores in use, of each core": (learners + servers) / wall_s / cores,
    }
