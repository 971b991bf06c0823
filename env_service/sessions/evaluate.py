"""Evaluation: greedy or scripted episodes with given seeds, and their results.

Episode i of an evaluation has the seed first_seed + i, so two policies are compared on the same
episodes. At most env_server.envs_per_worker copies of the environment are made: copy c of n plays
the episodes c, c + n, c + 2n, ... A copy that has played its episodes continues stepping, unseen,
until all have.

An episode is dropped if its environment fails: the session is played again from its start, with the
next unused seed in place of that episode's. So the number of episodes is always the requested one.

An episode that does not end ends the evaluation: a policy that stands still may never finish an
environment without a time limit.
"""

import asyncio
import itertools
import logging
import math
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry

from murmur.env_service.environment import (
    SeededPolicy,
    VectorEnvironment,
    environment_module,
    find_baseline,
)
from murmur.env_service.metrics import WorkerMetrics
from murmur.env_service.sessions.evaluation_result import EvaluationResult, joined_result
from murmur.env_service.sessions.expert import Expert
from murmur.env_service.sessions.ranks import LearnerChoice, Ranks
from murmur.env_service.sessions.reconnect import Disconnected
from murmur.env_service.sessions.record_transitions import TransitionRecorder
from murmur.env_service.sessions.recording import EpisodeRecorder
from murmur.env_service.sessions.worker import (
    Stream,
    closing_all,
    guarded_environment,
    hello_of,
    run_until,
)
from murmur.env_service.watchdog.faults import FaultCount, GuardedEnvironment, Heartbeat
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.process.errors import EnvironmentFault
from murmur.shared.process.process import run_coroutine
from murmur.shared.rpc import rollout_pb2 as pb
from murmur.shared.wire.credentials import Role
from murmur.shared.wire.episode_options import options_from_proto
from murmur.shared.wire.notices import GIVEN_UP, Notice, pack_notices
from murmur.shared.wire.spec import EnvSpec, agent_numbers
from murmur.shared.wire.timestep import Array, StepType, TimeStep

logger = logging.getLogger("murmur")

_SESSION_EPISODES = 64  # of one session of run_policy, or one round of run_baseline
_MAX_STEPS = 20_000  # of one episode, where the environment names no limit
_LOOK_EVERY = 128  # steps between two looks at the episodes' lengths
_REPORT_AFTER_S, _REPORT_MIN_STEPS = 15.0, 1_000  # before an episode is called long
_ROLES: tuple[Role, ...] = ("evaluator", "environment")  # either may evaluate

OnRow = Callable[[VectorEnvironment, TimeStep], None]
Curves = dict[str, NDArray[np.float64]]  # name -> [E, T+1]


class _Dropped(Exception):  # noqa: N818 - an event; playing again handles it
    """Episodes of an evaluation that failed; `episodes` are their numbers in the session."""

    def __init__(self, episodes: NDArray[np.int64]) -> None:
        self.episodes = episodes


class _Seeds:
    """Seeds of one session's episodes; those of episodes that failed are replaced."""

    def __init__(self, first: int, size: int, spare: Iterator[int]) -> None:
        """Begin with first, first + 1, ...; take others from `spare`."""
        self.values = np.arange(first, first + size, dtype=np.uint64)
        self._spare = spare

    def replace(self, episodes: NDArray[np.int64]) -> None:
        """Replace the seeds of some episodes by spare ones."""
        for i in episodes.tolist():
            old, self.values[i] = self.values[i], next(self._spare)
            logger.warning(
                "evaluation: the episode with seed %d failed; the one with seed %d is played "
                "instead",
                old,
                self.values[i],
            )


class EndlessEpisode(EnvironmentFault):
    """An episode of an evaluation that does not end."""


