"""Access: what a caller may do, how many sessions it has, and one line of the log about each.

Certificates are checked by gRPC before anything here runs; tokens are checked here.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import grpc

from learner_service.telemetry.metrics import LearnerMetrics
from shared.credentials import ROLES, CredentialFolder, Role
from shared.process import logger
from shared.rpc import METHOD
from shared.rpc import rollout_pb2 as pb

audit = logger.getChild("audit")
AUDIT_WINDOW_S = 10.0

_MODES: dict[Role, frozenset[int]] = {
    "environment": frozenset({pb.MODE_TRAIN, pb.MODE_EVALUATE, pb.MODE_SUPPLY}),
    "evaluator": frozenset({pb.MODE_EVALUATE}),
    "read-only": frozenset(),
}

Handler: TypeAlias = "grpc.RpcMethodHandler[bytes, bytes]"
Context = grpc.aio.ServicerContext[bytes, bytes]
Behaviour: TypeAlias = Callable[[Any, Context], Awaitable[None]]
_WATCH = "/grpc.health.v1.Health/Watch"
MAX_WATCHES = 32


class Refused(Exception):  # noqa: N818 - the peer's error, not ours
    """A stream that must end, with its gRPC status; `reason` is a metric's label."""

    def __init__(self, code: grpc.StatusCode, reason: str, details: str) -> None:
        super().__init__(details)
        self.code, self.reason, self.details = code, reason, details


@dataclass
class SessionRecord:
    """One stream, for the log.

    Attributes:
        identity: the common name of its certificate; empty in plain text.
        role: what its token gives; empty in plain text.
        peer: its address.
        worker, mode: what it says in Hello; empty before.
        messages: observations, or answers to grants, taken.
        outcome: how it ended.
        reason: the same as a metric's label, if it was refused.
    """

    identity: str = ""
    role: str = ""
    peer: str = ""
    worker: str = ""
    mode: str = ""
    messages: int = 0
    outcome: str = "CANCELLED"  # a stream that ends without a status
    reason: str = ""
    _began: float = field(default_factory=time.monotonic)

    def line(self) -> str:
        """Everything on one line; what the peer chose is quoted and escaped."""
        return (
            f"session identity={self.identity!r} role={self.role!r} worker={self.worker!r} "
            f"mode={self.mode!r} peer={self.peer} seconds={time.monotonic() - self._began:.1f} "
            f"messages={self.messages} outcome={self.outcome!r}"
        )


class AuditLog:
    """One line a stream; of one reason at most `max_lines`, the others counted. Event loop."""

    def __init__(self, max_lines: int, metrics: LearnerMetrics) -> None:
        """Write at most `max_lines` of one reason in AUDIT_WINDOW_S."""
        self._max_lines, self._metrics = max_lines, metrics
        self._lines: Counter[str] = Counter()  # of the window under way, by reason

    def write(self, level: int, reason: str, record: SessionRecord) -> None:
        """Write a line, or count it; `reason` says which lines are alike."""
        if not self._lines[reason]:
            loop = asyncio.get_running_loop()
            loop.call_later(AUDIT_WINDOW_S, self._end_window, level, reason)
        self._lines[reason] += 1
        if self._lines[reason] <= self._max_lines:
            audit.log(level, "%s", record.line())
        else:
            self._metrics.counter("audit_lines_suppressed", reason=reason).inc()

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


class Access(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """The learner's door. Used on the event loop."""

    def __init__(
        self,
        credentials: CredentialFolder | None,
        max_per_identity: int,
        metrics: LearnerMetrics,
        log: AuditLog,
    ) -> None:
        """Admit clients that have a token; all if there are no credentials.

        Args:
            credentials: the learner's folder, with all tokens.
            max_per_identity: most sessions of one identity; 0: any number.
            metrics: counts those who are turned away.
            log: where each of them has a line.
        """
        self._credentials, self._max_per_identity = credentials, max_per_identity
        self._log, self._watches = log, 0
        self._sessions: Counter[str] = Counter()
        self._metrics = metrics

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

    def enter(self, context: Context, record: SessionRecord) -> None:
        """Note who opens a session.

        Raises:
            Refused: if its token is no longer valid or of another role than its certificate, or
                its identity has too many sessions.
        """
        record.peer = context.peer()
        record.identity = _identity(context)
        record.role = self._role(context.invocation_metadata() or ()) or ""
        if record.role and record.identity in ROLES and record.identity != record.role:
            raise Refused(
                grpc.StatusCode.PERMISSION_DENIED,
                "role",
                f"the certificate is one of the role {record.identity}, the token one of the role "
                f"{record.role}: use both from one folder of `murmur certs`",
            )
        limit = self._max_per_identity
        if limit and record.identity and self._sessions[record.identity] >= limit:
            raise Refused(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "identity",
                f"'{record.identity}' has {limit} sessions, the limit is "
                f"learner.max_sessions_per_identity={limit}",
            )
        self._sessions[record.identity] += 1

    def check_mode(self, record: SessionRecord, mode: pb.Mode) -> None:
        """Hold a Hello to its role.

        Raises:
            Refused: if the role may not do this.
        """
        for role, modes in _MODES.items():
            if record.role == role and mode not in modes:
                raise Refused(
                    grpc.StatusCode.PERMISSION_DENIED,
                    "role",
                    f"a token of the role {role} does not allow {pb.Mode.Name(mode)}",
                )

    def leave(self, record: SessionRecord) -> None:
        """A session that had entered is over."""
        self._sessions[record.identity] -= 1
        if not self._sessions[record.identity]:
            del self._sessions[record.identity]

    def _role(self, metadata: Iterable[tuple[str, str | bytes]]) -> Role | None:
        """The role of a call's token; None in plain text.

        Raises:
            Refused: if it has none that is known.
        """
        if self._credentials is None:
            return None
        for key, value in metadata:
            if key == "authorization" and isinstance(value, str) and value[:7] == "Bearer ":
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
        """A handler that answers with a status whatever is asked."""

        async def refuse(_: Any, context: Context) -> None:  # noqa: ANN401
            self._metrics.counter("sessions_refused", reason=refused.reason).inc()
            record = SessionRecord(
                identity=_identity(context), peer=context.peer(), reason=refused.reason
            )
            record.outcome = f"{refused.code.name}: {refused.details}"
            self._log.write(logging.WARNING, refused.reason, record)
            await context.abort(refused.code, refused.details)

        return refuse

    def _watch(self, behaviour: Behaviour) -> Behaviour:
        """Health.Watch lasts until its caller ends it, so their number is limited."""

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


def _identity(context: Context) -> str:
    """The common name of the peer's certificate; empty in plain text."""
    names = context.auth_context().get("x509_common_name", ())
    return b"".join(names).decode(errors="replace")
