"""Fuzzing. A target is a module with SEEDS, MODULES and one(data) -> a word for its outcome.

`python -m tests.fuzz` runs targets guided by coverage (atheris), the suite runs them briefly with
hypothesis. Whatever `one` raises is a finding.
"""

import atexit
import os
import shutil
import tempfile
from pathlib import Path

TARGETS = (
    "codec",
    "handshake",
    "names",
    "session",
    "supply",
    "configuration",
    "arguments",
    "checkpoint",
    "raster",
    "images",
)


_MEMORY = Path("/dev/shm")  # noqa: S108 - a folder of our own in it


def scratch() -> Path:
    """A folder for small files that are written often, deleted at the end."""
    within = _MEMORY if os.access(_MEMORY, os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="murmur-fuzz-", dir=within))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


class Reader:
    """Turns fuzzed bytes into choices; zeros once they are used up."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    @property
    def left(self) -> int:
        """Bytes not used yet."""
        return max(0, len(self._data) - self._at)

    def byte(self) -> int:
        return int.from_bytes(self.take(1), "little")

    def below(self, n: int) -> int:
        """A number below n, n <= 256."""
        return self.byte() % n

    def take(self, n: int) -> bytes:
        """The next `n` bytes, or what is left."""
        taken = self._data[self._at : self._at + n]
        self._at += n
        return taken

    def rest(self) -> bytes:
        return self.take(self.left)

    def edited(self, valid: bytes) -> bytes:
        """`valid` after up to four edits: a byte changed, a stretch cut out, put in or repeated."""
        out = bytearray(valid)
        for _ in range(self.below(5)):
            at = (self.byte() << 8 | self.byte()) % (len(out) + 1)
            match self.below(5):
                case 0 if at < len(out):
                    out[at] = self.byte()
                case 1:
                    del out[at : at + 1 + self.byte()]
                case 2:
                    out[at:at] = self.take(1 + self.below(16))
                case 3:
                    out[at:at] = out[at : at + 1 + self.byte()]
                case _ if at < len(out):
                    out[at] ^= 1 << self.below(8)
        return bytes(out)
