"""Admission: which streams become sessions, how many there are, and the memory of their messages.

Certificates are checked by gRPC before anything here runs; tokens are checked here. A stream has a
place from its beginning and is admitted only if the memory that its messages may take is free, so
what all streams together can make the learner hold is bounded in whatever order they send.
Training and evaluation have places of their own. Every stream has a line in the audit log.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import grpc

from murmur.learner_service.telemetry.metrics import LearnerMetrics
from murmur.shared.config.learner import LearnerConfig
from murmur.shared.process.process import logger
from murmur.shared.rpc import LOAD_METHOD, METHOD
from murmur.shared.rpc import rollout_pb2 as pb
from murmur.shared.wire.credentials import ROLES, CredentialFolder, Role
from murmur.shared.wire.spec import MAX_ENVS

Mode: TypeAlias = Literal["train", "evaluate"]
Context = grpc.aio.ServicerContext[bytes, bytes]
Handler: TypeAlias = "grpc.RpcMethodHandler[bytes, bytes]"
Behaviour: TypeAlias = Callable[[Any, Context], Awaitable[None]]

audit = logger.getChild("audit")
AUDIT_WINDOW_S = 10.0
MODE_NAMES: dict[int, Mode] = {pb.MODE_TRAIN: "train", pb.MODE_EVALUATE: "evaluate"}
_ALLOWED_MODES: dict[Role, frozenset[int]] = {
    "environment": frozenset({pb.MODE_TRAIN, pb.MODE_EVALUATE, pb.MODE_SUPPLY}),
    "evaluator": frozenset({pb.MODE_EVALUATE}),
    "read-only": frozenset(),
}
_MIB = 1024 * 1024
_WATCH = "/grpc.health.v1.Health/Watch"
MAX_WATCHES = 32


class Refused(Exception):  # noqa: N818 - the peer's error, not ours
    """A stream that must end, with its gRPC status; `reason` is a metric's label."""

    def __init__(self, code: grpc.StatusCode, reason: str, details: str) -> None:
        super().__init__(details)
        self.code = code
        self.reason = reason
        self.details = details


@dataclass
class Admitted:
    """One stream: who opened it, what it holds of the learner, how it ended.

    Attributes:
        admission: Admission that counts it.
        place: the kind of place that it takes.
        identity: common name of its certificate; empty in plain text.
        role: role of its token; empty in plain text.
        peer: its address.
        worker: name given in Hello; empty before.
        mode: "train", "evaluate" or "supply"; empty before Hello.
        messages: observations, or answers to grants, taken.
        welcomed: whether Welcome was sent.
        outcome: status that it ended with, or "CANCELLED".
        reason: the outcome as a metric's label, if the stream was refused.
    """

    admission: "Admission"
    place: Mode
    identity: str = ""
    role: str = ""
    peer: str = ""
    worker: str = ""
    mode: str = ""
    messages: int = 0
    welcomed: bool = False
    outcome: str = "CANCELLED"  # a stream that ends without a status
    reason: str = ""
    _hello: pb.Hello | None = None
    _num_bytes: int = 0
    _began: float = field(default_factory=time.monotonic)

    def greet(self, hello: pb.Hello) -> None:
        """Note what the stream is for, and count what it brings.

        Raises:
            Refused: if the role of its token does not allow the mode.
        """
        self.worker = hello.worker_id
        self.mode = "supply" if hello.mode == pb.MODE_SUPPLY else MODE_NAMES[hello.mode]
        for role, modes in _ALLOWED_MODES.items():
            if self.role == role and hello.mode not in modes:
                raise Refused(
                    grpc.StatusCode.PERMISSION_DENIED,
                    "role",
                    f"a token of the role {role} does not allow {pb.Mode.Name(hello.mode)}",
                )
        self._hello = hello
        self.admission.count_load(hello, 1)

    def reserve(self, num_bytes: int) -> None:
        """Move to a place of the stream's mode, with memory for its messages.

        Raises:
            Refused: if there is no such place, or not the memory.
        """
        place: Mode = "evaluate" if self.mode == "evaluate" else "train"
        if place != self.place:
            self.admission.take_place(place)
            self.admission.free_place(self.place)
            self.place = place
        self.admission.reserve(place, num_bytes)
        self._num_bytes = num_bytes

    def welcome(self) -> None:
        """Count the stream as a session: Welcome was sent."""
        self.welcomed = True
        self.admission.metrics.gauge("sessions", mode=self.mode).inc()

    def release(self) -> None:
        """Give back all that the stream holds."""
        if self.welcomed:
            self.admission.metrics.gauge("sessions", mode=self.mode).dec()
        if self._hello is not None:
            self.admission.count_load(self._hello, -1)
        self.admission.reserve(self.place, -self._num_bytes)
        self.admission.free_place(self.place)

    def line(self) -> str:
        """Return everything on one line; what the peer chose is quoted and escaped."""
        return (
            f"session identity={self.identity!r} role={self.role!r} worker={self.worker!r} "
            f"mode={self.mode!r} peer={self.peer} seconds={time.monotonic() - self._began:.1f} "
            f"messages={self.messages} outcome={self.outcome!r}"
        )


