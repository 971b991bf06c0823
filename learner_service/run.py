"""One run that acts: algorithm, storage, loops and threads, built once the spec is known."""

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from murmur.learner_service.after_update import (
    Evaluate,
    KeepOpponents,
    count_rows,
    move_curriculum,
)
from murmur.learner_service.checkpoint.contents import (
    check_spec,
    load_algorithm,
    saved_config,
    saved_game,
    saved_policy,
    saved_spec,
    spec_text,
)
from murmur.learner_service.context import RunContext
from murmur.learner_service.device.cuda_graph import Graphs
from murmur.learner_service.device.device import restore_generator
from murmur.learner_service.device.memory import limited, require_room
from murmur.learner_service.device.precision import Precision
from murmur.learner_service.learning.base import (
    Algorithm,
    Policy,
    algorithm_config,
    build_algorithm,
)
from murmur.learner_service.learning.options import TeamsConfig
from murmur.learner_service.loop import Step
from murmur.learner_service.report import settle
from murmur.learner_service.serving.curriculum import Curriculum
from murmur.learner_service.serving.evaluation import (
    Evaluation,
    EvaluationScheduler,
    check_best_metric,
)
from murmur.learner_service.serving.game import Game, Pairing, check_opponent, opponent_view
from murmur.learner_service.serving.inference import InferenceLoop, ServingStats
from murmur.learner_service.serving.league import League
from murmur.learner_service.serving.lockstep import EnvSessions, in_order
from murmur.learner_service.serving.requests import DynamicBatcher, EnvSession
from murmur.learner_service.serving.slots import SlotTable
from murmur.learner_service.serving.snapshots import Snapshots
from murmur.learner_service.serving.staging import make_staging
from murmur.learner_service.storage.demonstrations import KEY as DATASET
from murmur.learner_service.storage.demonstrations import Demonstrations
from murmur.learner_service.storage.flight import Flight
from murmur.learner_service.storage.replay import ReplayStorage
from murmur.learner_service.storage.rollout import RolloutStorage
from murmur.learner_service.storage.storage import UnrollStorage
from murmur.learner_service.tuning.resolve import fit, with_flight
from murmur.learner_service.tuning.warm_up import WarmUp, check_in_flight
from murmur.shared.process.errors import ConfigError, ResourceError, SpecError
from murmur.shared.process.process import logger
from murmur.shared.rpc import rollout_pb2 as pb
from murmur.shared.wire.dataset import Dataset
from murmur.shared.wire.spec import (
    EXPERT_ACTION,
    Discrete,
    EnvSpec,
    first_difference,
    shown_agents,
)

# How long a stopping learner waits for the rows that environments are working on.
_DRAIN_S = 5.0