class _Episodes:
    """The episodes of a session, played in the copies of one environment.

    Attributes:
        timestep: rows to act on.
    """

    def __init__(
        self,
        environment: GuardedEnvironment,
        seeds: NDArray[np.uint64],
        on_row: OnRow | None,
        limit_key: str,
        recorder: TransitionRecorder | None,
        learns: Sequence[int] | slice,
    ) -> None:
        """Start all copies.

        Args:
            environment: environment of n copies; copy c plays the episodes c, c + n, c + 2n, ...
            seeds: [E] seeds of the episodes.
            on_row: callback for every row of episode 0.
            limit_key: configuration key of the environment's time limit; empty: it has none.
            recorder: recorder of the episodes; None: they are not recorded.
            learns: rows of the agents whose rewards are the return.

        Raises:
            _Dropped: if one of them fails.
        """
        n = environment.num_envs
        self._environment = environment
        self._on_row = on_row
        self._limit_key, self._learns = limit_key, learns
        self._recorder = recorder
        self._seeds, self._episode = seeds, np.arange(n)  # [n] under way; E and more: unseen
        self._counts = self._episode < len(seeds)
        self._return = np.zeros(n)
        self._rows: dict[str, list[NDArray[np.float64]]] = {
            name: [] for name in ("return", *environment.spec.metrics)
        }
        self._episodes: list[NDArray[np.int64]] = []  # of each row
        self._most_steps = max(_MAX_STEPS, environment.spec.max_episode_steps)
        self._calls, self._report_after_s = 0, _REPORT_AFTER_S
        self._reported = time.monotonic()
        environment.seeds[:] = seeds[self._episode % len(seeds)]
        if recorder is not None:
            recorder.begin(environment.spec, seeds)
        self.timestep = self._record(environment.reset())

    @property
    def done(self) -> bool:
        """Return whether every episode has ended."""
        return not self._counts.any()

    def advance(self, action: Array) -> None:
        """Take one step; copies after a LAST row start their next episode.

        Raises:
            _Dropped: if an environment fails in an episode that counts.
            EndlessEpisode: if an episode does not end.
        """
        environment = self._environment
        self._calls += 1
        if self._calls % _LOOK_EVERY == 0:
            self._look_for_endless()
        if environment.over.any():
            self._return[environment.over] = 0
            environment.seeds[:] = self._seeds[self._episode % len(self._seeds)]
        if self._recorder is not None:
            self._recorder.act(action)
        self.timestep = self._record(environment.step(action, environment.over))

    def _look_for_endless(self) -> None:
        """Log an episode that lasts long.

        Raises:
            EndlessEpisode: if an episode is longer than the limit.
        """
        steps = int(self._environment.steps[self._counts].max(initial=0))
        if steps > self._most_steps:
            raise EndlessEpisode(
                f"evaluation given up: {self._unfinished(steps)}, more than {self._most_steps}; "
                f"{self._advice()}"
            )
        long = steps >= max(_REPORT_MIN_STEPS, self._environment.spec.max_episode_steps)
        if not long or time.monotonic() - self._reported < self._report_after_s:
            return
        self._reported, self._report_after_s = time.monotonic(), 2 * self._report_after_s
        logger.warning(
            "evaluation: %s; it is given up after %d: %s",
            self._unfinished(steps),
            self._most_steps,
            self._advice(),
        )

    def _unfinished(self, steps: int) -> str:
        """Describe the longest episode under way."""
        copy = int(np.where(self._counts, self._environment.steps, -1).argmax())
        return (
            f"the episode with seed {self._environment.seeds[copy]} of environment "
            f"'{self._environment.spec.name}' has no end after {steps} steps"
        )

    def _advice(self) -> str:
        """Return advice to end an episode in which the policy stands still."""
        if self._environment.spec.max_episode_steps:
            return "end it after the max_episode_steps that its spec names"
        return f"set {self._limit_key}" if self._limit_key else "truncate its episodes"

    def _record(self, timestep: TimeStep) -> TimeStep:
        counts = self._counts
        failed = counts & (timestep.step_type == StepType.ABORTED)
        if failed.any():
            raise _Dropped(self._episode[failed])
        reward = timestep.reward[:, self._learns]
        self._return += np.where(counts, reward.sum(axis=1, dtype=np.float64), 0)
        for name in self._rows:
            value = self._return if name == "return" else timestep.metrics[name]
            self._rows[name].append(np.where(counts, value, np.nan).astype(np.float64))
        self._episodes.append(np.where(counts, self._episode, -1))
        if self._recorder is not None:
            self._recorder.take(timestep, self._episodes[-1])
        if self._on_row and self._episode[0] == 0:
            self._on_row(self._environment.environment, timestep)
        over = self._environment.over
        if over.any():
            self._episode[over] += len(over)
            self._counts = self._episode < len(self._seeds)
        return timestep

    def curves(self) -> Curves:
        """Return each metric's curves by name, [E, T+1], NaN after each episode's end."""
        episode = np.stack(self._episodes)  # [calls, n]
        copies = np.arange(len(self._seeds)) % episode.shape[1]
        calls = [np.flatnonzero(episode[:, copy] == e) for e, copy in enumerate(copies)]
        curves: Curves = {}
        for name, rows in self._rows.items():
            values = np.stack(rows)
            curve = curves[name] = np.full((len(calls), max(map(len, calls))), np.nan)
            for e, copy in enumerate(copies):
                curve[e, : len(calls[e])] = values[calls[e], copy]
        return curves


def copies_for(config: ExperimentConfig, episodes: int) -> int:
    """Return the number of copies for a session of `episodes`, as small as rounds allow."""
    return _shares(episodes, config.env_server.envs_per_worker)[0]


