"""Source `folder`: what is wrong with the folder is refused, what is wrong with a file named."""

import os
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from PIL import Image

from murmur.env_service.sources.folder import Folder
from murmur.env_service.sources.source import BrokenSample, make_source, read_sample
from murmur.shared.config import PluginConfig
from murmur.shared.process.errors import ConfigError

H, W = 20, 30


def write(root: Path, count: int = 6, classes: str = "ground\nleft\nright\n") -> Path:
    """A small data set; mask i has the value i % 3 in its upper half, 0 below."""
    (root / "images").mkdir(parents=True)
    (root / "masks").mkdir()
    (root / "classes.txt").write_text(classes)
    for i in range(count):
        mask = np.zeros((H, W), np.uint8)
        mask[: H // 2] = i % 3
        suffix = "jpg" if i % 2 else "png"
        Image.fromarray(np.full((H, W, 3), 20 * i % 256, np.uint8)).save(
            root / f"images/{i}.{suffix}"
        )
        Image.fromarray(mask).save(root / f"masks/{i}.png")
    return root


def folder(root: Path, **options: Any) -> Folder:
    source = make_source(PluginConfig(name="folder", path=str(root), **options))
    assert isinstance(source, Folder)
    return source


def lists(root: Path, train: str, valid: str, valid_name: str = "valid.txt") -> None:
    (root / "train.txt").write_text(train)
    (root / valid_name).write_text(valid)


def test_samples_have_the_configured_size(tmp_path: Path) -> None:
    lists(write(tmp_path), "1\n", "0.png\nimages/2.png\n", "val.txt")
    source = folder(tmp_path, size=[16, 24], flip_pairs=[["left", "right"]])
    assert source.spec.sizes == (1, 2)
    assert source.spec.classes == ("ground", "left", "right")
    assert source.spec.flip_pairs == ((1, 2),)
    sample = read_sample(source, "valid", 1)
    assert sample["image"].shape == (3, 16, 24)
    np.testing.assert_array_equal(sample["image"], 40)
    np.testing.assert_array_equal(sample["mask"][:8], 2)
    np.testing.assert_array_equal(sample["mask"][8:], 0)


def test_channels_are_red_green_blue(tmp_path: Path) -> None:
    write(tmp_path)
    Image.new("RGB", (W, H), (200, 100, 50)).save(tmp_path / "images/0.png")
    lists(tmp_path, "1", "0")
    image = read_sample(folder(tmp_path, size=16), "valid", 0)["image"]
    assert image[:, 0, 0].tolist() == [200, 100, 50]


def test_seeded_split_covers_everything_once(tmp_path: Path) -> None:
    write(tmp_path, 10)
    source = folder(tmp_path, valid_share=0.3)
    assert source.spec.sizes == (7, 3)
    splits = source._splits
    assert sorted(splits["train"] + splits["valid"]) == [str(i) for i in range(10)]
    assert folder(tmp_path, valid_share=0.3)._splits == splits
    assert folder(tmp_path, valid_share=0.3, split_seed=1)._splits != splits
    assert folder(tmp_path, valid_share=0.3, train=2).spec.sizes == (2, 3)


def test_image_turned_by_exif_fits_its_upright_mask(tmp_path: Path) -> None:
    write(tmp_path)
    exif = Image.Exif()
    exif[0x0112] = 6  # turn clockwise to see it upright
    stored = Image.fromarray(np.zeros((W, H, 3), np.uint8))
    stored.paste((255, 255, 255), (0, 0, H // 2, W))  # its left half is the upright image's top
    stored.save(tmp_path / "images/1.jpg", exif=exif)
    lists(tmp_path, "0", "1")
    sample = read_sample(folder(tmp_path, size=[H, W]), "valid", 0)
    assert sample["image"][0, 2].min() > 200
    assert sample["image"][0, -2].max() < 50
    assert sample["mask"][2].min() == 1


def test_broken_files_are_named_with_a_reason(tmp_path: Path) -> None:
    write(tmp_path, 8)
    jpeg = (tmp_path / "images/1.jpg").read_bytes()
    (tmp_path / "images/1.jpg").write_bytes(jpeg[: len(jpeg) // 2])
    Image.fromarray(np.zeros((H, W + 1), np.uint8)).save(tmp_path / "masks/2.png")
    Image.fromarray(np.full((H, W), 3, np.uint8)).save(tmp_path / "masks/3.png")
    (tmp_path / "images/4.png").write_bytes(b"no picture")
    Image.new("RGB", (W, H), (1, 2, 3)).save(tmp_path / "masks/5.png")
    lists(tmp_path, "\n".join("123456"), "0\n7")
    source = folder(tmp_path, size=16)
    (tmp_path / "masks/6.png").unlink()
    found = {}
    for index in range(6):
        with pytest.raises(BrokenSample) as caught:
            read_sample(source, "train", index)
        assert str(tmp_path) in caught.value.detail
        found[index + 1] = caught.value.reason
    assert found == {
        1: "unreadable",
        2: "mask_size",
        3: "class_range",
        4: "format",
        5: "mask_format",
        6: "unreadable",
    }
    assert read_sample(source, "valid", 0)["mask"].max() == 0


def test_ignored_pixels_are_in_range(tmp_path: Path) -> None:
    write(tmp_path)
    Image.fromarray(np.full((H, W), 9, np.uint8)).save(tmp_path / "masks/0.png")
    lists(tmp_path, "1", "0")
    assert read_sample(folder(tmp_path, ignore_index=9), "valid", 0)["mask"].min() == 9


def test_digest_follows_the_files(tmp_path: Path) -> None:
    write(tmp_path / "a")
    write(tmp_path / "b")
    first = folder(tmp_path / "a").spec
    assert first == folder(tmp_path / "b").spec
    assert first.digest != folder(tmp_path / "a", ignore_index=7).spec.digest
    with (tmp_path / "b/images/0.png").open("ab") as file:
        file.write(b"more")
    assert first.digest != folder(tmp_path / "b").spec.digest


def change(root: Path, what: str) -> None:
    """Break a folder in one way."""
    if what == "no images":
        for file in (root / "images").iterdir():
            file.rename(root / file.name)
    elif what == "no masks":
        (root / "masks").rename(root / "labels")
    elif what == "missing masks":
        for i in (0, 1, 2, 4):
            (root / f"masks/{i}.png").unlink()
    elif what == "one stem twice":
        (root / "images/0.jpg").touch()
    elif what == "no class names":
        (root / "classes.txt").unlink()
    elif what == "one class":
        (root / "classes.txt").write_text("all\n")
    elif what == "a class twice":
        (root / "classes.txt").write_text("a\nb\na\n")
    elif what == "one list":
        (root / "train.txt").write_text("0\n")
    elif what == "empty list":
        lists(root, "0\n1\n", "\n")
    elif what == "unknown stem":
        lists(root, "0\n1\n", "8.jpg\n")
    elif what == "a leak":
        lists(root, "0\n1\n", "1\n2\n")
    elif what == "twice":
        lists(root, "0\n0\n", "1\n")
    elif what == "list of bytes":
        (root / "train.txt").write_bytes(b"\xff\xfe")
        (root / "valid.txt").touch()
    elif what == "colours":
        for i in range(6):
            Image.new("RGB", (W, H), (1, 2, 3)).save(root / f"masks/{i}.png")


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("no images", "images has no *.jpg or *.jpeg or *.png"),
        ("no masks", "there is no folder"),
        ("missing masks", "4 of 6 images have no mask"),
        ("one stem twice", "have the same stem: remove one"),
        ("no class names", "one a line in the order of their indices, or set source.classes"),
        ("one class", "has 1 lines"),
        ("a class twice", "names class 'a' twice"),
        ("one list", "is there, valid.txt is not: write both, or remove it"),
        ("empty list", "split 'valid' is empty"),
        ("unknown stem", "names '8'; not in"),
        ("a leak", "'1' in both train.txt and valid.txt"),
        ("twice", "names '0' twice"),
        ("list of bytes", "is no text in UTF-8"),
        ("colours", "the masks are no class indices"),
    ],
)
def test_wrong_folder_is_refused_at_the_start(tmp_path: Path, what: str, words: str) -> None:
    change(write(tmp_path), what)
    with pytest.raises(ConfigError) as caught:
        folder(tmp_path)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"path": "nowhere"}, "'nowhere' is no folder; murmur downloads nothing"),
        ({"train": 6}, "source.train = 6, but split 'train'"),
        ({"flip_pairs": [["left", "top"]]}, "source.flip_pairs names 'top'"),
        ({"size": 5000}, "'source.size"),
        ({"classes": ["a", "a"]}, "'a' stands for two classes; give each class one"),
        ({"sise": 64}, "unknown key 'source.sise'; did you mean 'size'?"),
    ],
)
def test_wrong_option_is_refused_with_a_message(
    tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    write(tmp_path)
    with pytest.raises(ConfigError) as caught:
        make_source(PluginConfig(name="folder", **{"path": str(tmp_path), **options}))
    assert words in str(caught.value)


def test_one_image_cannot_be_split(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"split 'train' is empty: .* has 1 image"):
        folder(write(tmp_path, 1))


def test_what_is_no_file_of_the_data_set_is_left_out(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "images/.hidden.jpg").touch()
    (tmp_path / "images/notes.txt").touch()
    os.mkfifo(tmp_path / "images/pipe.jpg")
    assert sum(folder(tmp_path).spec.sizes) == 6


def test_workers_leave_the_other_cores_alone(tmp_path: Path) -> None:
    folder(write(tmp_path))
    assert cv2.getNumThreads() == 1
