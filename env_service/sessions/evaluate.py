"""Evaluation: greedy or scripted episodes with given seeds, and the table of what came out.

Copy i of an evaluation plays the episode of seed first_seed + i, so two policies are compared on
the same episodes. A copy whose episode has ended continues stepping, unseen, until all have ended.

An episode whose environment fails is dropped: the session is played again from its start, with the
next unused seed in the place of that episode's. So there are always as many as were asked for.
"""

import asyncio
import itertools
import logging
import math
import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
from grpc import aio
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry

from env_service.environment import (
    BaselineFactory,
    SeededPolicy,
    VectorEnvironment,
    find_baseline,
    make_environment,
)
from env_service.metrics import WorkerMetrics
from env_service.sessions.evaluation_result import EvaluationResult, joined_result
from env_service.sessions.expert import Expert
from env_service.sessions.ranks import Placement, Ranks
from env_service.sessions.reconnect import Disconnected
from env_service.sessions.recording import EpisodeRecorder
from env_service.sessions.worker import Stream, closing_all, run_until
from env_service.watchdog.faults import FaultCount, GuardedEnvironment
from env_service.watchdog.heartbeat import Heartbeat
from shared.config import ExperimentConfig
from shared.coroutines import run_coroutine
from shared.credentials import Role
from shared.rpc import rollout_pb2 as pb
from shared.timestep import Array, StepType, TimeStep

logger = logging.getLogger("murmur")

_MAX_ENVS = 64  # environments of one session; more episodes are played in several
_ROLES: tuple[Role, ...] = ("evaluator", "environment")  # either may evaluate

OnRow = Callable[[VectorEnvironment, TimeStep], None]


class _Dropped(Exception):  # noqa: N818 - an event; playing again handles it
    """Episodes of an evaluation that failed; `copies` are theirs."""

    def __init__(self, copies: NDArray[np.intp]) -> None:
        self.copies = copies


class _Seeds:
    """Seeds of one session's episodes; those of episodes that failed are replaced."""

    def __init__(self, first: int, size: int, spare: Iterator[int]) -> None:
        """Begin with first, first + 1, ...; take others from `spare`."""
        self.values = np.arange(first, first + size, dtype=np.uint64)
        self._spare = spare

    def replace(self, copies: NDArray[np.intp]) -> None:
        """Other seeds for some copies."""
        for i in copies.tolist():
            old, self.values[i] = self.values[i], next(self._spare)
            logger.warning(
                "evaluation: the episode with seed %d failed; the one with seed %d is played "
                "instead",
                old,
                self.values[i],
            )


class _FirstEpisodes:
    """The first episode of every copy of an environment, and what it gave.

    Attributes:
        timestep: the rows to act on.
    """

    def __init__(
        self,
        environment: GuardedEnvironment,
        seeds: NDArray[np.uint64],
        on_row: OnRow | None,
    ) -> None:
        """Start all copies, copy i with seeds[i].

        Raises:
            _Dropped: if one of them fails.
        """
        n = environment.num_envs
        self._environment, self._on_row = environment, on_row
        self._over = np.zeros(n, np.bool_)  # first episode ended before this row
        self._return = np.zeros(n)
        self._rows: dict[str, list[NDArray[np.float64]]] = {
            name: [] for name in ("return", *environment.spec.metrics)
        }
        environment.seeds[:] = seeds
        self.timestep = self._record(environment.reset())

    @property
    def done(self) -> bool:
        """Whether every copy has ended its first episode."""
        return bool(self._over.all())

    def advance(self, action: Array) -> None:
        """Take one step; copies whose last row was LAST start the same episode again.

        Raises:
            _Dropped: if an environment fails in its first episode.
        """
        self.timestep = self._record(self._environment.step(action, self._environment.over))

    def _record(self, timestep: TimeStep) -> TimeStep:
        counts = ~self._over
        failed = counts & (timestep.step_type == StepType.ABORTED)
        if failed.any():
            raise _Dropped(np.flatnonzero(failed))
        self._return += np.where(counts, timestep.reward.sum(axis=1, dtype=np.float64), 0)
        for name in self._rows:
            value = self._return if name == "return" else timestep.metrics[name]
            self._rows[name].append(np.where(counts, value, np.nan).astype(np.float64))
        if self._on_row and counts[0]:
            self._on_row(self._environment.environment, timestep)
        self._over |= self._environment.over
        return timestep

    def curves(self) -> dict[str, NDArray[np.float64]]:
        """Name -> [N, T+1], NaN after each copy's end."""
        return {name: np.stack(rows, axis=1) for name, rows in self._rows.items()}


