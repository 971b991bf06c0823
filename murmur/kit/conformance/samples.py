"""Acts that the kit plays with a session that supplies samples, in order."""

import asyncio
import time
from collections.abc import Callable, Sequence

import numpy as np

from murmur.env_service.checks import digests
from murmur.env_service.sources.source import BrokenSample, check_classes
from murmur.kit.conformance.checklist import Checklist
from murmur.kit.conformance.peer import Session
from murmur.kit.conformance.play import GARBAGE, Act, Limits, Stream, welcome
from murmur.shared.process.errors import SpecError
from murmur.shared.rpc import rollout_pb2 as pb
from murmur.shared.wire.codec import varint
from murmur.shared.wire.sample_codec import MAX_GRANT, Grant, SampleCodec, pack_grant
from murmur.shared.wire.samples import (
    MASK,
    SPLITS,
    SampleSpec,
    sample_difference,
    samples_from_proto,
)
from murmur.shared.wire.timestep import Array

_TRAIN = 0
_MOST_ASKED = 48  # samples of a split that are asked for
_MOST_BYTES = 8 << 20  # of the samples of one grant
_OPEN = 8  # grants, where several are open
_FEW = 3
_QUIET_S = 0.05  # time for a message that must not come
_NO_SAMPLE = "broken"  # in place of a digest
Digests = dict[str, bytes] | str


