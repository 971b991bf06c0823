"""The environment server: a parent process that keeps its workers alive and reports for them."""

import contextlib
import logging
import os
import struct
import tempfile
import threading
import time
from collections.abc import Iterator
from multiprocessing import connection, resource_tracker

from prometheus_client import CollectorRegistry, Counter, Metric
from prometheus_client.multiprocess import MultiProcessCollector

from env_service.metrics import counter, set_info
from env_service.sessions.connection import learner_credentials
from env_service.watchdog.descendants import (
    Guardian,
    adopt_orphans,
    child_ids,
    end_strangers,
    reap_orphans,
)
from env_service.worker_process import LOOK_EVERY_S, WorkerProcess, stop_all
from shared.addresses import host_and_port
from shared.config import ExperimentConfig
from shared.cores import with_workers
from shared.credentials import warn_if_insecure
from shared.errors import ConfigError
from shared.metrics_server import MetricsServer

logger = logging.getLogger("murmur")

_COLLECT_TRIES, _COLLECT_PAUSE_S = 20, 0.05
_REAP_EVERY_S = 5.0
_USER_ERROR = 2  # exit code of an error that no restart fixes


def _mode(config: ExperimentConfig, evaluate: bool) -> str:
    """What the sessions of this server do.

    Raises:
        ConfigError: if it is to evaluate a run that its learner evaluates.
    """
    if config.supervised and evaluate:
        raise ConfigError(
            "a run with a source is evaluated by its learner: --evaluate is for environments"
        )
    return "supply" if config.supervised else "evaluate" if evaluate else "train"


def _log_end(registry: CollectorRegistry, mode: str) -> None:
    """Log what all workers have sent."""
    sent = registry.get_sample_value("murmur_env_steps_total", {"mode": mode}) or 0
    if mode == "supply":
        logger.info("stopped: %d samples sent", sent)
    else:
        alone = registry.get_sample_value("murmur_env_rows_unanswered_total") or 0
        logger.info("stopped: %d rows sent, %d of them not answered", sent, alone)


def _registry(config: ExperimentConfig, mode: str, folder: str) -> CollectorRegistry:
    """The metrics that the workers keep in `folder`, added up."""
    registry = CollectorRegistry()
    _Collector(registry, path=folder)  # type: ignore[no-untyped-call]
    set_info(registry, config.run.name, config.environment.name or config.source.name, mode)
    return registry


def _workers(
    config: ExperimentConfig, first: int, evaluate: bool, folder: str, name: str
) -> list[WorkerProcess]:
    """The server's workers, not started yet."""
    return [
        WorkerProcess(config, first + i, evaluate, folder, name)
        for i in range(1 if evaluate else config.env_server.num_workers)
    ]


def run_env_server(
    config: ExperimentConfig,
    *,
    first_worker: int = 0,
    stop: threading.Event,
    evaluate: bool = False,
) -> int:
    """Run the workers until `stop` is set.

    A worker that ends is restarted after a pause, and counted, and so is one whose environment
    takes longer than env_server.step_timeout_s for a step or start_timeout_s to be made, or that
    grows beyond env_server.worker_memory_mib. One that ends with a user's error, or hangs time
    after time, ends the server. What a worker's environments have started ends with it. To be
    called from a process's main thread that has not used gRPC and is not itself a daemonic child.

    Args:
        config: the experiment.
        first_worker: number of this server's first worker, where several servers share a run; its
            environments prefer the learner's slots from first_worker * envs_per_worker.
        stop: ends the server.
        evaluate: instead of training sessions, run one worker that evaluates when the learner asks.

    Returns:
        The exit code: 0 after `stop`, 2 after a user's error.

    Raises:
        ResourceError: if the metrics port is not available.
        ConfigError: if the learner is elsewhere and nothing says how to protect the connection.
    """
    config = with_workers(config)
    server = config.env_server
    learner_credentials(config)  # may refuse
    warn_if_insecure(config.security)
    mode = _mode(config, evaluate)
    with tempfile.TemporaryDirectory(prefix="murmur-metrics-") as folder:
        registry = _registry(config, mode, folder)
        restarts = counter("murmur_env_worker_restarts_total", registry)
        name = f"{os.getpid()}.{time.monotonic_ns()}."  # unique on this machine
        workers = _workers(config, first_worker, evaluate, folder, name)
        metrics = MetricsServer(
            server.metrics_host, server.metrics_port, registry, lambda: _trouble(workers)
        )
        where = host_and_port(server.metrics_host, metrics.port)
        logger.info("metrics and health on http://%s", where)
        try:
            with _descendants_end(name) as own:
                return _keep_alive(workers, own, restarts, stop)
        finally:
            metrics.close()
            _log_end(registry, mode)


def _trouble(workers: list[WorkerProcess]) -> str:
    """Which workers are down; "" if none is."""
    down = [str(worker.number) for worker in workers if not worker.alive]
    return f"not ready: worker {', '.join(down)} is down" if down else ""


def _keep_alive(
    workers: list[WorkerProcess], own: set[int], restarts: Counter, stop: threading.Event
) -> int:
    """Start and replace workers until `stop` is set or one of them cannot run; the exit code."""
    reaped = time.monotonic()
    try:
        while not stop.is_set():
            for worker in workers:
                restarts.inc(worker.start_if_due())
            running = [w.process for w in workers if w.process]
            connection.wait([p.sentinel for p in running], timeout=LOOK_EVERY_S)
            if any([worker.tend() for worker in workers]):
                return _USER_ERROR
            if time.monotonic() - reaped > _REAP_EVERY_S:
                reap_orphans(own | {w.process.pid or 0 for w in workers if w.process})
                reaped = time.monotonic()
        return 0
    finally:
        stop_all(workers)


@contextlib.contextmanager
def _descendants_end(name: str) -> Iterator[set[int]]:
    """Let nothing outlive this process that its workers started; yields its other children.

    Args:
        name: of this server, with which the marks of its workers begin.
    """
    adopt_orphans()
    resource_tracker.ensure_running()  # else it would bear the first worker's mark
    guardian = Guardian(name)
    own = child_ids()
    try:
        yield own
    finally:
        if left := end_strangers(own):
            logger.warning("%d processes of environments were left behind; killed", left)
        guardian.close()


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
