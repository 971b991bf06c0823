"""Sessions of environments: greeted, then observation -> actions in lockstep until they leave."""

import asyncio

import grpc
import numpy as np

from learner_service.serving.admission import Admitted, Context, Refused
from learner_service.serving.batcher import Request
from learner_service.serving.handshake import Handshake, Host
from learner_service.serving.league import split
from learner_service.serving.session import EnvSession
from learner_service.telemetry.metrics import LearnerMetrics
from shared.config.learner import LearnerConfig
from shared.process.errors import WireError
from shared.rpc import rollout_pb2 as pb
from shared.wire.codec import ObservationCodec, RowCheck
from shared.wire.notices import GIVEN_UP, NOTICES_TAG, unpack_notices
from shared.wire.timestep import StepType, TimeStep

_FIRST_ROWS_PATIENCE = 10  # environments may compile and load before their first rows
_LAST = int(StepType.LAST)  # NumPy compares faster with ints


class EnvSessions:
    """Serves the sessions of environments. All methods run on the event loop."""

    def __init__(self, host: Host, config: LearnerConfig, metrics: LearnerMetrics) -> None:
        """Serve on behalf of `host`."""
        self._host = host
        self._handshake = Handshake(host)
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
        if hello.mode == pb.MODE_SUPPLY:
            raise Refused(
                grpc.StatusCode.FAILED_PRECONDITION,
                "mode",
                "this run trains in an environment, it takes no samples; start the server with "
                "the run's configuration",
            )
        session = await self._handshake.greet(hello, context, stream)
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
        except WireError as error:
            raise Refused(
                grpc.StatusCode.INVALID_ARGUMENT,
                "contents",
                f"worker '{session.worker_id}': {error}",
            ) from None
        finally:
            self._host.end(session)

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
            timestep = session.from_worker(timestep)
        if session.pairing is not None:
            timestep, other = split(session.spec, timestep)
        reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._arrived.append(Request(session, sequence, timestep, reply, other))
        if len(self._arrived) == 1:
            # The first of a turn of the event loop hands over all that arrive in that turn: they go
            # with the same batch, and the inference thread is woken once.
            try:
                await asyncio.sleep(0)
            finally:  # also if this session ends just now
                arrived, self._arrived = self._arrived, []
                self._host.batcher.submit(*arrived)
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
