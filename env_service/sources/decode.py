"""Reading of JPEG and PNG files of images and masks, with sizes checked before decoding.

OpenCV decodes. This module bounds its input: the header's size against MAX_PIXELS, the file's
against MAX_FILE_BYTES, and a PNG is cut down to the chunks that hold its pixels, with correct
checksums, so that no other chunk is unpacked.

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
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from murmur.env_service.sources.source import BrokenSample

MAX_PIXELS = 1 << 26  # 8192 × 8192; 192 MiB of RGB
MAX_FILE_BYTES = 1 << 28

_PNG = b"\x89PNG\r\n\x1a\n"
_GREY, _TRUECOLOUR, _PALETTE, _GREY_ALPHA, _RGBA = 0, 2, 3, 4, 6  # colour types of PNG
_DEPTHS = {
    _GREY: (1, 2, 4, 8, 16),
    _TRUECOLOUR: (8, 16),
    _PALETTE: (1, 2, 4, 8),
    _GREY_ALPHA: (8, 16),
    _RGBA: (8, 16),
}
_CHANNELS = {_GREY: 1, _TRUECOLOUR: 3, _PALETTE: 1, _GREY_ALPHA: 2, _RGBA: 4}
_NO_SIZE = (0xC4, 0xC8, 0xCC)  # the markers of JPEG from C0 to CF that begin no frame
_PROGRESSIVE = (0xC2, 0xC6, 0xCA, 0xCE)
_EXIF = b"Exif\0\0"
_ORIENTATION = 0x0112  # tag of EXIF
# A marker within or after a scan: FF, then neither a stuffed 0, a restart, nor a fill byte.
_MARKER = re.compile(b"\xff[^\x00\xd0-\xd7\xff]")
# Beginnings of all warnings of libjpeg (jerror.h) about the data of an image.
_JPEG_WARNING = re.compile(
    "Corrupt JPEG data|Premature end of JPEG|Inconsistent progression|Invalid SOS parameters|"
    "Unknown Adobe color transform"
)
_PNG_WARNING = re.compile("libpng (error|warning): ")
_TRAILING = re.compile(r"(\d+) extraneous bytes before marker 0xd9")  # the end of the image
_MOST_TRAILING = 16  # bytes after the last block, which some encoders add
_MARK = b"\0"
_MOST_BYTES = 1 << 20  # printed while one file is decoded

_lock = threading.Lock()  # there is one standard error


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a file, read before it is decoded.

    Attributes:
        kind: format, "jpeg" or "png".
        width, height: stored size, pixels; the EXIF orientation may swap them.
        depth: bits of a sample.
        channels: samples of a pixel: 1 grey or palette, 3 RGB, 4 CMYK or RGB and alpha.
        colour: PNG's color type; 0 for a JPEG.
        orientation: EXIF orientation, 1 to 8; 1 is upright.
        alpha: true if pixels may be transparent.
        frames: true if the image is animated.
        chunks: PNG chunks that hold the pixels, as (type, begin, end) of their contents.
    """

    kind: str
    width: int
    height: int
    depth: int
    channels: int
    colour: int = 0
    orientation: int = 1
    alpha: bool = False
    frames: bool = False
    chunks: tuple[tuple[bytes, int, int], ...] = ()

    @property
    def palette(self) -> bool:
        """Return whether pixels are indices of a palette."""
        return self.kind == "png" and self.colour == _PALETTE


