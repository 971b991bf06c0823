"""Learners of a run with a source that each break the contract in one point; one keeps it."""

import asyncio
from collections import deque

import grpc
import numpy as np

from murmur.kit.conformance.peer import Ended, Session, Status
from shared.process.errors import WireError
from shared.rpc import PROTOCOL_VERSION
from shared.rpc import rollout_pb2 as pb
from shared.wire.sample_codec import Grant, SampleCodec, pack_grant
from shared.wire.samples import MASK, SampleSpec, sample_difference, samples_from_proto

_WINDOW, _SIZE = 6, 8  # grants, and samples of each
TIMEOUT_S = 30.0
_REFUSED = grpc.StatusCode.FAILED_PRECONDITION


class Learner:
    """Keeps the contract: asks for one epoch, in order."""

    window = _WINDOW

    def __init__(self) -> None:
        self.spec: SampleSpec | None = None
        self.missing: deque[tuple[int, int]] = deque()
        self.tasks: set[asyncio.Task[None]] = set()

    def door(self, session: Session) -> Status | None:
        """Take a session, or refuse it."""
        hello = session.hello
        if hello is None:
            return grpc.StatusCode.INVALID_ARGUMENT, session.problem
        refusal = self.refusal(hello)
        if refusal is None:
            self.tasks.add(asyncio.get_running_loop().create_task(self.play(session)))
        return refusal

    def refusal(self, hello: pb.Hello) -> Status | None:
        if hello.protocol_version != PROTOCOL_VERSION or hello.mode != pb.MODE_SUPPLY:
            return _REFUSED, "another version or mode"
        spec = samples_from_proto(hello.source)
        if self.spec is None:
            self.spec = spec
            self.missing += [(s, i) for s in (0, 1) for i in range(spec.sizes[s])]
        difference = sample_difference(self.spec, spec)
        return None if difference is None else (_REFUSED, difference)

    async def play(self, session: Session) -> None:
        owed: deque[Grant] = deque()
        try:
            await session.write(pb.LearnerMessage(welcome=self.welcome()).SerializeToString())
            assert self.spec is not None
            codec, sequence = SampleCodec(self.spec), 0
            while True:
                while self.missing and len(owed) < self.window:
                    sequence += 1
                    owed.append(self.grant(sequence))
                    await session.write(pack_grant(owed[-1]))
                answer = codec.receive(self.read(await session.read(TIMEOUT_S)), owed[0])
                if answer is not None:
                    self.check(answer[0].get(MASK))
                    owed.popleft()
        except (WireError, IndexError) as error:
            session.end((grpc.StatusCode.INVALID_ARGUMENT, str(error)))
        except Ended:
            session.end(None)
        finally:
            self.give_back(owed)

    def welcome(self) -> pb.Welcome:
        return pb.Welcome()

    def grant(self, sequence: int) -> Grant:
        split = self.missing[0][0]
        indices = []
        while self.missing and self.missing[0][0] == split and len(indices) < _SIZE:
            indices.append(self.missing.popleft()[1])
        return Grant(sequence, 0, split, tuple(indices))

    def read(self, message: bytes) -> bytes:
        return message

    def check(self, mask: object) -> None:
        assert self.spec is not None
        if mask is not None and int(np.asarray(mask).max()) >= len(self.spec.classes):
            raise WireError("a mask holds an unknown class")

    def give_back(self, owed: deque[Grant]) -> None:
        for grant in reversed(owed):
            self.missing.extendleft((grant.split, i) for i in reversed(grant.indices))


class HasSlots(Learner):
    def welcome(self) -> pb.Welcome:
        return pb.Welcome(slots=[pb.SlotStart()])


class OneGrant(Learner):
    window = 1


class CountsFromZero(Learner):
    def grant(self, sequence: int) -> Grant:
        return super().grant(sequence - 1)


class AsksTwice(Learner):
    again = False

    def grant(self, sequence: int) -> Grant:
        grant = super().grant(sequence)
        if grant.split == 1 and not self.again:
            self.again = True
            self.missing.append((0, 40))
        return grant


class DropsGrants(Learner):
    def give_back(self, owed: deque[Grant]) -> None:
        pass


class AnyVersion(Learner):
    def refusal(self, hello: pb.Hello) -> Status | None:
        hello.protocol_version = PROTOCOL_VERSION
        return super().refusal(hello)


class AnyDataSet(Learner):
    def refusal(self, hello: pb.Hello) -> Status | None:
        if self.spec is not None and hello.mode == pb.MODE_SUPPLY:
            hello.source.digest = self.spec.digest
        return super().refusal(hello)


class AnyMask(Learner):
    def check(self, mask: object) -> None:
        pass


class OneOrder(Learner):
    """Looks for the sequence number at the start of samples."""

    def read(self, message: bytes) -> bytes:
        samples = pb.WorkerMessage.FromString(message).samples
        number = b"\x09" + samples.sequence.to_bytes(8, "little")
        if number not in message[:20]:
            raise WireError("no sequence number")
        return message


# Name -> (flaw, the key it breaks).
FLAWS: dict[str, tuple[type[Learner], str]] = {
    "has slots": (HasSlots, "welcome"),
    "opens one grant": (OneGrant, "window"),
    "counts from zero": (CountsFromZero, "grants"),
    "asks twice": (AsksTwice, "once"),
    "drops what was owed": (DropsGrants, "owed"),
    "takes any version": (AnyVersion, "version"),
    "takes any data set": (AnyDataSet, "data set"),
    "takes any mask": (AnyMask, "contents"),
    "reads one order": (OneOrder, "broken"),
}
