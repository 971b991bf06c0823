"""A learner and an environment server under test, and what is done to them: one function a fault.

Each function makes its fault while rows flow, sees it over, and returns how many seconds it took to
be noticed and to be over, and whatever else is worth a column.
"""

import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from murmur.shared.rpc import PROTOCOL_VERSION
from murmur.shared.wire.spec import ArraySpec, Discrete, EnvSpec
from tests.chaos.clock import Clock
from tests.chaos.controlled_environment import Controlled
from tests.chaos.links import Link
from tests.chaos.stack import Server, Stack
from tests.waiting import wait_until
from tests.wire import Client, Refused

WORKERS, SESSIONS, ENVS = 2, 4, 2  # of a session
MESSAGE = ENVS  # rows of a message
NOTICED_S, WORKER_BACK_S, LEARNER_BACK_S = 30.0, 5.0, 10.0
_SESSION_ENDS = 'rows_dropped_total{reason="session"}'
_RECONNECTS = "murmur_env_reconnects_total"
_ANOTHER = EnvSpec("another", 1, (ArraySpec("observation", "float32", (1,)),), Discrete(2))
_FLOW = 40  # rows that show that training continues


def experiment(control: Path, delay_ms: float = 5.0, *, large: bool = False) -> dict[str, Any]:
    """Small networks and environments that mostly wait: the processor is for what is measured.

    Large: updates whose arrays have 64 MiB each, so that memory is requested every time.
    """
    arguments = {"control": str(control), "delay_ms": delay_ms}
    factory = f"{Controlled.__module__}:make"
    return {
        "environment": {"name": "gymnasium", "factory": factory, "arguments": arguments},
        "env_server": {
            "num_workers": WORKERS,
            "envs_per_worker": ENVS * SESSIONS // WORKERS,
            "sessions_per_worker": SESSIONS // WORKERS,
            "max_faults_per_minute": 1000,
        },
        "algorithm": {
            "name": "mappo",
            "unroll_steps": 8,
            "batch_size": 1024 if large else 32,
            "batch_number": 1,
            "data_passes": 1 if large else 4,
        },
        "network": {"name": "mlp", "hidden": [1 << 14 if large else 16]},
        "learner": {
            "device": "cpu",
            "log_every_s": 0.2,
            "checkpoint_every_updates": 2,
            "max_policy_lag": 10_000,  # no row is ever too old: that is no fault
        },
    }


class Bench:
    """One stack, and what happens to it."""

    def __init__(self, stack: Stack, control: Path, link: Link | None, clock: Clock | None) -> None:
        self.stack, self.control, self.link, self.clock = stack, control, link, clock
        self.server: Server | None = None

    def start(self, *settings: str) -> Server:
        """An environment server at the far end of the link, its sessions playing."""
        address, prefix, host = "", (), "127.0.0.1"
        if self.link is not None:
            address = f"{self.link.host}:{self.link.port}"
            prefix, host = self.link.prefix, self.link.metrics_host
        self.server = self.stack.start_server(
            *settings, address=address, prefix=prefix, metrics_host=host, more=self.more
        )
        self.all_back()
        return self.server

    def start_learner(self) -> None:
        """The learner, from its latest checkpoint if there is one."""
        self.stack.start_learner(more=self.more)

    @property
    def more(self) -> dict[str, str]:
        """Environment variables of all processes."""
        return self.clock.environment if self.clock is not None else {}

    def all_back(self, timeout_s: float = 90.0) -> float:
        """Until all sessions are there and their rows flow; in seconds."""
        began = time.monotonic()
        wait_until(lambda: self.stack.sessions() == SESSIONS, "all sessions are back", timeout_s)
        self.stack.wait_for_rows(_FLOW)
        return time.monotonic() - began

    def make(self, fault: str) -> None:
        """Tell one environment to fail; returns once it has."""
        (self.control / fault).touch()
        wait_until(lambda: not (self.control / fault).exists(), f"an environment meets '{fault}'")

    def grows(self, name: str, act: Callable[[], object], environment: bool = False) -> float:
        """Act; how long after it a counter has grown, in seconds."""

        def read() -> float:
            if not environment:
                return self.stack.metric(name)
            assert self.server is not None
            return self.server.metrics().get(name, 0.0)

        before = read()
        act()
        return wait_until(lambda: read() > before, f"{name} grows", NOTICED_S)


def worker_killed(b: Bench) -> dict[str, Any]:
    """SIGKILL."""
    return _worker_ends(b, signal.SIGKILL)


def worker_crashed(b: Bench) -> dict[str, Any]:
    """The simulator ends its process."""
    noticed = b.grows(_SESSION_ENDS, lambda: b.make("crash"))
    return {"noticed s": noticed, "over s": noticed + b.all_back()}


