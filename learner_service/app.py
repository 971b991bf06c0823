"""The learner process: builds the parts, starts the threads, stops them in order."""

import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import uvloop
import yaml
from torch import Tensor

from learner_service.algorithms.base import Algorithm, Policy, build_algorithm
from learner_service.checkpoint import (
    CheckpointFolder,
    check_spec,
    load_algorithm,
    saved_policy,
    saved_spec,
    spec_text,
)
from learner_service.runtime.device import (
    keep_freed_memory,
    require_compiler,
    resolve_precision,
    restore_generator,
    select_device,
)
from learner_service.runtime.precision import Precision
from learner_service.serving.batcher import DynamicBatcher
from learner_service.serving.evaluation import Evaluation, EvaluationGate, check_best_metric
from learner_service.serving.inference import InferenceLoop
from learner_service.serving.league import League, Pairing, check_opponent, team_spec
from learner_service.serving.server import RolloutServer
from learner_service.serving.session import Session
from learner_service.storage.rollout import RolloutStorage
from learner_service.storage.storage import Storage
from learner_service.telemetry.device_clock import DeviceClock
from learner_service.telemetry.gpu import Gpu
from learner_service.telemetry.metrics import LearnerMetrics
from learner_service.telemetry.profiling import Profiling
from learner_service.telemetry.progress import Progress, ProgressLog, reached_limit
from learner_service.telemetry.tally import Tally
from learner_service.tools.batch_size import fit_batch_size
from learner_service.training.learner import Learner
from shared.config import ExperimentConfig
from shared.credentials import credentials_for, warn_if_insecure
from shared.errors import ConfigError, MurmurError, ResourceError, SpecError
from shared.ledger import Ledger, ThreadClock
from shared.process import (
    CriticalThread,
    MetricsServer,
    end_process,
    logger,
    wake_without_preempting,
)
from shared.rpc import rollout_pb2 as pb
from shared.spec import EnvSpec, action_layout

# How long a stopping sync run may take to reach the next update, where it can be saved exactly.
_SYNC_STOP_S = 20.0
# How long a stopping learner waits for the rows that environments are working on.
_DRAIN_S = 5.0
# How long a complete run waits for the evaluation of its final policy.
_LAST_EVALUATION_S = 300.0
# The interpreter's default of 5 ms makes the event loop wait for the learner's Python code.
_SWITCH_INTERVAL_S = 5e-4


