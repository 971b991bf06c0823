"""Interquartile means, intervals, profiles and probabilities: arithmetic, and every resample."""

import itertools

import numpy as np
import pytest

from murmur.comparison.statistics import (
    Scores,
    bootstrap,
    estimate,
    interquartile_mean,
    normalise,
    percentile_interval,
    performance_profile,
    probability_of_improvement,
    resample,
)

# Two tables of [runs, tasks], and what rliable 1.2.0 gives for them with 50 000 resamples.
FIRST = np.array(
    [
        *([0.5, 0.56, 0.445], [0.322, 0.409, 0.302], [0.512, 0.768, 0.402]),
        *([0.376, 0.598, 0.571], [0.521, 0.314, 0.494], [0.639, 0.231, 0.408]),
    ]
)
SECOND = np.array(
    [
        *([0.22, 0.342, 0.232], [0.553, 0.347, 0.654], [0.631, 0.563, 0.097]),
        *([0.492, 0.59, 0.623], [0.294, 0.504, 0.404]),
    ]
)
RLIABLE_IQM = {"value": 0.4627, "low": 0.3913, "high": 0.5259}
RLIABLE_IMPROVEMENT = {"value": 0.5444, "low": 0.3222, "high": 0.7667}


def column(*values: float) -> Scores:
    """Scores of runs of one task."""
    return np.array(values)[:, None]


def test_interquartile_mean_by_hand() -> None:
    # 8 scores: the 2 lowest and the 2 highest are left out; (3 + 4 + 5 + 7) / 4 = 4.75
    assert interquartile_mean(column(9, 1, 3, 100, 4, -50, 7, 5)) == 4.75
    # 5 scores: floor(5 / 4) = 1 at each end; (2 + 3 + 4) / 3 = 3
    assert interquartile_mean(column(2, 3, 4, -1000, 1000)) == 3
    # 3 scores: none is left out
    assert interquartile_mean(column(1, 2, 6)) == 3
    # two tasks of 2 runs: 4 scores together, the middle two; (2 + 10) / 2 = 6
    assert interquartile_mean(np.array([[1.0, 10.0], [2.0, 20.0]])) == 6


def test_probability_of_improvement_by_hand() -> None:
    # Pairs of (1, 3) and (2, 3): 1<2, 1<3, 3>2, 3=3 -> (0 + 0 + 1 + 0.5) / 4
    assert probability_of_improvement(column(1, 3), column(2, 3)) == 0.375
    # A second task in which every run wins: (0.375 + 1) / 2
    both = np.array([[1.0, 9.0], [3.0, 8.0]]), np.array([[2.0, 0.0], [3.0, 1.0]])
    assert probability_of_improvement(*both) == 0.6875


def test_performance_profile_by_hand() -> None:
    profile = performance_profile(column(1, 2, 2, 4), np.array([0.0, 1.0, 2.0, 4.0]))
    np.testing.assert_array_equal(profile, [1, 0.75, 0.25, 0])


def test_normalise_by_hand() -> None:
    scores = np.array([[10.0, 5.0], [20.0, 5.0]])
    scaled = normalise(scores, np.array([0.0, 5.0]), np.array([40.0, 5.0]))
    np.testing.assert_array_equal(scaled, [[0.25, 1], [0.5, 1]])


def every_resample(scores: Scores) -> Scores:
    """All ways to draw runs with replacement, for each task on its own."""
    runs, tasks = scores.shape
    draws = list(itertools.product(range(runs), repeat=runs))
    return np.array(
        [
            np.stack([scores[list(draw), task] for task, draw in enumerate(drawn)], axis=1)
            for drawn in itertools.product(draws, repeat=tasks)
        ]
    )


@pytest.mark.parametrize(
    "scores",
    [column(0, 1, 4, 10), np.array([[0.0, 5.0], [1.0, 7.0], [4.0, 20.0]])],
    ids=["256 resamples of four runs", "729 resamples of three runs of two tasks"],
)
def test_bootstrap_agrees_with_every_resample(scores: Scores) -> None:
    exact = interquartile_mean(every_resample(scores))
    drawn = bootstrap(interquartile_mean, scores, seed=3, repeats=40_000)
    assert set(np.round(drawn, 9)) <= set(np.round(exact, 9))
    for value in np.unique(np.round(exact, 9)):  # each is drawn as often as it should be
        share = np.mean(np.isclose(exact, value))
        assert np.mean(np.isclose(drawn, value)) == pytest.approx(share, abs=0.01)
    # Quantiles of few values jump: allow for a neighbouring one.
    low, high = percentile_interval(drawn)
    assert np.quantile(exact, 0.015) <= low <= np.quantile(exact, 0.035)
    assert np.quantile(exact, 0.965) <= high <= np.quantile(exact, 0.985)


def test_every_task_is_resampled_on_its_own() -> None:
    scores = np.array([[0.0, 10.0], [1.0, 11.0]])
    drawn = resample(scores, 500, np.random.default_rng(0))
    assert set(drawn[..., 0].ravel()) == {0, 1}
    assert set(drawn[..., 1].ravel()) == {10, 11}
    same_runs = (drawn[..., 0] == drawn[..., 1] - 10).all(axis=1)
    assert 0.15 < same_runs.mean() < 0.35  # 1/4 by chance; rows drawn whole would give 1


def test_estimates_agree_with_rliable() -> None:
    for found, told in (
        (estimate(interquartile_mean, FIRST), RLIABLE_IQM),
        (estimate(probability_of_improvement, FIRST, SECOND), RLIABLE_IMPROVEMENT),
    ):
        assert found.value == pytest.approx(told["value"], abs=1e-4)
        assert found.low == pytest.approx(told["low"], abs=0.012)
        assert found.high == pytest.approx(told["high"], abs=0.012)


def test_same_seed_gives_the_same_interval() -> None:
    assert estimate(interquartile_mean, FIRST) == estimate(interquartile_mean, FIRST)
    assert estimate(interquartile_mean, FIRST) != estimate(interquartile_mean, FIRST, seed=1)


def test_a_single_run_has_no_interval() -> None:
    assert estimate(interquartile_mean, column(3)) == (3, None, None)