def _worker_ends(b: Bench, number: int) -> dict[str, Any]:
    assert b.server is not None
    victim = b.server.workers()[0]
    noticed = b.grows(_SESSION_ENDS, lambda: victim.send_signal(number))
    return {"noticed s": noticed, "over s": noticed + b.all_back()}


def worker_paused(b: Bench) -> dict[str, Any]:
    """SIGSTOP of one worker until the learner gives its sessions up, then SIGCONT."""
    assert b.server is not None
    victim = b.server.workers()[0]
    noticed = b.grows(_SESSION_ENDS, victim.suspend)
    victim.resume()
    return {"noticed s": noticed, "over s": b.all_back()}


def worker_paused_shortly(b: Bench) -> dict[str, Any]:
    """SIGSTOP of one worker for three seconds: training continues."""
    assert b.server is not None
    victim = b.server.workers()[0]
    sessions = b.stack.metric(_SESSION_ENDS)
    victim.suspend()
    time.sleep(3)
    victim.resume()
    b.all_back()
    if b.stack.metric(_SESSION_ENDS) != sessions:
        raise AssertionError("a session was given up after three seconds")
    return {}


def server_terminated(b: Bench) -> dict[str, Any]:
    """SIGTERM of the environment server, and another one."""
    assert b.server is not None
    if b.server.end() != 0:
        raise AssertionError(b.server.text())
    noticed = wait_until(lambda: not b.stack.sessions(), "its sessions end", NOTICED_S)
    began = time.monotonic()
    b.start()
    return {"noticed s": noticed, "over s": time.monotonic() - began}


def environment_raises(b: Bench) -> dict[str, Any]:
    """An exception in one copy."""
    return _environment(b, "raise", "raised")


def environment_nan(b: Bench) -> dict[str, Any]:
    """NaN in one copy's observation."""
    return _environment(b, "nan", "contents")


def _environment(b: Bench, fault: str, reason: str) -> dict[str, Any]:
    name = f'murmur_env_episodes_dropped_total{{reason="{reason}"}}'
    noticed = b.grows(name, lambda: b.make(fault), environment=True)
    return {"noticed s": noticed, "over s": b.all_back()}


def environment_hangs(b: Bench) -> dict[str, Any]:
    """A step that never ends."""
    name = "murmur_env_worker_restarts_total"
    noticed = b.grows(name, lambda: b.make("hang"), environment=True)
    return {"noticed s": noticed, "over s": b.all_back()}


def environment_leaks(b: Bench) -> dict[str, Any]:
    """300 MiB at once: the worker is replaced in order."""
    name = "murmur_env_worker_restarts_total"
    noticed = b.grows(name, lambda: b.make("leak"), environment=True)
    return {"noticed s": noticed, "over s": b.all_back()}


def link_cut(b: Bench) -> dict[str, Any]:
    """Both sides get an error at once (proxy), or not at all (a device that goes down)."""
    return _link(b, lambda link: link.cut())


def link_stalled(b: Bench) -> dict[str, Any]:
    """Nothing passes, and neither side gets an error."""
    return _link(b, lambda link: link.stall())


def link_half_open(b: Bench) -> dict[str, Any]:
    """What the learner sends is lost."""
    return _link(b, lambda link: link.half())


def _link(b: Bench, break_it: Callable[[Link], None]) -> dict[str, Any]:
    assert b.link is not None
    assert b.server is not None
    link, began = b.link, time.monotonic()
    worker_s = b.grows(_RECONNECTS, lambda: break_it(link), environment=True)
    wait_until(lambda: not b.stack.sessions(), "the learner notices", NOTICED_S)
    learner_s = time.monotonic() - began
    link.heal()
    return {"noticed s": max(worker_s, learner_s), "over s": b.all_back()}


def link_slow(b: Bench) -> dict[str, Any]:
    """Ten seconds of it: slower, nothing else."""
    return _impaired(b, lambda link: link.slow())


def link_lossy(b: Bench) -> dict[str, Any]:
    """Ten seconds of 5 % loss each way: slower, nothing else."""
    return _impaired(b, lambda link: link.lose(0.05))  # type: ignore[attr-defined]


def _impaired(b: Bench, impair: Callable[[Link], None]) -> dict[str, Any]:
    assert b.link is not None
    impair(b.link)
    time.sleep(0.5)
    before, began = b.stack.metric("rows_received_total"), time.monotonic()
    time.sleep(10)
    rate = (b.stack.metric("rows_received_total") - before) / (time.monotonic() - began)
    b.link.heal()
    if not rate:
        raise AssertionError("no row came through")
    b.all_back()
    return {"rows/s meanwhile": rate}


def learner_killed(b: Bench) -> dict[str, Any]:
    """SIGKILL; started again at once."""
    learner = b.stack.learner
    assert learner is not None
    noticed = b.grows(_RECONNECTS, lambda: learner.end(signal.SIGKILL), environment=True)
    b.start_learner()
    return {"noticed s": noticed, "over s": b.all_back()}