class Admission(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Admits streams and answers how much the learner has to do. Used on the event loop.

    Attributes:
        metrics: metrics that count refusals, sessions and reserved memory.
        taken: places that are taken, by kind.
        reserved: bytes of memory that are reserved, by kind.
        stopping: why no stream is admitted any more; set from outside, empty before.
    """

    def __init__(
        self,
        config: LearnerConfig,
        metrics: LearnerMetrics,
        credentials: CredentialFolder | None = None,
        rank: int = 0,
        size: int = 1,
    ) -> None:
        """Admit clients that have a token; all if there are no credentials.

        Args:
            config: limits of sessions, of memory and of lines in the log.
            metrics: counts those that are refused.
            credentials: the learner's folder, with all tokens.
            rank: number of this learner among those of its run.
            size: learners of the run.
        """
        self.metrics = metrics
        self.taken: dict[Mode, int] = {"train": 0, "evaluate": 0}
        self.reserved: dict[Mode, int] = {"train": 0, "evaluate": 0}
        self.stopping = ""
        self._credentials = credentials
        self._rank = rank
        self._size = size
        self._max_places: dict[Mode, tuple[str, int]] = {
            "train": ("learner.max_sessions", config.max_sessions),
            "evaluate": ("learner.max_evaluation_sessions", config.max_evaluation_sessions),
        }
        self._max_mib: dict[Mode, tuple[str, float]] = {
            "train": ("learner.max_in_flight_mib", config.max_in_flight_mib),
            "evaluate": (
                "learner.max_evaluation_in_flight_mib",
                config.max_evaluation_in_flight_mib,
            ),
        }
        self._max_per_identity = config.max_sessions_per_identity
        self._identities: Counter[str] = Counter()
        self._environments = 0  # of training sessions
        self._modes: Counter[int] = Counter()  # streams that said Hello
        self._watches = 0
        self._max_lines = config.max_audit_lines
        self._lines: Counter[str] = Counter()  # of the window under way, by reason
        self._opening = asyncio.Lock()

    @asynccontextmanager
    async def admit(self, context: Context) -> AsyncIterator[Admitted]:
        """Give a stream a place while it lasts; answer Refused with its status, and log the end."""
        stream = Admitted(self, "train", identity=_identity(context), peer=context.peer())
        entered = False
        try:
            self._enter(stream, context)
            entered = True
            yield stream
            stream.outcome = "OK"
        except Refused as refused:
            counter = "rejected" if stream.welcomed else "sessions_refused"
            self.metrics.counter(counter, reason=refused.reason).inc()
            stream.outcome = f"{refused.code.name}: {refused.details}"
            stream.reason = refused.reason
            await context.abort(refused.code, refused.details)
        finally:
            if entered:
                stream.release()
                self._leave(stream.identity)
            level = logging.INFO if stream.outcome in ("OK", "CANCELLED") else logging.WARNING
            self._log(level, stream.reason or stream.outcome, stream)

    def _enter(self, stream: Admitted, context: Context) -> None:
        """Take a place: an evaluator's is for evaluation, others train until Hello says more.

        Raises:
            Refused: if its token is no longer valid or of another role than its certificate, if its
                identity has too many sessions, or if there is no place.
        """
        stream.role = self._role(context.invocation_metadata() or ()) or ""
        if stream.role and stream.identity in ROLES and stream.identity != stream.role:
            raise Refused(
                grpc.StatusCode.PERMISSION_DENIED,
                "role",
                f"the certificate is one of the role {stream.identity}, the token one of the role "
                f"{stream.role}: use both from one folder of `murmur certs`",
            )
        limit = self._max_per_identity
        if limit and stream.identity and self._identities[stream.identity] >= limit:
            raise Refused(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "identity",
                f"'{stream.identity}' has {limit} sessions, the limit is "
                f"learner.max_sessions_per_identity={limit}",
            )
        if self.stopping:
            raise Refused(grpc.StatusCode.UNAVAILABLE, "stopping", self.stopping)
        stream.place = "evaluate" if stream.role == "evaluator" else "train"
        self.take_place(stream.place)
        self._identities[stream.identity] += 1

    def _leave(self, identity: str) -> None:
        self._identities[identity] -= 1
        if not self._identities[identity]:
            del self._identities[identity]

    def take_place(self, kind: Mode) -> None:
        """Take a place of a kind.

        Raises:
            Refused: naming the limit.
        """
        name, limit = self._max_places[kind]
        if self.taken[kind] >= limit:
            what = "training" if kind == "train" else "evaluation"
            raise Refused(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "limit",
                f"{self.taken[kind]} {what} sessions are connected, the limit is {name}={limit}",
            )
        self.taken[kind] += 1

    def free_place(self, kind: Mode) -> None:
        """Give a place of a kind back."""
        self.taken[kind] -= 1

    def reserve(self, kind: Mode, num_bytes: int) -> None:
        """Reserve memory for the messages of one session; give it back where it is negative.

        Raises:
            Refused: naming the bytes and the limit.
        """
        name, limit = self._max_mib[kind]
        reserved = self.reserved[kind]
        if num_bytes > 0 and reserved + num_bytes > limit * _MIB:
            never = num_bytes > limit * _MIB
            code = grpc.StatusCode
            raise Refused(
                code.FAILED_PRECONDITION if never else code.RESOURCE_EXHAUSTED,
                "memory",
                f"the messages of this session take {num_bytes / _MIB:.1f} MiB, those of the "
                f"sessions connected {reserved / _MIB:.1f} MiB, the limit is {name}={limit:g}; "
                "raise it, or use fewer environments in a session",
            )
        self.reserved[kind] += num_bytes
        self.metrics.gauge("in_flight_bytes", mode=kind).set(self.reserved[kind])

    def count_load(self, hello: pb.Hello, sign: int) -> None:
        """Add (sign 1) or remove (-1) what a session brings to the learner."""
        self._modes[hello.mode] += sign
        if hello.mode == pb.MODE_TRAIN:
            self._environments += sign * min(hello.num_envs, MAX_ENVS)

    @property
    def training_sessions(self) -> int:
        """Return the number of sessions that bring rows to learn from. Read by any thread."""
        return self._modes[pb.MODE_TRAIN] + self._modes[pb.MODE_SUPPLY]

    def load_handler(self) -> "grpc.GenericRpcHandler[bytes, bytes]":
        """Serve LOAD_METHOD: clients that choose between several learners ask for their load."""
        _, service, method = LOAD_METHOD.split("/")
        answer = grpc.unary_unary_rpc_method_handler(self._answer_load)
        return grpc.method_handlers_generic_handler(service, {method: answer})

    async def _answer_load(self, _request: bytes, _: object) -> bytes:
        return pb.LoadReply(
            rank=self._rank,
            size=self._size,
            environments=self._environments,
            supply_sessions=self._modes[pb.MODE_SUPPLY],
            free_sessions=max(0, self._max_places["train"][1] - self.taken["train"]),
        ).SerializeToString()

    async def open_once(self, is_open: Callable[[], bool], begin: Callable[[], None]) -> None:
        """Return when the run is open; call `begin`, in its own thread, if no session has.

        A session that ends while `begin` runs does not let go of it: the next session waits for
        the same call, also where `is_open` says so before `begin` returns. Two calls at once would
        build two learners in one process.

        Raises:
            Exception: what `begin` raises, to the session that called it; the next one tries again.
        """

        async def open_run() -> None:
            async with self._opening:
                if not is_open():
                    await asyncio.get_running_loop().run_in_executor(None, begin)

        opening = asyncio.ensure_future(open_run())
        # asyncio prints an exception that no session is left to take.
        opening.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(opening)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Refuse every RPC, of whatever service, that brings no token for it."""
        handler = await continuation(handler_call_details)
        try:
            role = self._role(handler_call_details.invocation_metadata)
            if role == "read-only" and handler_call_details.method == METHOD:
                raise Refused(
                    grpc.StatusCode.PERMISSION_DENIED,
                    "role",
                    "a token of the role read-only opens no session, it only asks for the health",
                )
        except Refused as refused:
            return grpc.stream_stream_rpc_method_handler(self._refusal(refused))
        if handler_call_details.method == _WATCH:
            return grpc.unary_stream_rpc_method_handler(
                self._watch(handler.unary_stream),  # type: ignore[arg-type]
                handler.request_deserializer,
                handler.response_serializer,
            )
        return handler

    def _role(self, metadata: Iterable[tuple[str, str | bytes]]) -> Role | None:
        """Return the role of a call's token; None in plain text.

        Raises:
            Refused: if it has none that is known.
        """
        if self._credentials is None:
            return None
        for key, value in metadata:
            if key == "authorization" and isinstance(value, str) and value.startswith("Bearer "):
                role = self._credentials.current().role_of(value[7:])
                if role is not None:
                    return role
                raise Refused(
                    grpc.StatusCode.UNAUTHENTICATED,
                    "token",
                    "this token is not one of the learner's; was it replaced by a newer one?",
                )
        raise Refused(
            grpc.StatusCode.UNAUTHENTICATED, "token", "metadata 'authorization: Bearer ...' needed"
        )

    def _refusal(self, refused: Refused) -> Behaviour:
        """Return a handler that answers with a status whatever is asked."""

        async def refuse(_: Any, context: Context) -> None:  # noqa: ANN401
            self.metrics.counter("sessions_refused", reason=refused.reason).inc()
            stream = Admitted(self, "train", identity=_identity(context), peer=context.peer())
            stream.outcome = f"{refused.code.name}: {refused.details}"
            self._log(logging.WARNING, refused.reason, stream)
            await context.abort(refused.code, refused.details)

        return refuse

    def _watch(self, behaviour: Behaviour) -> Behaviour:
        """Bound the number of Health.Watch calls, which last until their callers end them."""

        async def watch(request: Any, context: Context) -> None:  # noqa: ANN401
            if self._watches >= MAX_WATCHES:
                await context.abort(
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    f"{self._watches} calls of Health.Watch are under way, the limit is "
                    f"{MAX_WATCHES}; call Health.Check instead",
                )
            self._watches += 1
            try:
                await behaviour(request, context)
            finally:
                self._watches -= 1

        return watch

    def _log(self, level: int, reason: str, stream: Admitted) -> None:
        """Write a stream's line, or count it: a window holds `max_audit_lines` of one reason."""
        if not self._lines[reason]:
            loop = asyncio.get_running_loop()
            loop.call_later(AUDIT_WINDOW_S, self._end_window, level, reason)
        self._lines[reason] += 1
        if self._lines[reason] <= self._max_lines:
            audit.log(level, "%s", stream.line())
        else:
            self.metrics.counter("audit_lines_suppressed", reason=reason).inc()

    def _end_window(self, level: int, reason: str) -> None:
        more = self._lines.pop(reason) - self._max_lines
        if more > 0:
            audit.log(
                level,
                "%d more like this in the last %g s: reason '%s' (learner.max_audit_lines=%d)",
                more,
                AUDIT_WINDOW_S,
                reason,
                self._max_lines,
            )


def _identity(context: Context) -> str:
    """Return the common name of the peer's certificate; empty in plain text."""
    names = context.auth_context().get("x509_common_name", ())
    return b"".join(names).decode(errors="replace")
