"""Sessions of environments: greeted, then observation -> actions in lockstep until they leave."""

import asyncio

import grpc
import numpy as np
from numpy.typing import NDArray

from learner_service.serving.admission import Admitted, Context, Refused
from learner_service.serving.batcher import Request
from learner_service.serving.handshake import Handshake, Host
from learner_service.serving.league import split
from learner_service.serving.session import Session
from learner_service.serving.validation import check_contents, check_order
from learner_service.telemetry.metrics import LearnerMetrics
from shared.codec import ObservationCodec
from shared.config.learner import LearnerConfig
from shared.errors import WireError
from shared.notices import GIVEN_UP, unpack_notices
from shared.row_check import RowCheck
from shared.rpc import rollout_pb2 as pb
from shared.timestep import StepType, TimeStep

_FIRST_ROWS_PATIENCE = 10  # environments may compile and load before their first rows
_MID, _LAST = int(StepType.MID), int(StepType.LAST)


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
        try:
            await self._lockstep(session, context, stream)
        finally:
            self._host.end(session)

    async def _lockstep(self, session: Session, context: Context, stream: Admitted) -> None:
        """Answer observations with actions, until the worker closes its side."""
        codec = ObservationCodec(session.spec, session.num_envs)
        check = RowCheck(session.spec, session.num_envs, self._max_abs_reward)
        requests = self._metrics.counter("requests", mode=stream.mode)
        loop = asyncio.get_running_loop()
        expected = 1
        ended: NDArray[np.bool_] | None = None  # [n] episodes that the last message ended
        patience_s = self._timeout_s and self._timeout_s * _FIRST_ROWS_PATIENCE
        none_ended, all_mid = np.zeros(session.num_envs, np.bool_), bytes([_MID]) * session.num_envs
        while True:
            try:
                observation = await self._receive(codec, context, session, patience_s)
                if observation is None:
                    return
                patience_s = self._timeout_s
                sequence, timestep = observation
                if sequence != expected:  # first: it explains rows that do not follow
                    raise Refused(
                        grpc.StatusCode.FAILED_PRECONDITION,
                        "sequence",
                        f"worker '{session.worker_id}' sent sequence number {sequence}, "
                        f"expected {expected}",
                    )
                step_type = timestep.step_type
                if ended is not none_ended or step_type.tobytes() != all_mid:  # not the usual one
                    check_order(session, step_type, ended)
                    over = step_type >= _LAST
                    ended = over if over.any() else none_ended
                check_contents(check, timestep)
            except WireError as error:
                raise Refused(
                    grpc.StatusCode.INVALID_ARGUMENT,
                    "contents",
                    f"worker '{session.worker_id}': {error}",
                ) from None
            stream.messages = expected
            expected += 1
            requests.inc()
            reply: asyncio.Future[bytes] = loop.create_future()
            other = None
            if session.order is not None:
                timestep = session.from_worker(timestep)
            if session.pairing is not None:
                timestep, other = split(session.spec, timestep)
            self._submit(Request(session, sequence, timestep, reply, other))
            await self._answer(context, await reply)

    async def _receive(
        self,
        codec: ObservationCodec,
        context: Context,
        session: Session,
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
                    if notices := unpack_notices(message):
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

    async def _answer(self, context: Context, reply: bytes) -> None:
        """Send an action; a worker that never reads does not keep its place."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await context.write(reply)
        except TimeoutError:
            raise Refused(
                grpc.StatusCode.DEADLINE_EXCEEDED,
                "idle",
                f"an answer was not read for {self._timeout_s:g} s (learner.session_timeout_s)",
            ) from None

    def _submit(self, request: Request) -> None:
        """Hand over requests once per turn of the event loop, not one by one.

        Whatever else has arrived by then goes with the same batch, and the inference thread is
        woken once.
        """
        if not self._arrived:
            asyncio.get_running_loop().call_soon(self._flush)
        self._arrived.append(request)

    def _flush(self) -> None:
        arrived, self._arrived = self._arrived, []
        self._host.batcher.submit(*arrived)