def read_file(path: Path) -> bytes:
    """Read the bytes of a file.

    Raises:
        BrokenSample: if it cannot be read ("unreadable") or is too large ("too_large").
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise BrokenSample("unreadable", f"{path}: {error.strerror}") from None
    if len(data) > MAX_FILE_BYTES:
        raise BrokenSample("too_large", f"{path} has more than {MAX_FILE_BYTES >> 20} MiB")
    return data


def read_header(data: bytes, name: str) -> Header:
    """Read kind and size of an image, without decoding it.

    Args:
        data: whole file.
        name: name of the file, for messages.

    Raises:
        BrokenSample: if it is no JPEG or PNG ("format"), damaged ("unreadable") or too large
            ("too_large").
    """
    if data.startswith(b"\xff\xd8"):
        header = _jpeg_header(data, name)
    elif data.startswith(_PNG):
        header = _png_header(data, name)
    elif not data:
        raise BrokenSample("unreadable", f"{name} is empty")
    else:
        raise BrokenSample("format", f"{name} is neither a JPEG nor a PNG file")
    if not header.width or not header.height:
        raise BrokenSample("unreadable", f"{name} says that it is {header.width}×{header.height}")
    if header.width * header.height > MAX_PIXELS:
        raise BrokenSample(
            "too_large",
            f"{name} says that it is {header.width}×{header.height}, at most {MAX_PIXELS} pixels "
            "are read",
        )
    return header


def _jpeg_header(data: bytes, name: str) -> Header:
    """Walk over the segments of a JPEG up to its first scan."""
    at, frame, progressive, orientation = 2, None, False, 1
    components: tuple[int, ...] = ()
    while True:
        while data[at : at + 2] == b"\xff\xff":  # fill bytes
            at += 1
        if at + 4 > len(data) or data[at] != 0xFF:
            raise BrokenSample("unreadable", f"{name} is damaged: no JPEG marker at byte {at}")
        marker, length = data[at + 1], int.from_bytes(data[at + 2 : at + 4], "big")
        if length < 2 or at + 2 + length > len(data):
            raise BrokenSample("unreadable", f"{name} ends within its header, at byte {len(data)}")
        if 0xC0 <= marker <= 0xCF and marker not in _NO_SIZE:
            if frame is not None or length < 8 or length < 8 + 3 * data[at + 9]:
                raise BrokenSample("unreadable", f"{name} is damaged: a wrong frame at byte {at}")
            height = int.from_bytes(data[at + 5 : at + 7], "big")
            width = int.from_bytes(data[at + 7 : at + 9], "big")
            frame = Header("jpeg", width, height, data[at + 4], data[at + 9])
            progressive = marker in _PROGRESSIVE
            components = tuple(data[at + 10 + 3 * k] for k in range(data[at + 9]))
        elif marker == 0xE1 and data.startswith(_EXIF, at + 4):
            orientation = _orientation(data[at + 4 + len(_EXIF) : at + 2 + length])
        if marker == 0xDA:
            break
        at += 2 + length
    if frame is None:
        raise BrokenSample("unreadable", f"{name} has a scan before its frame")
    if data.find(b"\xff\xd9", at + 2 + length) < 0:  # within a scan, FF is followed by 00
        raise BrokenSample("unreadable", f"{name} is cut off: the end of its image is missing")
    if progressive or data[at + 4] < len(components):  # several scans
        _check_scans(data, at, components, progressive, name)
    return replace(frame, orientation=orientation)


def _check_scans(
    data: bytes, at: int, components: tuple[int, ...], progressive: bool, name: str
) -> None:
    """Check that the scans of a JPEG hold every bit of every coefficient.

    libjpeg takes missing bits for 0, without a warning.

    Args:
        data: whole file.
        at: byte of the first scan's marker.
        components: identifiers of the frame's components.
        progressive: true if scans hold parts of coefficients, false if whole components.
        name: name of the file, for messages.

    Raises:
        BrokenSample: if a scan is missing ("unreadable").
    """
    # Low bits of each coefficient that no scan has held yet, by component; 64 before its first.
    left = {component: [64] * 64 for component in components}
    while True:
        marker, length = data[at + 1], int.from_bytes(data[at + 2 : at + 4], "big")
        if marker == 0xDA and at + 2 + length <= len(data):
            count = data[at + 4]
            first, last, bits = data[at + length - 1 : at + length + 2]
            for component in data[at + 5 : at + 5 + 2 * count : 2]:
                if component in left and progressive:
                    left[component][first : last + 1] = [bits & 15] * (last + 1 - first)
                elif component in left:
                    left[component] = [0] * 64
        found = _MARKER.search(data, at + 2 + length)
        if found is None or found[0] == b"\xff\xd9":
            break
        at = found.start()
    missing = sum(any(coefficients) for coefficients in left.values())
    if missing:
        raise BrokenSample(
            "unreadable",
            f"{name} is cut off: scans of {missing} of {len(components)} components are missing",
        )


def _orientation(exif: bytes) -> int:
    """Return the orientation that an EXIF block states; 1 if it states no valid one."""
    order: Literal["little", "big"] = "little" if exif.startswith(b"II") else "big"
    at = int.from_bytes(exif[4:8], order)
    count = int.from_bytes(exif[at : at + 2], order)
    for entry in range(at + 2, min(at + 2 + 12 * count, len(exif)), 12):
        if int.from_bytes(exif[entry : entry + 2], order) == _ORIENTATION:
            value = int.from_bytes(exif[entry + 8 : entry + 10], order)
            return value if 1 <= value <= 8 else 1
    return 1


def _png_header(data: bytes, name: str) -> Header:
    """Walk over the chunks of a PNG and check their checksums."""
    at, chunks, first = len(_PNG), [], b""
    orientation, transparent, frames = 1, False, False
    while first != b"IEND":
        if at + 12 > len(data):
            raise BrokenSample("unreadable", f"{name} is cut off after {len(data)} bytes")
        length, kind = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8]
        begin, end = at + 8, at + 8 + length
        if end + 4 > len(data):
            raise BrokenSample("unreadable", f"{name} is cut off after {len(data)} bytes")
        if (kind == b"IHDR") != (at == len(_PNG)) or (kind == b"IHDR" and length != 13):
            raise BrokenSample("unreadable", f"{name} is damaged: a wrong chunk at byte {at}")
        if zlib.crc32(memoryview(data)[at + 4 : end]) != int.from_bytes(data[end : end + 4], "big"):
            raise BrokenSample("unreadable", f"{name} is damaged: wrong checksum at byte {end}")
        if kind in (b"IHDR", b"PLTE", b"IDAT", b"IEND", b"eXIf"):
            chunks.append((kind, begin, end))
        elif kind[0] < 0x60:  # a capital: a chunk that a reader must know
            raise BrokenSample("unreadable", f"{name} has an unknown chunk at byte {at}")
        if kind == b"eXIf":
            orientation = _orientation(data[begin:end])
        transparent |= kind == b"tRNS"
        frames |= kind == b"acTL" and int.from_bytes(data[begin : begin + 4], "big") > 1
        first, at = kind, end + 4
    width, height = int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")
    depth, colour = data[24], data[25]
    if depth not in _DEPTHS.get(colour, ()):
        raise BrokenSample("unreadable", f"{name} has {depth} bits of colour type {colour}")
    return Header(
        *("png", width, height, depth, _CHANNELS[colour], colour, orientation),
        alpha=transparent or colour in (_GREY_ALPHA, _RGBA),
        frames=frames,
        chunks=tuple(chunks),
    )


def _plain_png(data: bytes, header: Header, as_grey: bool) -> bytes:
    """Write a PNG of only the chunks that hold the pixels.

    Args:
        data: whole file.
        header: header of the file.
        as_grey: true to declare palette indices as grey values, and to drop the orientation.
    """
    out = [_PNG]
    for kind, begin, end in header.chunks:
        content = data[begin:end]
        if as_grey and kind in (b"PLTE", b"eXIf"):
            continue
        if as_grey and kind == b"IHDR" and header.colour == _PALETTE:
            content = content[:9] + bytes([_GREY]) + content[10:]
        out += [len(content).to_bytes(4, "big"), kind, content]
        out.append(zlib.crc32(content, zlib.crc32(kind)).to_bytes(4, "big"))
    return b"".join(out)


def decode_image(
    data: bytes,
    name: str,
    at_least: tuple[int, int] = (0, 0),
    *,
    known: bool = False,
) -> tuple[NDArray[np.uint8], Header]:
    """Decode a JPEG or PNG, upright: its EXIF orientation is applied.

    Args:
        data: whole file.
        name: name of the file, for messages.
        at_least: (height, width) that the caller resizes to; a JPEG of twice, four or eight times
            that is decoded at a half, a quarter or an eighth, several times faster. (0, 0): no.
        known: true if these bytes were decoded before without damage.

    Returns:
        pixels [H, W, 3] in blue, green, red; and the header, with the stored size.

    Raises:
        BrokenSample: if it cannot be decoded.
    """
    import cv2

    header = read_header(data, name)
    flags = cv2.IMREAD_COLOR
    if header.kind == "png":
        data = _plain_png(data, header, as_grey=False)
    elif min(at_least) > 0:
        # Either side may be the height: compare with the larger of the sides asked for.
        factor = min(header.width, header.height) // max(at_least)
        for divisor in (8, 4, 2):
            if factor >= divisor:
                flags = getattr(cv2, f"IMREAD_REDUCED_COLOR_{divisor}")
                break
    return decode(data, flags, name, known), header


def decode_mask(data: bytes, name: str, *, known: bool = False) -> tuple[NDArray[np.uint8], Header]:
    """Decode the class indices of a PNG: grey values of any depth, or palette indices.

    Args:
        data: whole file.
        name: name of the file, for messages.
        known: true if these bytes were decoded before without damage.

    Returns:
        class indices [H, W]; and the header.

    Raises:
        BrokenSample: if it cannot be decoded, holds colors ("mask_format") or indices above 255
            ("class_range").
    """
    import cv2

    header = read_header(data, name)
    if header.kind != "png":
        raise BrokenSample(
            "mask_format", f"{name} is a JPEG, which does not keep class indices: save it as PNG"
        )
    mask = decode(_plain_png(data, header, as_grey=True), cv2.IMREAD_UNCHANGED, name, known)
    if mask.ndim == 3:
        if (mask[..., 0] != mask[..., 1]).any() or (mask[..., 0] != mask[..., 2]).any():
            raise BrokenSample(
                "mask_format",
                f"{name} holds colours: save class indices, as grey values or with a palette",
            )
        mask = mask[..., 0]
    if mask.dtype != np.uint8:
        if mask.max(initial=0) > 255:
            raise BrokenSample("class_range", f"{name} has class {int(mask.max())}; 255 is most")
        mask = mask.astype(np.uint8)
    if header.depth < 8:  # OpenCV stretches 1, 2 and 4 bits to the range of 8
        mask //= 255 // (2**header.depth - 1)
    return np.ascontiguousarray(mask), header


def same_size(header: Header, image: NDArray[np.uint8], mask: NDArray[np.uint8]) -> bool:
    """Return whether a mask has the size of the upright image.

    Args:
        header: header of the image's file, with the size before it is turned or reduced.
        image: [h, w, 3] upright image, perhaps reduced.
        mask: [H, W] class indices.
    """
    if sorted(mask.shape) != sorted((header.height, header.width)):
        return False
    reduced = round(max(mask.shape) / max(image.shape[:2]))
    return all(-(-m // reduced) == i for m, i in zip(mask.shape, image.shape[:2], strict=True))


def resize(array: NDArray[np.uint8], size: tuple[int, int], nearest: bool) -> NDArray[np.uint8]:
    """Resize an image or mask.

    Args:
        array: pixels [H, W] or [H, W, C].
        size: (height, width) of the result, pixels.
        nearest: true to keep values, for masks; false for area averages when it shrinks, bilinear
            interpolation when it grows.
    """
    import cv2

    height, width = array.shape[:2]
    if (height, width) == size:
        return array
    how = cv2.INTER_NEAREST
    if not nearest:
        smaller = size[0] <= height and size[1] <= width
        how = cv2.INTER_AREA if smaller else cv2.INTER_LINEAR
    resized: NDArray[np.uint8] = cv2.resize(array, size[::-1], interpolation=how)
    return resized


def planes(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Convert [H, W, 3] blue, green, red to contiguous [3, H, W] red, green, blue."""
    import cv2

    out = np.empty((3, *image.shape[:2]), np.uint8)
    cv2.split(image, [out[2], out[1], out[0]])
    return out


