"""What the comparison of augmentations makes of confusion matrices."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import segmentation_learning


def _scored(*right: tuple[int, int]) -> segmentation_learning.Scored:
    """Seeds that classify given numbers of 4 pixels of two classes correctly, of one image."""
    matrices = np.array([[[[a, 4 - a], [4 - b, b]]] for a, b in right])
    return segmentation_learning.over_seeds(matrices)


def test_a_presets_score_is_the_mean_of_its_seeds() -> None:
    # Seed 1: all right, F = 1. Seed 2: class 0 has TP 2, FN 2, FP 0 and F = 4 / 6,
    # class 1 has TP 4, FP 2 and F = 8 / 10; their mean is 11 / 15.
    found = segmentation_learning.joint(_scored((4, 4), (2, 4)))
    assert found["f_score"] == pytest.approx((1 + 11 / 15) / 2)
    # One image a seed: a draw takes seed 1 twice, both, or seed 2 twice.
    assert (found["low"], found["high"]) == pytest.approx((11 / 15, 1))


def test_a_gain_is_of_the_same_seeds_and_images() -> None:
    apart, same = (_scored((4, 4), (2, 4)) for _ in range(2))
    found = segmentation_learning.gains({"none": apart, "same": same})
    assert found == {"same over none": {"gain": 0, "low": 0, "high": 0}}  # though each varies


def test_the_page_names_every_run(tmp_path: Path) -> None:
    measured = {
        "f_score": 0.5,
        "f_score_ci95": [0.4, 0.6],
        "miou": 0.3,
        "accuracy": 0.9,
        "majority_f_score": 0.04,
    }
    run = {
        "minutes": 5.0,
        "cpu_minutes": None,
        "measured": measured,
        "curve": [{"minutes": 1.0, "updates": 80, "f_score": 0.2}],
    }
    record = {
        "command": "python -m x",
        "date": "2026-11-23T00:00:00",
        "commit": "0" * 10,
        "machine": {"cores": 2, "cpu": "AMD", "gpu": ""},
        "runs": {"none": {"1": run}},
        "presets": {"none": {"f_score": 0.5, "low": 0.4, "high": 0.6}},
        "gains": {},
    }
    segmentation_learning.write(record, tmp_path / "faces-learning.json")
    page = (tmp_path / "faces-learning.md").read_text()
    assert "| none | 1 | 5.0 |  | 0.500 [0.400, 0.600] | 0.300 | 0.900 | 0.040 |" in page
    assert json.loads((tmp_path / "faces-learning.json").read_text()) == record
    assert (tmp_path / "faces-learning.svg").read_text().startswith("<svg")
