"""Sessions of environments: greeted, then observation -> actions in lockstep until they leave."""

import asyncio
from dataclasses import replace
from typing import Protocol

import grpc
import numpy as np
from google.protobuf.message import DecodeError

from murmur.learner_service.learning.base import algorithm_config
from murmur.learner_service.learning.options import SharingConfig
from murmur.learner_service.serving.admission import (
    MODE_NAMES,
    Admission,
    Admitted,
    Context,
    Refused,
)
from murmur.learner_service.serving.curriculum import Curriculum
from murmur.learner_service.serving.evaluation import EvaluationScheduler
from murmur.learner_service.serving.requests import DynamicBatcher, EnvSession, Request
from murmur.learner_service.telemetry.metrics import LearnerMetrics
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.config.learner import LearnerConfig
from murmur.shared.process.errors import ConfigError, MurmurError, SpecError, WireError
from murmur.shared.process.process import logger
from murmur.shared.rpc import PROTOCOL_VERSION
from murmur.shared.rpc import rollout_pb2 as pb
from murmur.shared.wire.channel import MAX_HELLO_BYTES
from murmur.shared.wire.codec import (
    ObservationCodec,
    RowCheck,
    check_size,
    message_bytes,
    past_actions,
)
from murmur.shared.wire.episode_options import options_to_proto
from murmur.shared.wire.notices import GIVEN_UP, NOTICES_TAG, unpack_notices
from murmur.shared.wire.spec import (
    MAX_ENVS,
    MAX_NAME_CHARACTERS,
    STATE,
    EnvSpec,
    agent_order,
    first_difference,
    spec_from_proto,
)
from murmur.shared.wire.timestep import StepType, TimeStep

_EVALUATION_POLL_S = 0.05
HELLO_TIMEOUT_S = 10.0
_FIRST_ROWS_PATIENCE = 10  # environments may compile and load before their first rows
_LAST = int(StepType.LAST)  # NumPy compares faster with ints
_MAX_SLOT = 1 << 20  # the run remembers an episode's number for each slot it has seen


class Host(Protocol):
    """Interface of the run that the server serves."""

    run_seed: int
    batcher: DynamicBatcher
    scheduler: EvaluationScheduler
    spec: EnvSpec | None

    @property
    def curriculum(self) -> Curriculum | None:
        """Options of episodes that change during the run."""

    @property
    def policy_version(self) -> int:
        """Updates the acting policy has had."""

    def open(self, spec: EnvSpec) -> None:
        """Build the run for the spec of its first training session."""

    def team(self, spec: EnvSpec, training: bool) -> EnvSpec:
        """The part of a session's agents that the run's policy acts for, in the run's order."""

    def pair(self, session: EnvSession) -> None:
        """Get ready to act for the agents that the run's policy does not act for."""

    def admit(self, hello: pb.Hello, spec: EnvSpec) -> tuple[EnvSession, list[pb.SlotStart]]:
        """A training session's place, and where its environments start."""

    def end(self, session: EnvSession) -> None:
        """The session's stream is gone."""


async def read_hello(context: Context, stream: Admitted) -> pb.Hello:
    """Return the first message of a stream, checked against the protocol and the caller's role.

    Raises:
        Refused: if it does not come, is something else, or is not allowed.
    """
    try:
        first = await asyncio.wait_for(context.read(), HELLO_TIMEOUT_S)
    except TimeoutError:
        raise _bad_hello(
            f"no Hello within {HELLO_TIMEOUT_S:g} s: a silent stream does not keep its place",
            grpc.StatusCode.DEADLINE_EXCEEDED,
        ) from None
    hello = _parse_hello(first)
    stream.worker = hello.worker_id
    if hello.protocol_version != PROTOCOL_VERSION:
        raise Refused(
            grpc.StatusCode.FAILED_PRECONDITION,
            "protocol",
            f"worker '{hello.worker_id}' speaks protocol version {hello.protocol_version}, "
            f"this learner {PROTOCOL_VERSION}; use the same release of murmur on both sides",
        )
    plays = 1 <= hello.num_envs <= MAX_ENVS and hello.mode in MODE_NAMES
    if hello.mode != pb.MODE_SUPPLY and not plays:
        raise _bad_hello(
            f"worker '{hello.worker_id}' says Hello with num_envs={hello.num_envs} "
            f"(1 to {MAX_ENVS}), mode={hello.mode} ({', '.join(pb.Mode.keys())})",
        )
    stream.greet(hello)
    return hello


