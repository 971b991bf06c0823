"""A worker process: what it runs, and the supervision of its start, death, memory and time."""

import asyncio
import atexit
import contextlib
import ctypes
import faulthandler
import logging
import math
import os
import random
import signal
import time
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.context import SpawnProcess
from multiprocessing.sharedctypes import RawArray
from typing import Any

import psutil
from prometheus_client import REGISTRY
from prometheus_client.multiprocess import mark_process_dead

from murmur.env_service.metrics import WorkerMetrics
from murmur.env_service.sessions.evaluate import copies_for, serve_evaluations
from murmur.env_service.sessions.supply import run_supply
from murmur.env_service.sessions.worker import run_sessions
from murmur.env_service.watchdog.descendants import end_descendants, lead_session, marked
from murmur.env_service.watchdog.faults import Heartbeat
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.config.files import code_of
from murmur.shared.config.plugin_folders import look_in
from murmur.shared.process.errors import MurmurError, RunCompleteError
from murmur.shared.process.host_memory import MemoryKills
from murmur.shared.process.process import (
    Backoff,
    configure_logging,
    die_with_parent,
    end_process,
    new_event_loop,
    wake_without_preempting,
)
from murmur.shared.wire.samples import SPLITS

logger = logging.getLogger("murmur")

LOOK_EVERY_S = 0.2  # at the workers, and by a worker whether its parent asks to stop
KILL_AFTER_S = 10.0  # for a worker that ends: to close its environments and to exit
MAX_HANGS = 5  # in a row; then it is no accident
MAX_HANGS_AT_START, MAX_FAILED_STARTS = 2, 5  # in a row, before the environments are made
# Exit codes that say nothing of the environment: an operator, or a system without memory.
_KILLED_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM)
_RESTART_MIN_S, _RESTART_MAX_S = 0.5, 30.0
_HEALTHY_PAUSES = 10  # a worker that ran this many times its last pause restarts soon again
_HEALTHY_AFTER_S = 60.0  # the longest that this takes; a hang after this time may be an accident
_WEIGH_EVERY_S = 1.0  # a look at the worker's memory
_TRACEBACK_S = 1.0  # for a worker that hangs to write where, before it is killed
_WARM_UP_TURNS = 16  # steps begun and ended that may compile and load
_WARM_UP_PATIENCE = 10  # how many times longer than others they may take
_REMIND_AFTER_S = 30.0  # that environments are still being made


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


