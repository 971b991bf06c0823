"""What is finite."""

import numpy as np
import pytest

from murmur.shared.wire.timestep import Array, surely_finite


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_bad_number_anywhere_is_found(dtype: str, bad: float) -> None:
    good = np.ones((3, 5, 7), dtype)
    assert surely_finite([good, np.ones(2, np.uint8)])
    for place in [(0, 0, 0), (1, 2, 3), (2, 4, 6)]:
        spoiled = good.copy()
        spoiled[place] = bad
        assert not surely_finite([good, spoiled])
    both = good.copy()
    both[0, 0, 0], both[0, 0, 1] = np.inf, -np.inf
    assert not surely_finite([both[::2, ::2]])


@pytest.mark.parametrize(
    "large",
    [
        np.full(100, 6e4, np.float16),
        np.full(100, 3e38, np.float32),
        np.full(100, 1e308),
        np.ones(0),
    ],
)
def test_large_numbers_are_finite(large: Array) -> None:
    assert surely_finite([large])
