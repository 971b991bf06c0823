"""Examines a learner: connects to it as supply servers do, with a data set of the kit's own.

The learner is that of a run with a source, which has no supplier yet: the kit's first session
begins the run, and its samples are what is trained on.
"""

import asyncio
import contextlib
import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence

import grpc
import numpy as np
from grpc import aio

from murmur.conformance.checklist import LEARNER_CONTRACT, Checklist
from murmur.conformance.limits import Limits
from shared.channel import CHANNEL_OPTIONS
from shared.credentials import CredentialFolder, channel_credentials
from shared.errors import ConnectionLostError, WireError
from shared.framing import varint
from shared.rpc import METHOD, PROTOCOL_VERSION
from shared.rpc import rollout_pb2 as pb
from shared.sample_codec import Broken, Grant, SampleCodec, unpack_grant
from shared.samples import IMAGE, MASK, SPLITS, SampleSpec, samples_to_proto
from shared.spec import ArraySpec, Discrete, EnvSpec, spec_to_proto
from shared.timestep import Array

_SIZE = 64  # pixels a side
_SIZES = (200, 4)
_BROKEN = 7  # of the training split, and always
_QUIET_S = 0.5  # without another grant: the learner waits for samples
_LOST = "Internal error from Core"  # grpc.aio: a write after the end hides the status, grpc #36066
_TRIES = 5
SPEC = SampleSpec(
    name="conformance",
    arrays=(
        ArraySpec(IMAGE, "uint8", (3, _SIZE, _SIZE), per_agent=False),
        ArraySpec(MASK, "uint8", (_SIZE, _SIZE), per_agent=False),
    ),
    sizes=_SIZES,
    digest=hashlib.sha256(b"conformance").hexdigest(),
    classes=("dark", "bright"),
)
_ENVIRONMENT = EnvSpec("conformance", 1, (ArraySpec("x", "float32", (1,)),), Discrete(2), (), 1)
# Sends something wrong in answer to a grant.
_Breach = Callable[["_Supplier", Grant], bytes]


class _Over(Exception):  # noqa: N818 - an event
    """The learner ended the stream."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(f"{code.name}: {details}")
        self.code, self.details = code, details


def sample(split: int, index: int) -> dict[str, Array]:
    """A sample of the kit's data set: a bright disc on noise."""
    random = np.random.default_rng([split, index])
    y, x, radius = random.uniform(0.2, 0.8, 3) * _SIZE
    rows, columns = np.mgrid[:_SIZE, :_SIZE]
    mask = ((rows - y) ** 2 + (columns - x) ** 2 < (radius / 2) ** 2).astype(np.uint8)
    image = random.integers(0, 180, (3, _SIZE, _SIZE)) + 70 * mask
    return {IMAGE: image.astype(np.uint8), MASK: mask}