def _shares(episodes: int) -> list[int]:
    """Sizes of the sessions of an evaluation: as few as can be, as equal as can be."""
    size = math.ceil(episodes / math.ceil(episodes / _MAX_ENVS))
    return [min(size, episodes - start) for start in range(0, episodes, size)]


def run_baseline(
    config: ExperimentConfig,
    baseline: str,
    episodes: int,
    first_seed: int,
    on_row: OnRow | None = None,
) -> EvaluationResult:
    """Evaluate a scripted baseline; needs no learner.

    Args:
        config: names the environment.
        baseline: one of the environment's BASELINES, or package.module:Name.
        episodes: how many.
        first_seed: seed of the first.
        on_row: called with every row of the first episode, its copy being copy 0.

    Raises:
        ConfigError: for an unknown environment or baseline.
        EnvironmentFault: if environments fail too often.
    """
    config = config.for_evaluation()
    factory = find_baseline(config.environment, baseline)
    faults = FaultCount(config.env_server.max_faults_per_minute, lambda reason, episodes: None)
    spare = itertools.count(first_seed + episodes)
    parts = []
    seed = first_seed
    for size in _shares(episodes):
        environment = GuardedEnvironment(
            partial(make_environment, config.environment, size),
            faults,
            max_abs_reward=config.learner.max_abs_reward,
        )
        seeds = _Seeds(seed, size, spare)
        watch = on_row if seed == first_seed else None
        with closing(environment):
            while True:
                try:
                    parts.append(_play_baseline(environment, factory, seeds.values, watch))
                    break
                except _Dropped as dropped:
                    seeds.replace(dropped.copies)
        seed += size
    return joined_result(environment.spec.name, f"baseline {baseline}", first_seed, parts)


def _play_baseline(
    environment: GuardedEnvironment,
    baseline: BaselineFactory,
    seeds: NDArray[np.uint64],
    on_row: OnRow | None,
) -> dict[str, NDArray[np.float64]]:
    """The curves of one episode for each seed."""
    policy = baseline(environment.environment)
    if isinstance(policy, SeededPolicy):
        policy.seed(seeds)
    play = _FirstEpisodes(environment, seeds, on_row)
    while not play.done:
        play.advance(policy.act(play.timestep))
    return play.curves()


def run_policy(
    config: ExperimentConfig,
    learner_address: str,
    episodes: int,
    first_seed: int,
    on_row: OnRow | None = None,
) -> EvaluationResult:
    """Evaluate the learner's greedy policy over gRPC.

    Args:
        config: names the environment.
        learner_address: host:port.
        episodes: how many.
        first_seed: seed of the first.
        on_row: called with every row of the first episode, its copy being copy 0.

    Raises:
        MurmurError: if the learner refuses or stays away, or environments fail too often.
    """
    server = config.env_server.model_copy(update={"learner": learner_address})
    config = config.for_evaluation().model_copy(update={"env_server": server})

    async def evaluate() -> EvaluationResult:
        metrics = WorkerMetrics("evaluate", CollectorRegistry())
        evaluator = _Evaluator(config, metrics, "evaluation", Heartbeat.private(_MAX_ENVS))
        with closing(evaluator):
            async with Ranks(config, metrics, *_ROLES, number=0) as ranks:
                placement = ranks.placement(1)
                return await evaluator.evaluate(placement, episodes, first_seed, on_row)

    return run_coroutine(evaluate())


