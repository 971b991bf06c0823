"""`murmur check-source` counts what is broken and tells what a source holds."""

from pathlib import Path

import cv2
import numpy as np
import pytest
from rich.console import Console

from murmur.check_source import examine, show, write_sheet
from murmur.cli import main
from murmur.settings import resolve, source_config
from shared.config import ExperimentConfig, PluginConfig
from shared.errors import ConfigError
from shared.samples import SampleSpec
from shared.spec import ArraySpec
from shared.timestep import Array
from tests.env_service.sources.test_folder import lists, write


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
    assert resolve(config, ["source"])["source"] == {"name": plugin.name, "depth": 0}
