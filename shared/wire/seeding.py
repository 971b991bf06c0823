"""Episode seeds: a pure function of run seed, slot and episode number.

They do not depend on wall time or order of arrival, so a run can be repeated and resumed bit for
bit.
"""

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply the finalizer of splitmix64 (Steele et al. 2014), a bijection that scatters bits."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def episode_seeds(
    run_seed: int, slots: NDArray[np.integer], episodes: NDArray[np.integer]
) -> NDArray[np.uint64]:
    """Return the seeds of the given episodes in the given slots.

    Args:
        run_seed: the run's seed, any non-negative integer below 2**64.
        slots: [N] the learner's slot of each environment.
        episodes: [N] number of the episode within its slot, from 0.

    Returns:
        [N] uint64 seeds below 2**63 (so that they fit every library's idea of a seed).
    """
    seed = np.full(len(slots), run_seed, np.uint64)
    for part in (slots, episodes):
        seed = _mix((seed + _GOLDEN) ^ _mix(part.astype(np.uint64) + _GOLDEN))
    return seed >> np.uint64(1)


def uniform(seeds: NDArray[np.uint64], count: int) -> NDArray[np.float32]:
    """Return random numbers that are a pure function of seed and index, for many seeds at once.

    A counter-based generator: thousands of episodes start in microseconds, and the draws of one
    copy of an environment do not depend on the others.

    Args:
        seeds: [N] uint64.
        count: number of draws per seed.

    Returns:
        [count, N] float32, uniform over [0, 1) in steps of 2**-24.
    """
    with np.errstate(over="ignore"):
        counter = np.arange(1, count + 1, dtype=np.uint64)[:, None] * _GOLDEN
    bits = _mix(_mix(seeds + _GOLDEN) + counter) >> np.uint64(40)
    return bits.astype(np.float32) * np.float32(2**-24)


def unit(seed: int, name: str) -> float:
    """Return a random number that is a pure function of an episode's seed and a name.

    Draws of different names are independent, and so are those of `uniform`.

    Args:
        seed: seed of the episode, below 2**64.
        name: name of what is drawn.

    Returns:
        number of 53 bits, uniform over [0, 1).
    """
    key = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")
    with np.errstate(over="ignore"):
        bits = _mix(_mix(np.array([seed], np.uint64) + _GOLDEN) ^ np.uint64(key))
    return int(bits[0] >> np.uint64(11)) * 2.0**-53


def shuffled(run_seed: int, epoch: int, size: int) -> NDArray[np.int32]:
    """Shuffle a data set's samples for an epoch, as a pure function of seed, epoch and size.

    Args:
        run_seed: the run's seed.
        epoch: number of the epoch, from 0.
        size: number of samples.

    Returns:
        [size] int32, a permutation of 0 .. size - 1.
    """
    keys = episode_seeds(run_seed, np.full(size, epoch), np.arange(size))
    return np.argsort(keys, kind="stable").astype(np.int32)
