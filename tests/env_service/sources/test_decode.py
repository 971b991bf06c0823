"""Images are decoded as Pillow decodes them; what is damaged or too large is named."""

import io
import zlib
from collections.abc import Callable

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageOps

from murmur.env_service.sources.decode import (
    decode_image,
    decode_mask,
    planes,
    read_header,
    resize,
    same_size,
)
from murmur.env_service.sources.source import BrokenSample

NOISE = np.random.default_rng(0).integers(0, 256, (6, 9, 3), dtype=np.uint8)
PICTURE = Image.fromarray(cv2.resize(NOISE, (90, 60), interpolation=cv2.INTER_CUBIC))
INDICES = np.random.default_rng(1).integers(0, 16, (13, 9), dtype=np.uint8)


def encoded(picture: Image.Image, kind: str, **options: object) -> bytes:
    out = io.BytesIO()
    picture.save(out, kind, **options)  # type: ignore[arg-type]
    return out.getvalue()


def rgb(data: bytes) -> NDArray[np.uint8]:
    return planes(decode_image(data, "x")[0]).transpose(1, 2, 0)


def reason(call: Callable[[], object]) -> str:
    with pytest.raises(BrokenSample) as caught:
        call()
    assert "x.png" in caught.value.detail
    return caught.value.reason


def chunk(kind: bytes, content: bytes) -> bytes:
    return (
        len(content).to_bytes(4, "big")
        + kind
        + content
        + zlib.crc32(kind + content).to_bytes(4, "big")
    )


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["jpeg", "png"])
def test_exif_orientation_is_applied(kind: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(PICTURE, kind, exif=exif)
    upright = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
    assert np.abs(rgb(data).astype(int) - upright).max() <= 2  # decoders of JPEG may round
    reduced, header = decode_image(data, "x", (15, 15))
    assert max(reduced.shape) == (23 if kind == "jpeg" else 90)
    assert same_size(header, reduced, upright[..., 0])
    assert not same_size(header, reduced, upright[..., 0].T)
    assert not same_size(header, reduced, upright[1:, :, 0])


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "1"])
def test_png_of_every_kind_becomes_rgb(mode: str) -> None:
    picture = PICTURE.convert(mode)
    np.testing.assert_array_equal(rgb(encoded(picture, "png")), np.asarray(picture.convert("RGB")))


def test_16_bit_png_keeps_its_high_bytes() -> None:
    grey = np.asarray(PICTURE.convert("L"))
    data = encoded(Image.fromarray(grey.astype(np.uint16) * 256 + 7), "png")
    np.testing.assert_allclose(rgb(data)[..., 0], grey, atol=1)


@pytest.mark.parametrize("mode", ["CMYK", "L"])
def test_jpeg_of_other_colours_becomes_rgb(mode: str) -> None:
    assert rgb(encoded(PICTURE.convert(mode), "jpeg")).shape == (60, 90, 3)


def test_reduced_jpeg_looks_like_the_whole_one_made_smaller() -> None:
    data = encoded(PICTURE, "jpeg", quality=95)
    whole = resize(decode_image(data, "x")[0], (15, 22), nearest=False)
    reduced = resize(decode_image(data, "x", (15, 22))[0], (15, 22), nearest=False)
    assert np.abs(whole.astype(int) - reduced).mean() < 4


def palette(bits: int) -> bytes:
    picture = Image.new("P", INDICES.shape[::-1])
    picture.putdata(INDICES.ravel().tolist())
    picture.putpalette([255 - i for i in range(48)])
    return encoded(picture, "png", bits=bits, transparency=0)


@pytest.mark.parametrize(
    "data",
    [
        palette(8),
        palette(4),
        encoded(Image.fromarray(INDICES), "png"),
        encoded(Image.fromarray(INDICES.astype(np.uint16)), "png"),
        encoded(Image.merge("LA", [Image.fromarray(INDICES)] * 2), "png"),
        encoded(Image.merge("RGB", [Image.fromarray(INDICES)] * 3), "png"),
    ],
    ids=["palette-8", "palette-4", "grey-8", "grey-16", "grey-alpha", "rgb-of-grey"],
)
def test_mask_is_read_as_indices(data: bytes) -> None:
    mask, _ = decode_mask(data, "x")
    assert mask.flags.c_contiguous
    np.testing.assert_array_equal(mask, INDICES)