class WorkerProcess:
    """A worker process, its deaths and its next start. Used by the parent's main thread.

    Attributes:
        process: running process, or None.
        number: number of the worker, unique over all environment servers.
        run_complete: true once the process has ended because its run is complete.
    """

    def __init__(
        self, config: ExperimentConfig, number: int, evaluate: bool, folder: str, mark: str
    ) -> None:
        """Describe the worker; `start_if_due` starts it.

        Args:
            config: configuration of the experiment.
            number: number of the worker.
            evaluate: true if it evaluates.
            folder: folder of its metrics.
            mark: mark of the environment server, the prefix of the worker's mark.
        """
        self._job = Job(config, number, evaluate, os.getpid(), None)
        self._server = config.env_server
        self.number = number
        self._folder = folder
        plugin = config.source if config.supervised else config.environment
        kind = "source" if config.supervised else "environment"
        factory = plugin.options.get("factory")
        self._name = f"{kind} '{plugin.name}'" + (f" ({factory})" if factory else "")
        if config.imitation.baseline and not evaluate:  # evaluations ask none
            self._name += f" or imitation.baseline={config.imitation.baseline}"
        self._backoff = Backoff(_RESTART_MIN_S, _RESTART_MAX_S, random.random)
        self._due = 0.0
        self._started = 0.0
        self._starts = 0
        self._pause = 0.0
        self._weighed, self._ended_at = 0.0, 0.0  # told to end because it grew too large
        self._memory = RawArray(ctypes.c_uint64, Heartbeat.size(self._job.num_envs))
        self._heartbeat = Heartbeat(self._memory, self._job.num_envs)
        self._mark_prefix, self._mark = f"{mark}{number}.", ""
        self._hangs = 0
        self._start_hangs = 0
        self._failed_starts = 0  # in a row
        self._why_lost = "died"  # how the last process ended
        self._leader = 0  # process id of the latest process
        self._memory_kills = MemoryKills()
        self.process: SpawnProcess | None = None
        self.run_complete = False

    @property
    def alive(self) -> bool:
        """Return whether the process runs. Called from the metrics thread too."""
        process = self.process
        return process is not None and process.exitcode is None

    def start_if_due(self) -> int:
        """Start the process if it does not run and its pause is over; return 1 for a restart."""
        if self.process or time.monotonic() < self._due:
            return 0
        # What the last process cannot report any more, this one does.
        lost = (self._why_lost, self._job.num_envs) if self._heartbeat.turns else None
        self._why_lost = "died"
        ctypes.memset(self._memory, 0, ctypes.sizeof(self._memory))
        self._heartbeat.begin_making()
        self._position, self._still_s = self._heartbeat.position, 0.0
        self._looked = time.monotonic()
        self._reminded = False
        job = replace(self._job, lost=lost)
        process = get_context("spawn").Process(
            target=work, args=(job, self._memory), name=f"worker-{self.number}"
        )
        self._mark = f"{self._mark_prefix}{self._starts}"
        self._memory_kills = MemoryKills()
        with marked(self._mark, **worker_variables(self._folder)):
            process.start()
        assert process.pid is not None
        self.process = process
        self._started = time.monotonic()
        self._leader = process.pid
        self._starts += 1
        return int(self._starts > 1)

    def tend(self) -> bool:
        """Replace the process if it has ended, hangs or is too large.

        Returns:
            true if a restart cannot help; the log has the reason.
        """
        self._end_if_too_large()
        return self._end_if_hung() or self._collect()

    def _patience_s(self) -> float:
        """Return the longest time, s, that the process may spend in its current position."""
        heartbeat = self._heartbeat
        if heartbeat.closing:
            return KILL_AFTER_S
        if heartbeat.making:
            return self._server.start_timeout_s or math.inf
        if heartbeat.turns % 2 == 0:  # it waits for the learner
            return math.inf
        warm_up = heartbeat.turns < _WARM_UP_TURNS
        limit = self._server.step_timeout_s * (_WARM_UP_PATIENCE if warm_up else 1)
        return limit or math.inf

    def _end_if_hung(self) -> bool:
        """Kill the process if its environment takes too long; return True after too many hangs.

        Time counts only while this process runs: neither a stopped or suspended machine nor a
        changed clock makes a step too long.
        """
        if not self.alive:
            return False
        now, position = time.monotonic(), self._heartbeat.position
        looked, self._looked = self._looked, now
        if position != self._position:
            self._position, self._still_s = position, 0.0
            return False
        patience = self._patience_s()
        if patience == math.inf and not self._heartbeat.making:
            self._still_s = 0.0
            return False
        self._still_s += min(now - looked, 2 * LOOK_EVERY_S)
        if self._still_s < patience:
            self._remind(patience)
            return False
        return self._end_hung()

    def _remind(self, patience: float) -> None:
        """Log once that environments take long to be made."""
        if self._reminded or not self._heartbeat.making or self._still_s < _REMIND_AFTER_S:
            return
        self._reminded = True
        logger.warning(
            "worker %d: %s is still being made after %.0f s; the worker is replaced "
            "after %g s (env_server.start_timeout_s)",
            self.number,
            self._name,
            self._still_s,
            patience,
        )

    def _end_hung(self) -> bool:
        """Kill the process after a traceback in the log; return True after too many hangs."""
        assert self.process is not None
        heartbeat = self._heartbeat
        making, closing, started = heartbeat.making, heartbeat.closing, heartbeat.turns > 0
        setting = "start_timeout_s" if making else "step_timeout_s"
        if closing:
            what = "to close its environments and to exit"
        elif making:
            what = f"to be made (env_server.{setting})"
        else:
            what = f"for a step (env_server.{setting}), {self._where()}"
        logger.error(
            "%s took longer than %.3g s %s; worker %d is replaced, it hangs here:",
            self._name,
            self._still_s,
            what,
            self.number,
        )
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._leader, signal.SIGUSR1)  # see faulthandler in `work`
        self.process.join(_TRACEBACK_S)
        self.process.kill()
        self.process.join()
        if closing:
            return False
        self._why_lost = "hung"
        if started:
            healthy = time.monotonic() - self._started > _HEALTHY_AFTER_S + self._still_s
            self._hangs, self._start_hangs = 1 if healthy else self._hangs + 1, 0
        else:
            self._start_hangs += 1
        if self._hangs < MAX_HANGS and self._start_hangs < MAX_HANGS_AT_START:
            return False
        logger.error(
            "%s hung %d times in a row in worker %d: fix it, or raise "
            "env_server.%s if it does take so long",
            self._name,
            max(self._hangs, self._start_hangs),
            self.number,
            setting,
        )
        return True

    def _where(self) -> str:
        """Describe the episode or sample that the process was working on."""
        if not self._job.config.supervised:
            return self._heartbeat.where()
        index, split = self._heartbeat.sample()
        return f"reading sample {index} of split '{SPLITS[split]}'"

    def _end_if_too_large(self) -> None:
        """End the process if it takes too much memory; kill it if it does not stop in time."""
        limit = self._server.worker_memory_mib
        now = time.monotonic()
        if not limit or not self.alive or now - self._weighed < _WEIGH_EVERY_S:
            return
        assert self.process is not None
        self._weighed = now
        if self._ended_at:
            if now - self._ended_at > KILL_AFTER_S:
                self.process.kill()
            return
        try:
            size = psutil.Process(self.process.pid).memory_info().rss >> 20
        except psutil.NoSuchProcess:
            return
        if size > limit:
            logger.error(
                "worker %d takes %d MiB, more than env_server.worker_memory_mib = %d; it is "
                "replaced: its %s may leak memory",
                self.number,
                size,
                limit,
                self._name,
            )
            self._why_lost, self._ended_at = "memory", now
            self.ask_to_stop()

    def _collect(self) -> bool:
        """Plan the next start if the process has just ended; return True to plan none."""
        process = self.process
        if process is None or process.exitcode is None:
            return False
        code = process.exitcode
        self.release()
        if self._heartbeat.gave_up:
            self.run_complete = code == 0
            return True
        if self._ended_at:
            self._ended_at = 0.0
            return False
        healthy_s = min(_HEALTHY_PAUSES * self._pause, _HEALTHY_AFTER_S)
        if time.monotonic() - self._started > healthy_s:
            self._backoff.reset()
        self._pause = self._backoff.pause_s()
        self._due = time.monotonic() + self._pause
        logger.error(
            "worker %d died with code %d%s; restart in %.1f s",
            self.number,
            code,
            self._why_ended(code),
            self._pause,
        )
        started = self._heartbeat.turns > 0 or not self._heartbeat.making
        if started:
            self._failed_starts = 0
        elif code not in _KILLED_FROM_OUTSIDE:
            self._failed_starts += 1
        if self._failed_starts < MAX_FAILED_STARTS:
            return False
        logger.error(
            "%s ended its process %d times in a row while it was made in worker %d, "
            "the last time with code %d: its package, factory, __init__ or first reset() does that",
            self._name,
            self._failed_starts,
            self.number,
            code,
        )
        return True

    def _why_ended(self, code: int) -> str:
        """Explain an exit code, as text to append to it."""
        if code == -signal.SIGKILL and (why := self._memory_kills.explanation()):
            return f", {why}"
        return "" if code else ", though it was not asked to end"

    def ask_to_stop(self) -> None:
        """Ask the process to end in order."""
        assert self.process is not None
        self._heartbeat.stop_asked = True
        self.process.terminate()

    def release(self) -> None:
        """Release a process that has ended and its gauges, and kill processes that it started."""
        assert self.process is not None
        self.process.join()
        mark_process_dead(self.process.pid, self._folder)  # type: ignore[no-untyped-call]
        self.process.close()
        self.process = None
        if left := end_descendants(self._leader, self._mark):
            logger.warning(
                "worker %d left %d process%s of its environments behind; killed",
                self.number,
                left,
                "es" * (left > 1),
            )


def stop_all(workers: list[WorkerProcess]) -> None:
    """Stop all workers by SIGTERM, then by SIGKILL if they do not end in time."""
    running = [(worker, worker.process) for worker in workers if worker.process]
    for worker, _ in running:
        worker.ask_to_stop()
    deadline = time.monotonic() + KILL_AFTER_S
    for worker, process in running:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.exitcode is None:
            logger.warning("%s did not stop in time; killed", process.name)
            process.kill()
        worker.release()


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
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(_play(job, heartbeat))
    except RunCompleteError as end:
        logger.info("%s", end)
        heartbeat.gave_up = True
    except MurmurError as error:
        if not heartbeat.gave_up:  # else it has been logged before the environments were closed
            logger.error("%s", error)
            heartbeat.gave_up = True
        code = 2
    finally:
        heartbeat.closing = True
    # What libraries have registered runs, but threads that an environment left are not waited for.
    atexit._run_exitfuncs()
    end_process(code)


async def _watch(heartbeat: Heartbeat, stop: asyncio.Event) -> None:
    """Set `stop` when the parent asks, even if an environment replaced SIGTERM's handler."""
    while not heartbeat.stop_asked:
        await asyncio.sleep(LOOK_EVERY_S)
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