def _now_and_then(read: Callable[[], int], seconds: float) -> Iterator[int]:
    """What is read, a hundred times a second."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        yield read()
        time.sleep(0.01)


def device_memory_out(b: Bench) -> dict[str, Any]:
    """The learner may have no more memory than it has between updates; started again at once."""
    learner = b.stack.learner
    assert learner is not None
    process = psutil.Process(learner.pid)
    wait_until(lambda: b.stack.metric("updates_total") >= 3, "updates are made")

    def limit() -> None:
        between = min(_now_and_then(lambda: process.memory_info().vms, seconds=2.0))
        process.rlimit(resource.RLIMIT_AS, (between, resource.RLIM_INFINITY))

    noticed = b.grows(_RECONNECTS, limit, environment=True)
    code, words = learner.process.wait(NOTICED_S), learner.text()
    if code != 1 or "can't allocate memory" not in words:
        raise AssertionError(f"it ended with code {code}:\n{words}")
    b.start_learner()
    return {"noticed s": noticed, "over s": b.all_back()}


def learner_paused(b: Bench) -> dict[str, Any]:
    """SIGSTOP until the workers give it up, then SIGCONT."""
    learner = b.stack.learner
    assert learner is not None
    noticed = b.grows(_RECONNECTS, lambda: learner.send(signal.SIGSTOP), environment=True)
    time.sleep(5)  # while their connections fail
    learner.send(signal.SIGCONT)
    return {"noticed s": noticed, "over s": b.all_back()}


def rolling_restart(b: Bench) -> dict[str, Any]:
    """SIGTERM of the learner and of the environment server, one after the other, twice."""
    over = 0.0
    for _ in range(2):
        learner = b.stack.learner
        assert learner is not None
        if learner.end() != 0:
            raise AssertionError(learner.text())
        b.start_learner()
        over = max(over, b.all_back())
        assert b.server is not None
        b.server.end()
        b.start()
    return {"over s": over}


def disk_full(b: Bench) -> dict[str, Any]:
    """No file may grow beyond what it has: checkpoints and logs fail, training continues."""
    learner = b.stack.learner
    assert learner is not None
    process = psutil.Process(learner.pid)

    def limit(size: int) -> None:
        process.rlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    noticed = b.grows("checkpoint_failures_total", lambda: limit(1))
    updates = b.stack.metric("updates_total")
    wait_until(lambda: b.stack.metric("updates_total") > updates + 5, "training continues")
    over = b.grows("checkpoints_total", lambda: limit(resource.RLIM_INFINITY))
    return {"noticed s": noticed, "over s": over}


def folder_read_only(b: Bench) -> dict[str, Any]:
    """A read-only file system over the checkpoints: as above."""
    folder = str(b.stack.run / "checkpoints")
    mount = ["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", folder]

    def run(command: list[str]) -> None:
        subprocess.run(command, check=True, capture_output=True)

    noticed = b.grows("checkpoint_failures_total", lambda: run(mount))
    try:
        updates = b.stack.metric("updates_total")
        wait_until(lambda: b.stack.metric("updates_total") > updates + 5, "training continues")
    finally:
        over = b.grows("checkpoints_total", lambda: run(["umount", folder]))
    return {"noticed s": noticed, "over s": over}


def clock_jumps(b: Bench) -> dict[str, Any]:
    """A day ahead, then a day back, on both sides: no effect."""
    assert b.clock is not None
    assert b.server is not None
    name = "murmur_env_reconnects_total"
    before = b.server.metrics()[name]
    for seconds in (86_400, -86_400, 0):
        b.clock.set(seconds)
        checkpoints = b.stack.metric("checkpoints_total")
        b.stack.wait_for_rows(_FLOW)
        wait_until(
            lambda n=checkpoints: b.stack.metric("checkpoints_total") > n, "a checkpoint is written"
        )
    if b.server.metrics()[name] != before:
        raise AssertionError(f"a stream broke:\n{b.server.text()}")
    return {}


def two_of_one_name(b: Bench) -> dict[str, Any]:
    """A second environment server that takes itself for the first: both play, on other slots."""
    b.stack.start_server(more=b.more)
    over = wait_until(lambda: b.stack.sessions() == 2 * SESSIONS, "both servers play")
    b.stack.wait_for_rows(2 * _FLOW)
    return {"over s": over}


def other_protocol(b: Bench) -> dict[str, Any]:
    """An older and a newer worker are refused with a message; others are not affected."""
    words = []
    for version in (PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1):
        with Client(b.stack.port, _ANOTHER, num_envs=1) as client:
            try:
                client.hello(protocol_version=version)
            except Refused as refused:
                words.append(str(refused))
    if not all("use the same release of murmur" in w for w in words) or len(words) != 2:
        raise AssertionError(str(words))
    return {"over s": b.all_back()}
