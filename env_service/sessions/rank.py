"""A worker's record of one of the learners that share a run."""

import time

from grpc import aio

from env_service.sessions.connection import Connection
from env_service.sessions.reconnect import ReconnectPolicy
from shared.rpc import LOAD_METHOD
from shared.rpc import rollout_pb2 as pb

_ASK_S = 2.0  # a learner that does not say its load within this time is not there
_FULL_S = 10.0  # a learner that refused a session because it was full is avoided for this time


class Rank:
    """One of the learners. Used by one event loop.

    Attributes:
        address: host:port of the learner.
        connection: connection to the learner.
        backoff: pauses between attempts to connect.
        lost_at: time.monotonic() since which the learner is not reachable; None if it is.
    """

    def __init__(self, address: str, connection: Connection, reconnect: ReconnectPolicy) -> None:
        """Prepare; nothing is connected yet."""
        self.address = address
        self.connection = connection
        self.backoff = reconnect.backoff()
        self.lost_at: float | None = None
        self._full_until = 0.0

    @property
    def full(self) -> bool:
        """Return whether the learner has recently refused a session because it was full."""
        return time.monotonic() < self._full_until

    def refuse(self) -> None:
        """Mark the learner as full for _FULL_S."""
        self._full_until = time.monotonic() + _FULL_S

    def lose(self) -> None:
        """Mark the learner as not reachable from now on, unless it is already."""
        if self.lost_at is None:
            self.lost_at = time.monotonic()

    async def load(self) -> pb.LoadReply | None:
        """Return the learner's load, or None if it did not answer."""
        try:
            async with self.connection.channel() as channel:
                ask = channel.unary_unary(LOAD_METHOD, None, pb.LoadReply.FromString)
                reply: pb.LoadReply = await ask(b"", timeout=_ASK_S)
        except aio.AioRpcError:
            return None
        self.lost_at = None
        return reply
