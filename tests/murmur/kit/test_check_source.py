"""`murmur check-source` counts what is broken and tells what a source holds."""

import re
from pathlib import Path

import cv2
import numpy as np
import pytest
from rich.console import Console

from murmur.cli import main
from murmur.kit.check_source import examine, show, write_sheet
from murmur.runs.settings import source_config, with_plugin_defaults
from murmur.shared.config import PluginConfig
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.process.errors import ConfigError
from murmur.shared.wire.samples import SampleSpec
from murmur.shared.wire.spec import ArraySpec
from murmur.shared.wire.timestep import Array
from tests.env_service.sources.test_folder import H, W, lists, write


class Restless:
    """A source that gives another sample each time."""

    def __init__(self, depth: int = 0) -> None:
        arrays = (ArraySpec("image", "uint8", (3, 4, 4), per_agent=False),)
        self.spec = SampleSpec("restless", arrays, (3, 1), "0" * 64, ("a", "b"))
        self.times = 0

    def read(self, split: str, index: int) -> dict[str, Array]:
        self.times += 1
        return {"image": np.full((3, 4, 4), self.times, np.uint8)}


def text_of(name: str, options: list[str], most: int = 0) -> str:
    console = Console(soft_wrap=True, highlight=False, width=200)
    with console.capture() as capture:
        show(examine(source_config(name, options), most), console)
    return capture.get()


def test_broken_samples_are_counted_by_reason(tmp_path: Path) -> None:
    lists(write(tmp_path), "1\n2\n3\n4", "0")
    for i in (1, 2):
        (tmp_path / f"masks/{i}.png").write_bytes(b"")
    text = text_of("folder", [f"path={tmp_path}", "size=16"])
    assert f"✗ 2 broken, unreadable: {tmp_path}/masks/1.png is empty" in text
    assert "4 samples to train on, 1 to validate with" in text
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if "%" in line}
    # of masks 3, 4 and 0 only the upper half of 4 is class 1: a half of a third
    assert rows == {
        "ground": ["83.33%", "100%"],
        "left": ["16.67%", "33%"],
        "right": ["0.00%", "0%"],
    }


def data_set(root: Path, train: list[list[int]], valid: list[list[int]], classes: str) -> Path:
    """A folder in which each mask holds the numbers that are listed for it."""
    write(root, len(train) + len(valid), classes)
    for k, numbers in enumerate([*train, *valid]):
        mask = np.resize(np.array(numbers, np.uint8), (H, W))
        cv2.imwrite(str(root / f"masks/{k}.png"), mask)
    names = [str(k) for k in range(len(train) + len(valid))]
    lists(root, "\n".join(names[: len(train)]), "\n".join(names[len(train) :]))
    return root