def _shares(episodes: int, most: int) -> list[int]:
    """Split episodes into the fewest parts of at most `most`, of nearly equal size."""
    size = math.ceil(episodes / math.ceil(episodes / most))
    return [min(size, episodes - start) for start in range(0, episodes, size)]


def _limit_key(config: ExperimentConfig) -> str:
    """Return the configuration key of the environment's time limit; empty if it has none."""
    options = getattr(environment_module(config.environment.name).Config, "model_fields", {})
    return "environment.max_episode_steps" if "max_episode_steps" in options else ""


def _learning_rows(config: ExperimentConfig, spec: EnvSpec) -> Sequence[int] | slice:
    """Return the rows of agents whose rewards make the return: in a league the learning ones."""
    named = config.league.agents
    return agent_numbers(named, spec, "league.agents") if named else slice(None)


def run_baseline(
    config: ExperimentConfig,
    baseline: str,
    episodes: int,
    first_seed: int,
    on_row: OnRow | None = None,
    recorder: TransitionRecorder | None = None,
) -> EvaluationResult:
    """Evaluate a scripted baseline, without a learner.

    Args:
        config: configuration with the environment.
        baseline: name among the environment's BASELINES, or package.module:Name.
        episodes: number of episodes.
        first_seed: seed of the first episode.
        on_row: callback for every row of the first episode, played in copy 0.
        recorder: recorder of all episodes; None: they are not recorded.

    Raises:
        ConfigError: for an unknown environment or baseline.
        EnvironmentFault: if environments fail too often, or an episode does not end.
    """
    config = config.for_evaluation()
    factory = find_baseline(config.environment, baseline)
    faults = FaultCount(config.env_server.max_faults_per_minute, lambda reason, episodes: None)
    spare = itertools.count(first_seed + episodes)
    parts: list[Curves] = []
    shares = _shares(episodes, min(_SESSION_EPISODES, config.env_server.envs_per_worker))
    environment = guarded_environment(config, shares[0], faults)
    limit_key = _limit_key(config)
    with closing(environment):
        learns = _learning_rows(config, environment.spec)
        for size in shares:
            seeds = _Seeds(first_seed + len(parts) * shares[0], size, spare)
            watch = None if parts else on_row
            while True:  # until no episode fails
                policy = factory(environment.environment)
                if isinstance(policy, SeededPolicy):
                    policy.seed(seeds.values[np.arange(environment.num_envs) % size])
                try:
                    play = _Episodes(environment, seeds.values, watch, limit_key, recorder, learns)
                    while not play.done:
                        play.advance(policy.act(play.timestep))
                    break
                except _Dropped as dropped:
                    seeds.replace(dropped.episodes)
            if recorder is not None:
                recorder.keep()
            parts.append(play.curves())
    return joined_result(environment.spec.name, f"baseline {baseline}", first_seed, parts)


def run_policy(
    config: ExperimentConfig,
    learner_address: str,
    episodes: int,
    first_seed: int,
    on_row: OnRow | None = None,
    recorder: TransitionRecorder | None = None,
) -> EvaluationResult:
    """Evaluate the learner's greedy policy over gRPC.

    Args:
        config: configuration with the environment.
        learner_address: host:port of the learner.
        episodes: number of episodes.
        first_seed: seed of the first episode.
        on_row: callback for every row of the first episode, played in copy 0.
        recorder: recorder of all episodes; None: they are not recorded.

    Raises:
        MurmurError: if the learner refuses or is not reachable, environments fail too often, or
            an episode does not end.
    """
    server = config.env_server.model_copy(update={"learner": learner_address})
    config = config.for_evaluation().model_copy(update={"env_server": server})

    async def evaluate() -> EvaluationResult:
        metrics = WorkerMetrics("evaluate", CollectorRegistry())
        sizes = _shares(episodes, _SESSION_EPISODES)
        copies = copies_for(config, sizes[0])
        heartbeat = Heartbeat.private(copies)
        evaluator = _Evaluator(config, metrics, "evaluation", heartbeat, copies, recorder)
        parts: list[Curves] = []
        version = 0
        spare = itertools.count(first_seed + episodes)
        with closing(evaluator.environment):
            async with Ranks(config, metrics, *_ROLES, number=0) as ranks:
                choice = ranks.choice(1)
                for size in sizes:
                    seeds = _Seeds(first_seed + len(parts) * sizes[0], size, spare)
                    watch = None if parts else on_row
                    part, version = await evaluator.session(choice, seeds, watch)
                    parts.append(part)
        name = evaluator.environment.spec.name
        return joined_result(name, f"learned, version {version}", first_seed, parts)

    return run_coroutine(evaluate())