def _bad_hello(text: str, code: grpc.StatusCode = grpc.StatusCode.INVALID_ARGUMENT) -> Refused:
    """Make the refusal of a first message."""
    return Refused(code, "hello", text)


def _parse_hello(message: object) -> pb.Hello:
    """The first message of a stream."""
    if not isinstance(message, bytes):
        raise _bad_hello("the stream ended before Hello", grpc.StatusCode.FAILED_PRECONDITION)
    if len(message) > MAX_HELLO_BYTES:
        raise _bad_hello(
            f"the first message has {len(message)} bytes, a Hello at most {MAX_HELLO_BYTES}",
            grpc.StatusCode.RESOURCE_EXHAUSTED,
        )
    try:
        parsed = pb.WorkerMessage.FromString(message)
    except DecodeError as error:
        raise _bad_hello(
            f"the first message is no WorkerMessage: {error}",
        ) from None
    if parsed.WhichOneof("message") != "hello":
        raise _bad_hello(
            f"the first message must be hello, got {parsed.WhichOneof('message')}",
            grpc.StatusCode.FAILED_PRECONDITION,
        )
    hello = parsed.hello
    if len(hello.worker_id) > MAX_NAME_CHARACTERS or not hello.worker_id.isprintable():
        raise _bad_hello(
            f"worker_id {hello.worker_id[:40]!r} has {len(hello.worker_id)} characters; it may "
            f"have {MAX_NAME_CHARACTERS}, all printable",
        )
    if hello.preferred_first_slot >= _MAX_SLOT:
        raise _bad_hello(
            f"preferred_first_slot {hello.preferred_first_slot} is not below {_MAX_SLOT}",
        )
    return hello


def in_order(spec: EnvSpec, known: EnvSpec | None, config: ExperimentConfig) -> EnvSpec:
    """The spec with the agents in the order of `known`, if its rows may be put in that order.

    They may where all agents share their networks, nothing is observed of all of them together and
    there is no league. An environment that lists the agents otherwise may list them otherwise in a
    state, too; and what is learned for one agent alone is safe only where its name is certain.

    Args:
        spec: spec of a session.
        known: spec of the run, or of the checkpoint that it comes from; None: there is none.
        config: configuration of the run.
    """
    if known is None or not agent_order(known, spec):
        return spec
    options = algorithm_config(config.algorithm)
    may_be_put = (
        isinstance(options, SharingConfig)
        and not getattr(options, "teams", None)
        and len(set(options.slices(spec.num_agents))) == 1
        and all(o.per_agent for o in spec.observations)
        and not spec.observation(STATE)
        and not spec.gives_adjacency
        and not config.league.on
    )
    return replace(spec, agents=known.agents) if may_be_put else spec


def _require_curriculum(hello: pb.Hello, curriculum: Curriculum | None) -> None:
    """Refuse a session whose environments would not follow the run's curriculum.

    Raises:
        ConfigError: if the options that it takes are others.
    """
    here, there = sorted(curriculum.courses if curriculum else ()), sorted(hello.curriculum)
    if here != there:
        raise ConfigError(
            f"environment.curriculum names {', '.join(here) or 'no option'} here, "
            f"{', '.join(there)[:200] or 'no option'} at worker '{hello.worker_id}': start the "
            "environment server with the run's configuration"
        )