class Run:
    """One run: everything that exists once the environment's spec is known.

    The server's Host. `open` runs once; `admit` and `end` on the event loop.

    Attributes:
        begun: whether a training session has been let in.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        run_dir: Path,
        checkpoint: tuple[Path, dict[str, Any]] | None,
        serve_only: bool,
        stop: threading.Event,
    ) -> None:
        self._config, self._run_dir, self._stop = config, run_dir, stop
        self._checkpoint, self._serve_only = checkpoint, serve_only
        self._sync = config.learner.pipeline == "sync"
        self._folder = CheckpointFolder(run_dir, config.learner.keep_checkpoints)
        self.device = select_device(config.learner)
        self.metrics = LearnerMetrics(None if serve_only else Tally(run_dir / "counters.bin"))
        self.metrics.clock = self._clock = DeviceClock(self.device)
        if self.device.type == "cuda":
            self.metrics.gpu = Gpu(str(torch.cuda.get_device_properties(self.device).uuid))
            if self.metrics.gpu.trouble:
                logger.warning(
                    "the GPU's driver tells nothing (%s): no murmur_learner_gpu_ metrics",
                    self.metrics.gpu.trouble,
                )
        self.metrics.gauge(
            "info",
            run=config.run.name,
            environment=config.environment.name,
            algorithm=config.algorithm.name,
            device=self.device.type,
        ).set(1)
        self.progress = Progress()
        self.gate = EvaluationGate(lambda evaluation: None)
        self.batcher = DynamicBatcher(
            config.learner.batcher, config.total_envs if self._sync and not serve_only else 0
        )
        self.run_seed = config.run.seed
        self.spec: EnvSpec | None = None
        self.begun = False
        self.learner: Learner | None = None
        self._threads: list[CriticalThread] = []
        self._sessions: list[Session] = []
        self._lock = threading.Lock()
        self._next_episode: dict[int, int] = {}
        self._open_episodes: dict[int, bytes] = {}
        self._memory: dict[int, Tensor] = {}
        self._returns: dict[int, float] = {}
        self._again: set[int] = set()  # slots whose first row was counted before the checkpoint
        self._league = League(config.league, config.run.seed, self.device)
        guests = [self._folder.find(path) for path in config.league.checkpoints]
        self._guests = [str(path.resolve()) for path in guests]
        if checkpoint:
            self._open(saved_spec(checkpoint[1]))

    @property
    def policy_version(self) -> int:
        """Updates made."""
        return self.progress.updates

    def open(self, spec: EnvSpec) -> None:
        """Begin the run with the spec of its first session. Called by the server.

        Raises:
            SpecError: if the algorithm does not fit the environment: the next one may.
        """
        try:
            self._open(spec)
        except SpecError:
            raise
        except MurmurError as error:  # nobody who connects later can mend this
            logger.error("%s", error)
            end_process(2)
        except Exception:
            logger.exception("the run cannot begin; the process ends")
            end_process(1)

    def _open(self, spec: EnvSpec) -> None:
        """Build algorithm, storage and loops for this spec, and start them."""
        c = self._config
        if not self._serve_only:
            check_best_metric(c.evaluation.best_metric, spec)
        precision = Precision(resolve_precision(c.learner, self.device), self.device)
        chosen = c if self._serve_only else fit_batch_size(c, spec, self._run_dir)
        algorithm = build_algorithm(
            chosen.algorithm, spec, c.network, precision, self.device, c.run.seed
        )
        if c.learner.compile and not self._serve_only:
            require_compiler(self.device)
            algorithm.compile()
        generator = torch.Generator(self.device).manual_seed(c.run.seed)

        def load_opponent(file: str) -> Policy:
            path = self._folder.path / file  # a guest's file is an absolute path
            return opponent_policy(path, self._folder.load(path), spec, precision, self.device)

        for file in self._guests:
            self._league.invite(file, load_opponent(file))
        state = None
        if self._checkpoint:
            path, state = self._checkpoint
            load_algorithm(path, state, c, algorithm)
            self._restore(state, generator)
            # Who only serves plays against league.checkpoints; a run may have had no league so far.
            if "league" in state and not self._serve_only:
                self._league.load_state_dict(state["league"], load_opponent)
        storage: Storage[Any]
        if self._serve_only:  # no row is ever put: it stays empty, and a replay would be in the way
            storage = RolloutStorage(spec, 1, 1, None, self.device)
        else:
            storage = algorithm.make_storage(spec, None if self._sync else c.learner.max_policy_lag)
        if isinstance(storage, RolloutStorage):
            self._warn_of_waiting(storage)
        self.metrics.gauge("environments_limit").set(storage.environments_limit)
        if self._checkpoint and state is not None and not self._serve_only:
            self._folder.load_storage(self._checkpoint[0], state, storage)
            self.progress.settle(storage.waiting_rows + len(self._again))
        if not self._serve_only:
            self._settle_metrics(storage.waiting_rows)
        policy = algorithm.make_policy()
        self.inference = inference = InferenceLoop(
            spec,
            self.batcher,
            storage,
            policy,
            generator,
            self.gate,
            self.progress,
            self.metrics,
            self._clock,
            self._learn_ready if self._sync and not self._serve_only else None,
            self._league,
            torch.Generator(self.device).manual_seed(c.run.seed) if c.evaluation.sample else None,
        )
        if self._serve_only:
            self._serve(algorithm)
        else:
            self._start_learning(spec, algorithm, generator, storage, policy, state)
        self.spec = spec
        self._threads.append(self._thread("inference", inference.run))
        logger.info(
            "environment '%s': %d agents; learning on %s in %s",
            spec.name,
            spec.num_agents,
            self.device,
            precision.name,
        )
        for thread in self._threads:
            thread.start()

    def _start_learning(
        self,
        spec: EnvSpec,
        algorithm: Algorithm[Any],
        generator: torch.Generator,
        storage: Storage[Any],
        policy: Policy,
        state: dict[str, Any] | None,
    ) -> None:
        c = self._config

        def full_state() -> dict[str, Any]:
            return {
                "spec": spec_text(spec),
                "config": c.model_dump_json(),
                "algorithm": algorithm.state_dict(),
                "generator": generator.get_state(),
                "progress": self.progress.state_dict(),
                **({"league": self._league.state_dict()} if c.league.on else {}),
                **self._episodes(),
            }

        log = ProgressLog(self._run_dir, self.progress, spec.num_agents)
        learner = Learner(
            c,
            algorithm,
            storage,
            policy,
            self._folder,
            self.gate,
            self.progress,
            log,
            self.metrics,
            self._clock,
            full_state,
            self._stop,
            self._league,
            Profiling(self._run_dir, self.metrics.ledgers, self.device.type == "cuda"),
        )
        learner.best = self._folder.best_score(c.evaluation.best_metric) if state else None
        learner.inference = self.inference
        self.learner = learner
        storage.on_room = self.inference.wake
        if not self._sync:
            self._threads.append(self._thread("learner", learner.run))

    def _thread(self, name: str, target: Callable[[], None]) -> CriticalThread:
        """A thread that keeps a ledger of its time."""
        ledger = Ledger(name)
        self.metrics.keep(ledger)

        def run() -> None:
            ledger.adopt()
            target()

        return CriticalThread(name, run)

    def _serve(self, algorithm: Algorithm[Any]) -> None:
        """Answer every evaluation session at once, with the policy of the checkpoint."""
        p = self.progress

        def start() -> Evaluation:
            return Evaluation(algorithm.make_policy(), p.updates, p.env_steps)

        self.gate.start = start  # type: ignore[method-assign]

    def _learn_ready(self) -> bool:
        assert self.learner is not None
        return self.learner.learn_ready()

    def _restore(self, state: dict[str, Any], generator: torch.Generator) -> None:
        if not restore_generator(generator, state["generator"]) and not self._serve_only:
            logger.warning(
                "the checkpoint was saved on another kind of device: random numbers go on from "
                "the seed, so this run is not the one that would have gone on there"
            )
        self.progress.load_state_dict(state["progress"])
        for slot, episode, actions in state["slots"]:
            # Only the sync pipeline can go on in the middle of an episode.
            self._next_episode[slot] = episode if self._sync else episode + 1
            if self._sync:
                self._open_episodes[slot] = bytes.fromhex(actions)
        if self._sync:  # older checkpoints lack what is not found
            self._memory = state.get("memory", {})
            self._returns = state.get("returns", {})
            self._again = set(state.get("again", ()))

    def _settle_metrics(self, held: int) -> None:
        """Count what went with a process that was killed: the rows it held, its last updates.

        The metrics know every row that ever came, the progress those up to the checkpoint. A
        learner that was killed before its first checkpoint had saved nothing.
        """
        m, p = self.metrics, self.progress
        replay = p.rows_inserted or m.total("rows_inserted")
        learned = "rows_inserted" if replay else "rows_trained"
        if not m.total("rows_received"):  # an older murmur kept none
            m.counter("rows_received").inc(p.rows_received)
            m.counter(learned).inc(p.rows_settled)
            for reason, rows in p.rows_dropped.items():
                m.counter("rows_dropped", reason=reason).inc(rows)
        undone = m.total(learned) - p.rows_settled - m.total("rows_undone")
        m.counter("rows_undone").inc(max(0, undone))
        lost = m.total("rows_received") - m.total(learned) - m.total("rows_dropped") - held
        m.counter("rows_dropped", reason="restart").inc(max(0, lost))

    def _episodes(self) -> dict[str, Any]:
        """Per slot: the episode under way; in sync mode its actions so far and what is remembered.

        Memory is saved, not made again from the observations: it is what policies of the past made
        of them.
        """
        memory: dict[int, Tensor] = {}
        returns: dict[int, float] = {}
        with self._lock:
            slots = {slot: (slot, episode, "") for slot, episode in self._next_episode.items()}
            for session in self._sessions:
                for i, slot in enumerate(session.slots.tolist()):
                    actions = session.open_actions(i).hex() if self._sync else ""
                    slots[slot] = (slot, int(session.episode[i]), actions)
                    if self._sync:
                        returns[slot] = float(session.episode_return[i])
                    if self._sync and session.memory is not None:
                        memory[slot] = session.memory[i].cpu().clone()
        return {
            "slots": sorted(slots.values()),
            "memory": memory,
            "returns": returns,
            "again": sorted(returns),
        }

    def team(self, spec: EnvSpec, training: bool) -> EnvSpec:
        """What the run's policy acts for: all agents, or one of two teams.

        Of a league's evaluations one may be of the team alone, against what the environment has.

        Raises:
            SpecError: if there is a league, but no two equal teams.
            CheckpointError: if the run goes on from a checkpoint of another environment.
        """
        alone = not training and self.spec is not None and self.spec.num_agents == spec.num_agents
        team = spec if alone or not self._config.league.on else team_spec(spec)
        if self._checkpoint:
            check_spec(*self._checkpoint, team)
        return team

    def pair(self, session: Session) -> None:
        """Let the league play the other team in a session."""
        n = session.num_envs
        session.pairing = Pairing.of(n) if session.evaluating else self._league.pair(session.slots)

    def admit(self, hello: pb.Hello, spec: EnvSpec) -> tuple[Session, list[pb.SlotStart]]:
        """Slots for a training session: those it prefers if they are free, else the first gap.

        Raises:
            ConfigError: if this learner only evaluates.
            ResourceError: if the configuration cannot be written.
        """
        if self._serve_only:
            raise ConfigError("this learner serves evaluations only; it does not train")
        if not self.begun:
            self.keep_config()
            self.begun = True
        n = hello.num_envs
        wanted = hello.preferred_first_slot if hello.HasField("preferred_first_slot") else None
        with self._lock:
            first = self._free_slots(n, wanted)
            episode = np.array([self._next_episode.get(first + i, 0) for i in range(n)])
            actions = [self._open_episodes.pop(first + i, b"") for i in range(n)]
            session = Session(hello.worker_id, spec, n, first, episode)
            slots = session.slots.tolist()
            session.episode_return[:] = [self._returns.pop(slot, 0.0) for slot in slots]
            session.resumed = self._again.issuperset(slots)
            counted = self._again.intersection(slots)
            if counted and not session.resumed:  # another share of the slots: a fresh start
                self.progress.drop("restart", len(counted))
            self._again -= counted
            remembered = [self._memory.pop(first + i, None) for i in range(n)]
            known = next((m for m in remembered if m is not None), None)
            if known is not None:
                fresh = torch.zeros_like(known)
                session.memory = torch.stack([fresh if m is None else m for m in remembered])
            self._sessions.append(session)
            self._count_environments()
        _replay(session, actions)
        starts = [
            pb.SlotStart(episode=int(e), actions=a) for e, a in zip(episode, actions, strict=True)
        ]
        return session, starts

    def keep_config(self) -> None:
        """Write config.yaml; a run that is resumed does not before its first session.

        Until then the checkpoint may turn out to be of another environment, and the run goes on
        with the configuration that it had.

        Raises:
            ResourceError: if it cannot be written.
        """
        text = yaml.safe_dump(self._config.model_dump(), sort_keys=False)
        _write(self._run_dir / "config.yaml", text)

    def _count_environments(self) -> None:
        self.metrics.gauge("environments").set(sum(s.num_envs for s in self._sessions))

    def _free_slots(self, n: int, wanted: int | None) -> int:
        taken = sorted((s.first_slot, s.first_slot + s.num_envs) for s in self._sessions)
        if wanted is not None and all(wanted + n <= a or wanted >= b for a, b in taken):
            return wanted
        first = 0
        for start, stop in taken:
            if first + n <= start:
                break
            first = max(first, stop)
        return first

    def end(self, session: Session) -> None:
        """A session's stream is gone: free its slots, drop what it left open."""
        if not session.evaluating:
            with self._lock:
                if session in self._sessions:
                    self._sessions.remove(session)
                    if session.resumed and not session.rows:
                        self._take_back(session)
                    self._count_environments()
                    for slot, episode in zip(session.slots, session.episode, strict=True):
                        self._next_episode[int(slot)] = int(episode) + (1 if session.rows else 0)
        self.inference.end(session)

    def _take_back(self, session: Session) -> None:
        """Keep for another session where this one was to go on: it ended before its first row."""
        for i, slot in enumerate(session.slots.tolist()):
            self._again.add(slot)
            self._open_episodes[slot] = session.open_actions(i)
            self._returns[slot] = float(session.episode_return[i])
            if session.memory is not None:
                self._memory[slot] = session.memory[i]

    def _warn_of_waiting(self, storage: RolloutStorage) -> None:
        """Say beforehand if max_policy_lag keeps environments waiting, or wastes their rows."""
        c = self._config
        if self._sync or self._serve_only:
            return
        # Rows acted on now are at most max_policy_lag updates from being learned from.
        under_way = storage.environments_limit
        session_envs = c.env_server.envs_per_worker // c.env_server.sessions_per_worker
        if session_envs > under_way:
            what = f"of the {session_envs} in a session, the rows of the rest are dropped"
        elif c.total_envs > under_way:
            what = f"of {c.total_envs}, the others wait their turn"
        else:
            return
        logger.warning(
            "an update takes the unrolls of %d environments, and rows may be %d updates old: so "
            "at most %d environments can be under way %s. Raise algorithm.batch_number or "
            "learner.max_policy_lag, or lower env_server.envs_per_worker",
            storage.envs_per_update,
            c.learner.max_policy_lag,
            under_way,
            what,
        )

    def drain(self) -> None:
        """Stop answering training sessions, and wait for the rows they are working on."""
        if self._sync or self._serve_only or self.spec is None:
            return
        under_way = self.inference.turns  # this batch may still be answered
        self.inference.draining = True
        deadline = time.monotonic() + _DRAIN_S
        while time.monotonic() < deadline:
            with self._lock:
                answered = self.inference.turns > under_way
                if answered and all(session.waiting for session in self._sessions):
                    return
            time.sleep(0.01)
        logger.warning(
            "some environments take longer than %.0f s for a step; what they send now is lost",
            _DRAIN_S,
        )

    def finish(self) -> None:
        """Save what the last sessions have left; all of them have ended."""
        self.batcher.close()
        for thread in self._threads:
            thread.join(timeout=5)
        if self.learner is not None and not any(thread.is_alive() for thread in self._threads):
            self.learner.finish()

    def close(self) -> None:
        """Stop the threads."""
        self.batcher.close()
        for thread in self._threads:
            thread.join(timeout=5)
        if self.learner is not None:
            self.learner.close()


