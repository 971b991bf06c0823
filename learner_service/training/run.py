"""One run: its algorithm, storage, loops and threads, built once the spec is known."""

import math
import time
from dataclasses import replace
from typing import Any

import torch
from typing_extensions import override

from learner_service.algorithms.base import (
    Algorithm,
    Policy,
    algorithm_config,
    build_algorithm,
    grown,
    with_options,
)
from learner_service.checkpoint import (
    check_spec,
    load_algorithm,
    saved_spec,
    spec_text,
)
from learner_service.runtime.cuda_graph import Graphs
from learner_service.runtime.memory import require_room
from learner_service.runtime.precision import Precision
from learner_service.serving.batcher import DynamicBatcher
from learner_service.serving.evaluation import Evaluation, EvaluationScheduler, check_best_metric
from learner_service.serving.inference import InferenceLoop
from learner_service.serving.league import League, Pairing, team_spec
from learner_service.serving.session import Session
from learner_service.serving.slots import SlotTable
from learner_service.serving.snapshots import Snapshots
from learner_service.storage.flight import Flight
from learner_service.storage.replay import ReplayStorage
from learner_service.storage.rollout_storage import RolloutStorage
from learner_service.storage.storage import Storage
from learner_service.tools.batch_size import fit_batch_size
from learner_service.tools.probe import update_seconds
from learner_service.training.agents import in_order
from learner_service.training.chosen import resolve
from learner_service.training.duties import ActingDuties
from learner_service.training.learner import Learner
from learner_service.training.process import RunProcess
from learner_service.training.resume import opponent_policy, resume_generator, settle_metrics
from learner_service.training.share import (
    environments_of,
    rank_0_first,
    share_of,
    with_precision,
)
from learner_service.training.start_from import start_acting
from learner_service.training.warm_up import WarmUp, check_in_flight, warn_of_waiting
from shared.config.experiment import ExperimentConfig
from shared.config.text import config_text
from shared.errors import ConfigError, ResourceError, SpecError
from shared.process import (
    logger,
)
from shared.rpc import rollout_pb2 as pb
from shared.spec import EXPERT_ACTION, EnvSpec, first_difference, shown_agents

# How long a stopping learner waits for the rows that environments are working on.
_DRAIN_S = 5.0


