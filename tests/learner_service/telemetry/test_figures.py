"""Figures of an evaluation: in TensorBoard, in the run's folder, sent to trackers."""

import io
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from murmur.learner_service.telemetry.figures import Figures, confusion_matrix, of_masks, png
from murmur.learner_service.telemetry.progress import Progress, ProgressLog
from murmur.learner_service.telemetry.tracking import Forwarder
from murmur.shared.config.experiment import TrackingConfig

RED = np.full((4, 5, 3), (255, 0, 0), np.uint8)
SUMMARY = {"return": {"mean": 1.0}}


def board_of(run: Path) -> EventAccumulator:
    board = EventAccumulator(str(run / "tensorboard"), {"histograms": 0})  # all of them
    board.Reload()
    return board


def test_a_cells_colour_is_its_share_of_the_row() -> None:
    picture = confusion_matrix(np.array([[8, 0], [3, 1]]), ("floor", "wall"))
    grid = picture[-6 - 72 : -6, :]  # two rows of 36 pixels above the margin
    left = int(np.flatnonzero((grid[2] == (8, 48, 107)).all(1))[0])  # of the first full cell
    shades = grid[[2, 2, 38, 38], [left + 2, left + 38, left + 2, left + 38], 0]
    # 255 + share (8 - 255), for shares of 1, 0, 3/4 and 1/4
    assert shades.tolist() == [8, 255, 70, 193]


@pytest.mark.parametrize("classes", [1, 19, 255])
def test_any_number_of_classes_is_drawn(classes: int) -> None:
    names = tuple(f"class{i}" for i in range(classes))
    picture = confusion_matrix(np.eye(classes, dtype=np.int64), names)
    assert max(picture.shape[:2]) < 1200


def test_large_images_are_shown_small() -> None:
    image = torch.randint(256, (2, 3, 500, 300), dtype=torch.uint8)
    mask = torch.zeros(2, 500, 300, dtype=torch.uint8)
    found = of_masks(image, mask, mask, np.eye(2, dtype=np.int64), ("a", "b")).pictures
    assert found["masks"].shape == (2 * 167 + 4, 3 * 100 + 2 * 4, 3)  # every third pixel
    assert (found["masks"][:167, :100] == image[0, :, ::3, ::3].permute(1, 2, 0).numpy()).all()


def test_figures_are_drawn_at_their_interval(tmp_path: Path) -> None:
    made: list[int] = []

    def figures() -> Figures:
        made.append(len(made))
        return Figures({"masks": RED}, {"episodes/return": [1.0, float("nan"), 2.0]})

    log = ProgressLog(tmp_path, Progress(), num_agents=1, figures_every=2)
    for i in range(4):
        log.write_evaluation(i, 10 * i, SUMMARY, figures)
    log.close()
    board = board_of(tmp_path)
    assert made == [0, 1]
    images = board.Images("figures/masks")
    assert [image.step for image in images] == [0, 20]
    assert (np.asarray(Image.open(io.BytesIO(images[0].encoded_image_string))) == RED).all()
    assert [point.histogram_value.num for point in board.Histograms("episodes/return")] == [2, 2]
    assert (np.asarray(Image.open(tmp_path / "figures" / "masks.png")) == RED).all()
    found = Forwarder(tmp_path, "wandb", TrackingConfig(loggers=("wandb",)))._new_media()
    assert list(found) == ["figures/masks.png"]


def test_a_folder_that_cannot_be_made_costs_the_files_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "figures").touch()
    log = ProgressLog(tmp_path, Progress(), num_agents=1)
    with caplog.at_level(logging.ERROR):
        log.write_evaluation(1, 1, SUMMARY, lambda: Figures({"masks": RED}))
    log.close()
    assert "it is a file" in caplog.text
    assert "training continues" in caplog.text
    assert board_of(tmp_path).Tags()["images"] == ["figures/masks"]


def test_nothing_is_made_at_interval_0(tmp_path: Path) -> None:
    log = ProgressLog(tmp_path, Progress(), num_agents=1, figures_every=0)
    log.write_evaluation(1, 1, SUMMARY, lambda: pytest.fail("made"))
    log.close()


def test_a_png_is_what_was_drawn() -> None:
    assert (np.asarray(Image.open(io.BytesIO(png(RED)))) == RED).all()
