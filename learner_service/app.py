"""The learner process: loads what it continues, listens, waits, and stops in order."""

import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from murmur.learner_service.checkpoint.folder import CheckpointFolder
from murmur.learner_service.context import RunContext
from murmur.learner_service.device.device import (
    choose_own_gpu,
    keep_freed_memory,
    select_device,
)
from murmur.learner_service.device.precision import Precision
from murmur.learner_service.images.run import SupervisedRun
from murmur.learner_service.learning.base import algorithm_config
from murmur.learner_service.learning.supervised import supervised_config
from murmur.learner_service.ranks.group import ALONE, Group
from murmur.learner_service.ranks.watch import SILENT_S, Heartbeat, SessionWatch
from murmur.learner_service.run import Run
from murmur.learner_service.serving.admission import Admission
from murmur.learner_service.serving.server import RolloutServer
from murmur.learner_service.telemetry.progress import reached_limit
from murmur.learner_service.telemetry.tracking import require_trackers
from murmur.learner_service.tuning.batch_size import size_is_measured
from murmur.learner_service.tuning.resolve import share_of, with_learner_options
from murmur.shared.config.cores import available_cores, choose
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.config.learner import METRICS_PORT, PORT, LearnerConfig
from murmur.shared.process.addresses import host_and_port, in_use
from murmur.shared.process.errors import ConnectionLostError
from murmur.shared.process.files import make_folder, read_json, write_whole
from murmur.shared.process.ledger import ThreadClock
from murmur.shared.process.metrics_server import MetricsServer
from murmur.shared.process.process import (
    CriticalThread,
    critical_thread_works,
    ended_by_signals,
    exit_code,
    logger,
    new_event_loop,
    process_began,
    wake_without_preempting,
)
from murmur.shared.process.run_lock import RunLock
from murmur.shared.wire.channel import RUN_COMPLETE, STOPPING
from murmur.shared.wire.credentials import CredentialFolder, credentials_for, warn_if_insecure

# How long a stopping sync run may take to reach the next update, where it can be saved exactly.
_SYNC_STOP_S = 20.0
# How long a complete run waits for the evaluation of its final policy.
_LAST_EVALUATION_S = 300.0
_REMIND_OF_EVALUATION_S = 30.0  # after which the log says that it waits
# The interpreter's default of 5 ms makes the event loop wait for the learner's Python code.
_SWITCH_INTERVAL_S = 5e-4


def run_learner(
    config: ExperimentConfig,
    run_dir: Path,
    *,
    resume: bool,
    stop: threading.Event,
    auto_resume: bool = False,
    serve_only: bool = False,
    checkpoint: str = "latest",
    on_ready: Callable[[int, int], None] = lambda port, metrics_port: None,
) -> int:
    """Run a learner until the run is complete or `stop` is set; returns the exit code.

    Args:
        config: the experiment.
        run_dir: folder for checkpoints and logs; made if it does not exist.
        resume: continue from the latest checkpoint.
        auto_resume: the same if there is one, else begin, whatever an earlier start left.
        stop: set it to end the run in order.
        serve_only: do not learn; answer evaluation sessions with `checkpoint`.
        checkpoint: "latest", "best" or a path; for serve_only.
        on_ready: called with the gRPC port and the metrics port once both listen.

    Raises:
        MurmurError: if the user can fix the cause.
    """
    config, credentials, device = _prepared(config, run_dir, serve_only)
    group, heartbeat = ALONE, None
    try:
        if not serve_only:
            group, heartbeat = _joined(device, config.learner.group_timeout_s)
        share_of(config, group)  # may refuse
        # Rank 0 holds the lock for all.
        with _lock(run_dir, serve_only, group) as lock:
            again = None if auto_resume else resume
            loaded = _load(config, run_dir, again, serve_only, checkpoint, group)
            if group.any_rank(bool(loaded and not serve_only and _is_complete(config, loaded))):
                return 0
            context = RunContext(config, run_dir, loaded, serve_only, stop, group, lock)
            run = (SupervisedRun if config.supervised else Run)(context)
            if loaded is None:
                context.keep_config()
            elif not serve_only:
                path, state = loaded  # an offline run may have learned on by now
                logger.info("resumed %s: %d updates", path, state["progress"]["updates"])
            name = f"learner-{group.rank}" if group.rank else "learner"
            ports_file = run_dir / ("serve.json" if serve_only else f"{name}.json")
            _listen(run, credentials, stop, ports_file, on_ready)
    except ConnectionLostError as error:
        logger.error("%s", error)
        return exit_code(error)
    finally:
        if heartbeat is not None:
            heartbeat.close()
        if not critical_thread_works():  # else the end of the process closes it
            group.close()
    return 0


