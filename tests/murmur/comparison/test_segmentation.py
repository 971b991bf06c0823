"""What the commands make of a run of segmentation: scores, masks, pictures, a page."""

import json
import re
from pathlib import Path

import cv2
import imageio.v2 as imageio
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from murmur.cli import app
from murmur.comparison.segmentation import (
    Measured,
    load_trained,
    measure,
    open_source,
    segment_folder,
)
from murmur.comparison.segmentation_report import render_segmentation_page
from murmur.learner_service.checkpoint.contents import source_text
from murmur.learner_service.checkpoint.folder import CheckpointFolder
from murmur.learner_service.device.precision import Precision
from murmur.learner_service.learning.confusion import f_scores
from murmur.learner_service.learning.supervised import build_supervised
from murmur.learner_service.telemetry.figures import painted, palette, sheet
from murmur.runs.run_folder import RunFolder
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.config.files import save
from murmur.shared.config.section import validate
from murmur.shared.process.errors import ConfigError
from murmur.shared.wire.samples import IMAGE, MASK
from tests.learner_service.toys import CPU
from tests.murmur.comparison.test_report import Balanced

SIDE = 24


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run of tiny portraits that has learned nothing yet."""
    from murmur.env_service.sources.source import make_source

    given = {
        "run": {"name": "portraits"},
        "source": {"name": "faces", "size": SIDE, "train": 2, "valid": 5},
        "algorithm": {"name": "segmentation", "epochs": 2},
        "network": {"name": "unet", "channels": [8, 8], "groups": 2},
        "augment": {"preset": "progressive"},
    }
    config = validate(ExperimentConfig, given)
    folder = RunFolder.create(config, tmp_path_factory.mktemp("runs") / "portraits-1")
    save(config, folder.path / "config.yaml")
    spec = make_source(config.source).spec
    algorithm = build_supervised(config, spec, Precision("fp32", CPU), CPU)
    state = {
        "source": source_text(spec),
        "config": config.model_dump_json(),
        "algorithm": algorithm.state_dict(),
        "progress": {"updates": 4},
        "best": 0.1,
    }
    CheckpointFolder(folder.path, 1).save_best(state)
    lines = [
        {"kind": "progress", "seconds": 1.0, "updates": 2, "env_steps": 4, "losses": {"dice": 0.5}},
        {
            "kind": "evaluation",
            **{"updates": 2, "env_steps": 4},
            "metrics": {"f_score": {"mean": 0.1, "std": 0.0, "ci95": [0.1, 0.1]}},
        },
    ]
    folder.progress_file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def words(run: RunFolder, *arguments: str) -> tuple[int, str]:
    """Exit code and what a command prints, in one line."""
    command, *rest = arguments
    result = CliRunner().invoke(app, [command, str(run.path), *rest])
    if isinstance(result.exception, ConfigError):
        return 2, str(result.exception)
    return result.exit_code, " ".join(result.output.split())


def test_scores_are_those_of_the_confusion_matrix(run: RunFolder) -> None:
    trained, _ = load_trained(run, "best")
    source = open_source(trained)
    measured = measure(trained, source)
    samples = [source.read("valid", i) for i in range(5)]
    image, mask = (torch.from_numpy(np.stack([s[n] for s in samples])) for n in (IMAGE, MASK))
    assert (measured.matrix == trained.algorithm.confusion([(image, mask)])).all()
    low, high = measured.interval()
    record = measured.record("best.pt")
    assert low <= record["f_score"] <= high
    assert record["f_score"] == pytest.approx(np.nanmean(f_scores(measured.matrix)))
    assert json.loads(json.dumps(record, allow_nan=False)) == record


def test_interval_of_equal_images_is_a_point() -> None:
    matrices = np.array([[[3, 1], [0, 2]]] * 4)
    low, high = Measured(("a", "b"), matrices, 0).interval()
    assert low == pytest.approx(high)


def test_pictures_keep_their_size_and_get_the_policys_classes(run: RunFolder) -> None:
    trained, _ = load_trained(run, "best")
    image = torch.randint(0, 256, (2, 3, SIDE, SIDE), dtype=torch.uint8)
    ours = trained.segmenter({IMAGE: image})
    theirs = trained.algorithm.make_policy().act({IMAGE: image}, None)
    torch.testing.assert_close(ours["logits"], theirs["logits"])
    other = trained.segmenter({IMAGE: image[:, :, :17]})
    assert other[MASK].shape == (2, 17, SIDE)
    assert other["logits"].shape == (2, 19, 17, SIDE)


def test_a_folder_of_pictures_gets_masks(run: RunFolder, tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    for name, shape in (("one.jpg", (30, 41, 3)), ("two.png", (12, 9, 3))):
        cv2.imwrite(str(photos / name), np.random.default_rng(0).integers(0, 256, shape, np.uint8))
    (photos / "three.png").write_bytes(b"no picture")
    code, said = words(run, "evaluate", "--folder", str(photos), "--out", str(tmp_path / "masks"))
    assert code == 0
    assert re.search("left out .format.*three.png", said)
    assert "written: 2 masks" in said
    sizes = {}
    for file in sorted((tmp_path / "masks").iterdir()):
        mask = cv2.imread(str(file), cv2.IMREAD_UNCHANGED)
        assert mask.max() < 19
        sizes[file.name] = mask.shape
    assert sizes == {"one.png": (30, 41), "two.png": (12, 9)}


def test_folders_that_give_no_masks_are_refused(run: RunFolder, tmp_path: Path) -> None:
    trained, _ = load_trained(run, "best")
    for folder, out, match in (
        (tmp_path / "nowhere", tmp_path / "m", "there is no such folder"),
        (tmp_path, tmp_path / "m", r"it has no \.jpg or \.png file"),
    ):
        with pytest.raises(ConfigError, match=match):
            segment_folder(trained, folder, out, print)
    for name in ("a.jpg", "a.png"):
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match="two pictures are called 'a'"):
        segment_folder(trained, tmp_path, tmp_path / "m", print)
    assert words(run, "evaluate", "--out", "x") == (2, "--out x needs --folder: which pictures?")


def test_evaluate_prints_each_class_and_writes_json(run: RunFolder, tmp_path: Path) -> None:
    code, said = words(run, "evaluate", "--json", str(tmp_path / "scores.json"))
    assert code == 0
    for word in ("5 images", "F-score", "mIoU", "l_brow", "background"):
        assert word in said
    assert json.loads((tmp_path / "scores.json").read_text())["images"] == 5


def test_render_draws_images_masks_and_predictions(run: RunFolder, tmp_path: Path) -> None:
    code, _ = words(run, "render", "--out", str(tmp_path / "masks.png"))
    assert code == 0
    picture = imageio.imread(tmp_path / "masks.png")
    tile = SIDE * 4  # enlarged to 96 pixels; 5 rows of 3, with gaps of 4
    assert picture.shape[:2] == (5 * tile + 4 * 4, 3 * tile + 2 * 4)
    code, said = words(run, "render", "--out", "x.gif")
    assert code == 2
    assert "are written as .png" in said


def test_report_is_one_page_with_scores_and_pictures(run: RunFolder) -> None:
    said: list[str] = []
    page = render_segmentation_page(run, "best", said.append)
    parser = Balanced()
    parser.feed(page)
    assert parser.open == []
    assert not re.search(r"(?:src|href)=.https?:", page)
    assert page.count("data:image/png;base64,") == 3  # confusion, predictions, augmentation
    for text in ("commonest class", "l_brow", "Validation: f score", "progressive", "source.size"):
        assert text in page
    assert "NaN" not in re.sub(r'base64,[^"]*', "", page)
    assert said == ["measuring best.pt on 5 images"]


def test_a_run_without_checkpoint_has_a_page_too(run: RunFolder, tmp_path: Path) -> None:
    empty = RunFolder.create(run.config(), tmp_path / "portraits-2")
    save(run.config(), empty.path / "config.yaml")
    said: list[str] = []
    page = render_segmentation_page(empty, "best", said.append)
    assert "no network to measure" in said[0]
    assert "source.size" in page


def test_another_data_set_is_not_measured(run: RunFolder) -> None:
    trained, _ = load_trained(run, "best")
    config = validate(
        ExperimentConfig, {**trained.config.model_dump(), "source": {"name": "faces", "size": 16}}
    )
    other = type(trained)(trained.algorithm, trained.segmenter, trained.spec, config)
    with pytest.raises(ConfigError, match="is not what the run learned from"):
        open_source(other)


def test_classes_have_colours_of_their_own() -> None:
    colours = palette(19)
    assert len({tuple(c) for c in colours[:19].tolist()}) == 19
    assert painted(np.array([[0, 255]]), 19).tolist() == [[[0, 0, 0], [128, 128, 128]]]


def test_a_sheet_places_pictures_in_rows() -> None:
    red = np.full((100, 50, 3), (255, 0, 0), np.uint8)
    found = sheet([[red, red], [red]])
    assert found.shape == (204, 104, 3)
    assert found[150, 10].tolist() == [255, 0, 0]
    assert found[150, 80].tolist() == [255, 255, 255]  # nothing there