def decode(data: bytes, flags: int, name: str, quiet: bool = False) -> NDArray[Any]:
    """Decode the pixels of a file in memory.

    Args:
        data: whole file.
        flags: cv2.IMREAD_* flags.
        name: name of the file, for messages.
        quiet: true to leave standard error alone, for a file known to be whole.

    Raises:
        BrokenSample: if there are no pixels, or some were invented for damaged data.
    """
    import cv2

    printed: list[str] = []
    damage: list[str] = []
    image = None
    with contextlib.nullcontext() if quiet else _captured(printed):
        try:
            image = cv2.imdecode(np.frombuffer(data, np.uint8), flags)
        except cv2.error as error:
            damage.append(f"OpenCV says: {error.err}")
    if image is None and not damage:
        damage.append("OpenCV cannot decode it")
    damage += [line for line in printed if _JPEG_WARNING.search(line) and not _harmless(line)]
    damage += [line for line in printed if line.startswith("libpng error")]
    if damage:
        raise BrokenSample("unreadable", f"{name} is damaged: {'; '.join(damage)}")
    return np.asarray(image)


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
            # A write of another thread that has begun keeps the file locked: this one waits for it.
            os.write(printed, _MARK)
            text = os.pread(printed, _MOST_BYTES, 0).replace(_MARK, b"")
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
        if _JPEG_WARNING.search(line) or _PNG_WARNING.match(line):
            lines.append(line.strip())
        else:
            os.write(2, line.encode())
