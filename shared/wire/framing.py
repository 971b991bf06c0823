"""Protobuf's framing of messages: variable-length integers, and the general parser."""

from typing import Any

from google.protobuf.message import DecodeError, Message

from shared.process.errors import WireError


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
