"""The time ledger: does it account for every second, and what does it cost?

It adds up: a training as `murmur train` starts it; for each thread that keeps a ledger the seconds
that went into its states over the seconds that passed, and how much of the learner's processor time
is those threads'.

It costs: counted, the changes of state times what one takes, as a share of all processor time; and
seen, one training during which the ledger and the device's clock are switched off and on in turns,
so that whatever else the machine does meets both alike.
"""

import math
import statistics
import subprocess
import tempfile
import threading
import time
import timeit
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml
from prometheus_client import CollectorRegistry

from murmur.benchmarks._processes import Processes, Snapshot, cpu_s, scrape
from murmur.benchmarks.effort import Effort
from murmur.benchmarks.training_rate import experiment
from murmur.env_service.metrics import WorkerMetrics
from murmur.learner_service.app import run_learner
from murmur.learner_service.telemetry.device_clock import DeviceClock
from murmur.runs.child import child_environment, murmur_command
from murmur.shared.config.files import load
from murmur.shared.process import ledger
from murmur.shared.process.ledger import Ledger

DESCRIPTION = (
    "the time ledger: share of each thread's time that it accounts for (target ≥ 99 %), and what "
    "it costs (target < 1 % of throughput)"
)

_WORKERS = 2
_SIZES = (1, 128)  # environments of a message: most, and fewest changes of state a row
_STATES_OF_A_MESSAGE = 4  # that a worker enters: step, pack, wait, unpack


def run(effort: Effort = Effort.FULL) -> dict[str, Any]:
    """Measure the accounted time by thread, and the ledger's cost by environments per message."""
    result: dict[str, Any] = {}
    if effort is not Effort.SMOKE:  # a training more
        result["adds up"] = adds_up(effort.choose(0.0, 20.0, 600.0))
    costs = nanoseconds(effort.choose(5, 200, 200))
    result["one change of state, ns"] = costs
    for envs in effort.choose((8,), _SIZES, _SIZES):
        with Training(envs, effort.choose(1, 10, 10)) as training:
            result[f"{envs} environments a message"] = {
                **counted(training, costs, effort.choose(0.2, 5.0, 30.0)),
                **seen(training, effort.choose(2, 10, 150), effort.choose(0.2, 1.0, 1.0)),
            }
    result["load_average"] = psutil.getloadavg()[0]
    return result


def adds_up(seconds: float) -> dict[str, Any]:
    """Measure the seconds of each thread, and the share of them that is in a state."""
    config = experiment(8, 2)
    config["env_server"]["num_workers"] = _WORKERS
    with Processes(config) as processes:
        processes.wait_for_updates(3)
        before, cpu_before = processes.snapshot(), _thread_cpu(processes.learner)
        worker_before, worker_since = processes.worker_seconds(), time.monotonic()
        time.sleep(seconds)
        after, cpu_after = processes.snapshot(), _thread_cpu(processes.learner)
        worker_after, worker_until = processes.worker_seconds(), time.monotonic()
    threads = sorted({thread for thread, _ in after.states})
    wall = after.wall_s - before.wall_s
    result: dict[str, Any] = {
        f"learner: {thread}": {
            "seconds": wall,
            "in_a_state": (_in_states(after, thread) - _in_states(before, thread)) / wall,
        }
        for thread in threads
    }
    workers_wall = _WORKERS * (worker_until - worker_since)
    result[f"environment server: {_WORKERS} workers"] = {
        "seconds": workers_wall,
        "in_a_state": (worker_after - worker_before) / workers_wall,
    }
    spent = {name: cpu - cpu_before.get(name, 0.0) for name, cpu in cpu_after.items()}
    of_them = sum(spent.get(thread, 0.0) for thread in threads) / sum(spent.values())
    result["share of the learner's processor time that is these threads'"] = of_them
    return result


def _in_states(snapshot: Snapshot, thread: str) -> float:
    return sum(value for (of, _), value in snapshot.states.items() if of == thread)


def _thread_cpu(process: psutil.Process) -> dict[str, float]:
    """Return processor seconds by the name of the thread, as Linux counts them."""
    cpu: dict[str, float] = {}
    for thread in process.threads():
        name = Path(f"/proc/{process.pid}/task/{thread.id}/comm").read_text().strip()
        cpu[name] = cpu.get(name, 0.0) + thread.user_time + thread.system_time
    return cpu


def nanoseconds(rounds: int) -> dict[str, float]:
    """Measure a change of state on a thread of the learner, of a worker and of the device [ns]."""
    spent: dict[str, float] = {}

    def on_a_thread() -> None:
        Ledger("bench").adopt()
        spent["learner"] = _time(lambda: (ledger.enter("act"), ledger.enter("store")), 2, rounds)

    thread = threading.Thread(target=on_a_thread)
    thread.start()
    thread.join()
    worker = WorkerMetrics("train", CollectorRegistry())

    def step_and_pack() -> None:
        worker.enter("step")
        worker.enter("pack")

    spent["worker"] = _time(step_and_pack, 2, rounds)
    clock = DeviceClock(torch.device("cpu"))

    def work() -> None:
        with clock.working("act"):
            pass

    spent["device"] = _time(work, 1, rounds)
    return spent


