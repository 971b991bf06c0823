"""Lines of `murmur doctor` about the time from a request's arrival to its actions."""

import math
from collections.abc import Mapping

Buckets = Mapping[str, Mapping[float, float]]  # "update", "idle", "inference": bound -> count below
_FEWEST = 100  # requests: below this a 99th percentile says nothing
_FULL = 0.95  # share of the processors in use
_WHEN = {"update": "while updates run", "idle": "between updates"}


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


def latency_lines(
    seen: Buckets, target_ms: float, machine_busy: float | None = None
) -> tuple[str, ...]:
    """Return lines on the median and the 99th percentile of acting, and on obstacles to the target.

    Args:
        seen: latencies observed, as buckets by phase.
        target_ms: value of learner.batcher.latency_target_ms; 0: there is none, or it is not known.
        machine_busy: share of the machine's processors in use, 0 to 1; None: not known.
    """
    p99 = {
        phase: 1e3 * quantile(seen[phase], 0.99)
        for phase in _WHEN
        if max(seen.get(phase, {}).values(), default=0.0) >= _FEWEST
    }
    if not p99:
        return ()
    lines = [
        f"{1e3 * quantile(seen[phase], 0.5):.3g} ms (p50), {value:.3g} ms (p99) {_WHEN[phase]}"
        for phase, value in p99.items()
    ]
    if target_ms:
        lines.append(_verdict(p99, 1e3 * quantile(seen.get("inference", {}), 0.99), target_ms))
        if max(p99.values()) > target_ms and (machine_busy or 0.0) > _FULL:
            lines.append("this machine's processors are all in use: acting waits for its turn")
    return tuple(lines)


def _verdict(p99: Mapping[str, float], alone: float, target_ms: float) -> str:
    """Return whether the target is met and, if it is not, which part is too slow."""
    target = f"the target of {target_ms:g} ms (learner.batcher.latency_target_ms)"
    if max(p99.values()) <= target_ms:
        return f"within {target}"
    if p99.get("idle", math.inf) <= target_ms:
        return (
            f"above {target} only while updates run, which hold processors or interpreter: fewer "
            "learner.num_threads, environment servers on other machines, a GPU"
        )
    if not alone <= target_ms:
        return (
            f"above {target}: acting alone takes {alone:.3g} ms (p99); a smaller network, a faster "
            "device, or fewer environments in a message (env_server.envs_per_worker)"
        )
    return (
        f"above {target}: requests wait for the batches before theirs, acting alone takes "
        f"{alone:.3g} ms (p99); fewer and larger sessions (env_server.sessions_per_worker, "
        "envs_per_worker), or a smaller network"
    )
