"""The protobuf framing around a message's arrays, written once and recognized on arrival."""

from functools import cached_property
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError, Message

from shared.channel import ENCODING_BYTES
from shared.errors import WireError

_FIXED64 = np.dtype("<u8")


def varint(value: int) -> bytes:
    """Encode a number as protobuf's base-128 varint."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


class Frame:
    """A reusable protobuf frame: fixed64 fields 1..n, then one `bytes` field, in a oneof.

    Equal, byte for byte, to the output of protobuf's own code. Used by one thread. A frame that
    only reads never allocates the buffer of a message.

    Attributes:
        max_bytes: upper bound on the bytes of any encoding of such a message.
    """

    def __init__(self, oneof_field: int, num_counters: int, num_bytes: int) -> None:
        """Lay out the frame.

        Args:
            oneof_field: field number of this message in the outer oneof.
            num_counters: number of fixed64 fields that come first (sequence, policy_version).
            num_bytes: length of the `bytes` field that follows.
        """
        arrays_header = bytes([(num_counters + 1) << 3 | 2]) + varint(num_bytes)
        inner = 9 * num_counters + len(arrays_header) + num_bytes
        head = bytearray(bytes([oneof_field << 3 | 2]) + varint(inner))
        self._counters_at = [len(head) + 9 * i + 1 for i in range(num_counters)]
        for i in range(num_counters):
            head += bytes([(i + 1) << 3 | 1]) + bytes(8)
        head += arrays_header
        self._head, self._payload_at = bytes(head), len(head)
        self._length = len(head) + num_bytes
        self.max_bytes = self._length + ENCODING_BYTES
        # What every frame of this layout has in common, to recognise one on arrival. A zero
        # fixed64 is left out by protobuf's writers; such frames take the general path.
        self._common = [
            (start, self._head[start:stop])
            for start, stop in zip(
                [0, *(at + 8 for at in self._counters_at)],
                [*self._counters_at, self._payload_at],
                strict=True,
            )
        ]

    @cached_property
    def _buffer(self) -> bytearray:
        return bytearray(self._head) + bytes(self._length - self._payload_at)

    @cached_property
    def _counters(self) -> list[np.ndarray[Any, np.dtype[np.uint64]]]:
        return [np.frombuffer(self._buffer, _FIXED64, 1, at) for at in self._counters_at]

    @cached_property
    def payload(self) -> memoryview:
        """Return the writable bytes of the arrays; fill them, then call `tobytes`."""
        return memoryview(self._buffer)[self._payload_at :]

    def tobytes(self, *counters: int) -> bytes:
        """Set the counters and return the finished message."""
        for view, value in zip(self._counters, counters, strict=True):
            view[0] = value
        return bytes(self._buffer)

    def match(self, message: bytes) -> tuple[list[int], memoryview] | None:
        """Return counters and payload of a message of exactly this layout, else None."""
        if len(message) != self._length:
            return None
        for start, expected in self._common:
            if not message.startswith(expected, start):
                return None
        counters = [int.from_bytes(message[at : at + 8], "little") for at in self._counters_at]
        return counters, memoryview(message)[self._payload_at :]


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