async def serve_evaluations(
    config: ExperimentConfig,
    worker: int,
    stop: asyncio.Event,
    metrics: WorkerMetrics,
    heartbeat: Heartbeat,
) -> None:
    """Evaluate whenever the learner asks, by its answer to Hello, until `stop` is set.

    Each evaluation is one session. The learner receives every row and keeps the results; this
    process writes only evaluation.episode_file, if it is set. If an episode does not end, the
    evaluation is given up: the session sends a notice and closes its stream.

    Raises:
        MurmurError: if only the user can fix the cause.
    """
    config = config.for_evaluation()
    first, episodes = config.evaluation.first_seed, config.evaluation.episodes
    copies = copies_for(config, episodes)
    evaluator = _Evaluator(config, metrics, f"evaluator-{worker}", heartbeat, copies)
    file = config.evaluation.episode_file
    on_row = EpisodeRecorder(Path(file)).take if file else None

    async def loop() -> None:
        # The first learner evaluates for all.
        async with Ranks(config, metrics, *_ROLES, number=0) as ranks:
            choice = ranks.choice(1)
            while not stop.is_set():
                spare = itertools.count(first + episodes)
                try:
                    await evaluator.session(choice, _Seeds(first, episodes, spare), on_row)
                except EndlessEpisode as error:
                    logger.warning("%s", error)

    with closing_all((evaluator.environment,), heartbeat):
        await run_until(stop, metrics, [loop()])


class _Evaluator:
    """Player of evaluations, one session after another. Used by one asyncio task.

    Attributes:
        environment: environment of all sessions.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        metrics: WorkerMetrics,
        role: str,
        heartbeat: Heartbeat,
        copies: int,
        recorder: TransitionRecorder | None = None,
    ) -> None:
        """Make the environment.

        Args:
            config: configuration with the environment of evaluations.
            metrics: counts of the process.
            role: role of the process, for its name.
            heartbeat: heartbeat of `copies` environments.
            copies: number of copies of the environment.
            recorder: recorder of all episodes; None: they are not recorded.
        """
        self._metrics, self._recorder = metrics, recorder
        faults = FaultCount(config.env_server.max_faults_per_minute, metrics.drop_episodes)
        self.environment = guarded_environment(config, copies, faults, heartbeat.part(0, copies))
        heartbeat.end_making()
        self._expert = Expert(config, self.environment, asked=False)
        self._name = f"{socket.gethostname()}-{role}"
        self._limit_key = _limit_key(config)
        self._learns = _learning_rows(config, self.environment.spec)

    async def session(
        self, choice: LearnerChoice, seeds: _Seeds, on_row: OnRow | None
    ) -> tuple[Curves, int]:
        """Play the episodes of one session; return their curves and the policy's version.

        A session that disconnects reconnects and starts again.
        """
        spec, n, options = self._expert.spec, self.environment.num_envs, self.environment.options
        connect = partial(Stream, spec=spec, num_envs=n, metrics=self._metrics)
        hello = hello_of(spec, n, self._name, pb.MODE_EVALUATE, options.curriculum)
        hello.episodes = len(seeds.values)
        while True:
            try:
                async with choice.stream(connect, hello) as (stream, welcome):
                    if welcome.options:
                        options.set(options_from_proto(welcome.options))
                    curves = await self._play(stream, seeds.values, on_row)
                return curves, welcome.policy_version
            except Disconnected as error:
                await asyncio.sleep(choice.pause_s(error))
            except _Dropped as dropped:
                seeds.replace(dropped.episodes)

    async def _play(
        self, stream: Stream, seeds: NDArray[np.uint64], on_row: OnRow | None
    ) -> Curves:
        """Play `session` on one stream."""
        environment, expert, recorder = self.environment, self._expert, self._recorder
        play = _Episodes(environment, seeds, on_row, self._limit_key, recorder, self._learns)
        environment.notices.repeat()
        while True:
            self._metrics.count_rows(environment.num_envs)
            if environment.notices.pending:
                await stream.tell(environment.notices)
            timestep = expert.label(play.timestep) if expert.labels else play.timestep
            action = await stream.exchange(timestep)
            if play.done:  # the learner has seen every LAST
                break
            self._metrics.enter("step")
            try:
                play.advance(action)
            except EndlessEpisode as error:
                # Said, as the end of a stream may also be that of a connection.
                await stream.write(pack_notices([Notice(GIVEN_UP, self._limit_key, str(error))]))
                await stream.close()
                raise
        self._metrics.counts["episodes"] += len(seeds)
        await stream.close()
        if recorder is not None:
            recorder.keep()
        return play.curves()
