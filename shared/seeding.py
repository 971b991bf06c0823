"""Episode seeds: a pure function of run seed, slot and episode number.

Never of wall time or order of arrival, so a run can be repeated and continued to the bit.
"""

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele et al. 2014): a bijection that scatters every bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def episode_seeds(
    run_seed: int, slots: NDArray[np.integer], episodes: NDArray[np.integer]
) -> NDArray[np.uint64]:
    """Seeds of the given episodes in the given slots.

    Args:
        run_seed: the run's seed, any non-negative integer below 2**64.
        slots: [N] the learner's slot of each environment.
        episodes: [N] the number of the episode within its slot, from 0.

    Returns:
        [N] uint64 seeds below 2**63 (so that they fit every library's idea of a seed).
    """
    seed = np.full(len(slots), run_seed, np.uint64)
    for part in (slots, episodes):
        seed = _mix((seed + _GOLDEN) ^ _mix(part.astype(np.uint64) + _GOLDEN))
    return seed >> np.uint64(1)
