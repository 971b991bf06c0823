"""The environment server: a parent process that keeps its workers alive and reports for them."""

import asyncio
import contextlib
import ctypes
import faulthandler
import logging
import os
import random
import signal
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from multiprocessing import connection, get_context
from multiprocessing.context import SpawnProcess
from multiprocessing.sharedctypes import RawArray
from typing import Any

import psutil
import uvloop
from prometheus_client import REGISTRY, CollectorRegistry, Metric
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

from env_service.metrics import WorkerMetrics, counter, set_info
from env_service.sessions.evaluate import serve_evaluations
from env_service.sessions.worker import run_sessions
from env_service.watchdog.board import Board
from shared.config import ExperimentConfig
from shared.credentials import credentials_for, warn_if_insecure
from shared.errors import MurmurError
from shared.process import (
    Backoff,
    MetricsServer,
    configure_logging,
    die_with_parent,
    wake_without_preempting,
)

logger = logging.getLogger("murmur")

_LOOK_EVERY_S = 0.2  # at the stop event
_KILL_AFTER_S = 10.0  # between SIGTERM and SIGKILL
_RESTART_MIN_S, _RESTART_MAX_S = 0.5, 30.0
_HEALTHY_PAUSES = 10  # a worker that lived so many times its last pause restarts soon again
_HEALTHY_AFTER_S = 60.0  # the longest that this takes; who lived so long may hang by accident
_WEIGH_EVERY_S = 1.0  # a look at the workers' memory
_COLLECT_TRIES, _COLLECT_PAUSE_S = 20, 0.05
_USER_ERROR = 2  # exit code that no restart can mend
_TRACEBACK_S = 1.0  # for a worker that hangs to write where, before it is killed
MAX_HANGS = 5  # in a row; then it is no accident
_WARM_UP_TURNS = 16  # steps begun and ended that may compile and load
_WARM_UP_PATIENCE = 10  # how many times longer than others they may take


def run_env_server(
    config: ExperimentConfig,
    *,
    first_worker: int = 0,
    stop: threading.Event,
    evaluate: bool = False,
) -> int:
    """Run the workers until `stop` is set.

    A worker that dies is restarted after a pause, and counted, and so is one whose environment
    takes longer than env_server.step_timeout_s for a step, or that grows beyond
    env_server.worker_memory_mib. One that ends with a user's error, or
    hangs time after time, ends the server. To be called from a process's main thread that has not
    used gRPC and is not itself a daemonic child.

    Args:
        config: the experiment.
        first_worker: number of this server's first worker, where several servers share a run; its
            environments prefer the learner's slots from first_worker * envs_per_worker.
        stop: ends the server.
        evaluate: instead of training sessions, run one worker that evaluates when the learner asks.

    Returns:
        The exit code: 0, or 2 after a user's error.

    Raises:
        ResourceError: if the metrics port cannot be had.
        ConfigError: if the learner is elsewhere and nothing says how to protect the connection.
    """
    server = config.env_server
    credentials_for(config.security, server.learner, "env_server.learner")  # may refuse
    warn_if_insecure(config.security)
    with tempfile.TemporaryDirectory(prefix="murmur-metrics-") as folder:
        registry = CollectorRegistry()
        _Collector(registry, path=folder)  # type: ignore[no-untyped-call]
        restarts = counter("murmur_env_worker_restarts_total", registry)
        mode = "evaluate" if evaluate else "train"
        set_info(registry, config.run.name, config.environment.name, mode)
        count = 1 if evaluate else server.num_workers
        workers = [_Worker(config, first_worker + i, evaluate, folder) for i in range(count)]
        metrics = MetricsServer(
            server.metrics_host,
            server.metrics_port,
            registry,
            healthy=lambda: all(worker.alive for worker in workers),
        )
        logger.info("metrics and health on http://%s:%d", server.metrics_host, metrics.port)
        try:
            while not stop.is_set():
                for worker in workers:
                    restarts.inc(worker.start_if_due())
                connection.wait(
                    [w.process.sentinel for w in workers if w.process], timeout=_LOOK_EVERY_S
                )
                for worker in workers:
                    worker.replace_if_too_large()
                if any(worker.replace_if_hung() for worker in workers):
                    return _USER_ERROR
                if any(worker.collect() == _USER_ERROR for worker in workers):
                    return _USER_ERROR
                if all(worker.finished for worker in workers):
                    break
            return 0
        finally:
            _stop(workers)
            metrics.close()
            sent = registry.get_sample_value("murmur_env_steps_total", {"mode": mode})
            alone = registry.get_sample_value("murmur_env_rows_unanswered_total")
            logger.info("stopped: %d rows sent, %d of them not answered", sent or 0, alone or 0)


