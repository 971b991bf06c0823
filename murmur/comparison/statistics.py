"""Figures that compare groups of runs, with stratified-bootstrap intervals.

Agarwal et al. 2021, "Deep Reinforcement Learning at the Edge of the Statistical Precipice"
(arXiv:2108.13264). Scores are [R, M]: R runs of each of M tasks; larger is better.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Scores = NDArray[np.float64]
LEVEL = 0.95
REPEATS = 10_000  # of the bootstrap: the second digit of an interval's half-width is stable
_AT_ONCE = 4_000_000  # numbers of resampled scores that are held at a time


class Estimate(NamedTuple):
    """A figure with its interval.

    Attributes:
        value: value computed from all runs.
        low, high: ends of the interval; None if a group has a single run.
    """

    value: float
    low: float | None
    high: float | None


def interquartile_mean(scores: Scores) -> Scores:
    """Return the mean of the middle half of all runs' scores of all tasks.

    The lowest and the highest floor(N / 4) of the N = R M scores are left out.

    Args:
        scores: [..., R, M] scores of R runs on M tasks.

    Returns:
        [...] mean.
    """
    flat = np.sort(scores.reshape(*scores.shape[:-2], -1), axis=-1)
    cut = flat.shape[-1] // 4
    return np.asarray(flat[..., cut : flat.shape[-1] - cut].mean(-1))


def performance_profile(scores: Scores, thresholds: Scores) -> Scores:
    """Return the share of scores above each threshold.

    Args:
        scores: [..., R, M] scores of R runs on M tasks.
        thresholds: [K] thresholds.

    Returns:
        [..., K] shares, falling from 1 to 0.
    """
    flat = scores.reshape(*scores.shape[:-2], -1)
    return np.stack([(flat > threshold).mean(-1) for threshold in thresholds], axis=-1)


def probability_of_improvement(first: Scores, second: Scores) -> Scores:
    """Return the probability that a run of one group beats one of the other, mean over tasks.

    P = mean over tasks m, runs i, j of [x_im > y_jm] + [x_im = y_jm] / 2, the Mann-Whitney U
    statistic divided by the number of pairs.

    Args:
        first: [..., R1, M] scores of the first group.
        second: [..., R2, M] scores of the second group.

    Returns:
        [...] probability.
    """
    x, y = first[..., :, None, :], second[..., None, :, :]
    return np.asarray(((x > y) + 0.5 * (x == y)).mean((-3, -2, -1)))


def resample(scores: Scores, repeats: int, rng: np.random.Generator) -> Scores:
    """Draw runs with replacement, for each task on its own: tasks are the strata.

    Args:
        scores: [R, M, ...] scores of R runs on M tasks.
        repeats: number of resamples.
        rng: source of the draws.

    Returns:
        [repeats, R, M, ...] scores of the drawn runs.
    """
    runs, tasks = scores.shape[:2]
    drawn = rng.integers(runs, size=(repeats, runs, tasks))
    return np.asarray(scores[drawn, np.arange(tasks)])


def bootstrap(
    statistic: Callable[..., Scores], *groups: Scores, seed: int = 0, repeats: int = REPEATS
) -> Scores:
    """Return the statistic of resampled groups, each resampled independently.

    Returns:
        [repeats, ...] statistic of each resample.
    """
    rng = np.random.default_rng(seed)
    each = max(1, _AT_ONCE // sum(group.size for group in groups))
    # In chunks of at most _AT_ONCE numbers, so that memory stays bounded.
    counts = [min(each, repeats - start) for start in range(0, repeats, each)]
    parts = [statistic(*(resample(group, count, rng) for group in groups)) for count in counts]
    return np.concatenate(parts)


def percentile_interval(samples: Scores) -> tuple[Any, Any]:
    """Return the ends of the percentile interval of bootstrap samples, along their first axis."""
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(samples, [tail, 1 - tail], axis=0)
    return low, high


def estimate(statistic: Callable[..., Scores], *groups: Scores, seed: int = 0) -> Estimate:
    """Estimate a statistic of groups of runs with its interval.

    Args:
        statistic: function from [..., R, M] of each group to [...].
        groups: [R, M] scores of each group.
        seed: seed of the bootstrap.
    """
    value = float(statistic(*groups))
    if any(len(group) == 1 for group in groups):
        return Estimate(value, None, None)
    low, high = percentile_interval(bootstrap(statistic, *groups, seed=seed))
    return Estimate(value, float(low), float(high))


def normalise(scores: Scores, low: Scores, high: Scores) -> Scores:
    """Scale the scores of each task to [0, 1] by the lowest and highest of all runs compared.

    Gorsane et al. 2022, "Towards a Standardised Performance Evaluation Protocol for Cooperative
    MARL" (arXiv:2209.10485), section 5. A task in which all scores are equal gives 1.

    Args:
        scores: [R, M] scores of R runs on M tasks.
        low: [M] lowest scores.
        high: [M] highest scores.
    """
    width = np.where(high > low, high - low, 1.0)
    return np.asarray(np.where(high > low, (scores - low) / width, 1.0))
