"""The sessions of a worker process: their streams, and the learner's actions in environments.

A worker is one process with one thread, so it uses one core. Its sessions take turns: while one
steps its environments, which blocks the event loop on purpose, the other's observation and its
answer travel. Two sessions are double buffering.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Collection, Coroutine, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from grpc import aio
from numpy.typing import NDArray

from murmur.env_service.environment import VectorEnvironment, make_environment, zero_actions
from murmur.env_service.episode_options import EpisodeOptions
from murmur.env_service.metrics import WorkerMetrics
from murmur.env_service.sessions.connection import Call
from murmur.env_service.sessions.expert import Expert
from murmur.env_service.sessions.ranks import LearnerChoice, Ranks
from murmur.env_service.sessions.reconnect import Disconnected
from murmur.env_service.watchdog.faults import (
    FaultCount,
    GuardedEnvironment,
    Heartbeat,
    SessionHeartbeat,
    aborted_rows,
)
from murmur.shared.config.episode_options import Value
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.process.errors import ConfigError, EnvironmentFault, MurmurError, WireError
from murmur.shared.rpc import PROTOCOL_VERSION
from murmur.shared.rpc import rollout_pb2 as pb
from murmur.shared.wire.codec import ActionCodec, ObservationCodec, past_actions
from murmur.shared.wire.episode_options import options_from_proto
from murmur.shared.wire.seeding import episode_seeds
from murmur.shared.wire.spec import EnvSpec, spec_to_proto
from murmur.shared.wire.timestep import Array, StepType, TimeStep

logger = logging.getLogger("murmur")

_FLUSH_EVERY_S = 0.5  # between two reports to Prometheus
_GRACE_S = 1.0  # how long a stopping worker waits for answers under way


class Stream(Call):
    """A stream of observations and actions, in lockstep after `greet`. Used by one asyncio task.

    Attributes:
        updates: number of updates of the policy that answered last.
        options: options of the episodes that begin next, if the last answer changed them; else
            empty.
    """

    def __init__(
        self, channel: aio.Channel, spec: EnvSpec, num_envs: int, metrics: WorkerMetrics
    ) -> None:
        """Open the stream; nothing travels before `greet`."""
        super().__init__(channel, metrics)
        self._observations = ObservationCodec(spec, num_envs)
        self._actions = ActionCodec(spec, num_envs)
        self._sequence = self.updates = 0
        self.options: dict[str, Value] = {}

    async def exchange(self, timestep: TimeStep) -> Array:
        """Send rows and wait for their actions.

        Returns:
            actions, [N, A] int32 or [N, A, U] float32, a read-only view.

        Raises:
            Disconnected: if the stream ends.
            WireError: if the learner answers another sequence number, the wrong bytes, or actions
                that the environment does not accept.
        """
        self._sequence += 1
        self._metrics.enter("pack")
        messages = self._observations.messages(self._sequence, timestep)
        self._metrics.enter("wait")
        for message in messages:
            await self.write(message)
        reply = await self.read()
        self._metrics.enter("unpack")
        sequence, self.updates, action = self._actions.unpack(reply)
        self.options = self._actions.options
        if sequence != self._sequence:
            raise WireError(f"the learner answered sequence {sequence} to {self._sequence}")
        self._metrics.enter("wait")
        return action


def hello_of(
    spec: EnvSpec,
    num_envs: int,
    worker_id: str,
    mode: pb.Mode,
    curriculum: Sequence[str] = (),
) -> pb.Hello:
    """Return the first message of a session.

    Args:
        spec: spec of the rows that it sends.
        num_envs: number of its environments.
        worker_id: name of the session in the learner's logs.
        mode: MODE_TRAIN or MODE_EVALUATE.
        curriculum: names of the options that the learner changes.
    """
    return pb.Hello(
        protocol_version=PROTOCOL_VERSION,
        worker_id=worker_id,
        mode=mode,
        num_envs=num_envs,
        spec=spec_to_proto(spec),
        curriculum=curriculum,
    )


class WorkerSession:
    """A share of a worker's environments and their stream to the learner.

    Used by one asyncio task.
    """

    def __init__(
        self,
        environment: GuardedEnvironment,
        expert: Expert,
        worker_id: str,
        first_slot: int,
        stop: asyncio.Event,
    ) -> None:
        """Take over the environments.

        Args:
            environment: environments of the session.
            expert: labeler of these environments' rows.
            worker_id: name of the session in the learner's logs.
            first_slot: preferred slot of the first environment.
            stop: event that asks the worker to end.
        """
        n = environment.num_envs
        self._environment, self._expert = environment, expert
        self._worker_id, self._stop = worker_id, stop
        self._preferred_first_slot = first_slot
        self._run_seed = 0
        self._slots = np.arange(first_slot, first_slot + n)
        self._episodes = np.zeros(n, np.uint64)

    async def run(self, choice: LearnerChoice, metrics: WorkerMetrics) -> None:
        """Play until `stop` is set, reconnecting as needed.

        Raises:
            MurmurError: if reconnecting cannot help.
        """
        spec, n, options = self._expert.spec, self._environment.num_envs, self._environment.options
        connect = partial(Stream, spec=spec, num_envs=n, metrics=metrics)
        hello = hello_of(spec, n, self._worker_id, pb.MODE_TRAIN, options.curriculum)
        hello.preferred_first_slot = self._preferred_first_slot
        while not self._stop.is_set():
            try:
                async with choice.stream(connect, hello) as (stream, welcome):
                    await self._play(stream, welcome, metrics, choice.leaving)
            except Disconnected as error:
                await choice.pause(error, self._stop)

    async def _play(
        self, stream: Stream, welcome: pb.Welcome, metrics: WorkerMetrics, leaving: asyncio.Event
    ) -> None:
        """Play in lockstep with the learner until `stop` or `leaving` is set."""
        metrics.enter("step")
        environment = self._environment
        timestep = self._begin(welcome)
        environment.notices.repeat()
        while True:
            metrics.count_rows(len(self._slots))
            over = int(np.count_nonzero(environment.over))
            metrics.counts["episodes"] += over - environment.num_aborted
            try:
                if environment.notices.pending:
                    await stream.tell(environment.notices)
                action = await stream.exchange(timestep)
            except BaseException:
                metrics.counts["rows_unanswered"] += len(self._slots)
                raise
            if self._stop.is_set() or leaving.is_set():
                return await stream.close()
            metrics.enter("step")
            self._expert.updates = stream.updates
            if stream.options:
                environment.options.set(stream.options)
            ended = np.flatnonzero(environment.over) if over else None
            timestep = self._step(action, environment.over, ended)

    def _step(
        self,
        action: Array,
        restart: NDArray[np.bool_],
        ended: NDArray[np.intp] | None = None,
    ) -> TimeStep:
        """Step the environments; return their rows with the expert's actions.

        Args:
            action: actions, [N, A] int32 or [N, A, U] float32.
            restart: [N] bool, true for copies that begin an episode.
            ended: numbers of the copies that begin their next episode, None for none; other copies
                that restart begin the same episode again.
        """
        if ended is not None:
            self._episodes[ended] += np.uint64(1)
            self._environment.seeds[ended] = episode_seeds(
                self._run_seed, self._slots[ended], self._episodes[ended]
            )
            self._environment.options.next_episode(ended.tolist())
        timestep = self._environment.step(action, restart)
        return self._expert.label(timestep) if self._expert.labels else timestep

    def _begin(self, welcome: pb.Welcome) -> TimeStep:
        """Replay actions to bring every copy to its state in the learner's checkpoint.

        The replays may differ in length. Copies with shorter ones start later, so that all end
        together; until its start a copy plays episodes that are not recorded. A replay's last
        action may be the answer to the episode's LAST row: then the next episode begins. A copy
        that fails in its replay returns an ABORTED row, and loses that episode.

        Raises:
            WireError: if Welcome has another number of slots, or a replay's bytes are no whole
                number of actions.
            EnvironmentFault: if an episode ends before its replay does.
        """
        environment, n = self._environment, self._environment.num_envs
        if len(welcome.slots) != n:
            raise WireError(
                f"the learner's Welcome names {len(welcome.slots)} slots, the session has {n} "
                "environments"
            )
        self._expert.begin(welcome.policy_version)
        self._run_seed = welcome.run_seed
        self._slots = np.arange(welcome.first_slot, welcome.first_slot + n)
        self._episodes = np.array([slot.episode for slot in welcome.slots], np.uint64)
        environment.seeds[:] = episode_seeds(self._run_seed, self._slots, self._episodes)
        if welcome.options:
            environment.options.set(options_from_proto(welcome.options))
        environment.options.resume([options_from_proto(slot.options) for slot in welcome.slots])
        replays = [past_actions(environment.spec, slot.actions) for slot in welcome.slots]
        lengths = np.array([len(replay) for replay in replays])
        action = zero_actions(environment.spec, n)
        starts = lengths.max() - lengths  # the call in which each copy begins its episode
        lost = np.zeros(n, np.bool_)  # failed in its replay
        timestep = self._step(action, np.ones(n, np.bool_))
        for call in range(1, lengths.max() + 1):
            playing = np.flatnonzero((starts < call) & ~lost)
            for i in playing:
                action[i] = replays[i][call - starts[i] - 1]
            over = playing[environment.over[playing]]
            early = over[call - starts[over] < lengths[over]]
            lost[early] = timestep.step_type[early] == StepType.ABORTED
            if (ended := early[~lost[early]]).size:
                i = ended[0]
                raise EnvironmentFault(
                    f"environment '{environment.spec.name}' ended an episode after "
                    f"{environment.steps[i]} steps that was longer before: the same seed and "
                    f"actions must give the same episode (seed {environment.seeds[i]}, slot "
                    f"{self._slots[i]}, run seed {self._run_seed})"
                )
            restart = environment.over | (starts == call)
            timestep = self._step(action, restart, over[~lost[over]])
        if lost.any():
            timestep = aborted_rows(timestep, np.flatnonzero(lost).tolist())
            environment.over[lost] = True
        return timestep


def guarded_environment(
    config: ExperimentConfig,
    num_envs: int,
    faults: FaultCount,
    heartbeat: SessionHeartbeat | None = None,
    *,
    progress: float = 1.0,
) -> GuardedEnvironment:
    """Make copies of the configured environment that may fail; see GuardedEnvironment.

    Args:
        config: configuration of the experiment.
        num_envs: number of copies.
        faults: counter of the process's faults.
        heartbeat: heartbeat that the parent reads; None: no process watches.
        progress: part of the curriculum that has passed, 0 to 1, until the learner says another;
            evaluations use its end.
    """
    plugin = config.environment
    options = EpisodeOptions(plugin, num_envs, plugin.values_at(progress))

    def make() -> VectorEnvironment:
        environment = make_environment(plugin, num_envs, config.algorithm.name)
        options.require(environment)
        return environment

    return GuardedEnvironment(make, faults, heartbeat, config.learner.max_abs_reward, options)


async def run_sessions(
    config: ExperimentConfig,
    worker: int,
    preferred_first_slot: int,
    stop: asyncio.Event,
    metrics: WorkerMetrics,
    heartbeat: Heartbeat,
) -> None:
    """Play all sessions of one worker until `stop` is set.

    Args:
        config: configuration of the experiment.
        worker: number of the worker, for names.
        preferred_first_slot: preferred slot of the worker's first environment.
        stop: event that ends the sessions after the exchange under way, or a short grace.
        metrics: counts of the worker.
        heartbeat: heartbeat of the worker.

    Raises:
        MurmurError: if only the user can fix the cause.
    """
    server = config.env_server
    envs = server.envs_per_worker // server.sessions_per_worker
    sync = config.learner.pipeline == "sync"
    faults = FaultCount(server.max_faults_per_minute, metrics.drop_episodes)
    environments = [
        guarded_environment(config, envs, faults, heartbeat.part(i * envs, envs), progress=0.0)
        for i in range(server.sessions_per_worker)
    ]
    heartbeat.end_making()
    with closing_all(environments, heartbeat):
        if sync and not environments[0].environment.seeded:
            raise ConfigError(
                f"environment '{environments[0].spec.name}' begins episodes from seeds of its own, "
                "so no run can be repeated; set learner.pipeline: async"
            )
        async with Ranks(
            config,
            metrics,
            "environment",
            first_turn=worker * server.sessions_per_worker,
            number=worker if sync else None,
        ) as ranks:
            await run_until(
                stop,
                metrics,
                [
                    WorkerSession(
                        environment,
                        Expert(config, environment, asked=True),
                        f"{socket.gethostname()}-{worker}/{i}",
                        preferred_first_slot + i * envs,
                        stop,
                    ).run(ranks.choice(envs), metrics)
                    for i, environment in enumerate(environments)
                ],
            )


@contextlib.contextmanager
def closing_all(
    environments: Collection[GuardedEnvironment], heartbeat: Heartbeat
) -> Iterator[None]:
    """Close environments at the end; log an error before that, because close() may hang."""
    try:
        yield
    except MurmurError as error:
        logger.error("%s", error)
        heartbeat.gave_up = True
        raise
    finally:
        heartbeat.closing = True
        for environment in environments:
            environment.close()


async def run_until(
    stop: asyncio.Event, metrics: WorkerMetrics, plays: Sequence[Coroutine[None, None, None]]
) -> None:
    """Run coroutines side by side until all end, one fails, or `stop` is set and a grace is over.

    Raises:
        Exception: the first exception that one of them raised.
    """
    tasks = [asyncio.create_task(play) for play in plays]
    report = asyncio.create_task(_report(metrics))
    stopped = asyncio.create_task(stop.wait())
    playing = asyncio.gather(*tasks)
    try:
        ends: set[asyncio.Future[Any]] = {playing, stopped}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if not playing.done():
            await asyncio.wait({playing}, timeout=_GRACE_S)
        if playing.done():
            playing.result()
    finally:
        for task in (*tasks, report, stopped):
            task.cancel()
        await asyncio.gather(*tasks, playing, report, stopped, return_exceptions=True)
        metrics.flush()


async def _report(metrics: WorkerMetrics) -> None:
    """Report the worker's counts to Prometheus a few times a second."""
    while True:
        await asyncio.sleep(_FLUSH_EVERY_S)
        metrics.flush()
