"""Ten planted causes: which one `murmur doctor` names first, and how long it takes to say so.

Nine are planted in trainings of real processes, which the command examines while they run. The
tenth, tiny kernels, needs a GPU: it is read from the counters recorded on an H100.
"""

import asyncio
import contextlib
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import yaml

from murmur.benchmarks.effort import Effort
from murmur.runs.child import child_environment, murmur_command
from murmur.runs.run_folder import RunFolder

DESCRIPTION = (
    "ten planted causes of a slow run and what murmur doctor names (target: the planted one first "
    "on an idle machine, first or second on a loaded one; a verdict within 30 s)"
)
NEEDS = ("gymnasium",)

_START_S, _STOP_S = 400.0, 60.0
_UPDATES = 4
_DELAY_S = 0.02  # of the proxy, each way


def _slow(workers: int, envs: int, sessions: int = 2, **arguments: float) -> dict[str, Any]:
    factory = "benchmarks.slow_environment:make"
    return {
        "environment": {"name": "gymnasium", "factory": factory, "arguments": arguments},
        "env_server": {
            "num_workers": workers,
            "envs_per_worker": envs,
            "sessions_per_worker": sessions,
        },
    }


def _mappo(batch_size: int, batch_number: int = 2, data_passes: int = 1) -> dict[str, Any]:
    return {
        "name": "mappo",
        "batch_size": batch_size,
        "batch_number": batch_number,
        "data_passes": data_passes,
    }


_SPREAD = {"environment": {"name": "spread"}}
_USUAL = {"num_workers": 1, "envs_per_worker": 32}
_SMALL_NETWORK = {"name": "mlp", "hidden": [32, 32]}

# Cause -> the configuration that has it.
PLANTED: dict[str, dict[str, Any]] = {
    "environments wait": {
        **_slow(1, 8, delay_ms=10.0),
        "algorithm": _mappo(100),
        "network": _SMALL_NETWORK,
    },
    "environments compute": {
        **_slow(1, 8, busy_ms=10.0),
        "algorithm": _mappo(100),
        "network": _SMALL_NETWORK,
    },
    "network": {
        **_slow(1, 32),
        "algorithm": _mappo(400),
        "network": _SMALL_NETWORK,
    },
    "messages": {
        **_slow(1, 2),
        "algorithm": _mappo(100),
        "network": _SMALL_NETWORK,
    },
    "large network": {
        **_SPREAD,
        "env_server": _USUAL,
        "algorithm": _mappo(1200, 2, 2),
        "network": {"name": "mlp", "hidden": [1024, 1024]},
    },
    "small batches": {
        **_SPREAD,
        "env_server": _USUAL,
        "algorithm": _mappo(36, 32, 4),
        "network": _SMALL_NETWORK,
    },
    "turns": {
        **_slow(1, 16, busy_ms=0.2),  # as long as an update: either side alone waits half the time
        "algorithm": _mappo(100, 4, 20),
        "network": _SMALL_NETWORK,
        "learner": {"pipeline": "sync"},
    },
    "others": {
        **_SPREAD,
        "env_server": _USUAL,
        "algorithm": _mappo(600, 4, 4),
        "network": {"name": "mlp", "hidden": [128, 128]},
    },
    "evaluation": {
        **_SPREAD,
        "env_server": _USUAL,
        "algorithm": _mappo(1200),
        "network": _SMALL_NETWORK,
        "evaluation": {"every_updates": 1, "episodes": 1000},
    },
}
RECORDED = "kernels"
_SETTINGS = (
    *("--set", "learner.port=0", "--set", "learner.metrics_port=0"),
    *("--set", "env_server.metrics_port=0", "--set", "learner.device=cpu"),
    *("--set", "run.max_minutes=20"),
)


def _spin() -> None:
    while True:
        pass


@contextlib.contextmanager
def busy_processes(number: int) -> Iterator[None]:
    """Keep a number of processes computing during the block."""
    context = multiprocessing.get_context("spawn")
    others = [context.Process(target=_spin, daemon=True) for _ in range(number)]
    try:
        for other in others:
            other.start()
        yield
    finally:
        for other in others:
            other.kill()
            other.join()


class SlowNetwork:
    """TCP proxy that forwards every byte after a delay, each way.

    Attributes:
        port: port that it listens on.
    """

    def __init__(self, target: int, delay_s: float) -> None:
        """Listen on a free port and forward to `target` on this machine."""
        self._target, self._delay_s = target, delay_s
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = self._loop.run_until_complete(self._listen())
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    async def _listen(self) -> int:
        server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        port: int = server.sockets[0].getsockname()[1]
        return port

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        for source, target in ((reader, far_writer), (far_reader, writer)):
            task = self._loop.create_task(self._forward(source, target))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _forward(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 16):
            self._loop.call_later(self._delay_s, target.write, data)
        self._loop.call_later(self._delay_s, target.close)

    def close(self) -> None:
        """Stop forwarding."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


@contextlib.contextmanager
def _started(*arguments: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a murmur command during the block, and end it in order."""
    environment = {**child_environment(), "PYTHONPATH": ":".join(p for p in sys.path if p)}
    with log.open("wb") as file:
        process = subprocess.Popen(
            murmur_command(*arguments), env=environment, stdout=file, stderr=subprocess.STDOUT
        )
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_for(what: str, ready: Callable[[], Any], *logs: Path) -> Any:  # noqa: ANN401
    """Wait until `ready` returns something that is true, and return it."""
    deadline = time.monotonic() + _START_S
    while not (found := ready()):
        if time.monotonic() > deadline:
            texts = "\n".join(log.read_text(errors="replace")[-2000:] for log in logs)
            raise RuntimeError(f"{what} after {_START_S:.0f} s:\n{texts}")
        time.sleep(0.2)
    return found