async def serve_evaluations(
    config: ExperimentConfig,
    worker: int,
    stop: asyncio.Event,
    metrics: WorkerMetrics,
    heartbeat: Heartbeat,
) -> None:
    """Evaluate whenever the learner asks, which it does by answering Hello; until `stop` is set.

    Each evaluation is one session, of as many environments as episodes. The learner sees every row
    and keeps the results; here only evaluation.episode_file is kept, if it is set.

    Raises:
        MurmurError: if only the user can fix the cause.
    """
    config = config.for_evaluation()
    evaluator = _Evaluator(config, metrics, f"evaluator-{worker}", heartbeat)
    first, episodes = config.evaluation.first_seed, config.evaluation.episodes
    file = config.evaluation.episode_file
    on_row = EpisodeRecorder(Path(file)).take if file else None

    async def loop() -> None:
        # The first learner evaluates for all.
        async with Ranks(config, metrics, *_ROLES, number=0) as ranks:
            placement = ranks.placement(1)
            while not stop.is_set():
                spare = itertools.count(first + episodes)
                await evaluator.session(placement, _Seeds(first, episodes, spare), on_row)

    with closing_all(evaluator.environments.values(), heartbeat):
        await run_until(stop, metrics, [loop()])


class _Evaluator:
    """Plays evaluations, one session after another. Used by one asyncio task.

    Attributes:
        environments: by their number of copies; made when first needed, and kept.
    """

    def __init__(
        self, config: ExperimentConfig, metrics: WorkerMetrics, role: str, heartbeat: Heartbeat
    ) -> None:
        """Name the evaluator; no environment is made yet."""
        self._config, self._metrics, self._heartbeat = config, metrics, heartbeat
        self._faults = FaultCount(config.env_server.max_faults_per_minute, metrics.drop_episodes)
        self._name = f"{socket.gethostname()}-{role}"
        self.environments: dict[int, GuardedEnvironment] = {}

    def close(self) -> None:
        """Close the environments."""
        for environment in self.environments.values():
            environment.close()

    async def evaluate(
        self, placement: Placement, episodes: int, first_seed: int, on_row: OnRow | None
    ) -> EvaluationResult:
        """One evaluation, in sessions of bounded size."""
        parts, seed, version = [], first_seed, 0
        spare = itertools.count(first_seed + episodes)
        for size in _shares(episodes):
            part, version = await self.session(
                placement, _Seeds(seed, size, spare), on_row if seed == first_seed else None
            )
            parts.append(part)
            seed += size
        name = next(iter(self.environments.values())).spec.name
        return joined_result(name, f"learned, version {version}", first_seed, parts)

    async def session(
        self, placement: Placement, seeds: _Seeds, on_row: OnRow | None = None
    ) -> tuple[dict[str, NDArray[np.float64]], int]:
        """The episodes of one session: their curves and the policy's version.

        A session that breaks reconnects and is played from its start.
        """
        while True:
            try:
                async with placement.channel() as channel:
                    return await self._play(placement, channel, seeds.values, on_row)
            except Disconnected as error:
                await asyncio.sleep(placement.pause_s(error))
            except _Dropped as dropped:
                seeds.replace(dropped.copies)

    async def _play(
        self,
        placement: Placement,
        channel: aio.Channel,
        seeds: NDArray[np.uint64],
        on_row: OnRow | None,
    ) -> tuple[dict[str, NDArray[np.float64]], int]:
        """One stream's worth of `session`."""
        size = len(seeds)
        if size not in self.environments:
            self._heartbeat.begin_making()
            self.environments[size] = GuardedEnvironment(
                partial(make_environment, self._config.environment, size),
                self._faults,
                self._heartbeat.part(0, size),
                self._config.learner.max_abs_reward,
            )
            self._heartbeat.end_making()
        environment = self.environments[size]
        expert = Expert(self._config, environment, asked=False)
        stream = Stream(channel, expert.spec, size, self._metrics)
        try:
            welcome = await stream.open(self._name, pb.MODE_EVALUATE)
            async with placement.playing(stream):
                play = _FirstEpisodes(environment, seeds, on_row)
                while True:
                    self._metrics.count_rows(size)
                    action = await stream.exchange(expert.label(play.timestep))
                    if play.done:  # the learner has seen every LAST
                        break
                    self._metrics.enter("step")
                    play.advance(action)
                self._metrics.episodes += size
                await stream.close()
            return play.curves(), welcome.policy_version
        finally:
            stream.cancel()
