"""Lines of `murmur doctor` about the time from a request's arrival to its actions."""

import math
from collections.abc import Iterator, Mapping

Buckets = Mapping[str, Mapping[float, float]]  # "update", "idle", "inference": bound -> count below
_FEWEST = 100  # requests: below this a 99th percentile says nothing
_WHEN = {"update": "while updates run", "idle": "between updates"}


def middles(counts: Mapping[float, float]) -> Iterator[tuple[float, float]]:
    """Yield the middle of each cumulative bucket [s], its lower end if it has none, and its count.

    Args:
        counts: observations up to each upper bound, of which the last is infinite.
    """
    low = below = 0.0
    for le, count in sorted(counts.items()):
        yield low if math.isinf(le) else (low + le) / 2, count - below
        low, below = le, count


def quantile(counts: Mapping[float, float], q: float) -> float:
    """Return a quantile of cumulative buckets [s], linear within its bucket; NaN if none.

    Args:
        counts: observations up to each upper bound, of which the last is infinite.
        q: fraction of the observations, 0 to 1.
    """
    wanted = q * max(counts.values(), default=0.0)
    low = below = 0.0
    for le, count in sorted(counts.items()):
        if count >= wanted and count > below:
            return low if math.isinf(le) else low + (le - low) * (wanted - below) / (count - below)
        low, below = le, count
    return math.nan


def latency_lines(seen: Buckets) -> tuple[str, ...]:
    """Return lines on the median and the 99th percentile of acting.

    Args:
        seen: latencies observed, as buckets by phase.
    """
    p99 = {
        phase: 1e3 * quantile(seen[phase], 0.99)
        for phase in _WHEN
        if max(seen.get(phase, {}).values(), default=0.0) >= _FEWEST
    }
    return tuple(
        f"{1e3 * quantile(seen[phase], 0.5):.3g} ms (p50), {value:.3g} ms (p99) {_WHEN[phase]}"
        for phase, value in p99.items()
    )
