"""A latency target for acting: how long a batch may be gathered, tuned while the learner runs.

The larger the batches, the fewer forward passes; but whoever came first waits for them. A tuner
raises the wait and the preferred size step by step while the 99th percentile of a request's time,
from its arrival to its actions, leaves room, and halves both at once when it does not: additive
increase, multiplicative decrease (Chiu and Jain 1989; Clipper, Crankshaw et al. 2017, section 4.3).
"""

import math
from collections.abc import Sequence

_WINDOW = 200  # requests that a decision looks at
_LATE = 2  # of them may be late: the 99th percentile
_ROOM = 0.8  # of the target: above this nothing is raised
_STEP = 0.1  # of the target: what the wait is raised by
_BUSY = 0.5  # share of time spent acting below which larger batches gain nothing
_LEAST_WAIT_S = 1e-4  # shorter waits than a thread's wake-up are none
_KEEP = 0.98  # weight of what was seen a batch ago


class ActingTime:
    """Seconds of acting by environments in a batch: a line through recent batches."""

    def __init__(self) -> None:
        self._sums = [0.0] * 5  # of weights, n, s, n n, n s

    def add(self, envs: int, seconds: float) -> None:
        """Note a batch."""
        new = (1.0, float(envs), seconds, float(envs * envs), envs * seconds)
        self._sums = [_KEEP * old + x for old, x in zip(self._sums, new, strict=True)]

    def largest_within(self, seconds: float) -> float:
        """Environments that are acted for in so many seconds; infinite if size does not matter."""
        weight, n, s, nn, ns = self._sums
        if not weight:
            return 0.0
        spread = weight * nn - n * n
        slope = (weight * ns - n * s) / spread if spread > 1e-6 * nn * weight else s / max(n, 1e-9)
        constant = (s - slope * n) / weight
        if slope <= 0:
            return math.inf if s / weight <= seconds else 0.0
        return max(0.0, (seconds - constant) / slope)


class LatencyTuner:
    """Preferred size and longest wait of batches, for a target. Used by the inference thread.

    Attributes:
        preferred_envs: environments that a batch waits for; 0: for none.
        wait_s: longest wait of the oldest request, s.
    """

    def __init__(self, target_s: float) -> None:
        """Begin without waiting."""
        self._target_s = target_s
        self.preferred_envs, self.wait_s = 0, 0.0
        self._acting = ActingTime()
        self._begin(None)

    def _begin(self, now: float | None) -> None:
        """Forget what the settings until now led to."""
        self._latencies: list[float] = []
        self._late = self._batches = self._envs = 0
        self._acting_s, self._since = 0.0, now

    def observe(self, latencies: Sequence[float], envs: int, acting_s: float, now: float) -> None:
        """Take note of a batch; change the settings if it is time to.

        Args:
            latencies: of each request, from its arrival to its actions, s.
            envs: environments in the batch.
            acting_s: time of acting on the batch, s.
            now: time.monotonic() when it ended.
        """
        if self._since is None:
            self._since = now - acting_s
        self._acting.add(envs, acting_s)
        self._acting_s += acting_s
        self._batches, self._envs = self._batches + 1, self._envs + envs
        self._latencies += latencies
        self._late += sum(latency > self._target_s for latency in latencies)
        if self._late > _LATE:
            self._lower()
            self._begin(now)
        elif len(self._latencies) >= _WINDOW:
            busy = self._acting_s / max(now - self._since, 1e-9)
            p99 = sorted(self._latencies)[math.ceil(0.99 * len(self._latencies)) - 1]
            if p99 <= _ROOM * self._target_s and busy >= _BUSY:
                self._raise(p99)
            self._begin(now)

    def _lower(self) -> None:
        self.wait_s, self.preferred_envs = self.wait_s / 2, self.preferred_envs // 2
        if self.wait_s < _LEAST_WAIT_S or not self.preferred_envs:
            self.wait_s, self.preferred_envs = 0.0, 0

    def _raise(self, p99: float) -> None:
        room = _ROOM * self._target_s
        wait = self.wait_s + min(_STEP * self._target_s, room - p99)
        mean = self._envs / self._batches
        size = min(2 * max(mean, self.preferred_envs), self._acting.largest_within(room - wait))
        preferred = math.floor(size + 1e-6)
        if wait >= _LEAST_WAIT_S and preferred > mean:  # else the batches are as large already
            self.wait_s, self.preferred_envs = wait, preferred
