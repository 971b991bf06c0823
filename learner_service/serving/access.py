"""Access: what a caller may do, how many sessions it has, and one line of the log about each.

Certificates are checked by gRPC before anything here runs; tokens are checked here.
"""

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

import grpc

from learner_service.telemetry.metrics import LearnerMetrics
from shared.credentials import ROLES, CredentialFolder, Role
from shared.process import logger
from shared.rpc import METHOD
from shared.rpc import rollout_pb2 as pb

audit = logger.getChild("audit")

_MODES: dict[Role, frozenset[int]] = {
    "environment": frozenset({pb.MODE_TRAIN, pb.MODE_EVALUATE}),
    "evaluator": frozenset({pb.MODE_EVALUATE}),
    "read-only": frozenset(),
}

Handler: TypeAlias = "grpc.RpcMethodHandler[bytes, bytes]"
Context = grpc.aio.ServicerContext[bytes, bytes]


class Refused(Exception):  # noqa: N818 - the peer's error, not ours
    """A stream that must end, with its gRPC status; `reason` is a metric's label."""

    def __init__(self, code: grpc.StatusCode, reason: str, details: str) -> None:
        super().__init__(details)
        self.code, self.reason, self.details = code, reason, details


@dataclass
class Visit:
    """One stream, for the log.

    Attributes:
        identity: the common name of its certificate; empty in plain text.
        role: what its token gives; empty in plain text.
        peer: its address.
        worker, mode: what it says in Hello; empty before.
        messages: observations taken.
        outcome: how it ended.
    """

    identity: str = ""
    role: str = ""
    peer: str = ""
    worker: str = ""
    mode: str = ""
    messages: int = 0
    outcome: str = "CANCELLED"  # what ends a stream without a word
    _began: float = field(default_factory=time.monotonic)

    def line(self) -> str:
        """Everything on one line; what the peer chose is quoted and escaped."""
        return (
            f"session identity={self.identity!r} role={self.role!r} worker={self.worker!r} "
            f"mode={self.mode!r} peer={self.peer} seconds={time.monotonic() - self._began:.1f} "
            f"messages={self.messages} outcome={self.outcome!r}"
        )


class Access(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """The learner's door. Used on the event loop."""

    def __init__(
        self, credentials: CredentialFolder | None, max_per_identity: int, metrics: LearnerMetrics
    ) -> None:
        """Let in those who have a token; everybody if there are no credentials.

        Args:
            credentials: the learner's folder, with all tokens.
            max_per_identity: most sessions of one identity; 0: any number.
            metrics: counts those who are turned away.
        """
        self._credentials, self._max_per_identity = credentials, max_per_identity
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
            self._metrics.counter("sessions_refused", reason=refused.reason).inc()
            return grpc.stream_stream_rpc_method_handler(_refusal(refused))
        return handler

    def enter(self, context: Context, visit: Visit) -> None:
        """Note who opens a session.

        Raises:
            Refused: if its token is no longer valid or of another role than its certificate, or
                its identity has too many sessions.
        """
        visit.peer = context.peer()
        visit.identity = _identity(context)
        visit.role = self._role(context.invocation_metadata() or ()) or ""
        if visit.role and visit.identity in ROLES and visit.identity != visit.role:
            raise Refused(
                grpc.StatusCode.PERMISSION_DENIED,
                "role",
                f"the certificate is one of the role {visit.identity}, the token one of the role "
                f"{visit.role}: use both from one folder of `murmur certs`",
            )
        limit = self._max_per_identity
        if limit and visit.identity and self._sessions[visit.identity] >= limit:
            raise Refused(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "identity",
                f"'{visit.identity}' has {limit} sessions, the limit is "
                f"learner.max_sessions_per_identity={limit}",
            )
        self._sessions[visit.identity] += 1

    def check_mode(self, visit: Visit, mode: pb.Mode) -> None:
        """Hold a Hello to its role.

        Raises:
            Refused: if the role may not do this.
        """
        for role, modes in _MODES.items():
            if visit.role == role and mode not in modes:
                raise Refused(
                    grpc.StatusCode.PERMISSION_DENIED,
                    "role",
                    f"a token of the role {role} does not allow {pb.Mode.Name(mode)}",
                )

    def leave(self, visit: Visit) -> None:
        """A session that had entered is over."""
        self._sessions[visit.identity] -= 1
        if not self._sessions[visit.identity]:
            del self._sessions[visit.identity]

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


def _identity(context: Context) -> str:
    """The common name of the peer's certificate; empty in plain text."""
    names = context.auth_context().get("x509_common_name", ())
    return b"".join(names).decode(errors="replace")


def _refusal(refused: Refused) -> Callable[[object, Context], Awaitable[None]]:
    """A handler that answers with a status whatever is asked."""

    async def refuse(_: object, context: Context) -> None:
        visit = Visit(identity=_identity(context), peer=context.peer())
        visit.outcome = f"{refused.code.name}: {refused.details}"
        audit.warning("%s", visit.line())
        await context.abort(refused.code, refused.details)

    return refuse