def _time(what: Any, changes: int, rounds: int) -> float:  # noqa: ANN401 - called without arguments
    """Measure nanoseconds of processor per change of a call, in the least disturbed round."""
    spent = timeit.repeat(what, number=2_000, repeat=rounds, timer=time.thread_time)
    return min(spent) / 2_000 / changes * 1e9


class Training:
    """A learner in this process, so that its ledger can be switched, and an environment server."""

    def __init__(self, envs: int, updates: int) -> None:
        self._updates = updates  # before anything is measured
        self._config, self._stop = experiment(envs, 2), threading.Event()
        self._folder = tempfile.TemporaryDirectory(prefix="murmur-bench-")

    def __enter__(self) -> "Training":
        file = Path(self._folder.name) / "bench.yaml"
        file.write_text(yaml.safe_dump(self._config))
        config = load(str(file), ["learner.port=0", "learner.metrics_port=0"], environ={})
        ready = threading.Event()

        def listening(port: int, metrics_port: int) -> None:
            self._port, self._url = port, f"http://127.0.0.1:{metrics_port}/metrics"
            ready.set()

        def learn() -> None:
            run_learner(
                config, file.parent / "run", resume=False, stop=self._stop, on_ready=listening
            )

        self._thread = threading.Thread(target=learn)
        self._thread.start()
        ready.wait()
        connect = ["--set", f"env_server.learner=127.0.0.1:{self._port}"]
        self._server = subprocess.Popen(
            murmur_command("env-server", str(file), *connect, "--set", "env_server.metrics_port=0"),
            env=child_environment(),
            stderr=subprocess.DEVNULL,
        )
        while self.counted()["updates_total"] < self._updates:
            time.sleep(0.2)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.terminate()
        self._server.wait()
        self._stop.set()
        self._thread.join()
        self._folder.cleanup()

    def counted(self) -> dict[str, float]:
        """Return the learner's counters now."""
        return scrape(self._url)[0]

    def worker_cpu(self) -> float:
        """Return the processor seconds of the environment server and its worker so far."""
        server = psutil.Process(self._server.pid)
        return sum(map(cpu_s, [server, *server.children(recursive=True)]))

    def window(self, seconds: float) -> tuple[float, float, float]:
        """Return rows, CPU seconds of the learner, and seconds, of a window with at least a row."""
        first = self.counted()["rows_received_total"]
        cpu, since, rows = time.process_time(), time.monotonic(), 0.0
        while not rows:  # a slow machine may be busy with one update
            time.sleep(seconds)
            rows = self.counted()["rows_received_total"] - first
        return rows, time.process_time() - cpu, time.monotonic() - since


def counted(training: Training, costs: dict[str, float], seconds: float) -> dict[str, float]:
    """Return changes of state per row, and their share of the processor time."""
    changes: dict[str, int] = {"device": 0}
    enter, working = Ledger.enter, DeviceClock.working

    def counting(self: Ledger, state: str) -> str:
        changes[self.thread] = changes.get(self.thread, 0) + 1
        return enter(self, state)

    def counting_work(self: DeviceClock, kind: str) -> Any:  # noqa: ANN401 - a context manager
        changes["device"] += 1
        return working(self, kind)

    messages, worker_cpu = training.counted()["requests_total"], training.worker_cpu()
    with _patched(counting, counting_work):
        rows, cpu, took = training.window(seconds)
    messages = training.counted()["requests_total"] - messages
    worker_cpu = training.worker_cpu() - worker_cpu
    learner_ns = sum(
        count * costs["device" if of == "device" else "learner"] for of, count in changes.items()
    )
    worker_ns = messages * _STATES_OF_A_MESSAGE * costs["worker"]
    return {
        "rows_per_s": rows / took,
        "changes_a_row": sum(changes.values()) / rows,
        "counted_of_learner": learner_ns / cpu / 1e9,
        "counted_of_worker": worker_ns / worker_cpu / 1e9,
        "counted_of_both": (learner_ns + worker_ns) / (cpu + worker_cpu) / 1e9,
    }


@contextmanager
def _patched(enter: Any, working: Any) -> Iterator[None]:  # noqa: ANN401 - functions
    before = Ledger.enter, DeviceClock.working
    Ledger.enter, DeviceClock.working = enter, working  # type: ignore[method-assign]
    try:
        yield
    finally:
        Ledger.enter, DeviceClock.working = before  # type: ignore[method-assign]


def seen(training: Training, pairs: int, seconds: float) -> dict[str, float]:
    """Measure how much CPU time per row a ledger adds, and how much it slows rows down.

    Logarithms of ratios, so 0.01 is 1 %, with the standard error of their mean.
    """
    more_cpu, slower = [], []
    for pair in range(pairs):
        windows = {}
        for on in (True, False) if pair % 2 else (False, True):
            off = _patched(lambda _self, _state: None, lambda _self, _kind: nullcontext())
            with nullcontext() if on else off:
                windows[on] = training.window(seconds)
        (rows, cpu, took), (rows_off, cpu_off, took_off) = windows[True], windows[False]
        more_cpu.append(math.log((cpu / rows) / (cpu_off / rows_off)))
        slower.append(math.log((rows_off / took_off) / (rows / took)))
    return {
        "seen_more_cpu": statistics.mean(more_cpu),
        "seen_more_cpu_se": statistics.stdev(more_cpu) / math.sqrt(pairs),
        "seen_slower": statistics.mean(slower),
        "seen_slower_se": statistics.stdev(slower) / math.sqrt(pairs),
    }
