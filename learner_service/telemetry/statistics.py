"""Results of some episodes in short: mean, deviation and interval."""

import math
from collections.abc import Sequence
from typing import NamedTuple

FEWEST = 20  # trained episodes without which a run is not judged
_Z = 1.96  # normal quantile of 95 % intervals


class Statistics(NamedTuple):
    """Results of some episodes.

    Attributes:
        episodes: number of episodes.
        mean: mean result.
        std: standard deviation.
        low: least result.
        high: largest result.
    """

    episodes: int
    mean: float
    std: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Statistics":
        """Summarise results, of which there is one at least."""
        values = tuple(values)  # another thread may add to them
        n, mean = len(values), math.fsum(values) / len(values)
        variance = math.fsum((x - mean) ** 2 for x in values) / max(n - 1, 1)
        return cls(n, mean, math.sqrt(variance), min(values), max(values))

    @property
    def half(self) -> float:
        """Half width of the mean's 95 % interval (normal approximation)."""
        return _Z * self.std / math.sqrt(self.episodes)

    def above(self, other: "Statistics") -> bool:
        """Return whether the mean is higher than another's, by the interval of the difference."""
        return self.mean - other.mean > math.hypot(self.half, other.half)

    def __str__(self) -> str:
        """Format the mean with its interval."""
        return f"{number_text(self.mean)} ± {number_text(self.half)}"


def number_text(x: float) -> str:
    """Format a number with about four digits."""
    return f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.4g}"
