"""Sources are found by name or by path, and what they return is checked."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from murmur.env_service.sources.source import BrokenSample, make_source, read_sample
from murmur.shared.config import PluginConfig
from murmur.shared.process.errors import ConfigError
from murmur.shared.wire.samples import SampleSpec
from murmur.shared.wire.spec import ArraySpec
from murmur.shared.wire.timestep import Array

IMAGE = np.zeros((3, 4, 4), np.uint8)
MASK = np.zeros((4, 4), np.uint8)


class Toy:
    """Gives configured samples; `last` is the last pixel of the mask."""

    def __init__(self, given: Any = None, last: int = 0, ignore_index: int = 255) -> None:
        self.given, self.last = given, last
        self.spec = SampleSpec(
            name="toy",
            arrays=(
                ArraySpec("image", "uint8", (3, 4, 4), per_agent=False),
                ArraySpec("mask", "uint8", (4, 4), per_agent=False),
            ),
            sizes=(2, 1),
            digest="0" * 64,
            classes=("ground", "thing"),
            ignore_index=ignore_index,
        )

    def read(self, split: str, index: int) -> dict[str, Array]:
        if isinstance(self.given, Exception):
            raise self.given
        if self.given is not None:
            return self.given  # type: ignore[no-any-return]
        mask = MASK.copy()
        mask[-1, -1] = self.last
        return {"image": IMAGE, "mask": mask}


def toy_without_spec() -> object:
    return object()


def test_source_of_your_own_gets_options_as_keywords() -> None:
    source = make_source(PluginConfig(name=f"{__name__}:Toy", last=1))
    assert read_sample(source, "train", 0)["mask"][-1, -1] == 1


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("no_such", {}, "no source 'no_such'"),
        (f"{__name__}:Tox", {}, "did you mean 'Toy'"),
        (f"{__name__}:Toy", {"size": 3}, "unknown key 'source.size'"),
        (f"{__name__}:toy_without_spec", {}, "without a SampleSpec"),
    ],
)
def test_wrong_source_is_refused_with_a_message(
    name: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        make_source(PluginConfig(name=name, **options))


@pytest.mark.parametrize(
    ("given", "reason", "words"),
    [
        (ValueError("no\nfile"), "raised", "sample 1 of split 'train' of source 'toy' raised"),
        (BrokenSample("unreadable", "a.jpg"), "unreadable", "a.jpg"),
        ([], "wrong_arrays", "is a list"),
        ({"image": IMAGE}, "wrong_arrays", "has arrays ['image']"),
        ({"image": IMAGE, "mask": MASK[:2]}, "wrong_arrays", "'mask' is uint8 (2, 4)"),
        ({"image": IMAGE / 2, "mask": MASK}, "wrong_arrays", "'image' is float64"),
    ],
)
def test_wrong_sample_is_broken(given: Any, reason: str, words: str) -> None:
    with pytest.raises(BrokenSample) as caught:
        read_sample(Toy(given), "train", 1)
    assert caught.value.reason == reason
    assert words in caught.value.detail
    assert "\n" not in caught.value.detail


def test_class_out_of_range_is_named_and_ignored_one_is_not() -> None:
    assert read_sample(Toy(last=255), "train", 0)["mask"][-1, -1] == 255
    with pytest.raises(BrokenSample, match="has class 2 in 1 pixels; there are 2 classes"):
        read_sample(Toy(last=2), "train", 0)
    with pytest.raises(BrokenSample, match="class_range"):
        read_sample(Toy(last=255, ignore_index=7), "train", 0)


def test_arrays_are_contiguous() -> None:
    image = np.zeros((4, 4, 3), np.uint8).transpose(2, 0, 1)
    arrays = read_sample(Toy({"image": image, "mask": MASK}), "valid", 0)
    assert arrays["image"].flags.c_contiguous


def test_missing_opencv_is_said_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "cv2", None)
    with pytest.raises(ConfigError, match=r"this needs 'cv2', which is not installed: .*images"):
        make_source(PluginConfig(name="folder", path=str(tmp_path)))


def test_servers_without_images_import_no_opencv() -> None:
    code = (
        "import sys, murmur.env_service.app, murmur.env_service.worker_process, "
        "murmur.env_service.sources.folder, "
        "murmur.env_service.sources.faces; assert 'cv2' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