class LearnerExamination:
    """The whole examination. Used by one event loop.

    Attributes:
        checklist: what was seen.
    """

    def __init__(
        self,
        address: str,
        *,
        credentials: CredentialFolder | None = None,
        limits: Limits | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Prepare to connect.

        Args:
            address: of the learner, host:port.
            credentials: of an environment server; None: plain text.
            limits: patience.
            say: called with each message.
        """
        self.checklist = Checklist(LEARNER_CONTRACT)
        self._address, self._folder = address, credentials
        self._limits, self._say = limits or Limits(), say
        self._channel: aio.Channel | None = None

    async def run(self) -> Checklist:
        """Examine.

        Raises:
            ConnectionLostError: if no learner answers.
        """
        how = None
        if self._folder is not None:
            how = channel_credentials(self._folder.current(), "environment")
        async with self._open_channel(how) as self._channel, contextlib.AsyncExitStack() as stack:
            self._say("first session")
            first = await self._welcomed(stack, "conformance-1")
            if first is None:
                return self.checklist
            owed = await self._window(first)
            await self._hellos(stack)
            if not owed:
                return self.checklist
            for what, breach in _BREACHES.items():
                self._say(what)
                await self._breach(stack, what, breach)
            await self._second_session(stack, first, owed)
        if self._folder is not None:
            await self._strangers(self._folder)
        return self.checklist

    def _open_channel(self, how: grpc.ChannelCredentials | None) -> aio.Channel:
        if how is None:
            return aio.insecure_channel(self._address, CHANNEL_OPTIONS)
        return aio.secure_channel(self._address, how, CHANNEL_OPTIONS)

    # --- sessions

    async def _open(self, stack: contextlib.AsyncExitStack, hello: pb.Hello) -> "_Supplier":
        assert self._channel is not None
        return await stack.enter_async_context(_supplier(self._channel, hello))

    async def _welcomed(self, stack: contextlib.AsyncExitStack, name: str) -> "_Supplier | None":
        """A session that has been welcomed; None if it was not.

        Raises:
            ConnectionLostError: if no learner answers.
        """
        session = await self._open(stack, _hello(worker_id=name))
        try:
            message = await session.read(self._limits.start_s)
        except _Over as over:
            if over.code == grpc.StatusCode.UNAVAILABLE:
                raise ConnectionLostError(
                    f"no learner at {self._address} takes a session: {over.details}"
                ) from None
            self.checklist.broken("welcome", f"'{name}': {over}")
            return None
        problem = _welcome_problem(message)
        self.checklist.hold("welcome", problem)
        return None if problem else session

    async def _window(self, session: "_Supplier") -> list[Grant]:
        """All that a session is asked for before it answers."""
        grants: list[Grant] = []
        timeout_s = self._limits.patience_s
        while (message := await session.read(timeout_s)) is not None:
            grant = self._grant(session, message)
            if grant is None:
                return []
            grants.append(grant)
            timeout_s = _QUIET_S
        one = f"{len(grants)} grants came before the first was answered"
        self.checklist.hold("window", None if len(grants) > 1 else one)
        return grants

    def _grant(self, session: "_Supplier", message: bytes) -> Grant | None:
        """A message as the grant that it must be; None if it is none."""
        session.grants += 1
        problem, grant = None, None
        try:
            grant = unpack_grant(SPEC, message)
        except WireError as error:
            problem = str(error)
        else:
            if grant.sequence != session.grants:
                problem = f"grant {session.grants} of a stream has the number {grant.sequence}"
        self.checklist.hold("grants", problem)
        return grant

    async def _hellos(self, stack: contextlib.AsyncExitStack) -> None:
        """Sessions that must be refused, beside the one that is open."""
        other = samples_to_proto(SPEC)
        other.digest = "0" * 64
        for key, words, hello in (
            ("version", "", _hello(protocol_version=PROTOCOL_VERSION + 1)),
            ("data set", "digest", _hello(source=other)),
            (
                "mode",
                "",
                _hello(mode=pb.MODE_TRAIN, num_envs=1, spec=spec_to_proto(_ENVIRONMENT)),
            ),
        ):
            self._say(f"refused: {LEARNER_CONTRACT.sentences[key].partition(' ')[2]}")
            session = await self._open(stack, hello)
            wanted = grpc.StatusCode.FAILED_PRECONDITION
            await self._refused(session, key, wanted, f"another {key}", words)

    async def _breach(self, stack: contextlib.AsyncExitStack, what: str, breach: _Breach) -> None:
        """A session that answers its first grant wrongly."""
        session = await self._welcomed(stack, "conformance-2")
        message = await session.read(self._limits.patience_s) if session else None
        grant = self._grant(session, message) if session and message else None
        if session is None or grant is None:
            return
        await session.write(breach(session, grant))
        await self._refused(session, "contents", grpc.StatusCode.INVALID_ARGUMENT, what)

    async def _refused(
        self,
        session: "_Supplier",
        key: str,
        wanted: grpc.StatusCode,
        what: str,
        words: str = "",
    ) -> None:
        """The learner must end this session with a status and these words."""
        self.checklist.hold(key, await self._not_refused(session, wanted, what, words))

    async def _not_refused(
        self, session: "_Supplier", wanted: grpc.StatusCode, what: str, words: str = ""
    ) -> str | None:
        """How a session ended if not with this status and these words; None if it did."""
        try:
            while await session.read(self._limits.again_s) is not None:
                pass  # grants that were under way
        except _Over as over:
            right = over.code == wanted and words in over.details
            return None if right else f"{what} was refused with {over}"
        return f"{what} was not refused"

    async def _second_session(
        self, stack: contextlib.AsyncExitStack, first: "_Supplier", owed: Sequence[Grant]
    ) -> None:
        """A session that answers all, while the first one vanishes and owes what it was asked."""
        self._say("second session, the first is gone")
        session = await self._welcomed(stack, "conformance-3")
        if session is None:
            return
        first.vanish()
        missing = {(s, i) for s, size in enumerate(_SIZES) for i in range(size)}
        asked: Counter[tuple[int, int]] = Counter()
        try:
            while sum(asked.values()) < 2 * sum(_SIZES):
                message = await session.read(self._limits.patience_s if missing else _QUIET_S)
                grant = None if message is None else self._grant(session, message)
                if grant is None or grant.epoch > 0:
                    break
                here = [(grant.split, index) for index in grant.indices]
                asked.update(here)
                missing -= set(here)
                for answer in session.answers(grant):
                    await session.write(answer)
        except _Over as over:
            self.checklist.broken("broken", f"after {len(asked)} samples: {over}")
            return
        lost = {(g.split, i) for g in owed for i in g.indices} & missing
        self.checklist.hold("owed", f"{_some(lost)} were never asked of others" if lost else None)
        self.checklist.hold("broken", f"{_some(missing)} were never asked" if missing else None)
        twice = {which for which, count in asked.items() if count > 1}
        self.checklist.hold("once", f"{_some(twice)} were asked for twice" if twice else None)
        self.checklist.kept("encodings")

    async def _strangers(self, folder: CredentialFolder) -> None:
        """Sessions without a certificate, and without a token."""
        self._say("without certificate or token")
        own = folder.current()
        half = grpc.ssl_channel_credentials(own.ca, own.key, own.certificate)
        for what, how, wanted in (
            ("plain text", None, grpc.StatusCode.UNAVAILABLE),
            ("a session without a token", half, grpc.StatusCode.UNAUTHENTICATED),
        ):
            for _ in range(_TRIES):
                async with (
                    self._open_channel(how) as channel,
                    _supplier(channel, _hello()) as session,
                ):
                    problem = await self._not_refused(session, wanted, what)
                if _LOST not in (problem or ""):
                    break
            self.checklist.hold("credentials", problem)


class _Supplier:
    """One stream, as a supply server has it.

    Attributes:
        codec: of its samples.
        grants: that have come.
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
        """The next message; None if none comes in time.

        Raises:
            _Over: if the learner has ended the stream.
        """
        try:
            message = await asyncio.wait_for(self._messages.get(), timeout_s)
        except TimeoutError:
            return None
        if message is None:
            self._messages.put_nowait(None)  # a later reader gets it again
            raise _Over(await self._call.code(), await self._call.details() or "")
        return message

    async def write(self, message: bytes) -> None:
        """Send a message; what is sent on a stream that is over is lost."""
        with contextlib.suppress(aio.AioRpcError, asyncio.InvalidStateError):
            await self._call.write(message)

    def answers(self, grant: Grant) -> list[bytes]:
        """The right messages for a grant: every third time in other encodings."""
        lost = [i for i in grant.indices if grant.split == 0 and i == _BROKEN]
        good = [sample(grant.split, i) for i in grant.indices if i not in lost]
        broken = [Broken(i, "unreadable", f"{SPLITS[grant.split]}-{i}.png") for i in lost]
        messages = self.codec.messages(grant, good, broken)
        return [_encoded(message, grant.sequence % 3) for message in messages]

    def vanish(self) -> None:
        """End without a status, as a killed process does."""
        self._call.cancel()


@contextlib.asynccontextmanager
async def _supplier(channel: aio.Channel, hello: pb.Hello) -> AsyncIterator[_Supplier]:
    """A stream that has said Hello; ended with the block."""
    open_call = channel.stream_stream(METHOD)  # type: ignore[call-arg]
    call: aio.StreamStreamCall[bytes, bytes] = open_call()  # type: ignore[call-arg]
    session = _Supplier(call)
    pump = asyncio.create_task(session.pump())
    try:
        await session.write(pb.WorkerMessage(hello=hello).SerializeToString())
        yield session
    finally:
        call.cancel()
        pump.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await pump


def _hello(**changes: object) -> pb.Hello:
    """A right Hello, but for `changes`."""
    fields: dict[str, object] = {
        "protocol_version": PROTOCOL_VERSION,
        "worker_id": "conformance",
        "mode": pb.MODE_SUPPLY,
        "source": samples_to_proto(SPEC),
    }
    return pb.Hello(**{**fields, **changes})  # type: ignore[arg-type]


def _welcome_problem(message: bytes | None) -> str | None:
    """What is wrong with the answer to Hello."""
    if message is None:
        return "no answer to Hello came in time"
    parsed = pb.LearnerMessage.FromString(message)
    if parsed.WhichOneof("message") != "welcome":
        return f"Hello was answered with '{parsed.WhichOneof('message')}'"
    if parsed.welcome.slots:
        return f"Welcome has {len(parsed.welcome.slots)} slots, a data set has none"
    return None


def _encoded(message: bytes, encoding: int) -> bytes:
    """A message of samples: 0 as it is, 1 in another order, 2 with every field twice."""
    body = pb.WorkerMessage.FromString(message).samples
    if encoding == 0 or body.broken:
        return message
    parts = [pb.Samples(arrays=body.arrays), pb.Samples(sequence=body.sequence, part=body.part)]
    parts += [pb.Samples(sequence=body.sequence)] * (encoding - 1)
    inner = b"".join(part.SerializeToString() for part in parts)
    return b"\x1a" + varint(len(inner)) + inner


def _some(which: set[tuple[int, int]]) -> str:
    """Text about samples: the first ones, and how many there are."""
    words = ", ".join(f"{SPLITS[split]} {index}" for split, index in sorted(which)[:3])
    return f"{len(which)} samples ({words}{', …' if len(which) > 3 else ''})"


def _wrong_class(session: _Supplier, grant: Grant) -> bytes:
    samples = [sample(grant.split, index) for index in grant.indices]
    samples[0][MASK] = np.full_like(samples[0][MASK], len(SPEC.classes))
    return session.codec.messages(grant, samples, [])[0]


def _torn(_: _Supplier, grant: Grant) -> bytes:
    samples = pb.Samples(sequence=grant.sequence, arrays=b"\1" * (SPEC.sample_bytes - 1))
    return pb.WorkerMessage(samples=samples).SerializeToString()


def _other_grant(session: _Supplier, grant: Grant) -> bytes:
    return session.answers(grant._replace(sequence=grant.sequence + 3))[0]


def _not_asked(_: _Supplier, grant: Grant) -> bytes:
    beyond = pb.BrokenSample(index=SPEC.sizes[grant.split], reason="unreadable")
    samples = pb.Samples(sequence=grant.sequence, broken=[beyond])
    return pb.WorkerMessage(samples=samples).SerializeToString()


def _no_reason(_: _Supplier, grant: Grant) -> bytes:
    named = pb.BrokenSample(index=grant.indices[0], reason="No Slug")
    samples = pb.Samples(sequence=grant.sequence, broken=[named])
    return pb.WorkerMessage(samples=samples).SerializeToString()


_BREACHES: dict[str, _Breach] = {
    "samples of another size": _torn,
    "samples of another grant": _other_grant,
    "a mask with an index that is no class": _wrong_class,
    "a broken sample that was not asked for": _not_asked,
    "a broken sample with a reason that is none": _no_reason,
    "a second Hello": lambda *_: pb.WorkerMessage(hello=_hello()).SerializeToString(),
    "bytes that are no message": lambda *_: b"\xff\xff\xff",
}
