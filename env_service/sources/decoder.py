"""OpenCV's decoder, and the warnings of the libraries below it about a damaged file.

libjpeg returns the pixels of a damaged JPEG, grey where there are none, and prints a warning;
OpenCV passes on neither its code nor its text. So standard error goes to a file in memory
while OpenCV decodes.
"""

import contextlib
import fcntl
import os
import re
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Beginnings of all warnings of libjpeg (jerror.h) about the data of an image.
_JPEG = re.compile(
    "Corrupt JPEG data|Premature end of JPEG|Inconsistent progression|Invalid SOS parameters|"
    "Unknown Adobe color transform"
)
_PNG = re.compile("libpng (error|warning): ")
_TRAILING = re.compile(r"(\d+) extraneous bytes before marker 0xd9")  # the end of the image
_MOST_TRAILING = 16  # bytes after the last block, which some encoders add
_MOST_BYTES = 1 << 20  # printed while one file is decoded

_lock = threading.Lock()  # there is one standard error


def decode(data: bytes, flags: int, quiet: bool = False) -> tuple[NDArray[Any] | None, str]:
    """Decode a file in memory.

    Args:
        data: whole file.
        flags: cv2.IMREAD_* flags.
        quiet: true to leave standard error alone, for a file known to be whole.

    Returns:
        pixels, None if OpenCV has none; and a description of the damage, or "".
    """
    import cv2

    printed: list[str] = []
    error, image = "", None
    with contextlib.nullcontext() if quiet else _captured(printed):
        try:
            image = cv2.imdecode(np.frombuffer(data, np.uint8), flags)
        except cv2.error as raised:
            error = f"OpenCV says: {raised.err}"
    damage = [line for line in printed if _JPEG.search(line) and not _harmless(line)]
    errors = [line for line in printed if line.startswith("libpng error")]
    if image is None:
        error = error or "OpenCV cannot decode it"
    return image, "; ".join([*([error] if error else []), *damage, *errors])


def _harmless(warning: str) -> bool:
    """Return whether all pixels were read, and a few bytes follow them."""
    found = _TRAILING.search(warning)
    return found is not None and int(found[1]) <= _MOST_TRAILING


@contextlib.contextmanager
def _captured(lines: list[str]) -> Iterator[None]:
    """Append the output of libjpeg and libpng to `lines`; pass on the output of others."""
    with _lock, contextlib.ExitStack() as stack:
        try:
            kept = os.dup(2)
        except OSError:  # closed: libjpeg's warnings went nowhere
            kept = os.open(os.devnull, os.O_WRONLY)
        stack.callback(os.close, kept)
        printed = _memory_file()  # not a pipe, which may be full: writers must not wait
        stack.callback(os.close, printed)
        # Threads that write at once must not overwrite each other.
        fcntl.fcntl(printed, fcntl.F_SETFL, os.O_APPEND)
        os.dup2(printed, 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            text = os.pread(printed, _MOST_BYTES, 0)
    if text:
        _sort(text, lines)


def _memory_file() -> int:
    """Open an empty file without a name; return its descriptor."""
    if sys.platform == "linux":
        return os.memfd_create("decoder")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _sort(text: bytes, lines: list[str]) -> None:
    """Keep the libraries' lines, write the others to standard error."""
    for line in text.decode(errors="replace").splitlines(keepends=True):
        if _JPEG.search(line) or _PNG.match(line):
            lines.append(line.strip())
        else:
            os.write(2, line.encode())