class _Collector(MultiProcessCollector):
    """Adds up the workers' files; waits for one that a starting worker is about to fill."""

    def collect(self) -> list[Metric]:
        """All metrics."""
        for _ in range(_COLLECT_TRIES - 1):
            try:
                return list(super().collect())  # type: ignore[no-untyped-call]
            except struct.error:  # a file without its first four bytes
                time.sleep(_COLLECT_PAUSE_S)
        return list(super().collect())  # type: ignore[no-untyped-call]


class _Worker:
    """A worker process, its deaths and its next start. Used by the parent's main thread.

    Attributes:
        process: the running process, or None.
        finished: whether it ended by itself without an error.
    """

    def __init__(self, config: ExperimentConfig, number: int, evaluate: bool, folder: str) -> None:
        """Describe the worker; `start_if_due` starts it."""
        self._config, self._number, self._evaluate, self._folder = config, number, evaluate, folder
        self._backoff = Backoff(_RESTART_MIN_S, _RESTART_MAX_S, random.random)
        self._due, self._started, self._starts, self._pause = 0.0, 0.0, 0, 0.0
        self._weighed, self._ended_at = 0.0, 0.0  # told to end because it grew too large
        self._envs = config.evaluation.episodes if evaluate else config.env_server.envs_per_worker
        self._memory = RawArray(ctypes.c_uint64, Board.size(self._envs))
        self._board = Board(self._memory, self._envs)
        self._hangs = 0  # in a row
        self._why_lost = "died"  # what became of the last process's episodes
        self.process: SpawnProcess | None = None
        self.finished = False

    @property
    def alive(self) -> bool:
        """Whether the process runs. Called from the metrics thread too."""
        process = self.process
        return process is not None and process.exitcode is None

    def start_if_due(self) -> int:
        """Start the process if it does not run and its pause is over; returns 1 for a restart."""
        if self.process or self.finished or time.monotonic() < self._due:
            return 0
        # What the last process cannot report any more, this one does.
        lost = (self._why_lost, self._envs) if self._board.position[0] else None
        self._why_lost = "died"
        ctypes.memset(self._memory, 0, ctypes.sizeof(self._memory))
        self._position, self._looked, self._still_s = self._board.position, time.monotonic(), 0.0
        arguments = (
            self._config,
            self._number,
            self._evaluate,
            os.getpid(),
            self._memory,
            lost,
        )
        process = get_context("spawn").Process(
            target=_work, args=arguments, name=f"worker-{self._number}"
        )
        with _environment_variables(self._folder):
            process.start()
        self.process, self._started = process, time.monotonic()
        self._starts += 1
        return int(self._starts > 1)

    def replace_if_hung(self) -> bool:
        """Kill the process if its environment takes too long for a step; True: once too often.

        Time counts only as far as this process saw it pass: neither a stopped or suspended machine
        nor a changed clock makes a step too long.
        """
        limit = self._config.env_server.step_timeout_s
        if not self.alive or not limit:
            return False
        now, position = time.monotonic(), self._board.position
        looked, self._looked = self._looked, now
        stepping = position[0] % 2 == 1
        if not stepping or position != self._position:
            self._position, self._still_s = position, 0.0
            return False
        self._still_s += min(now - looked, 2 * _LOOK_EVERY_S)
        warm_up = position[0] < _WARM_UP_TURNS
        if self._still_s < limit * (_WARM_UP_PATIENCE if warm_up else 1):
            return False
        return self._replace_hung()

    def _replace_hung(self) -> bool:
        """Kill the process, with a traceback of where it hangs in the log."""
        assert self.process is not None
        assert self.process.pid is not None
        environment = self._config.environment
        factory = environment.options.get("factory")
        name = f"'{environment.name}'" + (f" ({factory})" if factory else "")
        logger.error(
            "environment %s took longer than %.3g s for a step (env_server.step_timeout_s), %s; "
            "worker %d is replaced, it hangs here:",
            name,
            self._still_s,
            self._board.where(),
            self._number,
        )
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGUSR1)  # see faulthandler in _work
        self.process.join(_TRACEBACK_S)
        self.process.kill()
        self.process.join()
        self._why_lost = "hung"
        healthy = time.monotonic() - self._started > _HEALTHY_AFTER_S + self._still_s
        self._hangs = 1 if healthy else self._hangs + 1
        if self._hangs < MAX_HANGS:
            return False
        logger.error(
            "environment %s hung %d times in a row in worker %d: mend it, or raise "
            "env_server.step_timeout_s if its steps do take so long",
            name,
            self._hangs,
            self._number,
        )
        return True

    def replace_if_too_large(self) -> None:
        """End the process in order if it takes too much memory; by force if it does not obey."""
        limit = self._config.env_server.worker_memory_mib
        now = time.monotonic()
        if not limit or not self.alive or now - self._weighed < _WEIGH_EVERY_S:
            return
        assert self.process is not None
        self._weighed = now
        if self._ended_at:
            if now - self._ended_at > _KILL_AFTER_S:
                self.process.kill()
            return
        try:
            size = psutil.Process(self.process.pid).memory_info().rss >> 20
        except psutil.NoSuchProcess:
            return
        if size > limit:
            logger.error(
                "worker %d takes %d MiB, more than env_server.worker_memory_mib = %d; it is "
                "replaced: its environment '%s' may leak memory",
                self._number,
                size,
                limit,
                self._config.environment.name,
            )
            self._why_lost, self._ended_at = "memory", now
            self.process.terminate()

    def collect(self) -> int | None:
        """The exit code if the process has just ended, else None; plans the next start."""
        process = self.process
        if process is None or process.exitcode is None:
            return None
        code = process.exitcode
        self.forget()
        if self._ended_at:
            self._ended_at = 0.0
        elif code == 0:
            self.finished = True
        elif code != _USER_ERROR:
            healthy_s = min(_HEALTHY_PAUSES * self._pause, _HEALTHY_AFTER_S)
            if time.monotonic() - self._started > healthy_s:
                self._backoff.reset()
            self._pause = self._backoff.pause_s()
            self._due = time.monotonic() + self._pause
            logger.error(
                "worker %d died with code %d; restart in %.1f s", self._number, code, self._pause
            )
        return code

    def forget(self) -> None:
        """Release a process that has ended, and its gauges."""
        assert self.process is not None
        self.process.join()
        mark_process_dead(self.process.pid, self._folder)  # type: ignore[no-untyped-call]
        self.process.close()
        self.process = None