class EnvSessions:
    """Serves the sessions of environments. All methods run on the event loop."""

    def __init__(self, host: Host, config: LearnerConfig, metrics: LearnerMetrics) -> None:
        """Serve on behalf of `host`."""
        self._host = host
        self._metrics = metrics
        self._received = metrics.counter("received_bytes")
        self._timeout_s = config.session_timeout_s or None
        self._max_abs_reward = config.max_abs_reward
        self._arrived: list[Request] = []  # in this turn of the event loop

    async def serve(self, hello: pb.Hello, context: Context, stream: Admitted) -> None:
        """Serve one session, from its Hello to the end of its stream.

        Raises:
            Refused: if there can be no such session, or it breaks the contract.
        """
        session = await self._greet(hello, context, stream)
        codec = ObservationCodec(session.spec, session.num_envs)
        check = RowCheck(session.spec, session.num_envs, self._max_abs_reward)
        requests = self._metrics.counter("requests", mode=stream.mode)
        # [n] whether an episode must begin; None: training sessions may be in the midst of one.
        begins = np.ones(session.num_envs, np.bool_) if session.evaluating else None
        patience_s = self._timeout_s and self._timeout_s * _FIRST_ROWS_PATIENCE
        try:
            while observation := await self._receive(codec, context, session, patience_s):
                patience_s = self._timeout_s
                sequence, timestep = observation
                if sequence != stream.messages + 1:  # first: it explains rows that do not follow
                    raise Refused(
                        grpc.StatusCode.FAILED_PRECONDITION,
                        "sequence",
                        f"worker '{session.worker_id}' sent sequence number {sequence}, "
                        f"expected {stream.messages + 1}",
                    )
                if not check.passes(timestep, begins):
                    for env, what in sorted(check.broken(timestep, begins).items()):
                        raise WireError(
                            f"environment {env} returned {what}; nothing of this message was stored"
                        )
                begins = timestep.step_type >= _LAST
                stream.messages = sequence
                requests.inc()
                await self._answer(context, session, sequence, timestep)
        finally:
            self._host.end(session)

    async def _greet(self, hello: pb.Hello, context: Context, stream: Admitted) -> EnvSession:
        """Answer the Hello of a session that steps environments with Welcome.

        Raises:
            Refused: if there can be no such session.
        """
        if hello.mode == pb.MODE_SUPPLY:
            raise Refused(
                grpc.StatusCode.FAILED_PRECONDITION,
                "mode",
                "this run trains in an environment, it takes no samples; start the server with "
                "the run's configuration",
            )
        try:
            spec = spec_from_proto(hello.spec)
            check_size(spec, hello.num_envs)
            stream.reserve(message_bytes(spec, hello.num_envs))
            _require_curriculum(hello, self._host.curriculum)
            team = await self._agree(hello, spec, stream.admission)
        except MurmurError as error:
            raise Refused(grpc.StatusCode.FAILED_PRECONDITION, "spec", str(error)) from None
        starts: list[pb.SlotStart] = []
        if hello.mode == pb.MODE_EVALUATE:
            session = await self._evaluation(hello, spec)
        else:
            try:
                session, starts = self._host.admit(hello, spec)
            except MurmurError as error:
                raise Refused(grpc.StatusCode.FAILED_PRECONDITION, "mode", str(error)) from None
        if team.num_agents < spec.num_agents:
            self._host.pair(session)
        starts = self._arrange(session, starts)
        welcome = pb.Welcome(
            first_slot=max(session.first_slot, 0),
            policy_version=self._host.policy_version,
            run_seed=self._host.run_seed,
            slots=starts,
            options=() if session.values is None else options_to_proto(session.values.options),
        )
        try:
            await context.write(pb.LearnerMessage(welcome=welcome).SerializeToString())
        except BaseException:
            self._host.end(session)
            raise
        stream.welcome()
        return session

    async def _agree(self, hello: pb.Hello, spec: EnvSpec, admission: Admission) -> EnvSpec:
        """The part of the agents that the run acts for; the first training session begins the run.

        Raises:
            MurmurError: if this is another environment than the run's.
        """
        training = hello.mode == pb.MODE_TRAIN
        while self._host.spec is None and not training:
            await asyncio.sleep(_EVALUATION_POLL_S)  # there is nothing to evaluate yet
        if self._host.spec is not None and not training:  # their episodes may have another limit
            spec = replace(spec, max_episode_steps=self._host.spec.max_episode_steps)
        team = self._host.team(spec, training)
        await admission.open_once(
            lambda: self._host.spec is not None, lambda: self._host.open(team)
        )
        assert self._host.spec is not None
        team = self._host.team(spec, training)  # another session may have begun the run meanwhile
        difference = first_difference(self._host.spec, team)
        if difference:
            raise SpecError(
                f"worker '{hello.worker_id}' brings another environment than this run's: "
                f"{difference} (here: the learner, there: the worker)"
            )
        return team

    def _arrange(self, session: EnvSession, starts: list[pb.SlotStart]) -> list[pb.SlotStart]:
        """Note which row of the worker holds each of the run's agents; reorder its actions."""
        assert self._host.spec is not None
        order = agent_order(self._host.spec, session.spec)
        if not order:
            return starts
        logger.info(
            "worker '%s' lists the agents in another order than the run; its rows are put in order",
            session.worker_id,
        )
        session.order = np.array(order)
        for start in starts:
            taken = past_actions(session.spec, start.actions)
            start.actions = taken[:, np.argsort(order)].tobytes()
        return starts

    async def _evaluation(self, hello: pb.Hello, spec: EnvSpec) -> EnvSession:
        """A session for the next evaluation, as soon as one is due."""
        while (evaluation := self._host.scheduler.start()) is None:
            await asyncio.sleep(_EVALUATION_POLL_S)
        evaluation.wanted = hello.episodes
        zeros = np.zeros(hello.num_envs, np.int64)
        curriculum = self._host.curriculum
        return EnvSession(
            hello.worker_id,
            spec,
            hello.num_envs,
            -1,
            zeros,
            evaluation=evaluation,
            values=None if curriculum is None else curriculum.last,
        )

    async def _receive(
        self,
        codec: ObservationCodec,
        context: Context,
        session: EnvSession,
        patience_s: float | None,
    ) -> tuple[int, TimeStep] | None:
        """Return the next observation, all of its parts; None if the worker has closed its side."""
        try:
            async with asyncio.timeout(patience_s):
                while True:
                    message = await context.read()
                    if not isinstance(message, bytes):  # grpc.aio.EOF
                        return None
                    self._received.inc(len(message))
                    if message.startswith(NOTICES_TAG) and (notices := unpack_notices(message)):
                        self._metrics.notices.add(notices)
                        session.given_up |= any(n.kind == GIVEN_UP for n in notices)
                        continue
                    observation = codec.receive(message)
                    if observation is not None:
                        return observation
        except TimeoutError:
            raise Refused(
                grpc.StatusCode.DEADLINE_EXCEEDED,
                "idle",
                f"worker '{session.worker_id}' has sent no whole observation for {patience_s:g} s "
                "(learner.session_timeout_s): a silent session does not keep its environments' "
                "places",
            ) from None

    async def _answer(
        self, context: Context, session: EnvSession, sequence: int, timestep: TimeStep
    ) -> None:
        """Request actions for a time step, and send them.

        Raises:
            Refused: if the worker does not read the answer: it does not keep its place.
        """
        other = None
        if session.order is not None:
            timestep = session.of_agents(timestep, session.order)
        if session.game is not None:  # in a league the spec is that of all agents
            game, every = session.game, timestep
            timestep = session.of_agents(every, game.own_rows)
            other = every if game.shows_all else session.of_agents(every, game.other_rows)
        reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._arrived.append(Request(session, sequence, timestep, reply, other))
        if len(self._arrived) == 1:
            # The first of a turn of the event loop hands over all that arrive in that turn: they go
            # with the same batch, and the inference thread is woken once.
            try:
                await asyncio.sleep(0)
            finally:  # also if this session ends just now
                arrived, self._arrived = self._arrived, []
                self._host.batcher.arrivals.put(arrived)
        message = await reply
        try:
            async with asyncio.timeout(self._timeout_s):
                await context.write(message)
        except TimeoutError:
            raise Refused(
                grpc.StatusCode.DEADLINE_EXCEEDED,
                "idle",
                f"an answer was not read for {self._timeout_s:g} s (learner.session_timeout_s)",
            ) from None
