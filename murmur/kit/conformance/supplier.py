"""One session of a supply server, as the kit plays it, and the data set that it supplies."""

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator

import grpc
import numpy as np
from grpc import aio

from shared.rpc import METHOD, PROTOCOL_VERSION
from shared.rpc import rollout_pb2 as pb
from shared.wire.framing import varint
from shared.wire.sample_codec import Broken, Grant, SampleCodec
from shared.wire.samples import IMAGE, MASK, SPLITS, SampleSpec, samples_to_proto
from shared.wire.spec import ArraySpec
from shared.wire.timestep import Array

_SIZE = 64  # pixels a side
SIZES = (200, 4)
_BROKEN = 7  # of the training split, and always
SPEC = SampleSpec(
    name="conformance",
    arrays=(
        ArraySpec(IMAGE, "uint8", (3, _SIZE, _SIZE), per_agent=False),
        ArraySpec(MASK, "uint8", (_SIZE, _SIZE), per_agent=False),
    ),
    sizes=SIZES,
    digest=hashlib.sha256(b"conformance").hexdigest(),
    classes=("dark", "bright"),
)


class StreamOver(Exception):  # noqa: N818 - an event
    """End of the stream by the learner."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(f"{code.name}: {details}")
        self.code, self.details = code, details


def sample(split: int, index: int) -> dict[str, Array]:
    """Draw a sample of the kit's data set: a bright disk on noise."""
    random = np.random.default_rng([split, index])
    y, x, radius = random.uniform(0.2, 0.8, 3) * _SIZE
    rows, columns = np.mgrid[:_SIZE, :_SIZE]
    mask = ((rows - y) ** 2 + (columns - x) ** 2 < (radius / 2) ** 2).astype(np.uint8)
    image = random.integers(0, 180, (3, _SIZE, _SIZE)) + 70 * mask
    return {IMAGE: image.astype(np.uint8), MASK: mask}


class Supplier:
    """One stream, as a supply server has it.

    Attributes:
        codec: codec of its samples.
        grants: grants received.
    """

    def __init__(self, call: "aio.StreamStreamCall[bytes, bytes]") -> None:
        """Take over a call."""
        self._call = call
        self._messages: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.codec, self.grants = SampleCodec(SPEC), 0

    async def pump(self) -> None:
        """Take messages as they come: a read that is given up would end the call."""
        with contextlib.suppress(aio.AioRpcError, asyncio.InvalidStateError):
            while isinstance(message := await self._call.read(), bytes):
                await self._messages.put(message)
        await self._messages.put(None)

    async def read(self, timeout_s: float) -> bytes | None:
        """Read the next message; None if none comes in time.

        Raises:
            StreamOver: if the learner has ended the stream.
        """
        try:
            message = await asyncio.wait_for(self._messages.get(), timeout_s)
        except TimeoutError:
            return None
        if message is None:
            self._messages.put_nowait(None)  # a later reader gets it again
            raise StreamOver(await self._call.code(), await self._call.details() or "")
        return message

    async def write(self, message: bytes) -> None:
        """Send a message; what is sent on a stream that is over is lost."""
        with contextlib.suppress(aio.AioRpcError, asyncio.InvalidStateError):
            await self._call.write(message)

    def answers(self, grant: Grant) -> list[bytes]:
        """Return the right messages for a grant: every third time in other encodings."""
        lost = [i for i in grant.indices if grant.split == 0 and i == _BROKEN]
        good = [sample(grant.split, i) for i in grant.indices if i not in lost]
        broken = [Broken(i, "unreadable", f"{SPLITS[grant.split]}-{i}.png") for i in lost]
        messages = self.codec.messages(grant, good, broken)
        return [_encoded(message, grant.sequence % 3) for message in messages]

    def vanish(self) -> None:
        """End without a status, as a killed process does."""
        self._call.cancel()


@contextlib.asynccontextmanager
async def open_supplier(channel: aio.Channel, hello: pb.Hello) -> AsyncIterator[Supplier]:
    """Open a stream that has said Hello; it ends with the block."""
    open_call = channel.stream_stream(METHOD)  # type: ignore[call-arg]
    call: aio.StreamStreamCall[bytes, bytes] = open_call()  # type: ignore[call-arg]
    session = Supplier(call)
    pump = asyncio.create_task(session.pump())
    try:
        await session.write(pb.WorkerMessage(hello=hello).SerializeToString())
        yield session
    finally:
        call.cancel()
        pump.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await pump


def hello_of(**changes: object) -> pb.Hello:
    """Return a right Hello, but for `changes`."""
    fields: dict[str, object] = {
        "protocol_version": PROTOCOL_VERSION,
        "worker_id": "conformance",
        "mode": pb.MODE_SUPPLY,
        "source": samples_to_proto(SPEC),
    }
    return pb.Hello(**{**fields, **changes})  # type: ignore[arg-type]


def _encoded(message: bytes, encoding: int) -> bytes:
    """Encode a message of samples: 0 as it is, 1 in another order, 2 with every field twice."""
    body = pb.WorkerMessage.FromString(message).samples
    if encoding == 0 or body.broken:
        return message
    parts = [pb.Samples(arrays=body.arrays), pb.Samples(sequence=body.sequence, part=body.part)]
    parts += [pb.Samples(sequence=body.sequence)] * (encoding - 1)
    inner = b"".join(part.SerializeToString() for part in parts)
    return b"\x1a" + varint(len(inner)) + inner
