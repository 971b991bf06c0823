"""Examination of a learner by a supply server of the kit, with a data set of its own.

The learner is that of a run with a source, which has no supplier yet: the kit's first session
begins the run, and its samples are what is trained on.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence

import grpc
import numpy as np
from grpc import aio

from murmur.kit.conformance.checklist import LEARNER_CONTRACT, Checklist
from murmur.kit.conformance.limits import Limits
from murmur.kit.conformance.supplier import (
    SIZES,
    SPEC,
    StreamOver,
    Supplier,
    hello_of,
    open_supplier,
    sample,
)
from shared.process.errors import ConnectionLostError, WireError
from shared.rpc import PROTOCOL_VERSION
from shared.rpc import rollout_pb2 as pb
from shared.wire.channel import channel_options
from shared.wire.credentials import CredentialFolder, channel_credentials
from shared.wire.sample_codec import Grant, unpack_grant
from shared.wire.samples import MASK, SPLITS, samples_to_proto
from shared.wire.spec import ArraySpec, Discrete, EnvSpec, spec_to_proto

_QUIET_S = 0.5  # without another grant: the learner waits for samples
_LOST = "Internal error from Core"  # grpc.aio: a write after the end hides the status, grpc #36066
_TRIES = 5
_ENVIRONMENT = EnvSpec("conformance", 1, (ArraySpec("x", "float32", (1,)),), Discrete(2), (), 1)
# Sends something wrong in answer to a grant.
_Breach = Callable[[Supplier, Grant], bytes]


class LearnerExamination:
    """The whole examination. Used by one event loop.

    Attributes:
        checklist: observations of the contract.
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
            address: address of the learner, host:port.
            credentials: credentials of an environment server; None: plain text.
            limits: time limits of the examination.
            say: function called with each message.
        """
        self.checklist = Checklist(LEARNER_CONTRACT)
        self._address, self._folder = address, credentials
        self._limits, self._say = limits or Limits(), say
        self._channel: aio.Channel | None = None

    async def run(self) -> Checklist:
        """Examine the learner.

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
        options = channel_options(self._address)
        if how is None:
            return aio.insecure_channel(self._address, options)
        return aio.secure_channel(self._address, how, options)

    # --- sessions

    async def _open(self, stack: contextlib.AsyncExitStack, hello: pb.Hello) -> Supplier:
        assert self._channel is not None
        return await stack.enter_async_context(open_supplier(self._channel, hello))

    async def _welcomed(self, stack: contextlib.AsyncExitStack, name: str) -> Supplier | None:
        """Open a session and wait for Welcome; None if it was not welcomed.

        Raises:
            ConnectionLostError: if no learner answers.
        """
        session = await self._open(stack, hello_of(worker_id=name))
        try:
            message = await session.read(self._limits.start_s)
        except StreamOver as over:
            if over.code == grpc.StatusCode.UNAVAILABLE:
                raise ConnectionLostError(
                    f"no learner at {self._address} takes a session: {over.details}"
                ) from None
            self.checklist.broken("welcome", f"'{name}': {over}")
            return None
        problem = _welcome_problem(message)
        self.checklist.hold("welcome", problem)
        return None if problem else session

    async def _window(self, session: Supplier) -> list[Grant]:
        """Read all grants that a session gets before it answers."""
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

    def _grant(self, session: Supplier, message: bytes) -> Grant | None:
        """Parse a message as a grant; None if it is none."""
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
        """Open sessions that must be refused, beside the one that is open."""
        other = samples_to_proto(SPEC)
        other.digest = "0" * 64
        for key, words, hello in (
            ("version", "", hello_of(protocol_version=PROTOCOL_VERSION + 1)),
            ("data set", "digest", hello_of(source=other)),
            (
                "mode",
                "",
                hello_of(mode=pb.MODE_TRAIN, num_envs=1, spec=spec_to_proto(_ENVIRONMENT)),
            ),
        ):
            self._say(f"refused: {LEARNER_CONTRACT.sentences[key].partition(' ')[2]}")
            session = await self._open(stack, hello)
            wanted = grpc.StatusCode.FAILED_PRECONDITION
            await self._refused(session, key, wanted, f"another {key}", words)

    async def _breach(self, stack: contextlib.AsyncExitStack, what: str, breach: _Breach) -> None:
        """Open a session that answers its first grant wrongly."""
        session = await self._welcomed(stack, "conformance-2")
        message = await session.read(self._limits.patience_s) if session else None
        grant = self._grant(session, message) if session and message else None
        if session is None or grant is None:
            return
        await session.write(breach(session, grant))
        await self._refused(session, "contents", grpc.StatusCode.INVALID_ARGUMENT, what)

    async def _refused(
        self,
        session: Supplier,
        key: str,
        wanted: grpc.StatusCode,
        what: str,
        words: str = "",
    ) -> None:
        """Check that the learner ends this session with a status and this message."""
        self.checklist.hold(key, await self._not_refused(session, wanted, what, words))

    async def _not_refused(
        self, session: Supplier, wanted: grpc.StatusCode, what: str, words: str = ""
    ) -> str | None:
        """Return how a session ended if not with this status and message; None if it did."""
        try:
            while await session.read(self._limits.again_s) is not None:
                pass  # grants that were under way
        except StreamOver as over:
            right = over.code == wanted and words in over.details
            return None if right else f"{what} was refused with {over}"
        return f"{what} was not refused"

    async def _second_session(
        self, stack: contextlib.AsyncExitStack, first: Supplier, owed: Sequence[Grant]
    ) -> None:
        """Play a session that answers all, while the first one vanishes and owes its samples."""
        self._say("second session, the first is gone")
        session = await self._welcomed(stack, "conformance-3")
        if session is None:
            return
        first.vanish()
        missing = {(s, i) for s, size in enumerate(SIZES) for i in range(size)}
        asked: Counter[tuple[int, int]] = Counter()
        try:
            while sum(asked.values()) < 2 * sum(SIZES):
                message = await session.read(self._limits.patience_s if missing else _QUIET_S)
                grant = None if message is None else self._grant(session, message)
                if grant is None or grant.epoch > 0:
                    break
                here = [(grant.split, index) for index in grant.indices]
                asked.update(here)
                missing -= set(here)
                for answer in session.answers(grant):
                    await session.write(answer)
        except StreamOver as over:
            self.checklist.broken("broken", f"after {len(asked)} samples: {over}")
            return
        lost = {(g.split, i) for g in owed for i in g.indices} & missing
        self.checklist.hold("owed", f"{_some(lost)} were never asked of others" if lost else None)
        self.checklist.hold("broken", f"{_some(missing)} were never asked" if missing else None)
        twice = {which for which, count in asked.items() if count > 1}
        self.checklist.hold("once", f"{_some(twice)} were asked for twice" if twice else None)
        self.checklist.kept("encodings")

    async def _strangers(self, folder: CredentialFolder) -> None:
        """Open sessions without a certificate, and without a token."""
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
                    open_supplier(channel, hello_of()) as session,
                ):
                    problem = await self._not_refused(session, wanted, what)
                if _LOST not in (problem or ""):
                    break
            self.checklist.hold("credentials", problem)


