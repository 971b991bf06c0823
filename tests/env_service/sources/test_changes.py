"""What reading an image or a mask changes is said once; classes are read as the options say."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from murmur.env_service.sources.folder import Folder
from murmur.env_service.sources.source import BrokenSample, read_sample
from murmur.shared.process.errors import ConfigError
from tests.env_service.sources.test_folder import H, W, folder, lists, write

COLOURS = np.random.default_rng(0).integers(0, 256, (H, W, 3), dtype=np.uint8)
PICTURE = Image.fromarray(COLOURS)
MASK = Image.fromarray(np.eye(H, W, dtype=np.uint8))


def turned(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def said(root: Path, picture: Image.Image, name: str, label: Image.Image = MASK, **how: Any) -> str:
    """What a source says after it has read one image with its mask; twice, so that it repeats."""
    write(root, 2)
    (root / "images/0.png").unlink()
    picture.save(root / "images" / name, **how.get("image", {}))
    label.save(root / "masks/0.png", **how.get("mask", {}))
    lists(root, "0", "1")
    source = folder(root, size=[H, W])
    for _ in range(2):
        read_sample(source, "train", 0)
    return " | ".join(f"{n.kind} {n.subject}: {n.text}" for n in source.notices.all)


@pytest.mark.parametrize(
    ("image", "name", "how", "words"),
    [
        (PICTURE, "0.png", {}, ""),
        (PICTURE, "0.jpg", {}, ""),
        (PICTURE.convert("P"), "0.png", {}, ""),
        (PICTURE.convert("L"), "0.png", {}, "grey images: grey images become RGB"),
        (PICTURE.convert("L"), "0.jpg", {}, "grey images: grey images become RGB"),
        (PICTURE.convert("CMYK"), "0.jpg", {}, "cmyk images: CMYK images become RGB"),
        (PICTURE.convert("RGBA"), "0.png", {}, "alpha images: alpha of images is dropped"),
        (
            PICTURE.convert("P"),
            "0.png",
            {"transparency": 0},
            "alpha images: alpha of images is dropped",
        ),
        (
            Image.fromarray(COLOURS[..., 0].astype(np.uint16) * 257),
            "0.png",
            {},
            "depth images: of 16 bits of an image the upper 8 are kept",
        ),
        (
            PICTURE,
            "0.png",
            {"save_all": True, "append_images": [PICTURE.rotate(180)]},
            "frames images: of animated images the first frame is kept",
        ),
        (
            PICTURE,
            "0.jpg",
            {"exif": turned(3)},
            "orientation images: images are turned upright by their EXIF orientation (3)",
        ),
        (
            PICTURE.resize((W * 2, H)),
            "0.png",
            {},
            "resized images: images are resized from 60×20 to 30×20 (source.size), masks to the "
            "nearest pixel, and proportions change from 3.00 to 1.50",
        ),
    ],
)
def test_change_of_an_image_is_said_with_its_file(
    tmp_path: Path, image: Image.Image, name: str, how: dict[str, Any], words: str
) -> None:
    mask = MASK.resize(image.size, Image.Resampling.NEAREST)
    text = said(tmp_path, image, name, mask, image=how)
    assert text.startswith(words)
    assert (f"file is {tmp_path}/images/{name}" in text) == bool(words)
    if not words:
        assert not text


@pytest.mark.parametrize(
    ("mask", "how", "words"),
    [
        (MASK.convert("P"), {}, "palette masks: of masks with a palette the indices"),
        (Image.merge("RGB", [MASK] * 3), {}, "channels masks: of masks with three equal channels"),
        (Image.merge("LA", [MASK] * 2), {}, "alpha masks: alpha of masks is ignored"),
        (
            MASK,
            {"exif": turned(3)},
            "orientation masks: the EXIF orientation of masks (3) is ignored",
        ),
        (Image.fromarray(np.eye(H, W, dtype=np.uint16)), {}, ""),
        (Image.fromarray(np.eye(H, W, dtype=np.bool_)), {}, ""),
    ],
)
def test_what_of_a_mask_is_not_read_is_said(
    tmp_path: Path, mask: Image.Image, how: dict[str, Any], words: str
) -> None:
    text = said(tmp_path, PICTURE, "0.png", mask, mask=how)
    assert text.startswith(words)
    assert bool(text) == bool(words)


def test_an_image_turned_beside_a_mask_that_is_not_is_named(tmp_path: Path) -> None:
    write(tmp_path)
    Image.fromarray(COLOURS).save(tmp_path / "images/1.jpg", exif=turned(6))
    lists(tmp_path, "1", "0")
    with pytest.raises(BrokenSample, match=r"1\.jpg is 30×20, turned upright \(EXIF 6\)"):
        read_sample(folder(tmp_path), "train", 0)


def test_files_that_nothing_reads_are_said(tmp_path: Path) -> None:
    write(tmp_path)
    for name in ("a.webp", "b.tif", "c.gif", "d.bmp"):
        (tmp_path / "images" / name).write_bytes(b"x")
    MASK.save(tmp_path / "masks/alone.png")
    source = folder(tmp_path, classes=["ground", "right", "left"])
    texts = {notice.subject: notice.text for notice in source.notices.all}
    assert "left out: 'a.webp', 'b.tif', 'c.gif' and 1 more" in texts[str(tmp_path / "images")]
    assert "1 masks have no image" in texts["masks"]
    assert "source.classes (ground, right, left) is used" in texts["classes.txt"]


def test_a_file_replaced_after_the_start_is_broken(tmp_path: Path) -> None:
    write(tmp_path)
    lists(tmp_path, "2", "0")
    source = folder(tmp_path, size=16)
    read_sample(source, "train", 0)
    PICTURE.save(tmp_path / "images/2.png")
    with pytest.raises(BrokenSample, match=r"changed: .*2\.png had \d+ bytes when it was listed"):
        read_sample(source, "train", 0)


def masks_of(root: Path, held: list[int], **options: Any) -> Folder:
    """A folder in which mask k holds held[k] alone, and all of them train but the last."""
    write(root, len(held), "ground\nobject\n")
    for k, value in enumerate(held):
        Image.fromarray(np.full((H, W), value, np.uint8)).save(root / f"masks/{k}.png")
    lists(root, "\n".join(map(str, range(len(held) - 1))), str(len(held) - 1))
    return folder(root, size=16, **options)


def test_values_name_the_number_of_each_class(tmp_path: Path) -> None:
    source = masks_of(tmp_path, [0, 255, 128, 7, 0], values=[0, 255], ignore_index=7)
    found = [int(read_sample(source, "train", k)["mask"].max()) for k in (0, 1, 3)]
    assert found == [0, 1, source.spec.ignore_index]
    with pytest.raises(BrokenSample, match=r"2\.png holds 128, which source\.values does not"):
        read_sample(source, "train", 2)
    assert source.spec.digest != folder(tmp_path, size=16, ignore_index=7).spec.digest


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"values": [0]}, "source.values has 1 numbers, there are 2 classes"),
        ({"values": [0, 1, 2]}, "source.values has 3 numbers, there are 2 classes"),
        ({"values": [3, 3]}, "3 stands for two classes"),
        ({"values": [0, 256]}, "less than or equal to 255"),
        ({"ignore_index": 0}, "source.ignore_index is 0, the index of class 'ground'"),
    ],
)
def test_values_that_cannot_be_are_refused(
    tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        masks_of(tmp_path, [0, 1], **options)
