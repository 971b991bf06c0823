"""Supply servers that each break the contract in one point, and one that keeps it."""

import queue
import struct
from collections.abc import Iterator

import grpc

from examples.environment_server import METHOD, BrokenContractError, Server
from murmur.shared.rpc import PROTOCOL_VERSION
from murmur.shared.rpc import rollout_pb2 as pb

SIZE, SIZES = 4, (10, 3)
_SAMPLE = 4 * SIZE * SIZE  # bytes of image and mask
BROKEN = 5


class Supplier(Server):
    """Keeps the contract; sample 5 is broken."""

    def hello(self) -> pb.Hello:
        spec = pb.SampleSpec(
            name="toy",
            arrays=[
                pb.ArraySpec(name="image", dtype="uint8", shape=[3, SIZE, SIZE]),
                pb.ArraySpec(name="mask", dtype="uint8", shape=[SIZE, SIZE]),
            ],
            sizes=SIZES,
            digest="ab" * 32,
            classes=["ground", "thing"],
            ignore_index=255,
        )
        return pb.Hello(
            protocol_version=PROTOCOL_VERSION,
            worker_id=self.worker_id,
            mode=pb.MODE_SUPPLY,
            source=spec,
        )

    def play(self, channel: grpc.Channel) -> None:
        out: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        grants = channel.stream_stream(METHOD)(iter(out.get, None))
        try:
            out.put(pb.WorkerMessage(hello=self.hello()).SerializeToString())
            if self.read(grants, "welcome") is None:
                return
            self.pause_s, sequence = 0.2, 0
            for message in self.before_grants():
                out.put(message)
            while (answer := self.read(grants, "grant")) is not None and not self.stop.is_set():
                sequence += 1
                for message in self.answer(self.checked(answer.grant, sequence)):
                    out.put(message)
        finally:
            out.put(None)  # half-close
            if self.stop.is_set():
                for _ in grants:
                    pass
            grants.cancel()

    def before_grants(self) -> Iterator[bytes]:
        yield from ()

    def checked(self, grant: pb.Grant, sequence: int) -> pb.Grant:
        whole = len(grant.indices) % 4 == 0 and 0 < len(grant.indices) <= 256
        if grant.sequence != sequence or grant.split > 1 or not whole:
            raise BrokenContractError(f"grant {grant.sequence}")
        if not all(0 <= i < SIZES[grant.split] for i in self.indices(grant)):
            raise BrokenContractError(f"grant {grant.sequence} of {self.indices(grant)}")
        return grant

    def indices(self, grant: pb.Grant) -> list[int]:
        return [i for (i,) in struct.iter_unpack("<i", grant.indices)]

    def answer(self, grant: pb.Grant) -> Iterator[bytes]:
        indices = self.indices(grant)
        lost = [i for i in indices if grant.split == 0 and i == BROKEN]
        good = [i for i in indices if i not in lost]
        if lost:
            named = [pb.BrokenSample(index=i, reason="unreadable", detail="5.png") for i in lost]
            yield self.samples(grant, broken=named)
        if good:
            yield self.samples(grant, arrays=self.arrays(grant.split, good))

    def arrays(self, split: int, indices: list[int]) -> bytes:
        images = b"".join(bytes([i + split] * (3 * SIZE * SIZE)) for i in indices)
        return images + b"".join(bytes([i % 2] * (SIZE * SIZE)) for i in indices)

    def samples(self, grant: pb.Grant, **fields: object) -> bytes:
        answer = pb.Samples(sequence=grant.sequence, **fields)  # type: ignore[arg-type]
        return pb.WorkerMessage(samples=answer).SerializeToString()


class ImpossibleDataSet(Supplier):
    def hello(self) -> pb.Hello:
        hello = super().hello()
        hello.source.digest = "none"
        return hello


class OtherDigest(Supplier):
    """Another digest on every stream."""

    streams = 0

    def hello(self) -> pb.Hello:
        self.streams += 1
        hello = super().hello()
        hello.source.digest = f"{self.streams:064}"
        return hello


class SendsUnasked(Supplier):
    def before_grants(self) -> Iterator[bytes]:
        yield self.samples(pb.Grant(sequence=1), arrays=self.arrays(0, [0]))


class CountsFromZero(Supplier):
    def samples(self, grant: pb.Grant, **fields: object) -> bytes:
        return super().samples(pb.Grant(sequence=grant.sequence - 1), **fields)


class ByteTooMany(Supplier):
    def arrays(self, split: int, indices: list[int]) -> bytes:
        return super().arrays(split, indices) + b"\0"


class UnknownClass(Supplier):
    def arrays(self, split: int, indices: list[int]) -> bytes:
        return super().arrays(split, indices)[:-1] + b"\2"


class ShoutedReason(Supplier):
    def samples(self, grant: pb.Grant, **fields: object) -> bytes:
        for broken in fields.get("broken", ()):  # type: ignore[attr-defined]
            broken.reason = "No such file!"
        return super().samples(grant, **fields)


class OtherPixels(Supplier):
    """Every sample is another one when it is asked for again."""

    asked = 0

    def arrays(self, split: int, indices: list[int]) -> bytes:
        self.asked += 1
        return bytes([self.asked]) + super().arrays(split, indices)[1:]


class OneOrder(Supplier):
    """Looks for the indices at the end of a grant."""

    def read(self, answers: Iterator[bytes], wanted: str) -> pb.LearnerMessage | None:
        data = next(answers, None)
        if data is None:
            return None
        message = pb.LearnerMessage.FromString(data)
        if wanted == "grant" and not data.endswith(message.grant.indices):
            self.stop.set()
            return None
        return message


# Name -> (flaw, the key it breaks, the acts that show it).
FLAWS: dict[str, tuple[type[Supplier], str, tuple[str, ...]]] = {
    "has a data set that cannot be": (ImpossibleDataSet, "hello", ("first samples",)),
    "has another digest each time": (OtherDigest, "hello", ("first samples", "a large grant")),
    "sends too much": (SendsUnasked, "unasked", ("nothing to send",)),
    "counts from zero": (CountsFromZero, "samples", ("first samples",)),
    "sends a byte too many": (ByteTooMany, "samples", ("first samples",)),
    "sends an unknown class": (UnknownClass, "classes", ("first samples",)),
    "shouts its reasons": (ShoutedReason, "samples", ("first samples",)),
    "sends other pixels": (OtherPixels, "repeats", ("first samples", "a large grant")),
    "reads one order": (OneOrder, "encodings", ("first samples", "the same samples")),
}
