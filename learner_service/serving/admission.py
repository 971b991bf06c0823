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
# By kind: options that limit places, and the memory of messages.
_LIMITS: dict[Mode, tuple[str, str]] = {
    "train": ("max_sessions", "max_in_flight_mib"),
    "evaluate": ("max_evaluation_sessions", "max_evaluation_in_flight_mib"),
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


@dataclass(eq=False)
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
        hello: its Hello, once it is known to be allowed.
        num_bytes: memory that its messages may take.
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
    hello: pb.Hello | None = None
    num_bytes: int = 0
    outcome: str = "CANCELLED"  # a stream that ends without a status
    reason: str = ""
    _began: float = field(default_factory=time.monotonic)

    def greet(self, hello: pb.Hello) -> None:
        """Note what the stream is for and what it brings.

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
        self.hello = hello

    def reserve(self, num_bytes: int) -> None:
        """Move to a place of the stream's mode, with memory for its messages.

        Raises:
            Refused: if there is no such place, or not the memory.
        """
        place: Mode = "evaluate" if self.mode == "evaluate" else "train"
        if place != self.place:
            self.admission.require_place(place)
            self.place = place
        self.admission.require_memory(place, num_bytes)
        self.num_bytes = num_bytes
        self.admission.show_memory(place)

    def welcome(self) -> None:
        """Count the stream as a session: Welcome was sent."""
        self.welcomed = True
        self.admission.metrics.gauge("sessions", mode=self.mode).inc()

    def line(self) -> str:
        """Return everything on one line; what the peer chose is quoted and escaped."""
        return (
            f"session identity={self.identity!r} role={self.role!r} worker={self.worker!r} "
            f"mode={self.mode!r} peer={self.peer} seconds={time.monotonic() - self._began:.1f} "
            f"messages={self.messages} outcome={self.outcome!r}"
        )


@dataclass(eq=False)
class Admission(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Admits streams and answers how much the learner has to do. Used on the event loop.

    Attributes:
        config: limits of sessions, of memory and of lines in the log.
        metrics: metrics that count refusals, sessions and reserved memory.
        credentials: the learner's folder, with all tokens; None: all clients are admitted.
        rank: number of this learner among those of its run.
        size: learners of the run.
        streams: streams that have a place.
        stopping: reason for which no stream is admitted any more; set from outside, empty before.
    """

    config: LearnerConfig
    metrics: LearnerMetrics
    credentials: CredentialFolder | None = None
    rank: int = 0
    size: int = 1
    stopping: str = ""

    def __post_init__(self) -> None:
        """Begin without streams."""
        names = (name for pair in _LIMITS.values() for name in pair)
        self._limits: dict[str, float] = {name: getattr(self.config, name) for name in names}
        self.streams: set[Admitted] = set()
        self._watches = 0
        self._lines: Counter[str] = Counter()  # of the window under way, by reason
        self._opening = asyncio.Lock()

    @asynccontextmanager
    async def admit(self, context: Context) -> AsyncIterator[Admitted]:
        """Give a stream a place while it lasts; answer Refused with its status, and log the end."""
        stream = Admitted(self, "train", identity=_identity(context), peer=context.peer())
        try:
            self._enter(stream, context)
            yield stream
            stream.outcome = "OK"
        except Refused as refused:
            counter = "rejected" if stream.welcomed else "sessions_refused"
            self.metrics.counter(counter, reason=refused.reason).inc()
            stream.outcome = f"{refused.code.name}: {refused.details}"
            stream.reason = refused.reason
            await context.abort(refused.code, refused.details)
        finally:
            if stream.welcomed:
                self.metrics.gauge("sessions", mode=stream.mode).dec()
            self.streams.discard(stream)
            self.show_memory(stream.place)
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
        limit = self.config.max_sessions_per_identity
        own = sum(other.identity == stream.identity for other in self.streams)
        if limit and stream.identity and own >= limit:
            raise Refused(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "identity",
                f"'{stream.identity}' has {limit} sessions, the limit is "
                f"learner.max_sessions_per_identity={limit}",
            )
        if self.stopping:
            raise Refused(grpc.StatusCode.UNAVAILABLE, "stopping", self.stopping)
        stream.place = "evaluate" if stream.role == "evaluator" else "train"
        self.require_place(stream.place)
        self.streams.add(stream)

    def require_place(self, kind: Mode) -> None:
        """Check that a place of a kind is free.

        Raises:
            Refused: naming the limit.
        """
        name, _ = _LIMITS[kind]
        limit, taken = self._limits[name], self._taken(kind)
        if taken >= limit:
            what = "training" if kind == "train" else "evaluation"
            raise Refused(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "limit",
                f"{taken} {what} sessions are connected, the limit is learner.{name}={limit}",
            )

    def require_memory(self, kind: Mode, num_bytes: int) -> None:
        """Check that there is memory for the messages of one more session.

        Raises:
            Refused: naming the bytes and the limit.
        """
        _, name = _LIMITS[kind]
        limit, reserved = self._limits[name], self._reserved(kind)
        if reserved + num_bytes > limit * _MIB:
            never = num_bytes > limit * _MIB
            code = grpc.StatusCode
            raise Refused(
                code.FAILED_PRECONDITION if never else code.RESOURCE_EXHAUSTED,
                "memory",
                f"the messages of this session take {num_bytes / _MIB:.1f} MiB, those of the "
                f"sessions connected {reserved / _MIB:.1f} MiB, the limit is "
                f"learner.{name}={limit:g}; raise it, or use fewer environments in a session",
            )

    def show_memory(self, kind: Mode) -> None:
        """Set the gauge of reserved memory."""
        self.metrics.gauge("in_flight_bytes", mode=kind).set(self._reserved(kind))

    def _taken(self, kind: Mode) -> int:
        return sum(stream.place == kind for stream in self.streams)

    def _reserved(self, kind: Mode) -> int:
        return sum(stream.num_bytes for stream in self.streams if stream.place == kind)

    def _hellos(self, mode: int) -> list[pb.Hello]:
        """Return the Hellos of the streams of a mode. Called by any thread."""
        found = [stream.hello for stream in list(self.streams)]
        return [hello for hello in found if hello is not None and hello.mode == mode]

    @property
    def training_sessions(self) -> int:
        """Return the number of sessions that bring rows to learn from. Read by any thread."""
        return len(self._hellos(pb.MODE_TRAIN)) + len(self._hellos(pb.MODE_SUPPLY))

    def load_handler(self) -> "grpc.GenericRpcHandler[bytes, bytes]":
        """Serve LOAD_METHOD: clients that choose between several learners ask for their load."""
        _, service, method = LOAD_METHOD.split("/")
        answer = grpc.unary_unary_rpc_method_handler(self._answer_load)
        return grpc.method_handlers_generic_handler(service, {method: answer})

    async def _answer_load(self, _request: bytes, _: object) -> bytes:
        training = self._hellos(pb.MODE_TRAIN)
        return pb.LoadReply(
            rank=self.rank,
            size=self.size,
            environments=sum(min(hello.num_envs, MAX_ENVS) for hello in training),
            supply_sessions=len(self._hellos(pb.MODE_SUPPLY)),
            free_sessions=max(0, self.config.max_sessions - self._taken("train")),
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
        if self.credentials is None:
            return None
        for key, value in metadata:
            if key == "authorization" and isinstance(value, str) and value.startswith("Bearer "):
                role = self.credentials.current().role_of(value[7:])
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
        if self._lines[reason] <= self.config.max_audit_lines:
            audit.log(level, "%s", stream.line())
        else:
            self.metrics.counter("audit_lines_suppressed", reason=reason).inc()

    def _end_window(self, level: int, reason: str) -> None:
        more = self._lines.pop(reason) - self.config.max_audit_lines
        if more > 0:
            audit.log(
                level,
                "%d more like this in the last %g s: reason '%s' (learner.max_audit_lines=%d)",
                more,
                AUDIT_WINDOW_S,
                reason,
                self.config.max_audit_lines,
            )


def _identity(context: Context) -> str:
    """Return the common name of the peer's certificate; empty in plain text."""
    names = context.auth_context().get("x509_common_name", ())
    return b"".join(names).decode(errors="replace")
