"""Figures of results: names that do not overlap, bands over seeds, baselines chosen."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="needs the report extra")

from benchmarks.figures import Panel, chosen_baselines, draw, mean_and_range, spread


def test_names_far_apart_stay_where_they_are() -> None:
    assert spread([0.9, 0.1, 0.5], 0.1) == pytest.approx([0.9, 0.1, 0.5])


def test_names_that_touch_move_apart_around_their_middle() -> None:
    # 0.50 and 0.52 with a gap of 0.1: 0.46 and 0.56; the one at 0.6 joins them, 0.54 in the middle
    assert spread([0.52, 0.5], 0.1) == pytest.approx([0.56, 0.46])
    assert spread([0.52, 0.5, 0.6], 0.1) == pytest.approx([0.54, 0.44, 0.64])


def test_a_band_spans_the_seeds_where_all_have_points() -> None:
    curves = [
        [{"x": 0, "y": 0.0}, {"x": 10, "y": 10.0}, {"x": 30, "y": 10.0}],
        [{"x": 0, "y": 4.0}, {"x": 20, "y": 4.0}],
    ]
    line = mean_and_range(curves, "x", "y")
    np.testing.assert_allclose(line.x, [0, 10, 20])  # the shorter ends the line
    np.testing.assert_allclose(line.y, [2, 7, 7])
    np.testing.assert_allclose(line.low, [0, 4, 4])
    np.testing.assert_allclose(line.high, [4, 10, 10])
    assert not len(mean_and_range(curves[:1], "x", "y").low)


def test_random_and_the_best_baselines_are_shown() -> None:
    levels = {"a": 1.0, "random": 0.0, "b": 3.0, "c": 2.0}
    assert list(chosen_baselines(levels)) == ["random", "b", "c"]
    assert list(chosen_baselines(levels, less_is_better=True)) == ["random", "a", "c"]
    assert list(chosen_baselines({"a": 1.0})) == ["a"]


def test_a_figure_names_its_lines_and_follows_the_colour_scheme(tmp_path: Path) -> None:
    line = mean_and_range([[{"x": 0, "y": 0.0}, {"x": 1, "y": 1.0}]], "x", "y")
    file = tmp_path / "figure.svg"
    draw([Panel("return", "steps", {"trained": line}, {"random": 0.3})] * 4, file)
    text = file.read_text()
    assert text.startswith("<svg")
    assert "prefers-color-scheme:dark" in text
    assert text.count(">trained</text>") == text.count(">random</text>") == 4