class Run:
    """One run in environments. The Host of EnvSessions.

    `open` runs once; `admit` and `end` on the event loop.

    Attributes:
        context: parts that do not depend on the environment.
        sessions: serves the streams of environments.
        batcher: queue of their requests.
        scheduler: hands evaluations to evaluators.
        spec: environment's spec; None before the run is open.
        run_seed: run.seed.
        curriculum: options of episodes that change during the run; None: there are none.
        inference: loop that acts; there once the run is open.
    """

    inference: InferenceLoop

    def __init__(self, context: RunContext) -> None:
        """Make what there is before the first session; open the run if a checkpoint has the spec.

        Raises:
            MurmurError: if the run cannot be as it is configured.
        """
        self.context = context
        config, group = context.config, context.group
        server = config.env_server
        self.run_seed = config.run.seed
        self._offline = config.run.offline and not context.serve_only
        # Where no environment trains there is nothing to act and learn in turns for.
        self._sync = config.learner.pipeline == "sync" and not self._offline
        if self._sync and server.num_workers < group.size:
            raise ConfigError(
                f"{group.size} learners in the sync pipeline need as many workers: "
                f"env_server.num_workers={server.num_workers}; set it to {group.size} or more"
            )
        # Of one environment server: worker i's are rank i mod N. 0 while their number is not known.
        workers = len(range(group.rank, server.num_workers, group.size))
        self._environments = 0 if self._offline else workers * server.envs_per_worker
        self.scheduler = EvaluationScheduler(lambda evaluation: None)
        waits_for_all = self._sync and not context.serve_only
        self.batcher = DynamicBatcher(
            config.learner.batcher, self._environments if waits_for_all else 0
        )
        self.sessions = EnvSessions(self, config.learner, context.metrics)
        self.spec: EnvSpec | None = None
        courses = config.environment.courses
        self.curriculum = Curriculum(courses, group.size) if courses else None
        self._slots = SlotTable(
            self._sync, context.progress, rank=group.rank, curriculum=self.curriculum
        )
        self._league = League(config.league, config.run.seed, context.device, group)
        # Absolute paths: opponents of the run itself are named by their file.
        opponents = [context.folder.checkpoints.find(path) for path in config.league.checkpoints]
        self._opponents = [str(path.resolve()) for path in opponents]
        if context.loaded:
            if self._offline:
                self._require_offline(*context.loaded)
            if config.league.agents:
                self._league.game = Game.of(saved_game(*context.loaded), config.league)
            with limited(config.learner.memory_limit_gib):
                self._open(saved_spec(context.loaded[1]))
        elif self._offline:
            key = DATASET if config.imitation.dataset else "algorithm.replay.dataset"
            with limited(config.learner.memory_limit_gib):
                self._open(Dataset(config.dataset, key).spec)
        if self._offline:
            context.begin()

    @staticmethod
    def _require_offline(path: Path, state: dict[str, Any]) -> None:
        """Refuse to continue a run of environments with a dataset alone.

        Raises:
            ConfigError: if the checkpoint's run was not offline.
        """
        if not saved_config(state, str(path)).run.offline:
            raise ConfigError(
                f"run.offline=true: {path} is of a run that learned in environments, which resumes "
                f"with their rows, not with a dataset alone; start a new run with "
                f"run.start_from={path} (--from), or set run.offline=false"
            )

    # --- opening ---------------------------------------------------------------------------------

    def open(self, spec: EnvSpec) -> None:
        """Begin the run with the spec of its first session. Called by the server.

        Raises:
            SpecError: if the algorithm does not fit the environment: the next one may.
        """
        with self.context.opening(spec_text(spec)):
            self._open(spec)

    def _open(self, spec: EnvSpec) -> None:
        """Build algorithm, storage and loops for this spec, and start them."""
        context = self.context
        config = own = resolved = context.config
        if not context.serve_only:
            whose = f"environment '{spec.name}'"
            check_best_metric(config.evaluation.best_metric, whose, spec.metrics)
            if self.curriculum is not None:
                self.curriculum.check(spec)
            resolved, own = fit(config, context.group, spec, context.run_dir, context.device)
            # `auto` stands for another network if this environment is refused and another comes.
            config = config.changed({"learner.precision": resolved.learner.precision})
            context.config = config
        precision = Precision.of(config.learner, context.device, context.group)
        precision.warn_if_slow()
        algorithm = build_algorithm(
            own.algorithm,
            spec,
            config.network,
            precision,
            context.device,
            config.run.seed,
            config.augment,
            config.imitation,
        )
        context.make_ready(algorithm, spec)
        seed = context.group.own_seed(config.run.seed)
        generator = torch.Generator(context.device).manual_seed(seed)
        self._resume(spec, precision, algorithm, generator)
        storage = self._make_storage(spec, algorithm)
        snapshots = Snapshots(algorithm.snapshot, context.progress.updates, context.device)
        self._make_inference(storage, snapshots, generator)
        threads = {"inference": self.inference.run}
        if context.serve_only:
            p = context.progress
            # Every evaluation session is answered at once, with the checkpoint's policy.
            self.scheduler.serve(
                lambda: Evaluation(algorithm.evaluated(), p.updates, p.all_env_steps)
            )
        else:
            self._make_learner(spec, algorithm, generator, storage, snapshots)
            if not self._sync:
                threads = {"learner": self._learn, **threads}
        self.spec, context.resolved = spec, resolved
        named = f" ({shown_agents(spec.agents)})" if spec.agents else ""
        what = f"environment '{spec.name}': {spec.num_agents} agents{named}"
        context.start_threads(what, precision.name, threads)

    def _resume(
        self,
        spec: EnvSpec,
        precision: Precision,
        algorithm: Algorithm[Any],
        generator: torch.Generator,
    ) -> None:
        """Add the opponents, and continue from the checkpoint if there is one."""
        context, checkpoints = self.context, self.context.folder.checkpoints

        def load_opponent(file: str) -> Policy:
            path = checkpoints.path / file
            state = checkpoints.load(path)
            game, view = self._league.game, None
            if game is not None and game.shows_all:
                league = context.config.league
                itself = bool(league.latest or league.size)
                view = opponent_view(path, state, game, plays_itself=itself)
            else:
                check_opponent(path, state, spec)
            policy = saved_policy(str(path), state, precision, context.device)[0]
            return policy if game is None else game.assign(policy, view)

        for file in self._opponents:
            self._league.add(file, load_opponent(file))
        if not context.loaded:
            return
        path, state = context.loaded
        load_algorithm(path, state, context.config, algorithm)
        # None: of a rank that did not exist.
        saved, serve_only = state["generator"], context.serve_only
        if saved is not None and not restore_generator(generator, saved) and not serve_only:
            logger.warning(
                "the checkpoint was saved on another kind of device: random numbers continue from "
                "the seed, so this run differs from one that continued there"
            )
        context.progress.load_state_dict(state["progress"])
        if self.curriculum is not None and "curriculum" in state:
            self.curriculum.load_state_dict(state["curriculum"])
        self._slots.load_state_dict(state)
        # Who only serves plays against league.checkpoints; a run may have had no league so far.
        if "league" in state and not serve_only:
            self._league.load_state_dict(state["league"], load_opponent)

    def _make_storage(self, spec: EnvSpec, algorithm: Algorithm[Any]) -> UnrollStorage[Any]:
        """Return the algorithm's storage, with the rows that the checkpoint holds."""
        context, config = self.context, self.context.config
        if context.serve_only:  # no row is ever put: a replay would be in the way
            return RolloutStorage(spec, 1, 1, None, context.device)
        storage: UnrollStorage[Any] = algorithm.make_storage(
            spec, None if self._sync else config.learner.policy_lag
        )
        if isinstance(storage, ReplayStorage):
            context.metrics.watch(storage.graphs)
            storage.offline = self._offline
            logger.info(storage.pace)
        if isinstance(storage, RolloutStorage):
            storage.expect(self._environments)
            self._require_room(spec, algorithm, storage)
            if not self._sync:
                check_in_flight(config, storage, self._environments)
            storage.demonstrations = self._demonstrations(spec, algorithm)
        context.metrics.gauge("environments_limit").set(storage.environments_limit)
        checkpoints = context.folder.checkpoints
        restored = context.loaded and checkpoints.load_storage(*context.loaded, storage)
        if isinstance(storage, ReplayStorage) and not restored:
            storage.fill()
        if context.loaded and not self._offline:
            context.progress.settle(storage.waiting_rows + self._slots.num_counted)
        if self._offline and not storage.ready:
            raise ConfigError(
                f"{config.dataset}: learners share its episodes, and none is left for rank "
                f"{context.group.rank} of {context.group.size}; record more, or start fewer"
            )
        settle(context.metrics, context.progress, storage.waiting_rows)
        return storage

    def _demonstrations(self, spec: EnvSpec, algorithm: Algorithm[Any]) -> Demonstrations | None:
        """Read the dataset that is cloned; None if there is none, or no more of it is cloned.

        Raises:
            ConfigError: if it cannot be cloned as configured.
        """
        config, group = self.context.config, self.context.group
        imitation = config.imitation
        updates = math.inf if self._offline else imitation.updates
        if not imitation.dataset or self.context.progress.updates >= updates:
            return None
        options = algorithm_config(config.algorithm)
        learned = {"algorithm": options}
        if isinstance(options, TeamsConfig):
            learned |= {f"algorithm.teams.{t}": options.of_team(t).options for t in options.teams}
        no_ratio = "a dataset has no probabilities of its actions"
        kept = [
            (f"{where}.vtrace_clip", getattr(own, "vtrace_clip", 0), no_ratio)
            for where, own in learned.items()
        ]
        remembers = "network.recurrent", algorithm.memory_size, "a dataset has no recurrent states"
        for key, value, why in (remembers, *kept):
            if value:
                raise ConfigError(
                    f"{DATASET}={imitation.dataset} and {key}={value:g}: {why}; set {key}=0"
                )
        return Demonstrations(
            imitation.dataset,
            updates,
            spec,
            algorithm.extras,
            algorithm.frames,
            self.context.device,
            group.own_seed(config.run.seed),
        )

    def _require_room(
        self, spec: EnvSpec, algorithm: Algorithm[Any], storage: RolloutStorage
    ) -> None:
        """Check that unrolls, and CUDA graphs of updates, fit into memory.

        Raises:
            SpecError: naming the numbers and the fix.
        """
        require_room(
            storage.memory_bytes(self._environments, storage.envs_per_update),
            f"an unroll of {storage.length} steps of {self._environments} environments "
            f"('{spec.name}', max_episode_steps {spec.max_episode_steps}) and an update's rows",
            "observe less (environment.resize, grey), use fewer environments, shorter "
            "unrolls, or fewer rows an update",
            self.context.device,
        )
        if algorithm.graphs.enabled:
            rows = storage.envs_per_update * (storage.length + 1)
            require_room(
                algorithm.graph_bytes(rows),
                f"CUDA graphs of updates of {rows} environment rows",
                "use fewer environments, rows an update or minibatches, or set "
                "learner.cuda_graph=false",
                self.context.device,
            )

    def _make_inference(
        self,
        storage: UnrollStorage[Any],
        snapshots: Snapshots,
        generator: torch.Generator,
    ) -> None:
        """Build the loop that acts; in the sync pipeline it also learns."""
        context, config = self.context, self.context.config
        server = config.env_server
        graphs = Graphs(context.device, enabled=config.learner.cuda_graph, priority=-1)
        context.metrics.watch(graphs)
        session = server.envs_per_worker // server.sessions_per_worker
        most = max(config.learner.batcher.max_batch_envs, session)
        staging = make_staging(
            storage,
            snapshots.policy.memory_size,
            generator,
            graphs,
            context.metrics.copied,
            self._environments if self._sync else most,
        )
        stats = ServingStats(
            storage, context.progress, context.metrics, context.clock, self.curriculum
        )
        sampling = None  # evaluations are greedy
        if config.evaluation.sample:
            sampling = torch.Generator(context.device).manual_seed(config.run.seed)
        self.inference = InferenceLoop(
            batcher=self.batcher,
            storage=storage,
            snapshots=snapshots,
            staging=staging,
            scheduler=self.scheduler,
            league=self._league,
            stats=stats,
            sampling=sampling,
        )
        storage.on_room = self.inference.wake

    def _learn(self) -> None:
        """Make updates once acts are captured: the learner thread."""
        assert self.context.learner is not None
        self.inference.prepared.wait()
        self.context.learner.run()

    def _make_learner(
        self,
        spec: EnvSpec,
        algorithm: Algorithm[Any],
        generator: torch.Generator,
        storage: UnrollStorage[Any],
        snapshots: Snapshots,
    ) -> None:
        """Build the learner and the steps after an update."""
        context, config, curriculum = self.context, self.context.config, self.curriculum

        def full_state() -> dict[str, Any]:
            game = self._league.game
            return {
                "spec": spec_text(self.spec or spec),
                "algorithm": algorithm.state_dict(),
                "generator": generator.get_state(),
                "progress": context.progress.state_dict(),
                **({"league": self._league.state_dict()} if config.league.on else {}),
                **({"game": spec_text(game.spec)} if game and game.shows_all else {}),
                **({"curriculum": curriculum.state_dict()} if curriculum is not None else {}),
                **self._slots.state_dict(),
            }

        def steps() -> Iterator[Step]:
            if measure := self._warm_up(algorithm, storage):
                yield measure
            keeper = context.keeper
            if self._offline:
                yield partial(count_rows, context.ranks)
            if curriculum is not None:
                yield partial(move_curriculum, curriculum, context.ranks)
            yield KeepOpponents(self._league, algorithm, keeper, context.metrics)
            every = context.config.evaluation
            if every.on and not context.group.rank:
                yield Evaluate(algorithm, snapshots, self.scheduler, keeper, context.report, every)

        learner = context.make_learner(
            algorithm,
            storage,
            full_state,
            steps,
            num_agents=spec.acting_agents,
            best_metric=config.evaluation.best_metric,
            judged=not (config.league.on or config.environment.curriculum),
            # A sync run is saved where no update is due: there it can continue exactly.
            settled=lambda updated: not self._sync or (updated and storage.settled),
            waits_for_sessions=not self._sync,
            figures=lambda: {} if curriculum is None else curriculum.figures(context.metrics),
            publish=lambda version: snapshots.publish(algorithm.refresh, version),
        )
        if self._sync:
            self.inference.learn = learner.learn_ready

    def _warm_up(self, algorithm: Algorithm[Any], storage: UnrollStorage[Any]) -> Step | None:
        """Let the first updates choose what of the work in flight is not configured."""
        any_lag = self.context.config.learner.max_policy_lag is None
        is_open = any_lag or not (algorithm.unroll_length and algorithm.unrolls_per_update)
        never = self._sync or self._offline
        if never or not is_open or not isinstance(storage, RolloutStorage):
            return None

        def keep(flight: Flight) -> None:
            self.context.metrics.gauge("environments_limit").set(storage.environments_limit)
            try:
                self.context.keep_measured(with_flight(self.context.resolved, flight))
            except ResourceError as error:
                logger.error("%s; a resumed run chooses again", error)

        return WarmUp(
            storage,
            self.context.metrics,
            any_lag=any_lag,
            keep=keep,
            group=self.context.group,
            unsettled=lambda: algorithm.graphs.unsettled,
        )

    # --- sessions --------------------------------------------------------------------------------

    @property
    def policy_version(self) -> int:
        """Updates made."""
        return self.context.progress.updates

    def team(self, spec: EnvSpec, training: bool) -> EnvSpec:
        """Return what the run's policy acts for: all agents, or one of two teams.

        Of a league's evaluations one may be of the team alone, against what the environment has.

        Raises:
            SpecError: if there is a league, but no two equal teams; if imitation is configured
                on one side alone.
            CheckpointError: if the run continues from a checkpoint of another environment.
        """
        config = self.context.config
        baseline, told = config.imitation.baseline, spec.observation(EXPERT_ACTION)
        if training and told and not isinstance(spec.action, Discrete):
            raise SpecError(
                f"'{EXPERT_ACTION}' of environment '{spec.name}': advice is learned for discrete "
                "actions alone; leave it out"
            )
        if training and bool(baseline) != bool(told):
            sends = "sends" if told else "does not send"
            raise SpecError(
                f"imitation.baseline is '{baseline}' here, but the environment server {sends} "
                f"'{EXPERT_ACTION}'; give it the learner's configuration"
            )
        alone = not training and self.spec is not None and self.spec.num_agents == spec.num_agents
        team = spec if alone or not config.league.on else self._first_team(spec)
        team = in_order(team, self._known_spec(), config)
        if self.context.loaded:
            check_spec(*self.context.loaded, team)
        return team

    def _first_team(self, spec: EnvSpec) -> EnvSpec:
        """Return the learning team of a league's games; the first session names all agents.

        Raises:
            MurmurError: if there are no two teams, or another session has other ones.
        """
        game = Game.of(spec, self.context.config.league)
        if self.spec is None or self._league.game is None:
            self._league.game = game
        elif difference := first_difference(self._league.game.spec, spec):
            raise SpecError(f"a league's games have the same agents everywhere: {difference}")
        return game.team.spec

    def _known_spec(self) -> EnvSpec | None:
        """Return the spec of the run, or of the checkpoint that it comes from, if there is one."""
        if self.spec is not None:
            return self.spec
        if self.context.loaded:
            return saved_spec(self.context.loaded[1])
        return None if self.context.origin is None else saved_spec(self.context.origin.state)

    def pair(self, session: EnvSession) -> None:
        """Let the league play the other team in a session."""
        n, session.game = session.num_envs, self._league.game
        session.pairing = Pairing.of(n) if session.evaluating else self._league.pair(session.slots)

    def admit(self, hello: pb.Hello, spec: EnvSpec) -> tuple[EnvSession, list[pb.SlotStart]]:
        """Return a training session's place, and where its environments start.

        Raises:
            ConfigError: if this learner only evaluates.
            ResourceError: if the configuration cannot be written.
        """
        if self.context.serve_only:
            raise ConfigError("this learner serves evaluations only; it does not train")
        if self._offline:
            raise ConfigError(
                "run.offline=true: this run learns from a dataset alone; leave the environment "
                "server out, or set run.offline=false"
            )
        self.context.begin()
        assert self.spec is not None
        if not self.spec.agents:  # of a checkpoint of 0.2, or of another worker: from now on known
            self.spec = replace(self.spec, agents=self.team(spec, training=True).agents)
        session, starts = self._slots.admit(hello, spec)
        self._count_environments()
        return session, starts

    def end(self, session: EnvSession) -> None:
        """Free the slots of a session whose stream is gone, and drop what it left open."""
        if not session.evaluating:
            self._slots.end(session)
            self._count_environments()
        self.inference.end(session)

    def _count_environments(self) -> None:
        self.context.metrics.gauge("environments").set(self._slots.num_envs)

    # --- the end ---------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Return True if there is an evaluation that the end of a complete run waits for.

        An offline run may be complete before its evaluator is there.
        """
        return self.scheduler.busy or self.lacks_evaluator

    @property
    def lacks_evaluator(self) -> bool:
        """Return True if an offline run has an evaluation due, and no evaluator has come yet."""
        return self._offline and self.scheduler.awaits_evaluator

    def drain(self) -> None:
        """Stop answering training sessions, and wait for the rows they are working on."""
        if self._sync or self.context.serve_only or self.spec is None:
            return
        under_way = self.inference.batches_served  # this batch may still be answered
        self.inference.draining = True
        deadline = time.monotonic() + _DRAIN_S
        while time.monotonic() < deadline:
            if self.inference.batches_served > under_way and self._slots.all_waiting:
                return
            time.sleep(0.01)
        logger.warning(
            "some environments take longer than %.0f s for a step; what they send now is lost",
            _DRAIN_S,
        )

    def end_input(self) -> None:
        """Note that all sessions have ended: no batch comes any more."""
        self.batcher.close()
