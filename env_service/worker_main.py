"""The outermost function of a worker process."""

import asyncio
import atexit
import contextlib
import faulthandler
import logging
import os
import signal
import sys
from dataclasses import dataclass
from typing import Any

import uvloop
from prometheus_client import REGISTRY

from env_service.metrics import WorkerMetrics
from env_service.sessions.evaluate import copies_for, serve_evaluations
from env_service.sessions.supply import run_supply
from env_service.sessions.worker import run_sessions
from env_service.watchdog.descendants import lead_session
from env_service.watchdog.heartbeat import Heartbeat
from shared.config.experiment import ExperimentConfig
from shared.config.files import code_of
from shared.config.plugin_folders import look_in
from shared.process.errors import MurmurError
from shared.process.process import (
    configure_logging,
    die_with_parent,
    wake_without_preempting,
)

logger = logging.getLogger("murmur")

_LOOK_EVERY_S = 0.2  # whether the parent asks to stop


@dataclass(frozen=True)
class Job:
    """The start parameters of a worker.

    Attributes:
        config: configuration of the experiment.
        number: number of the worker.
        evaluate: true if it evaluates.
        parent: process id of the parent.
        lost: (reason, number of episodes) that the previous process lost, or None.
    """

    config: ExperimentConfig
    number: int
    evaluate: bool
    parent: int
    lost: tuple[str, int] | None

    @property
    def num_envs(self) -> int:
        """Return the number of the worker's environments; 1 if it reads samples."""
        config = self.config
        if config.supervised:
            return 1
        if self.evaluate:
            return copies_for(config, config.evaluation.episodes)
        return config.env_server.envs_per_worker


def worker_variables(folder: str) -> dict[str, str]:
    """Return the environment variables that a worker needs when it imports its modules.

    Args:
        folder: folder of its metrics.
    """
    defaults = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    kept = {name: os.environ.get(name, value) for name, value in defaults.items()}
    return {"PROMETHEUS_MULTIPROC_DIR": folder, **kept}


def work(job: Job, memory: Any) -> None:  # noqa: ANN401 - a ctypes array
    """Run a worker until SIGTERM. `memory` is the heartbeat's."""
    die_with_parent(job.parent)
    lead_session()
    wake_without_preempting()
    errors = os.dup(2)  # a copy: the decoder of images redirects standard error for moments
    faulthandler.enable(errors)  # also a simulator that crashes shows where
    faulthandler.register(signal.SIGUSR1, errors)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which stops us
    configure_logging(f"{'evaluator' if job.evaluate else 'worker'}-{job.number}")
    look_in(job.config.run.plugin_folders, code_of(job.config))
    heartbeat, code = Heartbeat(memory, job.num_envs), 0
    heartbeat.note_start()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_play(job, heartbeat))
    except MurmurError as error:
        if not heartbeat.gave_up:  # else it has been logged before the environments were closed
            logger.error("%s", error)
            heartbeat.give_up()
        code = 2
    finally:
        heartbeat.begin_closing()
    # What libraries have registered runs, but threads that an environment left are not waited for.
    atexit._run_exitfuncs()
    with contextlib.suppress(Exception):  # an environment may have closed the files
        logging.shutdown()
        sys.stdout.flush()
    os._exit(code)


async def _watch(heartbeat: Heartbeat, stop: asyncio.Event) -> None:
    """Set `stop` when the parent asks, even if an environment replaced SIGTERM's handler."""
    while not heartbeat.stop_asked:
        await asyncio.sleep(_LOOK_EVERY_S)
    stop.set()


async def _play(job: Job, heartbeat: Heartbeat) -> None:
    """Run all sessions until SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    mode = "supply" if job.config.supervised else "evaluate" if job.evaluate else "train"
    metrics = WorkerMetrics(mode, REGISTRY)
    if job.lost is not None:
        metrics.drop_episodes(*job.lost)
        metrics.flush()  # now: this process may be lost as soon
    watch = asyncio.create_task(_watch(heartbeat, stop))
    try:
        if job.config.supervised:
            await run_supply(job.config, job.number, stop, metrics, heartbeat)
        elif job.evaluate:
            await serve_evaluations(job.config, job.number, stop, metrics, heartbeat)
        else:
            first_slot = job.number * job.num_envs
            await run_sessions(job.config, job.number, first_slot, stop, metrics, heartbeat)
    finally:
        watch.cancel()
