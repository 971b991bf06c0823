"""The environment server: a parent process that restarts its workers and serves their metrics."""

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

from murmur.env_service.metrics import TreeCpu, register_counter, set_info
from murmur.env_service.sessions.connection import learner_credentials
from murmur.env_service.watchdog.descendants import (
    Guardian,
    adopt_orphans,
    child_ids,
    end_strangers,
    reap_orphans,
)
from murmur.env_service.worker_process import LOOK_EVERY_S, WorkerProcess, stop_all
from murmur.shared.config.cores import available_cores, choose
from murmur.shared.config.experiment import ENV_METRICS_PORT, ExperimentConfig
from murmur.shared.process.addresses import host_and_port, in_use, is_loopback, learner_addresses
from murmur.shared.process.errors import ConfigError
from murmur.shared.process.metrics_server import MetricsServer
from murmur.shared.wire.credentials import warn_if_insecure

logger = logging.getLogger("murmur")

_COLLECT_TRIES, _COLLECT_PAUSE_S = 20, 0.05
_REAP_EVERY_S = 5.0
_USER_ERROR = 2  # exit code of an error that no restart fixes


def _mode(config: ExperimentConfig, evaluate: bool) -> str:
    """Return the mode of this server's sessions: "supply", "evaluate" or "train".

    Raises:
        ConfigError: if `evaluate` is set for a run that its learner evaluates, or not set for one
            that no environment trains.
    """
    if config.supervised and evaluate:
        raise ConfigError(
            "a run with a source is evaluated by its learner: --evaluate is for environments"
        )
    if config.run.offline and not evaluate:
        raise ConfigError(
            "run.offline=true: the run learns from a dataset alone, and no environment trains; "
            "leave the environment server out, or start an evaluator: murmur env-server --evaluate"
        )
    return "supply" if config.supervised else "evaluate" if evaluate else "train"


def _log_end(registry: CollectorRegistry, mode: str) -> None:
    """Log the number of samples or rows that all workers have sent."""
    sent = registry.get_sample_value("murmur_env_steps_total", {"mode": mode}) or 0
    if mode == "supply":
        logger.info("stopped: %d samples sent", sent)
    else:
        alone = registry.get_sample_value("murmur_env_rows_unanswered_total") or 0
        logger.info("stopped: %d rows sent, %d of them not answered", sent, alone)


def run_env_server(
    config: ExperimentConfig,
    *,
    first_worker: int = 0,
    stop: threading.Event,
    evaluate: bool = False,
) -> int:
    """Run the workers until `stop` is set.

    A worker that ends is restarted after a pause, and counted. So is a worker with an environment
    that takes longer than env_server.step_timeout_s for a step or start_timeout_s to be made, and
    one that grows beyond env_server.worker_memory_mib. A worker that ends with a user's error, or
    hangs repeatedly, ends the server. Processes that a worker's environments have started end with
    the worker. Call it from the main thread of a process that has not used gRPC and is not itself
    a daemonic child.

    Args:
        config: configuration of the experiment.
        first_worker: number of this server's first worker, if several servers share a run; its
            environments prefer the learner's slots from first_worker * envs_per_worker.
        stop: event that ends the server.
        evaluate: true to run one worker that evaluates when the learner asks, and no training.

    Returns:
        exit code: 0 after `stop` and when the run is complete, 2 after a user's error.

    Raises:
        ResourceError: if the metrics port is not available.
        ConfigError: if the learner is on another machine and neither credentials nor `insecure`
            are configured.
    """
    alone = not any(map(is_loopback, learner_addresses(config.env_server.learner)))
    config = config.changed(choose(config, available_cores(), alone=alone))
    server = config.env_server
    learner_credentials(config)  # may refuse
    warn_if_insecure(config.security)
    mode = _mode(config, evaluate)
    with tempfile.TemporaryDirectory(prefix="murmur-metrics-") as folder:
        registry = CollectorRegistry()  # sums of the workers' metrics in the folder
        _Collector(registry, path=folder)  # type: ignore[no-untyped-call]
        registry.register(TreeCpu())
        set_info(registry, config.run.name, config.environment.name or config.source.name, mode)
        restarts = register_counter("worker_restarts", registry)
        name = f"{os.getpid()}.{time.monotonic_ns()}."  # unique on this machine
        workers = [
            WorkerProcess(config, first_worker + i, evaluate, folder, name)
            for i in range(1 if evaluate else server.num_workers)
        ]
        port = ENV_METRICS_PORT if server.metrics_port is None else server.metrics_port
        metrics = MetricsServer(
            server.metrics_host,
            port,
            registry,
            lambda: _trouble(workers),
            section="env_server.",
            or_any=server.metrics_port is None,
        )
        where = host_and_port(server.metrics_host, metrics.port)
        logger.info("metrics and health on http://%s%s", where, in_use(port, metrics.port))
        try:
            with _descendants_end(name) as own:
                return _keep_alive(workers, own, restarts, stop)
        finally:
            metrics.close()
            _log_end(registry, mode)


def _trouble(workers: list[WorkerProcess]) -> str:
    """Name the workers that are down; "" if none is."""
    down = [str(worker.number) for worker in workers if not worker.alive]
    return f"not ready: worker {', '.join(down)} is down" if down else ""


def _keep_alive(
    workers: list[WorkerProcess], own: set[int], restarts: Counter, stop: threading.Event
) -> int:
    """Start and replace workers until `stop` is set or one cannot run; return the exit code."""
    reaped = time.monotonic()
    try:
        while not stop.is_set():
            for worker in workers:
                restarts.inc(worker.start_if_due())
            running = [w.process for w in workers if w.process]
            connection.wait([p.sentinel for p in running], timeout=LOOK_EVERY_S)
            if ended := [worker for worker in workers if worker.tend()]:
                return 0 if all(worker.run_complete for worker in ended) else _USER_ERROR
            if time.monotonic() - reaped > _REAP_EVERY_S:
                reap_orphans(own | {w.process.pid or 0 for w in workers if w.process})
                reaped = time.monotonic()
        return 0
    finally:
        stop_all(workers)


@contextlib.contextmanager
def _descendants_end(name: str) -> Iterator[set[int]]:
    """End the processes that workers started when this one ends; yield ids of other children.

    Args:
        name: name of this server, the prefix of its workers' marks.
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
    """Collector that sums the workers' files; waits for one that a new worker is about to fill."""

    def collect(self) -> list[Metric]:
        """Return all metrics."""
        for _ in range(_COLLECT_TRIES - 1):
            try:
                return list(super().collect())  # type: ignore[no-untyped-call]
            except struct.error:  # a file without its first four bytes
                time.sleep(_COLLECT_PAUSE_S)
        return list(super().collect())  # type: ignore[no-untyped-call]
