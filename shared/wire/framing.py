"""Protobuf's framing of messages: its integers, its parser, and observations in several messages.

An observation too large for one message is cut into parts. Part k holds bytes k * PART_BYTES to
(k + 1) * PART_BYTES of its arrays, the last part the rest. gRPC never has more than one part of a
stream in memory. The receiver knows the number of parts from the spec, so the sender does not
announce it.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError, Message

from murmur.shared.process.errors import WireError
from murmur.shared.rpc import ENCODING_BYTES, PART_BYTES
from murmur.shared.rpc import rollout_pb2 as pb

OBSERVATION = pb.WorkerMessage.OBSERVATION_FIELD_NUMBER
_SEQUENCE, _ARRAYS, _PART = b"\x09", b"\x12", b"\x1d"  # tags of Observation's and Samples' fields


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


class PartFrame:
    """The protobuf framing of one part: all its bytes but the sequence number and the arrays.

    Equal, byte for byte, to the output of protobuf's own code.
    """

    def __init__(self, part: int, size: int, field: int = OBSERVATION) -> None:
        """Frame part number `part`, which holds `size` bytes of the arrays.

        Args:
            part: number of the part, from 0.
            size: bytes of the arrays in this part.
            field: field number in WorkerMessage: OBSERVATION or SAMPLES.
        """
        self._tail = _PART + part.to_bytes(4, "little") if part else b""  # protobuf omits zeros
        self._arrays = _ARRAYS + varint(size)
        inner = 9 + len(self._arrays) + size + len(self._tail)
        self._head = bytes([field << 3 | 2]) + varint(inner) + _SEQUENCE
        self._data_at = len(self._head) + 8 + len(self._arrays)
        self._end = self._data_at + size
        self.size = size

    def pack(self, sequence: int, data: memoryview) -> bytes:
        """Return the message that carries this part."""
        counter = sequence.to_bytes(8, "little")
        return b"".join((self._head, counter, self._arrays, data, self._tail))

    def match(self, message: bytes) -> tuple[int, memoryview] | None:
        """Return sequence number and data of a message of exactly this framing, else None."""
        at = len(self._head)
        if (
            len(message) != self._end + len(self._tail)
            or not message.startswith(self._head)
            or not message.startswith(self._arrays, at + 8)
            or not message.endswith(self._tail)
        ):
            return None
        sequence = int.from_bytes(message[at : at + 8], "little")
        return sequence, memoryview(message)[self._data_at : self._end]


def part_frames(num_bytes: int, field: int = OBSERVATION) -> list[PartFrame]:
    """Return the frames of an observation, or of samples, with arrays of `num_bytes` bytes."""
    starts = range(0, max(num_bytes, 1), PART_BYTES)
    return [PartFrame(k, min(PART_BYTES, num_bytes - at), field) for k, at in enumerate(starts)]


def split(frames: list[PartFrame], sequence: int, payload: memoryview) -> Iterator[bytes]:
    """Yield the messages of one observation, in order."""
    at = 0
    for frame in frames:
        yield frame.pack(sequence, payload[at : at + frame.size])
        at += frame.size


class Assembly:
    """A buffer that joins the parts of one observation after the other. Used by one thread."""

    def __init__(self, frames: list[PartFrame], num_bytes: int) -> None:
        """Reserve the buffer; the system provides its memory only as parts arrive."""
        self._frames = frames
        self._buffer = np.empty(num_bytes, np.uint8).data
        self._part = 0
        self._filled = 0
        self._sequence = 0

    def add(self, message: bytes) -> tuple[int, memoryview] | None:
        """Add a part; return sequence number and payload once the observation is complete.

        The payload is valid until the next call. The result is None while parts are missing.

        Raises:
            WireError: if this is not the part that comes next.
        """
        frame = self._frames[self._part]
        sequence, data = frame.match(message) or self._parse(message, frame)
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

    def _parse(self, message: bytes, frame: PartFrame) -> tuple[int, memoryview]:
        """Parse a part in any valid encoding, by protobuf's general parser."""
        observation = parse(pb.WorkerMessage, message, "observation", frame.size + ENCODING_BYTES)
        if observation.part != self._part:
            raise WireError(
                f"part {observation.part} of an observation came, expected part {self._part} of "
                f"{len(self._frames)}"
            )
        if len(observation.arrays) != frame.size:
            raise WireError(
                f"part {self._part} of an observation holds {len(observation.arrays)} bytes, "
                f"expected {frame.size}: every part holds {PART_BYTES}, the last one the rest"
            )
        return observation.sequence, memoryview(observation.arrays)
