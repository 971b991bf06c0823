"""Damaged images are refused with their name; what a decoder makes up is never used."""

import io
import os
import re
import threading
from collections.abc import Callable

import cv2
import numpy as np
import pytest
from PIL import Image

from murmur.env_service.sources.decode import decode, decode_image
from murmur.env_service.sources.source import BrokenSample

RNG = np.random.default_rng(0)
NOISE = RNG.integers(0, 120, (128, 128, 3)).astype(np.uint8)


def damage(data: bytes) -> str:
    """Decode a file; return what is wrong with it, or ""."""
    try:
        decode(data, cv2.IMREAD_COLOR, "x")
    except BrokenSample as broken:
        return broken.detail
    return ""


def jpeg(picture: np.ndarray = NOISE, **options: object) -> bytes:
    out = io.BytesIO()
    Image.fromarray(picture).save(out, "JPEG", **{"quality": 90, **options})  # type: ignore[arg-type]
    return out.getvalue()


RESTARTS = jpeg(restart_marker_blocks=8)
PROGRESSIVE = jpeg(progressive=True)


def scans(data: bytes) -> list[int]:
    return [found.start() for found in re.finditer(rb"\xff\xda", data)]


def closed(data: bytes, at: int) -> bytes:
    """Cut off, and given the end of an image by a tool."""
    return data[:at] + b"\xff\xd9"


def zeroed(data: bytes, at: int, count: int) -> bytes:
    """Zeros in place of a block, as a file system leaves them after a crash of the machine."""
    return data[:at] + bytes(count) + data[at + count :]


def swapped(data: bytes) -> bytes:
    """The second and fifth restart markers in each other's place."""
    return data.replace(b"\xff\xd1", b"\xff\x01", 1).replace(b"\xff\xd4", b"\xff\xd1", 1)


DAMAGED: dict[str, Callable[[], bytes]] = {
    "closed after a third": lambda: closed(jpeg(), len(jpeg()) // 3),
    "closed after all but a few bytes": lambda: closed(jpeg(), len(jpeg()) - 60),
    "zeros to the end": lambda: zeroed(jpeg(), len(jpeg()) // 3, len(jpeg()) * 2 // 3 - 3),
    "a block of zeros": lambda: zeroed(jpeg(), 4096, 4096),
    "a block of another file": lambda: jpeg()[:4096] + jpeg(255 - NOISE)[3000:6000] + jpeg()[7096:],
    "grey, closed": lambda: closed(jpeg(NOISE[..., 0]), 3000),
    "restart markers swapped": lambda: swapped(RESTARTS),
    "a restart interval missing": lambda: (
        RESTARTS[: RESTARTS.index(b"\xff\xd1")] + RESTARTS[RESTARTS.index(b"\xff\xd2") :]
    ),
    "progressive, closed within a scan": lambda: closed(PROGRESSIVE, scans(PROGRESSIVE)[4] + 90),
    "progressive, closed between scans": lambda: closed(PROGRESSIVE, scans(PROGRESSIVE)[4]),
    "progressive, one scan of many": lambda: closed(PROGRESSIVE, scans(PROGRESSIVE)[1]),
}


@pytest.mark.parametrize("what", DAMAGED)
@pytest.mark.parametrize("at_least", [(0, 0), (32, 32)], ids=["whole", "reduced"])
def test_damaged_jpeg_with_its_end_is_unreadable(what: str, at_least: tuple[int, int]) -> None:
    data = DAMAGED[what]()
    assert cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR) is not None
    with pytest.raises(BrokenSample, match=r"^unreadable: x\.jpg is (damaged|cut off): "):
        decode_image(data, "x.jpg", at_least)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"progressive": True},
        {"optimize": True, "quality": 30},
        {"restart_marker_rows": 1},
        {"subsampling": 0, "comment": b"\xff\xda\xff\xd9"},
        {"icc_profile": b"no profile" * 20},
    ],
    ids=str,
)
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_whole_jpeg_is_read(mode: str, options: dict[str, object]) -> None:
    picture = np.asarray(Image.fromarray(NOISE[:50, :71]).convert(mode))
    if mode == "CMYK":
        out = io.BytesIO()
        Image.fromarray(picture, "CMYK").save(out, "JPEG", **options)
        data = out.getvalue()
    else:
        data = jpeg(picture, **options)
    image, header = decode_image(data, "x.jpg")
    assert image.shape == (50, 71, 3)
    assert header.channels == len(mode)


def test_a_few_bytes_after_the_last_block_are_harmless() -> None:
    """Some cameras write them; no pixel is made up."""
    whole = jpeg()
    image, _ = decode_image(whole[:-2] + b"\x00\x00" + whole[-2:], "x.jpg")
    np.testing.assert_array_equal(image, decode_image(whole, "x.jpg")[0])


def test_what_others_write_meanwhile_reaches_standard_error(
    capfd: pytest.CaptureFixture[str],
) -> None:
    damaged, stop = DAMAGED["closed after a third"](), threading.Event()

    def write() -> None:
        while not stop.is_set():
            os.write(2, b"a line of another thread\n")

    thread = threading.Thread(target=write)
    thread.start()
    try:
        verdicts = [damage(damaged) for _ in range(50)]
    finally:
        stop.set()
        thread.join()
    assert set(verdicts) == {"x is damaged: Corrupt JPEG data: premature end of data segment"}
    lines = capfd.readouterr().err.splitlines()
    assert set(lines) == {"a line of another thread"}


def test_verdict_does_not_stay_with_the_next_file() -> None:
    for _ in range(3):
        assert damage(DAMAGED["closed after a third"]())
        assert not damage(jpeg())


def test_threads_that_decode_at_once_have_their_own_verdicts() -> None:
    files = [jpeg(), DAMAGED["a block of zeros"]()]
    wrong: list[int] = []

    def work(which: int) -> None:
        for _ in range(30):
            if bool(damage(files[which])) != bool(which):
                wrong.append(which)

    threads = [threading.Thread(target=work, args=(i % 2,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_no_descriptor_is_left_open() -> None:
    before = len(os.listdir("/dev/fd"))
    for _ in range(20):
        damage(jpeg())
        damage(b"no picture")
    assert len(os.listdir("/dev/fd")) == before