@pytest.mark.parametrize(
    ("train", "valid", "classes", "words", "usable"),
    [
        (
            [[0, 255]] * 3,
            [[0, 255]],
            "ground object",
            [
                "✗ class 'object' (1) is in none of 3 training samples: not learned. 255 is "
                "ignored (source.ignore_index): if it means 'object', write masks of 0 and 1, or "
                "set source.values=[0, 255]",
                "✗ class 'object' (1) is in none of 1 validation samples: f_score and miou are 0",
            ],
            False,
        ),
        (
            [[255]] * 3,
            [[0, 1]],
            "ground object",
            ["✗ all masks of 3 training samples hold 255 alone, which is ignored"],
            False,
        ),
        (
            [[0, 1], [1, 255]],
            [[0, 1, 2]],
            "a b c",
            [
                "! class 'c' (2) is in none of 2 training samples: not learned. 255 is ignored "
                "(source.ignore_index): if it means 'c', write 2 in its place, or set "
                "source.values=[0, 1, 255]",
                "! class 'c' (2) is in validation samples alone: the score of each is about 0",
            ],
            True,
        ),
        (
            [[0, 1, 2]],
            [[0, 1]],
            "a b c",
            ["! class 'c' (2) is in none of 1 validation samples: f_score and miou are means over"],
            True,
        ),
        (
            [[0, 1]],
            [[0, 1]],
            "a b c d e f g h",
            ["! classes 'c' (2), 'd' (3), 'e' (4), 'f' (5), 'g' (6) and 1 more are in none of 1"],
            True,
        ),
        ([[0, 1]], [[0, 1], [0, 255]], "ground object", [], True),
        (
            [[0, 128, 255]] * 2,
            [[0, 1]],
            "ground half object",
            ["✗ 2 broken, class_range: ", "set source.values if masks hold other numbers"],
            False,
        ),
    ],
    ids=["0 and 255", "ignored", "valid only", "train only", "many", "whole", "0, 128, 255"],
)
def test_classes_that_do_not_occur_are_named(
    tmp_path: Path,
    train: list[list[int]],
    valid: list[list[int]],
    classes: str,
    words: list[str],
    usable: bool,
) -> None:
    data_set(tmp_path, train, valid, "\n".join(classes.split()))
    options = [f"path={tmp_path}", f"size=[{H},{W}]"]
    text = text_of("folder", options)
    for line in words:
        assert line in text
    assert bool(words) or not re.search("✗|! class", text)
    assert examine(source_config("folder", options), 0).usable == usable


def test_part_of_a_source_proves_no_class_absent(tmp_path: Path) -> None:
    data_set(tmp_path, [[0, 255]] * 9, [[0, 255]], "ground\nobject")
    text = text_of("folder", [f"path={tmp_path}", "size=16"], most=4)
    assert "! class 'object' (1) is in none of 3 training samples" in text
    assert "! only some samples were read; --samples 0 reads all" in text


def test_every_damaged_file_is_named(tmp_path: Path) -> None:
    lists(write(tmp_path, 30), "\n".join(map(str, range(1, 30))), "0")
    for i in range(1, 24):
        (tmp_path / f"masks/{i}.png").write_bytes(b"")
    text = text_of("folder", [f"path={tmp_path}", "size=16"])
    assert "✗ 23 broken, unreadable: " in text
    assert text.count(".png is empty") == 20
    assert "and 3 more" in text


def test_source_that_changes_is_named() -> None:
    assert "read again, was another" in text_of(f"{__name__}:Restless", [])


def test_samples_of_both_splits_are_read() -> None:
    found = examine(PluginConfig(name="faces", size=16, train=30, valid=10), 8)
    assert found.read == 8
    assert not found.broken
    assert not found.changed
    assert found.pixels.sum() == 8 * 16 * 16


def test_command_writes_a_sheet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "sheet.png"
    options = ["--samples", "5", "--set", "size=16", "--sheet", str(file)]
    monkeypatch.setattr("sys.argv", ["murmur", "check-source", "faces", *options])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert "✓ 'faces': 5 samples can be used" in capsys.readouterr().out
    assert cv2.imread(str(file)).shape == (2 * 100 - 4, 8 * 100 - 4, 3)  # six times as large


def test_sheet_needs_masks(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no image with a mask"):
        write_sheet(examine(PluginConfig(name=f"{__name__}:Restless"), 0), tmp_path / "x.png")


def test_source_is_named_by_a_configuration(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("source: {name: faces, size: 64}\nalgorithm: {name: segmentation}\n")
    assert source_config(str(file), ["source.train=5"]).options == {"size": 64, "train": 5}
    with pytest.raises(ConfigError, match="has an environment, not a source"):
        source_config("spread", [])
    with pytest.raises(ConfigError, match="known: faces, folder"):
        source_config("fcaes", [])


def test_source_given_by_its_class_has_its_parameters_as_options() -> None:
    plugin = PluginConfig(name=f"{__name__}:Restless")
    config = ExperimentConfig(source=plugin)
    assert with_plugin_defaults(config, ["source"]).source == PluginConfig(
        name=plugin.name, depth=0
    )