def opponent_policy(
    path: Path, state: dict[str, Any], spec: EnvSpec, precision: Precision, device: torch.device
) -> Policy:
    """The policy of a checkpoint to play against.

    Raises:
        MurmurError: if it is of another environment, or this murmur cannot build it.
    """
    check_opponent(path, state, spec)
    policy, _ = saved_policy(str(path), state, precision, device)
    return policy


def _replay(session: Session, actions: list[bytes]) -> None:
    """Take up a session in the middle of its episodes: its past actions, ends aligned."""
    dtype, shape = action_layout(session.spec.action)
    size = dtype.itemsize * session.spec.num_agents * int(np.prod(shape, dtype=np.int64))
    lengths = [len(a) // size for a in actions]
    longest = max(lengths)
    for t in range(longest):
        rows = np.zeros((session.num_envs, session.spec.num_agents, *shape), dtype)
        for i, (length, data) in enumerate(zip(lengths, actions, strict=True)):
            at = t - (longest - length)
            if at >= 0:
                part = np.frombuffer(data[at * size : (at + 1) * size], dtype)
                rows[i] = part.reshape(rows[i].shape)
        session.taken.append(rows)
    session.started = np.array([longest - length for length in lengths])


def run_learner(
    config: ExperimentConfig,
    run_dir: Path,
    *,
    resume: bool,
    stop: threading.Event,
    serve_only: bool = False,
    checkpoint: str = "latest",
    on_ready: Callable[[int, int], None] = lambda port, metrics_port: None,
) -> int:
    """Run a learner until the run is complete or `stop` is set.

    Args:
        config: the experiment.
        run_dir: where checkpoints and logs go; made if it does not exist.
        resume: continue from the latest checkpoint.
        stop: set it to end the run in order.
        serve_only: do not learn; answer evaluation sessions with `checkpoint`.
        checkpoint: "latest", "best" or a path; for serve_only.
        on_ready: called with the gRPC port and the metrics port once both listen.

    Returns:
        the exit code.

    Raises:
        MurmurError: for what the user can mend.
    """
    credentials = credentials_for(config.security, config.learner.host, "learner.host")
    warn_if_insecure(config.security)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    keep_freed_memory()
    wake_without_preempting()
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ResourceError(f"cannot make run folder {run_dir}: {error.strerror}") from None
    folder = CheckpointFolder(run_dir, config.learner.keep_checkpoints)
    loaded = None
    if serve_only:
        path = folder.find(checkpoint)
        loaded = (path, folder.load(path))
    elif resume:
        loaded = folder.load_latest()
        so_far = loaded[1]["progress"]
        if limit := reached_limit(
            config.run, so_far["updates"], so_far["env_steps"], so_far["seconds"]
        ):
            logger.warning(
                "nothing to do: %s has reached %s; raise it to train on", loaded[0], limit
            )
            return 0
    run = Run(config, run_dir, loaded, serve_only, stop)
    if loaded and not serve_only:
        logger.info("resumed %s: %d updates", loaded[0], loaded[1]["progress"]["updates"])
    if loaded is None:
        run.keep_config()
    serving = threading.Event()
    metrics = MetricsServer(
        config.learner.metrics_host,
        config.learner.metrics_port,
        run.metrics.registry,
        serving.is_set,
    )
    loop = uvloop.new_event_loop()
    server = RolloutServer(run, config.learner, run.metrics, credentials)
    grpc_thread = CriticalThread("grpc", loop.run_forever)
    try:
        loop.run_until_complete(server.start())
        grpc_thread.start()
        run.metrics.keep(ThreadClock(grpc_thread))
        serving.set()  # before anybody can read where it listens
        ports = {"pid": os.getpid(), "port": server.port, "metrics_port": metrics.port}
        _write(run_dir / ("serve.json" if serve_only else "learner.json"), json.dumps(ports))
        logger.info("listening on %s:%d", config.learner.host, server.port)
        on_ready(server.port, metrics.port)
        _wait(run, stop)
        serving.clear()
        server.stopping = True
        run.drain()
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result(10)
        run.finish()
    finally:
        run.close()
        metrics.close()
        if grpc_thread.is_alive():
            loop.call_soon_threadsafe(loop.stop)
            grpc_thread.join()
        loop.close()
    return 0


def _wait(run: Run, stop: threading.Event) -> None:
    """Until the run is complete, or told to stop and saved."""
    deadline = None
    while True:
        learner = run.learner
        if learner is not None and learner.finished.wait(0.1):
            _await_evaluation(run, stop)
            return
        if not stop.wait(0 if learner else 0.1):
            continue
        if learner is None or not run.begun:
            return
        deadline = deadline or time.monotonic() + _SYNC_STOP_S
        if time.monotonic() > deadline:
            logger.warning("stopped between updates; what came after the last checkpoint is lost")
            return


def _await_evaluation(run: Run, stop: threading.Event) -> None:
    """Let the evaluation of the final policy come to its end."""
    deadline = time.monotonic() + _LAST_EVALUATION_S
    while run.gate.busy and not stop.is_set() and time.monotonic() < deadline:
        time.sleep(0.1)


def _write(path: Path, text: str) -> None:
    """Write a small file whole."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_text(text)
        temporary.replace(path)
    except OSError as error:
        raise ResourceError(f"cannot write {path}: {error.strerror}") from None