def _stop(workers: list[_Worker]) -> None:
    """SIGTERM, then, to those that do not end in time, SIGKILL."""
    running = [worker for worker in workers if worker.process]
    for worker in running:
        assert worker.process is not None
        worker.process.terminate()
    deadline = time.monotonic() + _KILL_AFTER_S
    for worker in running:
        assert worker.process is not None
        worker.process.join(max(0.0, deadline - time.monotonic()))
        if worker.process.exitcode is None:
            logger.warning("%s did not stop in time; killed", worker.process.name)
            worker.process.kill()
        worker.forget()


@contextlib.contextmanager
def _environment_variables(folder: str) -> Iterator[None]:
    """What a worker must find in its environment when it imports its modules."""
    added = {"PROMETHEUS_MULTIPROC_DIR": folder}
    for name, value in (("OMP_NUM_THREADS", "1"), ("OMP_WAIT_POLICY", "passive")):
        added[name] = os.environ.get(name, value)
    before = {name: os.environ.get(name) for name in added}
    os.environ.update(added)
    try:
        yield
    finally:
        for name, old in before.items():
            if old is None:
                del os.environ[name]
            else:
                os.environ[name] = old


def _work(
    config: ExperimentConfig,
    number: int,
    evaluate: bool,
    parent: int,
    memory: Any,  # noqa: ANN401 - a ctypes array
    lost: tuple[str, int] | None,
) -> None:
    """A worker process's outermost function.

    Args:
        config: the experiment.
        number: the worker's number.
        evaluate: whether it evaluates.
        parent: the parent's process id.
        memory: of the board.
        lost: why, and how many, episodes the process lost whose place this one takes.
    """
    die_with_parent(parent)
    wake_without_preempting()
    faulthandler.enable()  # also a simulator that crashes shows where
    faulthandler.register(signal.SIGUSR1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which stops us
    configure_logging(f"evaluator-{number}" if evaluate else f"worker-{number}")

    async def main() -> None:
        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        metrics = WorkerMetrics("evaluate" if evaluate else "train", REGISTRY)
        if lost is not None:
            metrics.drop_episodes(*lost)
            metrics.flush()  # now: this process may be lost as soon
        envs = config.evaluation.episodes if evaluate else config.env_server.envs_per_worker
        board = Board(memory, envs)
        if evaluate:
            await serve_evaluations(config, number, stop, metrics, board)
        else:
            first_slot = number * envs
            await run_sessions(config, number, first_slot, stop, metrics, board)

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())
    except MurmurError as error:
        logger.error("%s", error)
        sys.exit(_USER_ERROR)
