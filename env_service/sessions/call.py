"""One stream to the learner, message by message, for sessions of all kinds."""

import asyncio
import contextlib

from google.protobuf.message import DecodeError
from grpc import aio

from murmur.env_service.metrics import WorkerMetrics
from murmur.env_service.sessions.reconnect import Disconnected
from murmur.shared.process.errors import WireError
from murmur.shared.rpc import METHOD
from murmur.shared.rpc import rollout_pb2 as pb
from murmur.shared.wire.notices import Notices, pack_notices

_GRACE_S = 1.0  # how long a stopping worker waits for the learner to end the stream


class Call:
    """A stream; its end raises Disconnected. Used by one asyncio task; any may cancel it.

    Attributes:
        written: number of messages sent.
    """

    def __init__(self, channel: aio.Channel, metrics: WorkerMetrics) -> None:
        """Open the stream; nothing travels before `greet`."""
        self._metrics, self.written = metrics, 0
        # No (de)serialisers: the codecs read and write the bytes of the messages themselves.
        open_call = channel.stream_stream(METHOD)  # type: ignore[call-arg]
        self._call: aio.StreamStreamCall[bytes, bytes] = open_call()  # type: ignore[call-arg]

    async def greet(self, hello: pb.Hello) -> pb.Welcome:
        """Send Hello and wait for Welcome, without a timeout.

        The channel's keepalive notices a learner that dies meanwhile.

        Raises:
            Disconnected: if the learner is not reachable, refuses or disconnects.
            WireError: if the answer is no Welcome.
        """
        await self.write(pb.WorkerMessage(hello=hello).SerializeToString())
        reply = await self.read()
        try:
            message = pb.LearnerMessage.FromString(reply)
        except DecodeError as error:
            raise WireError(
                f"the learner's answer to Hello is no LearnerMessage: {error}"
            ) from None
        if message.WhichOneof("message") != "welcome":
            raise WireError(f"the learner answered Hello with '{message.WhichOneof('message')}'")
        return message.welcome

    async def write(self, message: bytes) -> None:
        """Send a message.

        Raises:
            Disconnected: if the stream is over.
        """
        try:
            await self._call.write(message)
        except (aio.AioRpcError, asyncio.InvalidStateError):
            raise await self._over() from None
        except asyncio.CancelledError:
            # grpc.aio raises this also when the *peer* ends the stream with CANCELLED.
            if _told_to_end():
                raise
            raise await self._over() from None
        self.written += 1
        self._metrics.messages_sent += 1
        self._metrics.bytes_sent += len(message)

    async def tell(self, notices: Notices) -> None:
        """Send the notices that are pending.

        Raises:
            Disconnected: if the stream is over.
        """
        await self.write(pack_notices(notices.take()))

    async def read(self) -> bytes:
        """Return the next message.

        Raises:
            Disconnected: if the stream is over.
        """
        message = None
        try:
            message = await self._call.read()
        except (aio.AioRpcError, asyncio.InvalidStateError):
            pass  # the stream is over; its status says why
        except asyncio.CancelledError:
            if _told_to_end():
                raise
        if not isinstance(message, bytes):  # None or grpc.aio.EOF
            raise await self._over()
        self._metrics.messages_received += 1
        self._metrics.bytes_received += len(message)
        return message

    async def close(self) -> None:
        """Half-close the stream and wait for the learner to end it."""
        with contextlib.suppress(asyncio.InvalidStateError, aio.AioRpcError, TimeoutError):
            await self._call.done_writing()
            await asyncio.wait_for(self._call.code(), _GRACE_S)

    def cancel(self) -> None:
        """End the stream at once."""
        self._call.cancel()

    async def _over(self) -> Disconnected:
        return Disconnected(await self._call.code(), await self._call.details() or "")


def _told_to_end() -> bool:
    """Return whether the current task is being cancelled.

    A function: a task in a local variable of a frame that its own exception passes through is a
    cycle, which keeps the call and its connection open until the garbage collector runs.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