class SamplePlayer:
    """Player of the data set that a session's first Hello announces.

    Attributes:
        spec: specification of the samples.
        checklist: checklist that receives the findings.
        limits: time limits.
        seen: digests of every sample so far, by split and index.
        acts: acts in order, one for each stream.
        wrong_answers: messages by what is wrong in the last one, which must end the server.
    """

    def __init__(self, hello: pb.Hello, checklist: Checklist, limits: Limits) -> None:
        """Prepare to play.

        Raises:
            SpecError: if there can be no such data set.
        """
        self.spec = samples_from_proto(hello.source)
        if not self.spec.sizes[_TRAIN]:
            raise SpecError(f"source '{self.spec.name}' has no samples in its split 'train'")
        self.checklist, self.limits = checklist, limits
        self.seen: dict[tuple[int, int], Digests] = {}
        self.acts = (
            Act("first samples", self._first_samples),
            Act("the same samples", self._same_samples, "encodings"),
            Act("nothing to send", self._nothing_to_send),
            Act("many grants", self._many_grants),
            Act("a large grant", self._large_grant),
            Act("a few samples", self._few_samples),
        )
        self.wrong_answers = _wrong_answers(self.spec)

    def check_hello(self, hello: pb.Hello) -> str | None:
        """Return the error in a Hello of this session; None: there is none.

        Raises:
            SpecError: if there can be no such data set.
        """
        difference = sample_difference(self.spec, samples_from_proto(hello.source))
        if difference is None:
            return None
        return f"the data set differs from that of the session's first Hello: {difference}"

    async def until_ended(self, session: Session, stop: Callable[[], None]) -> None:
        """Ask for samples until the server ends the stream, as `stop` asks it after the first.

        Raises:
            Ended: when it does.
            Silent: if it does not, and says no more.
        """
        supply = await self._open(session)
        await supply.ask(_TRAIN, [0])
        await supply.answer()
        stop()
        while True:
            await supply.ask(_TRAIN, [0])
            await supply.answer()

    # --- the acts

    async def _first_samples(self, session: Session) -> None:
        """Ask for samples of both splits, one grant after the other; Welcome is delayed."""
        await asyncio.sleep(self.limits.delay_s)
        supply = await self._open(session)
        enough = time.monotonic() + self.limits.play_s
        for split, size in enumerate(self.spec.sizes):
            asked = min(size, _MOST_ASKED)
            for at in range(0, asked, _FEW):
                if at == _FEW and split == _TRAIN:
                    await asyncio.sleep(self.limits.delay_s)
                    self.checklist.note("patient")
                await supply.ask(split, range(at, min(at + _FEW, asked)))
                await supply.answer()
                if time.monotonic() > enough:
                    break
        await supply.expect_nothing()

    async def _same_samples(self, session: Session) -> None:
        """Ask for the same samples, one by one, backwards, in another epoch and encoding."""
        supply = await self._open(session)
        for k, (split, index) in enumerate(reversed(sorted(self.seen))):
            await supply.ask(split, [index], epoch=1 + k, encoding=k % 3)
            await supply.answer()
            if k >= self.limits.rows:
                break
        if self.seen:
            self.checklist.note("encodings")

    async def _nothing_to_send(self, session: Session) -> None:
        """Ask for no sample for a while."""
        supply = await self._open(session)
        await asyncio.sleep(self.limits.delay_s)
        await supply.expect_nothing()
        await supply.ask(_TRAIN, [0])
        await supply.answer()

    async def _many_grants(self, session: Session) -> None:
        """Open several grants; answers come in order."""
        supply = await self._open(session)
        size = self.spec.sizes[_TRAIN]
        for k in range(_OPEN):
            await supply.ask(_TRAIN, [(_FEW * k + i) % size for i in range(min(_FEW, size))])
        for _ in range(_OPEN):
            await supply.answer()
        await supply.expect_nothing()

    async def _large_grant(self, session: Session) -> None:
        """Ask for as many samples as a grant may name, or as a message may hold."""
        size, sample = self.spec.sizes[_TRAIN], self.spec.sample_bytes
        count = max(1, min(MAX_GRANT, size, _MOST_BYTES // sample))
        supply = await self._open(session)
        await supply.ask(_TRAIN, range(count))
        await supply.answer()

    async def _few_samples(self, session: Session) -> None:
        """Open grants before the learner leaves."""
        supply = await self._open(session)
        for _ in range(_FEW):
            await supply.ask(_TRAIN, [0])
        await supply.answer()

    async def _open(self, session: Session) -> "_Supply":
        """Send Welcome; nothing may have come before."""
        supply = _Supply(self, session)
        await supply.expect_nothing()
        await session.write(welcome(0))
        return supply


class _Supply(Stream):
    """Grants and samples of one stream."""

    def __init__(self, player: SamplePlayer, session: Session) -> None:
        """Begin a stream of the player's data set; the player keeps the digests of its samples."""
        super().__init__(session, player.checklist, player.limits.patience_s)
        self._spec, self._codec = player.spec, SampleCodec(player.spec)
        self._seen, self._sequence = player.seen, 0
        self._open: list[Grant] = []

    async def ask(
        self, split: int, indices: Sequence[int], *, epoch: int = 0, encoding: int = 0
    ) -> None:
        """Send a grant: 0 as murmur writes it, 1 in another order, 2 with every field twice."""
        self._sequence += 1
        grant = Grant(self._sequence, epoch, split, tuple(indices))
        self._open.append(grant)
        await self.session.write(_encoded(grant, encoding))

    async def answer(self) -> None:
        """Read the answer to the oldest grant and check it by the contract.

        Raises:
            Ended: if the stream ends.
            Silent: if nothing comes in time.
            Unplayable: if it cannot be read.
        """
        grant = self._open.pop(0)
        name = f"grant {grant.sequence}"
        arrays, broken = await self.receive(
            "samples", name, lambda message: self._codec.receive(message, grant)
        )
        if broken:
            self.checklist.note("named")
        lost = {b.index for b in broken}
        good = [index for index in grant.indices if index not in lost]
        found: dict[int, Digests] = dict.fromkeys(lost, _NO_SAMPLE)
        where = f"of split '{SPLITS[grant.split]}'"
        for row, index in enumerate(good):
            sample = {name: array[row] for name, array in arrays.items()}
            self._examine(sample, f"sample {index} {where}")
            found[index] = digests(sample)
        for index, seen in found.items():
            before = self._seen.setdefault((grant.split, index), seen)
            if before is not seen:
                words = f"sample {index} {where} is not what it was on an earlier stream"
                self.checklist.note("repeats", None if before == seen else words)

    async def expect_nothing(self) -> None:
        """Check that no message comes while no grant is open."""
        await asyncio.sleep(_QUIET_S)
        early = "a message came that answers no grant" if self.session.unread else None
        self.checklist.note("unasked", early)

    def _examine(self, sample: dict[str, Array], which: str) -> None:
        """Check the values of a sample."""
        for name, array in sample.items():
            if array.dtype.kind == "f":
                wrong = f"'{name}' of {which} holds NaN or infinity"
                self.checklist.note("finite", None if np.isfinite(array).all() else wrong)
        if MASK in sample:
            mask, problem = np.asarray(sample[MASK], np.uint8), None
            try:
                check_classes(mask, self._spec, f"the mask of {which}")
            except BrokenSample as broken:
                problem = broken.detail
            self.checklist.note("classes", problem)


def _encoded(grant: Grant, encoding: int) -> bytes:
    """Encode a grant: 0 as murmur writes it, 1 in another order, 2 with every field twice."""
    message = pack_grant(grant)
    if encoding == 0:
        return message
    body = pb.LearnerMessage.FromString(message).grant
    counters = pb.Grant(sequence=body.sequence, epoch=body.epoch, split=body.split)
    parts = [pb.Grant(indices=body.indices), counters]
    inner = b"".join(part.SerializeToString() for part in parts * encoding)
    return b"\x1a" + varint(len(inner)) + inner


def _wrong_answers(spec: SampleSpec) -> dict[str, tuple[bytes, ...]]:
    def granted(sequence: int, indices: bytes, split: int = _TRAIN) -> tuple[bytes, ...]:
        grant = pb.Grant(sequence=sequence, split=split, indices=indices)
        return welcome(0), pb.LearnerMessage(grant=grant).SerializeToString()

    zero, beyond = bytes(4), spec.sizes[_TRAIN].to_bytes(4, "little")
    return {
        "a Grant with another sequence number": granted(2, zero),
        "a Grant for a sample that there is not": granted(1, beyond),
        "a Grant for a negative index": granted(1, b"\xff" * 4),
        "a Grant for a third split": granted(1, zero, 2),
        "a Grant without indices": granted(1, b""),
        "a Grant for more than 64 samples": granted(1, zero * (MAX_GRANT + 1)),
        "a Grant whose indices are no whole number of indices": granted(1, bytes(5)),
        "a Grant instead of Welcome": granted(1, zero)[1:],
        "bytes that are no message": (GARBAGE,),
    }
