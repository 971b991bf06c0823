"""Protobuf's framing of messages: its integers, its parser, and observations in several messages.

An observation too large for one message is cut into parts. Part k holds bytes k * PART_BYTES to
(k + 1) * PART_BYTES of its arrays, the last part the rest. gRPC never has more than one part of a
stream in memory. The receiver knows the number of parts from the spec, so the sender does not
announce it.
"""

from collections.abc import Iterator, Sequence
from struct import Struct
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError, Message

from murmur.shared.process.errors import WireError
from murmur.shared.rpc import ENCODING_BYTES, PART_BYTES
from murmur.shared.rpc import rollout_pb2 as pb

_PART = b"\x1d"  # tag of Observation's and Samples' field


def varint(value: int) -> bytes:
    """Encode a number as protobuf's base-128 varint."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def parse(kind: type[Message], message: bytes, field: str, max_bytes: int) -> Any:  # noqa: ANN401
    """Return the wanted member of a message's oneof, by protobuf's general parser (a copy).

    Raises:
        WireError: if the message is too long, invalid, or holds another member.
    """
    if len(message) > max_bytes:
        raise WireError(
            f"a message of {len(message)} bytes came; by the spec '{field}' has at most {max_bytes}"
        )
    try:
        parsed = kind.FromString(message)
    except DecodeError as error:
        raise WireError(f"message is no {kind.__name__}: {error}") from None
    got = parsed.WhichOneof("message")
    if got != field:
        raise WireError(f"expected message '{field}', got '{got}'")
    return getattr(parsed, field)


class Frame:
    """The protobuf framing of one kind of message: numbers, then arrays, then a part's number.

    The numbers are fixed64 fields 1..n, the arrays together one `bytes` field. Written messages
    equal, byte for byte, the output of protobuf's own code. Used by one thread.

    Attributes:
        size: bytes of the arrays.
    """

    def __init__(
        self, kind: type[Message], field: str, numbers: int, size: int, part: int = 0
    ) -> None:
        """Lay out the frame. Allocates no memory of the arrays' size.

        Args:
            kind: message on the stream, with a oneof.
            field: name of this message in the oneof.
            numbers: number of its fixed64 fields (sequence, policy_version).
            size: bytes of the arrays.
            part: number of the part, from 0; 0 also for arrays in one message.
        """
        self._kind, self._field = kind, field
        self.size = size
        self._tail = _PART + part.to_bytes(4, "little") if part else b""  # protobuf omits zeros
        arrays = bytes([(numbers + 1) << 3 | 2]) + varint(size)
        inner = 9 * numbers + len(arrays) + size + len(self._tail)
        outer = bytes([kind.DESCRIPTOR.fields_by_name[field].number << 3 | 2]) + varint(inner)
        tags = [bytes([i << 3 | 1]) for i in range(1, numbers + 1)]
        # What all messages of this frame have in common: the bytes before each number and before
        # the arrays. Protobuf's writers omit a number of zero; such messages are parsed.
        self._common = (outer + tags[0], *tags[1:], arrays)
        self._head = Struct("<" + "Q".join(f"{len(text)}s" for text in self._common))
        self._values: list[bytes | int] = [0] * (2 * numbers + 1)
        self._values[::2] = self._common
        self._place = slice(self._head.size, self._head.size + size)
        self._length = self._head.size + size + len(self._tail)

    def pack(self, numbers: Sequence[int], arrays: Sequence[Any]) -> bytes:
        """Encode numbers and arrays, which together have `size` bytes, as a message."""
        self._values[1::2] = numbers
        head = self._head.pack(*self._values)
        try:
            return b"".join((head, *arrays, self._tail))
        except TypeError:  # an array that is not contiguous, such as one with agents reordered
            return b"".join((head, *map(np.ascontiguousarray, arrays), self._tail))  # type: ignore[arg-type]

    def match(self, message: bytes) -> tuple[Sequence[int], memoryview] | None:
        """Return numbers and arrays of a message of exactly this framing.

        None for any other message, which `parse` decodes if its encoding is valid.
        """
        if len(message) == self._length:
            values = self._head.unpack_from(message)
            if values[::2] == self._common and (not self._tail or message.endswith(self._tail)):
                return values[1::2], memoryview(message)[self._place]
        return None

    def parse(self, message: bytes, further: int = 0) -> Any:  # noqa: ANN401 - of protobuf
        """Parse a message in any valid encoding, by protobuf's general parser.

        Args:
            message: bytes of the message.
            further: largest size of its fields that are not in the frame, bytes.

        Raises:
            WireError: if it is another message, or too long.
        """
        limit = self._length + ENCODING_BYTES + further
        return parse(self._kind, message, self._field, limit)


def part_frames(num_bytes: int, field: str = "observation") -> list[Frame]:
    """Return the frames of an observation, or of samples, with arrays of `num_bytes` bytes."""
    return [
        Frame(pb.WorkerMessage, field, 1, min(PART_BYTES, num_bytes - start), part)
        for part, start in enumerate(range(0, max(num_bytes, 1), PART_BYTES))
    ]


def split(frames: list[Frame], sequence: int, payload: memoryview) -> Iterator[bytes]:
    """Yield the messages of one observation, in order."""
    at = 0
    for frame in frames:
        yield frame.pack((sequence,), (payload[at : at + frame.size],))
        at += frame.size


class Assembly:
    """A buffer that joins the parts of one observation after the other. Used by one thread."""

    def __init__(self, frames: list[Frame]) -> None:
        """Reserve the buffer; the system provides its memory only as parts arrive."""
        self._frames = frames
        size = sum(frame.size for frame in frames) if len(frames) > 1 else 0
        self._buffer = np.empty(size, np.uint8).data
        self._part = 0
        self._filled = 0
        self._sequence = 0

    def add(self, message: bytes) -> tuple[int, memoryview] | None:
        """Add a part; return sequence number and payload once the observation is complete.

        The payload is valid until the next call. The result is None while parts are missing. An
        observation of one message is not copied.

        Raises:
            WireError: if this is not the part that comes next.
        """
        frame = self._frames[self._part]
        (sequence,), data = frame.match(message) or self._parse(message, frame)
        if len(self._frames) == 1:
            return sequence, data
        if self._part and sequence != self._sequence:
            raise WireError(
                f"part {self._part} of an observation has sequence number {sequence}, the parts "
                f"before it {self._sequence}"
            )
        self._buffer[self._filled : self._filled + frame.size] = data
        self._sequence, self._part = sequence, self._part + 1
        self._filled += frame.size
        if self._part < len(self._frames):
            return None
        self._part = self._filled = 0
        return sequence, self._buffer.toreadonly()

    def _parse(self, message: bytes, frame: Frame) -> tuple[Sequence[int], memoryview]:
        """Parse a part in any valid encoding, by protobuf's general parser."""
        observation = frame.parse(message)
        if observation.part != self._part:
            raise WireError(
                f"part {observation.part} of an observation came, expected part {self._part} of "
                f"{len(self._frames)}"
            )
        if len(observation.arrays) != frame.size and len(self._frames) > 1:
            raise WireError(
                f"part {self._part} of an observation holds {len(observation.arrays)} bytes, "
                f"expected {frame.size}: every part holds {PART_BYTES}, the last one the rest"
            )
        return (observation.sequence,), memoryview(observation.arrays)