def set_up_process() -> None:
    """Set what holds for a learner's whole process; before it has threads."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    keep_freed_memory()
    wake_without_preempting()


def _lock(run_dir: Path, serve_only: bool, group: Group) -> RunLock:
    """The lock of the run's folder; a learner that only serves needs none.

    Raises:
        ResourceError: if another process has it.
    """
    if serve_only:
        return RunLock(None)
    return RunLock.of_group(run_dir) if group.rank else RunLock.acquire(run_dir)


def _prepared(
    config: ExperimentConfig, run_dir: Path, serve_only: bool
) -> tuple[ExperimentConfig, CredentialFolder | None, torch.device]:
    """The configuration for this machine, the credentials and the device; the process is set up.

    What a sync run computes depends on device and precision, so its config.yaml must hold them.

    Raises:
        MurmurError: if the user can fix the cause.
    """
    choose_own_gpu(config.learner)
    here = os.environ.get("LOCAL_WORLD_SIZE", "")
    chosen = choose(config, available_cores(), learners=int(here) if here.isdecimal() else 1)
    if config.learner.pipeline != "sync":  # environment servers choose it, each for its machine
        chosen.pop("env_server.num_workers", None)
    config = config.changed(chosen)
    credentials = credentials_for(config.security, config.learner.host, "learner.host")
    warn_if_insecure(config.security)
    set_up_process()
    config = with_learner_options(config)  # wrong settings are refused before anything is written
    if not serve_only:
        require_trackers(config.tracking.services)
    device = select_device(config.learner)
    if not serve_only and config.learner.pipeline == "sync":
        if key := algorithm_config(config.algorithm).about.open_batch_size:
            raise size_is_measured(config, key, run_dir)
        precision = Precision.of(config.learner, device).name
        config = config.changed({"learner.device": device.type, "learner.precision": precision})
    make_folder(run_dir)
    return config, credentials, device


def _joined(device: torch.device, timeout_s: float) -> tuple[Group, Heartbeat | None]:
    """The group that torchrun's variables describe, and its signs of life; ALONE without them.

    Raises:
        MurmurError: if the ranks do not find one another.
    """
    with ended_by_signals():  # who waits for other ranks in C++ would see to none
        group = Group.from_environment(device, timeout_s)
    if group.store is None:
        return group, None
    logger.info("rank %d of %d learners", group.rank, group.size)
    silent_s = min(SILENT_S, timeout_s)
    return group, Heartbeat(group.store.clone(), group.rank, group.size, silent_s)


def _ports_to_bind(learner: LearnerConfig, group: Group, ports_file: Path) -> tuple[int, int]:
    """Return the ports of gRPC and of the metrics to bind; 0: any.

    Ranks add their number on this machine to those configured, so that machines with a rank each
    use the same ones. Environment servers connect to the gRPC port they know, also after a restart
    of the learner: where none is set, it is the one it had.
    """
    local = 0
    if group.size > 1:
        number = os.environ.get("LOCAL_RANK", "")
        local = int(number) if number.isdecimal() else group.rank
    had = read_json(ports_file)
    if learner.port:
        port = learner.port + local
    else:
        port = had.get("port") or (0 if learner.port == 0 else PORT + local)
    if learner.metrics_port == 0:
        return port, had.get("metrics_port", 0)
    return port, (learner.metrics_port or METRICS_PORT) + local


def _load(
    config: ExperimentConfig,
    run_dir: Path,
    resume: bool | None,
    serve_only: bool,
    checkpoint: str,
    group: Group,
) -> tuple[Path, dict[str, Any]] | None:
    """The checkpoint to begin with, if any.

    Args:
        config: the experiment.
        run_dir: the run's folder.
        resume: whether to continue; None: if there is a checkpoint.
        serve_only: whether to serve `checkpoint`.
        checkpoint: "latest", "best" or a path.
        group: continues together, as rank 0 decides.

    Raises:
        CheckpointError: if it is wanted, and missing or damaged.
        ConfigError: if a new run would begin over another.
    """
    folder = CheckpointFolder(run_dir, config.learner.keep_checkpoints, group)
    if serve_only:
        path = folder.find(checkpoint)
        return path, folder.load(path)
    wanted = False
    if group.rank == 0:
        wanted = folder.has_checkpoint() if resume is None else resume
        if resume is False:
            folder.require_no_run()
        for file in run_dir.glob("learner-*.json"):  # of ranks that are not there any more
            number = file.stem.partition("-")[2]
            if not number.isdecimal() or int(number) >= group.size:
                file.unlink()
    return folder.load_latest() if group.any_rank(wanted) else None


def _is_complete(config: ExperimentConfig, loaded: tuple[Path, dict[str, Any]]) -> bool:
    """Whether a checkpoint has reached the run's limit already; says so."""
    path, state = loaded
    so_far = state["progress"]
    limit = reached_limit(
        config.run,
        so_far["updates"],
        so_far["env_steps"],
        so_far["seconds"],
        so_far["episodes"],
    )
    if config.supervised and so_far["epochs"] >= supervised_config(config).epochs:
        limit = f"algorithm.epochs={so_far['epochs']}"
    if limit:
        logger.warning("nothing to do: %s has reached %s; raise it to train on", path, limit)
    return bool(limit)