def _updates(run: RunFolder) -> float:
    record: Mapping[str, Any] = next(run.newest_records("progress"), {})
    return float(record.get("updates", 0))


@contextlib.contextmanager
def training(config: Mapping[str, Any], folder: Path) -> Iterator[list[str]]:
    """Train with `murmur train`; yield the doctor's arguments once it makes updates."""
    run, log = RunFolder(folder / "run"), folder / "log"
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(dict(config)))
    arguments = ("train", str(file), "--run", str(run.path), *_SETTINGS)
    with _started(*arguments, log=log):
        _wait_for("no update", lambda: _updates(run) >= _UPDATES, log)
        yield [str(run.path)]


@contextlib.contextmanager
def training_by_hand(config: Mapping[str, Any], folder: Path) -> Iterator[list[str]]:
    """Train with a learner and a server behind a slow network; yield the doctor's arguments."""
    run, logs = RunFolder(folder / "run"), [folder / "learner.log", folder / "server.log"]
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(dict(config)))
    learner = ("learner", str(file), "--run", str(run.path), *_SETTINGS)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_started(*learner, log=logs[0]))
        ports = _wait_for("no port", lambda: run.read_json("learner.json"), logs[0])
        proxy = SlowNetwork(ports["port"], _DELAY_S)
        stack.callback(proxy.close)
        address = f"env_server.learner=127.0.0.1:{proxy.port}"
        server = ("env-server", str(file), *_SETTINGS, "--set", address)
        stack.enter_context(_started(*server, log=logs[1]))
        listens = "metrics and health on "
        page = _wait_for(
            "no metrics",
            lambda: logs[1].read_text().partition(listens)[2].split("\n")[0].strip(),
            logs[1],
        )
        _wait_for("no update", lambda: _updates(run) >= _UPDATES, *logs)
        metrics = f"http://127.0.0.1:{ports['metrics_port']},{page}"
        yield [str(run.path), "--metrics", metrics]


def examine(arguments: list[str]) -> tuple[dict[str, Any], float]:
    """Run `murmur doctor --json`; return what it says and the seconds it took."""
    environment = {**child_environment(), "PYTHONPATH": ":".join(p for p in sys.path if p)}
    began = time.monotonic()
    done = subprocess.run(
        murmur_command("doctor", *arguments, "--json"),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode not in (0, 1):
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout), time.monotonic() - began


def plant(name: str, seconds: float) -> dict[str, Any]:
    """Plant a cause, let it train for some seconds, and examine it.

    Args:
        name: name of the cause.
        seconds: time from the first updates to the doctor's look [s].
    """
    # Twice as many as processors have turns for: the run gets less than half of them.
    busy = 2 * (os.cpu_count() or 1) * (name == "others")
    make = training_by_hand if name == "network" else training
    with (
        tempfile.TemporaryDirectory(prefix="murmur-bench-") as folder,
        busy_processes(busy),
        make(PLANTED[name], Path(folder)) as arguments,
    ):
        time.sleep(seconds)
        said, took = examine(arguments)
    return _row(name, said, took)


def recorded() -> dict[str, Any]:
    """Examine a learner of an H100 by its recorded counters, updates replayed as graphs."""
    from murmur.doctor.diagnosis import diagnose
    from murmur.doctor.page import as_json
    from tests.murmur.recorded_h100 import tiny_kernels

    began = time.monotonic()
    said = json.loads(as_json(diagnose(*tiny_kernels())))
    return _row(RECORDED, said, time.monotonic() - began)


def _row(name: str, said: Mapping[str, Any], took: float) -> dict[str, Any]:
    named = [cause["name"] for cause in said["causes"]]
    shares = ", ".join(f"{c['name']} {100 * c['score']:.0f} %" for c in said["causes"][:3])
    machine = said["machine"] or {}
    return {
        "place": named.index(name) + 1 if name in named else 0,
        "named": shares,
        "evidence": next((c["evidence"] for c in said["causes"] if c["name"] == name), ""),
        "best_remedy": said["remedies"][-1]["what"] if said["remedies"] else "",
        "own_cores": machine.get("own"),
        "busy_cores": machine.get("busy"),
        "too_few": said["too_few"],
        "verdict_s": took,
    }


def run(effort: Effort = Effort.FULL, *, at_once: int = 1) -> dict[str, Any]:
    """Plant every cause; return the place at which the doctor names it.

    Args:
        effort: extent of the measurement.
        at_once: number of trainings at a time, which load the machine for each other.
    """
    seconds = effort.choose(1.0, 12.0, 16.0)
    names = ["environments wait"] if effort is Effort.SMOKE else list(PLANTED)
    began = time.monotonic()

    def row(name: str) -> dict[str, Any]:
        found = plant(name, seconds)
        print(f"{name}: {found['place']}: {found['named']}", file=sys.stderr, flush=True)
        return found

    with ThreadPoolExecutor(at_once) as pool:
        rows = dict(zip(names, pool.map(row, names), strict=True))
    rows[RECORDED] = recorded()
    return {
        **rows,
        "first": sum(row["place"] == 1 for row in rows.values()),
        "first or second": sum(row["place"] in (1, 2) for row in rows.values()),
        "longest_verdict_s": max(row["verdict_s"] for row in rows.values()),
        "seconds": time.monotonic() - began,
        "load_average": psutil.getloadavg()[0],
    }
