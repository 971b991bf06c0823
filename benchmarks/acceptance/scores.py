"""Statistics of the acceptance tests: a seed's score, the seeds' joint score, its interval."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from murmur.env_service.sessions.evaluation_result import EvaluationResult

_RESAMPLES = 2000  # of the bootstrap

Floats = NDArray[np.float64]


def interquartile_mean(scores: Floats) -> float:
    """Return the mean of the middle half of the seeds, each of them the mean of its episodes.

    A quarter of the seeds, rounded down, is left out at each end: none if there are fewer than
    four. Agarwal et al. 2021, "Deep Reinforcement Learning at the Edge of the Statistical
    Precipice" (arXiv:2108.13264), section 4.3.

    Args:
        scores: [seeds, episodes] scores.
    """
    ordered = np.sort(scores.mean(axis=1))
    cut = len(ordered) // 4
    return float(ordered[cut : len(ordered) - cut].mean())


def bootstrap_interval(scores: Floats) -> tuple[float, float]:
    """Return the 95 % interval of the interquartile mean: resampled seeds, then their episodes.

    Args:
        scores: [seeds, episodes] scores.

    Returns:
        (low, high); the same scores always give the same interval.
    """
    random = np.random.default_rng(0)
    seeds, episodes = scores.shape
    values = []
    for _ in range(_RESAMPLES):
        chosen = scores[random.integers(seeds, size=seeds)]
        which = random.integers(episodes, size=(seeds, episodes))
        values.append(interquartile_mean(np.take_along_axis(chosen, which, axis=1)))
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)


def scores(result: EvaluationResult, steps: int) -> Floats:
    """Return S of each episode, [E]: its return or, if steps > 0, see `sums`."""
    return sums(result.curves["return"], steps) if steps else result.metrics["return"]


def sums(curves: Floats, steps: int) -> Floats:
    """Return the sum of each episode's first `steps` rewards, [E]; 0: of all its rewards.

    Where an episode ends before, the next one follows, after the last one the first.

    Args:
        curves: [E, T + 1] rewards so far; NaN after the end.
        steps: number of steps to count.
    """
    lengths = (~np.isnan(curves)).sum(axis=1) - 1
    found = np.zeros(len(curves))
    for first in range(len(curves)):
        left, episode = steps or lengths[first], first
        while left:
            taken = min(left, lengths[episode])
            found[first] += curves[episode, taken]
            left -= taken
            episode = (episode + 1) % len(curves)
    return found


def common_evaluations(seeds: Sequence[Mapping[int, float]]) -> tuple[list[int], Floats]:
    """Return the evaluations that all seeds have made, and their means.

    Args:
        seeds: mean returns of a seed's evaluations by their numbers, for each seed.

    Returns:
        numbers, in order, and [seeds, evaluations] means.
    """
    numbers = sorted(set(seeds[0]).intersection(*seeds[1:]))
    return numbers, np.array([[means[number] for number in numbers] for means in seeds])


def with_interval(score: float, low: float | None, high: float | None) -> str:
    """Format a score: "2.5 [2, 3]"; without the interval if it is a point or None."""
    known = low is not None and high is not None and low < high
    return f"{score:.4g}" + (f" [{low:.4g}, {high:.4g}]" if known else "")