class Run(RunProcess):
    """One run: everything that exists once the environment's spec is known.

    The server's Host. `open` runs once; `admit` and `end` on the event loop.
    """

    @override
    def _prepare(self) -> None:
        config, group = self._config, self.group
        self._environments = environments_of(config, group)
        self.scheduler = EvaluationScheduler(lambda evaluation: None)
        waits_for_all = self._sync and not self._serve_only
        self.batcher = DynamicBatcher(
            config.learner.batcher, self._environments if waits_for_all else 0
        )
        self.spec: EnvSpec | None = None
        self._both_teams: EnvSpec | None = None  # of a league
        self._flight: Flight | None = None
        self._slots = SlotTable(self._sync, self.progress, rank=group.rank)
        self._league = League(config.league, config.run.seed, self.device, group)
        opponents = [self._folder.find(path) for path in config.league.checkpoints]
        self._opponents = [str(path.resolve()) for path in opponents]

    @override
    def _open_saved(self, state: dict[str, Any]) -> None:
        self._open(saved_spec(state))

    def open(self, spec: EnvSpec) -> None:
        """Begin the run with the spec of its first session. Called by the server.

        Raises:
            SpecError: if the algorithm does not fit the environment: the next one may.
        """
        self.gathering.join(spec_text(spec))
        with self._opening():
            self._open(spec)

    def _open(self, spec: EnvSpec) -> None:
        """Build algorithm, storage and loops for this spec, and start them."""
        c = self._config
        if not self._serve_only:
            whose = f"environment '{spec.name}'"
            check_best_metric(c.evaluation.best_metric, whose, spec.metrics)
            c = self._config = self._with_precision(spec)
        precision = Precision.of(c.learner, self.device, self.group)
        precision.warn_if_slow()
        algorithm = self._build_algorithm(spec, precision)
        generator = torch.Generator(self.device).manual_seed(self.group.own_seed(c.run.seed))
        self._resume(spec, precision, algorithm, generator)
        storage = self._make_storage(spec, algorithm)
        if isinstance(storage, ReplayStorage):
            self.metrics.watch(storage.graphs)
        snapshots = Snapshots(algorithm.make_policy, self.progress.updates, self.device)
        graphs = Graphs(self.device, enabled=c.learner.cuda_graph, priority=-1)
        self.metrics.watch(graphs)
        self.inference = inference = InferenceLoop(
            spec=spec,
            batcher=self.batcher,
            storage=storage,
            snapshots=snapshots,
            generator=generator,
            scheduler=self.scheduler,
            progress=self.progress,
            metrics=self.metrics,
            clock=self._clock,
            learn_ready=self._learn_ready if self._sync and not self._serve_only else None,
            league=self._league,
            evaluation_generator=torch.Generator(self.device).manual_seed(c.run.seed)
            if c.evaluation.sample
            else None,
            graphs=graphs,
            most_rows=self._most_acting,
        )
        if self._serve_only:
            self._serve_evaluations(algorithm)
        else:
            self._start_learning(spec, algorithm, generator, storage, snapshots)
        self.spec = spec
        self._threads.append(self._thread("inference", inference.run))
        named = f" ({shown_agents(spec.agents)})" if spec.agents else ""
        what = f"environment '{spec.name}': {spec.num_agents} agents{named}"
        self._note_device(what, precision.name)
        for thread in self._threads:
            thread.start()

    @property
    def _most_acting(self) -> int:
        """Environments of the largest batch that is acted on."""
        server = self._config.env_server
        if self._sync:
            return self._environments
        session = server.envs_per_worker // server.sessions_per_worker
        return max(self._config.learner.batcher.max_batch_envs, session)

    def _with_precision(self, spec: EnvSpec) -> ExperimentConfig:
        """The configuration with the fastest precision, if it says auto."""
        how = self.group, spec, self._run_dir, self.device, update_seconds
        measured = with_precision(grown(self._config, spec), *how)
        return self._config.changed({"learner.precision": measured.learner.precision})

    def _build_algorithm(self, spec: EnvSpec, precision: Precision) -> Algorithm[Any]:
        """The configured algorithm, with untrained networks."""
        c = self._config
        chosen = c if self._serve_only else self._with_batch_size(spec)
        algorithm = build_algorithm(
            chosen.algorithm, spec, c.network, precision, self.device, c.run.seed, c.augment
        )
        if self._origin is not None:
            start_acting(self._origin, c, spec, algorithm, self._run_dir)
        self._make_ready(algorithm)
        return algorithm

    def _with_batch_size(self, spec: EnvSpec) -> ExperimentConfig:
        """This rank's share of the configuration, with the largest batch if it says 0.

        Minibatches are as large as the number of environments makes them.
        """
        group, whole = self.group, grown(self._config, spec)
        if whole is not self._config and not group.rank:
            size, asked = (
                algorithm_config(c.algorithm).about.learned_at_once for c in (whole, self._config)
            )
            logger.info(
                "%d environments: a minibatch has %d agent-transitions, %d times those configured; "
                "learning rates are %.3g times as large",
                whole.total_envs,
                size,
                size // asked,
                math.sqrt(size / asked),
            )
        own = share_of(whole, group)
        with rank_0_first(group):
            fitted = fit_batch_size(own, spec, self._run_dir)
        options = algorithm_config(own.algorithm)
        if group.size == 1 or not options.about.open_batch_size:
            return fitted
        sizes = {"rows": float(algorithm_config(fitted.algorithm).about.learned_at_once)}
        size = round(group.agree(sizes, "min")["rows"])
        return with_options(own, options.changed({options.about.batch_size: size}))

    def _resume(
        self,
        spec: EnvSpec,
        precision: Precision,
        algorithm: Algorithm[Any],
        generator: torch.Generator,
    ) -> None:
        """Add the opponents, and continue from the checkpoint if there is one."""

        def load_opponent(file: str) -> Policy:
            # Opponents of league.checkpoints have absolute paths.
            path = self._folder.path / file
            return opponent_policy(path, self._folder.load(path), spec, precision, self.device)

        for file in self._opponents:
            self._league.add(file, load_opponent(file))
        if not self._checkpoint:
            return
        path, state = self._checkpoint
        load_algorithm(path, state, self._config, algorithm)
        if state["generator"] is not None:  # else of a rank that did not exist
            resume_generator(generator, state["generator"], self._serve_only)
        self.progress.load_state_dict(state["progress"])
        self._resumed_at = self.progress.updates
        self._slots.load_state_dict(state)
        # Who only serves plays against league.checkpoints; a run may have had no league so far.
        if "league" in state and not self._serve_only:
            self._league.load_state_dict(state["league"], load_opponent)

    def _make_storage(self, spec: EnvSpec, algorithm: Algorithm[Any]) -> Storage[Any]:
        """The algorithm's storage, with the rows that the checkpoint holds."""
        if self._serve_only:  # no row is ever put: it stays empty, and a replay would be in the way
            return RolloutStorage(spec, 1, 1, None, self.device)
        c = self._config
        storage: Storage[Any] = algorithm.make_storage(
            spec, None if self._sync else c.learner.policy_lag
        )
        if isinstance(storage, RolloutStorage):
            storage.expect(self._environments)
            require_room(
                storage.memory_bytes(self._environments, storage.envs_per_update),
                f"an unroll of {storage.length} steps of {self._environments} environments "
                f"('{spec.name}', max_episode_steps {spec.max_episode_steps}) and an update's rows",
                "observe less (environment.resize, gray), use fewer environments, shorter "
                "unrolls, or fewer rows an update",
                self.device,
            )
            if algorithm.graphs.enabled:
                rows = storage.envs_per_update * (storage.length + 1)
                require_room(
                    algorithm.graph_bytes(rows),
                    f"CUDA graphs of updates of {rows} environment rows",
                    "use fewer environments, rows an update or minibatches, or set "
                    "learner.cuda_graph=false",
                    self.device,
                )
            if not self._sync:
                check_in_flight(c, storage)
                warn_of_waiting(c, storage, self._environments)
        self.metrics.gauge("environments_limit").set(storage.environments_limit)
        if self._checkpoint:
            path, state = self._checkpoint
            self._folder.load_storage(path, state, storage)
            self.progress.settle(storage.waiting_rows + self._slots.num_counted)
        settle_metrics(self.metrics, self.progress, storage.waiting_rows)
        return storage

    def _start_learning(
        self,
        spec: EnvSpec,
        algorithm: Algorithm[Any],
        generator: torch.Generator,
        storage: Storage[Any],
        snapshots: Snapshots,
    ) -> None:
        """Build the learner; in the async pipeline it has a thread of its own."""
        c, text = self._config, config_text(self._config)

        def full_state() -> dict[str, Any]:
            self._keep_folder()
            return {
                "spec": spec_text(self.spec or spec),
                "config": text,
                "algorithm": algorithm.state_dict(),
                "generator": generator.get_state(),
                "progress": self.progress.state_dict(),
                **({"league": self._league.state_dict()} if c.league.on else {}),
                **self._slots.state_dict(),
            }

        duties = ActingDuties(
            c,
            algorithm,
            storage,
            snapshots,
            self._folder,
            self.scheduler,
            self.inference,
            self.progress,
            full_state,
            self._league,
            self.group,
        )
        learner = self._make_learner(c, algorithm, storage, duties, full_state, spec.num_agents)
        storage.on_room = self.inference.wake
        self._measure(algorithm, storage, learner)
        if self._sync:
            return

        def learn() -> None:
            self.inference.prepared.wait()
            learner.run()

        self._threads.append(self._thread("learner", learn))

    def _measure(self, algorithm: Algorithm[Any], storage: Storage[Any], learner: Learner) -> None:
        """Let the first updates choose what of the work in flight is not configured."""
        any_lag = self._config.learner.max_policy_lag is None
        is_open = any_lag or not (algorithm.unroll_length and algorithm.unrolls_per_update)
        if self._sync or not is_open or not isinstance(storage, RolloutStorage):
            return

        def keep(flight: Flight) -> None:
            self._flight = flight
            self.metrics.gauge("environments_limit").set(storage.environments_limit)
            try:
                self.keep_config()
            except ResourceError as error:
                logger.error("%s; a resumed run chooses again", error)

        warm_up = WarmUp(
            *(storage, self.metrics),
            any_lag=any_lag,
            keep=keep,
            group=self.group,
            unsettled=lambda: algorithm.graphs.unsettled,
        )
        learner.on_update = warm_up.updated

    def _serve_evaluations(self, algorithm: Algorithm[Any]) -> None:
        """Answer every evaluation session at once, with the policy of the checkpoint."""
        p = self.progress

        def start() -> Evaluation:
            return Evaluation(algorithm.make_policy(), p.updates, p.all_env_steps)

        self.scheduler.serve(start)

    def _learn_ready(self) -> bool:
        assert self.learner is not None
        return self.learner.learn_ready()

    def team(self, spec: EnvSpec, training: bool) -> EnvSpec:
        """What the run's policy acts for: all agents, or one of two teams.

        Of a league's evaluations one may be of the team alone, against what the environment has.

        Raises:
            SpecError: if there is a league, but no two equal teams; if imitation is configured
                on one side alone.
            CheckpointError: if the run continues from a checkpoint of another environment.
        """
        baseline, told = self._config.imitation.baseline, spec.observation(EXPERT_ACTION)
        if training and bool(baseline) != bool(told):
            sends = "sends" if told else "does not send"
            raise SpecError(
                f"imitation.baseline is '{baseline}' here, but the environment server {sends} "
                f"'{EXPERT_ACTION}'; give it the learner's configuration"
            )
        alone = not training and self.spec is not None and self.spec.num_agents == spec.num_agents
        team = spec if alone or not self._config.league.on else self._first_team(spec)
        team = in_order(team, self._known_spec(), self._config)
        if self._checkpoint:
            check_spec(*self._checkpoint, team)
        return team

    def _first_team(self, spec: EnvSpec) -> EnvSpec:
        """The learning team of a league's games; the names of both teams are the first session's.

        Raises:
            SpecError: if there are no two equal teams, or another session has other ones.
        """
        team = team_spec(spec)
        if self.spec is not None:
            self._both_teams = self._both_teams or spec
            difference = first_difference(self._both_teams, spec)
            if difference:
                raise SpecError(f"a league's games have the same agents everywhere: {difference}")
        return team

    def _known_spec(self) -> EnvSpec | None:
        """The spec of the run, or of the checkpoint that it comes from; None: of neither."""
        if self.spec is not None:
            return self.spec
        if self._checkpoint:
            return saved_spec(self._checkpoint[1])
        return None if self._origin is None else saved_spec(self._origin.state)

    def pair(self, session: Session) -> None:
        """Let the league play the other team in a session."""
        n = session.num_envs
        session.pairing = Pairing.of(n) if session.evaluating else self._league.pair(session.slots)

    def admit(self, hello: pb.Hello, spec: EnvSpec) -> tuple[Session, list[pb.SlotStart]]:
        """A training session's place, and where its environments start.

        Raises:
            ConfigError: if this learner only evaluates.
            ResourceError: if the configuration cannot be written.
        """
        if self._serve_only:
            raise ConfigError("this learner serves evaluations only; it does not train")
        if not self.begun:
            self.keep_config()
            self.begun = True
        assert self.spec is not None
        if not self.spec.agents:  # of a checkpoint of 0.2, or of another worker: from now on known
            self.spec = replace(self.spec, agents=spec.agents[: self.spec.num_agents])
        session, starts = self._slots.admit(hello, spec)
        self._count_environments()
        return session, starts

    @property
    def busy(self) -> bool:
        """See RunProcess: whether an evaluation is under way."""
        return self.scheduler.busy

    @override
    def _completed(self) -> ExperimentConfig:
        return resolve(self._config, self.spec, self._flight)

    def end(self, session: Session) -> None:
        """A session's stream is gone: free its slots, drop what it left open."""
        if not session.evaluating:
            self._slots.end(session)
            self._count_environments()
        self.inference.end(session)

    def _count_environments(self) -> None:
        self.metrics.gauge("environments").set(self._slots.num_envs)

    def drain(self) -> None:
        """Stop answering training sessions, and wait for the rows they are working on."""
        if self._sync or self._serve_only or self.spec is None:
            return
        under_way = self.inference.turns  # this batch may still be answered
        self.inference.draining = True
        deadline = time.monotonic() + _DRAIN_S
        while time.monotonic() < deadline:
            if self.inference.turns > under_way and self._slots.all_waiting:
                return
            time.sleep(0.01)
        logger.warning(
            "some environments take longer than %.0f s for a step; what they send now is lost",
            _DRAIN_S,
        )

    def _end_input(self) -> None:
        """See RunProcess: no batch comes any more."""
        self.batcher.close()
