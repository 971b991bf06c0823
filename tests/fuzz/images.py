"""Files that are no image or mask are refused in one line; what is read has the header's size."""

import io
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
from PIL import Image

from murmur.env_service.sources import decode
from murmur.env_service.sources.decode import decode_image, decode_mask, read_header
from murmur.env_service.sources.source import BrokenSample
from tests.fuzz import Reader

MODULES = ("murmur.env_service.sources.decode",)
_PICTURE = Image.fromarray(
    np.random.default_rng(0).integers(0, 256, (17, 24, 3), dtype=np.uint8)
).resize((20, 14))
_NULL = os.open(os.devnull, os.O_WRONLY)


def _encoded(picture: Image.Image, kind: str, **options: object) -> bytes:
    out = io.BytesIO()
    picture.save(out, kind, **options)  # type: ignore[arg-type]
    return out.getvalue()


def _turned() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif


_INDICES = _PICTURE.convert("L").point(lambda v: v // 16)
_VALID = [
    _encoded(_PICTURE, "jpeg", quality=60, exif=_turned()),
    _encoded(_PICTURE, "jpeg", quality=30, progressive=True, optimize=True),
    _encoded(_PICTURE.convert("CMYK"), "jpeg", quality=20, restart_marker_blocks=1),
    _encoded(_PICTURE, "png", exif=_turned()),
    _encoded(_PICTURE.resize((9, 7)), "png", save_all=True, append_images=[_PICTURE]),
    _encoded(_PICTURE.convert("P"), "png", transparency=3),
    _encoded(_PICTURE.convert("P", colors=16), "png", bits=4),
    _encoded(Image.fromarray(np.asarray(_INDICES).astype(np.uint16)), "png"),
    _encoded(_INDICES.convert("1"), "png"),
    _encoded(Image.merge("LA", [_INDICES, _INDICES]), "png"),
]
SEEDS = [bytes([k, 1, 1, 0]) for k in range(len(_VALID))] + [
    bytes([k, 0, k % 2]) + valid for k, valid in enumerate(_VALID)
]


def _with_checksums(png: bytes) -> bytes:
    """A PNG with the right checksum after each chunk, so that its contents are looked at."""
    out, at = bytearray(png), 8
    while at + 12 <= len(out):
        end = at + 8 + int.from_bytes(out[at : at + 4], "big")
        if end + 4 > len(out):
            break
        out[end : end + 4] = zlib.crc32(out[at + 4 : end]).to_bytes(4, "big")
        at = end + 4
    return bytes(out)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what libpng and libjpeg print: a million lines."""
    kept = os.dup(2)
    os.dup2(_NULL, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


@patch.object(decode, "MAX_PIXELS", 1 << 14)  # so that a case takes little time
def one(data: bytes) -> str:
    reader = Reader(data)
    valid = _VALID[reader.below(len(_VALID))]
    mutate, as_mask = reader.below(4), reader.below(2)
    content = reader.edited(valid) if mutate else reader.rest()
    if mutate != 2 and content.startswith(b"\x89PNG"):
        content = _with_checksums(content)
    try:
        header = read_header(content, "x")
        with _quiet():
            if as_mask:
                mask, _ = decode_mask(content, "x")
                shape = mask.shape
                assert mask.dtype == np.uint8
                assert mask.flags.c_contiguous
            else:
                image, _ = decode_image(content, "x")
                assert image.dtype == np.uint8
                assert image.shape[2] == 3
                shape = image.shape[:2]
    except BrokenSample as broken:
        return broken.reason
    assert sorted(shape) == sorted((header.height, header.width))
    return "mask read" if as_mask else "image read"