def _welcome_problem(message: bytes | None) -> str | None:
    """Return the error in the answer to Hello; None: there is none."""
    if message is None:
        return "no answer to Hello came in time"
    parsed = pb.LearnerMessage.FromString(message)
    if parsed.WhichOneof("message") != "welcome":
        return f"Hello was answered with '{parsed.WhichOneof('message')}'"
    if parsed.welcome.slots:
        return f"Welcome has {len(parsed.welcome.slots)} slots, a data set has none"
    return None


def _some(which: set[tuple[int, int]]) -> str:
    """Return text about samples: the first ones, and their number."""
    words = ", ".join(f"{SPLITS[split]} {index}" for split, index in sorted(which)[:3])
    return f"{len(which)} samples ({words}{', …' if len(which) > 3 else ''})"


def _wrong_class(session: Supplier, grant: Grant) -> bytes:
    samples = [sample(grant.split, index) for index in grant.indices]
    samples[0][MASK] = np.full_like(samples[0][MASK], len(SPEC.classes))
    return session.codec.messages(grant, samples, [])[0]


def _torn(_: Supplier, grant: Grant) -> bytes:
    samples = pb.Samples(sequence=grant.sequence, arrays=b"\1" * (SPEC.sample_bytes - 1))
    return pb.WorkerMessage(samples=samples).SerializeToString()


def _other_grant(session: Supplier, grant: Grant) -> bytes:
    return session.answers(grant._replace(sequence=grant.sequence + 3))[0]


def _not_asked(_: Supplier, grant: Grant) -> bytes:
    beyond = pb.BrokenSample(index=SPEC.sizes[grant.split], reason="unreadable")
    samples = pb.Samples(sequence=grant.sequence, broken=[beyond])
    return pb.WorkerMessage(samples=samples).SerializeToString()


def _no_reason(_: Supplier, grant: Grant) -> bytes:
    named = pb.BrokenSample(index=grant.indices[0], reason="No Slug")
    samples = pb.Samples(sequence=grant.sequence, broken=[named])
    return pb.WorkerMessage(samples=samples).SerializeToString()


_BREACHES: dict[str, _Breach] = {
    "samples of another size": _torn,
    "samples of another grant": _other_grant,
    "a mask with an index that is no class": _wrong_class,
    "a broken sample that was not asked for": _not_asked,
    "a broken sample with a reason that is none": _no_reason,
    "a second Hello": lambda *_: pb.WorkerMessage(hello=hello_of()).SerializeToString(),
    "bytes that are no message": lambda *_: b"\xff\xff\xff",
}