def _listen(
    run: Run | SupervisedRun,
    credentials: CredentialFolder | None,
    stop: threading.Event,
    ports_file: Path,
    on_ready: Callable[[int, int], None],
) -> None:
    """Listen until the run is complete or told to stop; then end everything in order."""
    context, serving = run.context, threading.Event()
    group, liveness, learner = context.group, context.liveness, context.config.learner
    port, metrics_port = _ports_to_bind(learner, group, ports_file)
    metrics = MetricsServer(
        learner.metrics_host,
        metrics_port,
        context.metrics.registry,
        lambda: liveness.trouble() if serving.is_set() else "not ready: it takes no sessions",
        section="learner.",
        or_any=not learner.metrics_port,
    )
    loop = new_event_loop()
    admission = Admission(learner, context.metrics, credentials, group.rank, group.size)
    server = RolloutServer(
        run.sessions, admission, learner, credentials, asked=port, or_any=not learner.port
    )
    grpc_thread = CriticalThread("grpc", loop.run_forever)
    watch: SessionWatch | None = None
    try:
        loop.run_until_complete(server.start())
        grpc_thread.start()
        context.metrics.keep(ThreadClock(grpc_thread))
        serving.set()  # before a client can read where it listens
        ports = {
            "pid": os.getpid(),
            "began": process_began(os.getpid()),
            "port": server.port,
            "metrics_port": metrics.port,
        }
        write_whole(ports_file, json.dumps(ports))
        logger.info(
            "listening on %s%s, metrics on http://%s%s",
            host_and_port(learner.host, server.port),
            in_use(port, server.port),
            host_and_port(learner.metrics_host, metrics.port),
            in_use(metrics_port, metrics.port),
        )
        on_ready(server.port, metrics.port)
        watch = _watch_sessions(learner.group_timeout_s, context, admission)
        _wait(run, stop)
        serving.clear()
        stopped = stop.is_set() or context.keeper.ranks.stopping
        admission.stopping = STOPPING if stopped else RUN_COMPLETE
        run.drain()
        asyncio.run_coroutine_threadsafe(server.stop(admission.stopping), loop).result(10)
        run.end_input()
        context.finish()
        p, how = context.progress, "stopped" if stopped else "done"
        logger.info("%s: %d updates, %d environment steps", how, p.updates, p.all_env_steps)
    finally:
        stop.set()  # else the learner's thread continues, if this is an error
        if watch is not None:
            watch.close()
        run.end_input()
        context.close()
        metrics.close()
        if grpc_thread.is_alive():
            loop.call_soon_threadsafe(loop.stop)
            grpc_thread.join()
        loop.close()


def _watch_sessions(
    timeout_s: float, context: RunContext, admission: Admission
) -> SessionWatch | None:
    """Watch for ranks without sessions; None of a learner that is alone, or needs none."""
    group = context.group
    if group.store is None or context.config.run.offline:
        return None

    def updates() -> int | None:
        ended = context.learner is not None and context.learner.finished.is_set()
        return None if ended or admission.stopping else context.progress.updates

    return SessionWatch(
        group.store.clone(),
        group.rank,
        group.size,
        lambda: admission.training_sessions,
        updates,
        context.metrics.gauge("ranks_without_sessions").set,
        timeout_s,
    )


def _wait(run: Run | SupervisedRun, stop: threading.Event) -> None:
    """Wait until the run is complete, or told to stop and saved."""
    context, deadline = run.context, None
    alone = context.group.size == 1
    if context.learner is None and not alone and not context.barrier.await_all(stop):
        return
    while True:
        learner = context.learner
        if learner is not None and learner.finished.wait(0.1):
            _await_evaluation(run, stop)
            return
        if not stop.wait(0 if learner else 0.1):
            continue
        if alone and (learner is None or not context.begun):
            return
        if learner is None:
            time.sleep(0.1)
        deadline = deadline or time.monotonic() + _SYNC_STOP_S
        if time.monotonic() > deadline:
            logger.warning("stopped between updates; what came after the last checkpoint is lost")
            return


def _await_evaluation(run: Run | SupervisedRun, stop: threading.Event) -> None:
    """Let the evaluation of the final policy come to its end, in bounded time, on all ranks."""
    began, reminded, waited = time.monotonic(), False, 0.0
    none_came = "no evaluator has come: start `murmur env-server --evaluate`"
    while run.context.barrier.await_end(run.busy and waited < _LAST_EVALUATION_S, stop):
        waited = time.monotonic() - began
        if run.busy and waited > _REMIND_OF_EVALUATION_S and not reminded:
            reminded = True
            under_way = "the evaluation under way"
            logger.warning(
                "all updates are made; the run ends after %s, or without it in %.0f s",
                f"the last evaluation ({none_came})" if run.lacks_evaluator else under_way,
                _LAST_EVALUATION_S - waited,
            )
    if run.busy and waited >= _LAST_EVALUATION_S:
        missing, why = "the evaluation under way", "its episodes have not ended"
        if run.lacks_evaluator:
            missing, why = "its last evaluation", none_came
        logger.warning(
            "the run ends without %s: %s within %.0f s", missing, why, _LAST_EVALUATION_S
        )
