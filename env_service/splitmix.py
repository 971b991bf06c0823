"""SplitMix64 for compiled code: draws follow from a key alone.

Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators".
"""

import numpy as np
from numpy.typing import NDArray

from murmur.env_service.compiled import compiled


@compiled()
def mix(x: np.uint64) -> np.uint64:
    """Apply the finalizer of splitmix64: scatter 64 bits over 64 bits."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.uint64(x ^ (x >> np.uint64(31)))


@compiled()
def generator(seed: np.uint64, number: int) -> np.uint64:
    """Return the first state of one of a seed's generators, which are independent."""
    return np.uint64(mix(seed + np.uint64(number + 1) * np.uint64(0x9E3779B97F4A7C15)))


@compiled()
def draw(states: NDArray[np.uint64], n: int, below: int) -> int:
    """Draw the next random integer of generator n, uniform over 0 .. below - 1.

    Args:
        states: [N] states of the generators; entry n advances.
        n: index of the generator.
        below: number of values, at most 2**32; the upper half of 64 bits is scaled to it.
    """
    states[n] += np.uint64(0x9E3779B97F4A7C15)
    return int(((mix(states[n]) >> np.uint64(32)) * np.uint64(below)) >> np.uint64(32))
