"""An HTTP/2 client that is not polite: streams that begin a message and never finish it.

Only what such attacks need (RFC 9113, RFC 7541): literal headers, DATA within the peer's windows.
"""

import socket
import struct
import threading
from types import TracebackType
from typing import Self

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING, _WINDOW_UPDATE = 0, 1, 3, 4, 6, 8
_END_HEADERS, _ACK = 4, 1
_INITIAL_WINDOW_SIZE = 4
_CHUNK = 16_384  # the largest frame that every peer takes


def _header(name: str, value: str) -> bytes:
    """A literal header field without indexing (RFC 7541, section 6.2.2), without Huffman code."""
    assert len(name) < 127
    assert len(value) < 127
    return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


class RawClient:
    """One connection in plain text with any number of streams."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=10)
        self._port, self._next = port, 1
        self._initial, self._window = 65_535, 65_535
        self._windows: dict[int, int] = {}
        self._changed = threading.Condition()
        self.closed = False
        self.ended: set[int] = set()
        self._socket.sendall(_PREFACE + _frame(_SETTINGS, 0, 0, b""))
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def stream(self, path: str, **metadata: str) -> int:
        """Open a stream; returns its number."""
        with self._changed:
            number, self._next = self._next, self._next + 2
            self._windows[number] = self._initial
        block = b"".join(
            _header(name, value)
            for name, value in (
                (":method", "POST"),
                (":scheme", "http"),
                (":path", path),
                (":authority", f"127.0.0.1:{self._port}"),
                ("content-type", "application/grpc"),
                ("te", "trailers"),
                *metadata.items(),
            )
        )
        self._socket.sendall(_frame(_HEADERS, _END_HEADERS, number, block))
        return number

    def send(self, stream: int, data: bytes, timeout_s: float = 0.5) -> int:
        """Send as much as the peer's windows allow; returns how much that was."""
        sent = 0
        while sent < len(data):
            with self._changed:
                if not self._changed.wait_for(lambda: self._room(stream) or self._over(stream),
                                              timeout_s):  # fmt: skip
                    break
                if self._over(stream):
                    break
                size = min(self._room(stream), _CHUNK, len(data) - sent)
                self._windows[stream] -= size
                self._window -= size
            try:
                self._socket.sendall(_frame(_DATA, 0, stream, data[sent : sent + size]))
            except OSError:
                break
            sent += size
        return sent

    def message(self, stream: int, message: bytes, announced: int | None = None) -> int:
        """Send a gRPC message, or the beginning of one that is announced to be longer."""
        size = len(message) if announced is None else announced
        return self.send(stream, b"\0" + struct.pack(">I", size) + message)

    def _room(self, stream: int) -> int:
        return max(0, min(self._window, self._windows[stream]))

    def _over(self, stream: int) -> bool:
        return self.closed or stream in self.ended

    def _read(self) -> None:
        """Windows, settings and ends of streams, until the connection ends."""
        try:
            with self._socket.makefile("rb") as file:
                while head := file.read(9):
                    size = int.from_bytes(head[:3], "big")
                    stream = int.from_bytes(head[5:], "big") & 0x7FFF_FFFF
                    self._take(head[3], head[4], stream, file.read(size))
        except (OSError, ValueError):
            pass
        with self._changed:
            self.closed = True
            self._changed.notify_all()

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == _PING and not flags & _ACK:
            self._socket.sendall(_frame(_PING, _ACK, 0, payload))
        with self._changed:
            if kind == _WINDOW_UPDATE:
                more = int.from_bytes(payload, "big")
                if stream:
                    self._windows[stream] += more
                else:
                    self._window += more
            elif kind == _SETTINGS and not flags & _ACK:
                for name, value in struct.iter_unpack(">HI", payload):
                    if name == _INITIAL_WINDOW_SIZE:
                        for number in self._windows:
                            self._windows[number] += value - self._initial
                        self._initial = value
                self._socket.sendall(_frame(_SETTINGS, _ACK, 0, b""))
            elif kind == _RST_STREAM or (kind == _HEADERS and flags & 1):
                self.ended.add(stream)
            self._changed.notify_all()


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return (
        len(payload).to_bytes(3, "big") + bytes([kind, flags]) + struct.pack(">I", stream) + payload
    )