def test_mask_of_one_bit_has_classes_0_and_1() -> None:
    mask, _ = decode_mask(encoded(Image.fromarray(INDICES > 7), "png"), "x")
    np.testing.assert_array_equal(mask, INDICES > 7)


def test_mask_keeps_its_orientation() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    np.testing.assert_array_equal(
        decode_mask(encoded(Image.fromarray(INDICES), "png", exif=exif), "x")[0], INDICES
    )


def test_mask_that_cannot_hold_classes_is_refused() -> None:
    wide = Image.fromarray(np.full((3, 3), 300, np.uint16))
    assert reason(lambda: decode_mask(encoded(wide, "png"), "x.png")) == "class_range"
    assert reason(lambda: decode_mask(encoded(PICTURE, "png"), "x.png")) == "mask_format"
    assert reason(lambda: decode_mask(encoded(PICTURE, "jpeg"), "x.png")) == "mask_format"


@pytest.mark.parametrize("kind", ["jpeg", "png"])
def test_every_cut_of_a_file_is_unreadable(kind: str) -> None:
    data = encoded(PICTURE.resize((30, 20)), kind)
    for end in range(0, len(data) - (2 if kind == "jpeg" else 0), 7):
        assert reason(lambda end=end: decode_image(data[:end], "x.png")) in ("unreadable", "format")  # type: ignore[misc]


def test_changed_byte_of_a_png_is_found_by_its_checksum() -> None:
    data = bytearray(encoded(PICTURE, "png"))
    data[len(data) // 2] ^= 1
    with pytest.raises(BrokenSample, match="wrong checksum"):
        decode_image(bytes(data), "x.png")


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "unreadable"),
        (b"GIF89a" + bytes(20), "format"),
        (b"\xff\xd8\xff\xd9", "unreadable"),
        (b"\xff\xd8" + b"\xff\xc0\x00\x0b\x08\x00\x00\x00\x00\x01\x01\x11\x00", "unreadable"),
        (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", bytes(13)) + chunk(b"IEND", b""), "unreadable"),
    ],
)
def test_what_is_no_image_is_named(data: bytes, why: str) -> None:
    assert reason(lambda: decode_image(data, "x.png")) == why


def test_giant_sizes_are_refused_before_decoding() -> None:
    size = (100_000).to_bytes(4, "big") * 2
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size + b"\x08\x02\x00\x00\x00")
    png += chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    assert reason(lambda: decode_image(png, "x.png")) == "too_large"
    jpeg = bytearray(encoded(PICTURE, "jpeg"))
    frame = jpeg.index(b"\xff\xc0")
    jpeg[frame + 5 : frame + 9] = b"\xff\xff\xff\xff"
    assert reason(lambda: decode_image(bytes(jpeg), "x.png")) == "too_large"


def test_header_says_the_stored_size() -> None:
    for kind in ("jpeg", "png"):
        header = read_header(encoded(PICTURE, kind), "x")
        assert (header.kind, header.width, header.height, header.depth) == (kind, 90, 60, 8)
    progressive = read_header(encoded(PICTURE, "jpeg", progressive=True), "x")
    assert (progressive.width, progressive.height) == (90, 60)


def test_animated_png_gives_its_first_frame() -> None:
    frames = [PICTURE, PICTURE.rotate(180)]
    data = encoded(frames[0], "png", save_all=True, append_images=frames[1:])
    np.testing.assert_array_equal(rgb(data), np.asarray(PICTURE))


def test_mask_resized_keeps_its_values() -> None:
    resized = resize(INDICES, (40, 31), nearest=True)
    assert resized.shape == (40, 31)
    assert set(np.unique(resized)) == set(np.unique(INDICES))


def test_image_shrinks_by_the_mean_of_areas() -> None:
    image = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    means = image.reshape(2, 2, 2, 2, 3).mean((1, 3))
    np.testing.assert_allclose(resize(image, (2, 2), nearest=False), means, atol=0.5)
