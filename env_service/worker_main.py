"""A worker process from inside: its outermost function."""

import asyncio
import contextlib
import faulthandler
import logging
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import uvloop
from prometheus_client import REGISTRY

from env_service.metrics import WorkerMetrics
from env_service.sessions.evaluate import serve_evaluations
from env_service.sessions.worker import run_sessions
from env_service.watchdog.board import Board
from env_service.watchdog.descendants import VARIABLE, lead_session
from shared.config import ExperimentConfig
from shared.errors import MurmurError
from shared.process import configure_logging, die_with_parent, wake_without_preempting

logger = logging.getLogger("murmur")


@dataclass(frozen=True)
class Job:
    """What a worker is told when it starts.

    Attributes:
        config: the experiment.
        number: the worker's number.
        evaluate: whether it evaluates.
        parent: the parent's process id.
        lost: why, and how many, episodes the process lost whose place this one takes.
    """

    config: ExperimentConfig
    number: int
    evaluate: bool
    parent: int
    lost: tuple[str, int] | None

    @property
    def num_envs(self) -> int:
        """Environments of the worker."""
        config = self.config
        return config.evaluation.episodes if self.evaluate else config.env_server.envs_per_worker


@contextlib.contextmanager
def worker_variables(folder: str, mark: str) -> Iterator[None]:
    """What a worker must find in its environment when it imports its modules.

    Args:
        folder: where its metrics go.
        mark: tells what it starts from what others start.
    """
    added = {"PROMETHEUS_MULTIPROC_DIR": folder, VARIABLE: mark}
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


def work(job: Job, memory: Any) -> None:  # noqa: ANN401 - a ctypes array
    """Play until told to stop by SIGTERM. `memory` is the board's."""
    die_with_parent(job.parent)
    lead_session()
    wake_without_preempting()
    faulthandler.enable()  # also a simulator that crashes shows where
    faulthandler.register(signal.SIGUSR1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which stops us
    configure_logging(f"{'evaluator' if job.evaluate else 'worker'}-{job.number}")
    board = Board(memory, job.num_envs)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_play(job, board))
    except MurmurError as error:
        if not board.gave_up:  # else it has been logged before the environments were closed
            logger.error("%s", error)
            board.give_up()
        sys.exit(2)
    finally:
        board.begin_closing()


async def _play(job: Job, board: Board) -> None:
    """All sessions, until SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    metrics = WorkerMetrics("evaluate" if job.evaluate else "train", REGISTRY)
    if job.lost is not None:
        metrics.drop_episodes(*job.lost)
        metrics.flush()  # now: this process may be lost as soon
    if job.evaluate:
        await serve_evaluations(job.config, job.number, stop, metrics, board)
    else:
        first_slot = job.number * job.num_envs
        await run_sessions(job.config, job.number, first_slot, stop, metrics, board)
