"""A latency target for acting: how long a batch may be gathered, tuned while the learner runs.

The larger the batches, the fewer forward passes; but the request that came first waits for them.
Where environments come back sooner than a forward pass takes, larger batches raise the rate; where
they do not, the wait is lost. So a tuner tries a longer wait only while the 99th percentile of a
request's time, from its arrival to its actions, leaves room, and keeps it only if more environments
are acted for in a second than without it. It halves the wait as soon as requests are late, as
Clipper does (Crankshaw et al. 2017, section 4.3).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

_WINDOW = 200  # requests that a decision looks at
_LATE = 2  # of them may be late: the 99th percentile
_ROOM = 0.8  # of the target: above this no longer wait is tried
_GROWTH = 2.0, 1.5, 1.25  # of batches: what a trial asks for, and what after one that failed
_BUSY = 0.5  # share of time spent acting below which larger batches gain nothing
_LEAST_WAIT_S = 1e-4  # shorter waits than a thread's wake-up are none
_KEEP = 0.98  # weight of what was seen a batch ago
_TRIAL = 16  # windows with the settings that are tried, in turns with as many without them
_GAIN = 1.05  # of the rate: what a longer wait must bring
_PAUSES = 16, 1024  # windows from one trial to the next: at first, and after many that failed


class ActingTime:
    """Seconds of acting by environments in a batch: a line through recent batches."""

    def __init__(self) -> None:
        self._sums = [0.0] * 5  # of weights, n, s, n n, n s

    def add(self, envs: int, seconds: float) -> None:
        """Note a batch."""
        new = (1.0, float(envs), seconds, float(envs * envs), envs * seconds)
        self._sums = [_KEEP * old + x for old, x in zip(self._sums, new, strict=True)]

    def largest_within(self, seconds: float) -> float:
        """Environments that one act serves in this time, s; infinite if size does not matter."""
        weight, n, s, nn, ns = self._sums
        if not weight:
            return 0.0
        spread = weight * nn - n * n
        slope = (weight * ns - n * s) / spread if spread > 1e-6 * nn * weight else s / max(n, 1e-9)
        constant = (s - slope * n) / weight
        if slope <= 0:
            return math.inf if s / weight <= seconds else 0.0
        return max(0.0, (seconds - constant) / slope)


class Limits(NamedTuple):
    """Limits of a batch's wait.

    Attributes:
        preferred_envs: environments; 0: for none.
        wait_s: longest wait of the oldest request, s.
    """

    preferred_envs: int = 0
    wait_s: float = 0.0


class _Trial:
    """Windows with new limits, in turns with windows of the old ones.

    Attributes:
        limits: the new ones.
        needed: rate with them by the rate without, from which they are kept.
    """

    def __init__(self, limits: Limits, needed: float) -> None:
        self.limits, self._needed = limits, needed
        self._envs = [0, 0]
        self._seconds = [0.0, 0.0]
        self._windows = 0

    @property
    def trying(self) -> bool:
        """Whether the new limits hold in this window."""
        return self._windows % 2 == 0

    def add(self, envs: int, seconds: float) -> None:
        """Note the window that has ended."""
        side = self._windows % 2
        self._envs[side] += envs
        self._seconds[side] += seconds
        self._windows += 1

    @property
    def passed(self) -> bool | None:
        """Whether the new limits are to be kept; None: not known yet."""
        if self._windows < 2 * _TRIAL:
            return None
        new, old = (e / max(s, 1e-9) for e, s in zip(self._envs, self._seconds, strict=True))
        return new >= self._needed * old


class LatencyTuner:
    """Preferred size and longest wait of batches, for a target. Used by the inference thread.

    Attributes:
        kept: the limits that have proved best so far.
    """

    def __init__(self, target_s: float) -> None:
        """Begin without waiting."""
        self._target_s = target_s
        self.kept = Limits()
        self._acting = ActingTime()
        self._trial: _Trial | None = None
        self._pause = self._left = _PAUSES[0]  # windows between trials, until the next one
        self._failed = 0  # trials in a row
        self._down = False  # whether the last trial was one of less
        self._begin()

    @property
    def limits(self) -> Limits:
        """Limits of the next batch's wait."""
        trial = self._trial
        return trial.limits if trial is not None and trial.trying else self.kept

    def _begin(self) -> None:
        """Begin a window."""
        self._latencies: list[float] = []
        self._late = 0
        self._batches = 0
        self._envs = 0
        self._acting_s = 0.0
        self._seconds = 0.0
        self._waited = 0.0

    def observe(
        self, latencies: Sequence[float], envs: int, acting_s: float, seconds: float
    ) -> None:
        """Take note of a batch; change the limits if it is time to.

        Args:
            latencies: latency of each request, from its arrival to its actions, s.
            envs: environments in the batch.
            acting_s: time of acting on the batch, s.
            seconds: time since the end of the batch before it, s.
        """
        self._acting.add(envs, acting_s)
        self._acting_s += acting_s
        self._seconds += seconds
        self._batches, self._envs = self._batches + 1, self._envs + envs
        self._latencies += latencies
        self._waited += max(latencies, default=acting_s) - acting_s  # the oldest, in the queue
        self._late += sum(latency > self._target_s for latency in latencies)
        if self._late > _LATE:
            self._lower()
            self._begin()
        elif len(self._latencies) >= _WINDOW:
            self._decide()
            self._begin()

    def _lower(self) -> None:
        """Requests are late: end the trial that made them so, else halve what is kept."""
        if self._trial is not None and self._trial.trying:
            self._end_trial(passed=False)
        else:
            self._trial, self._left = None, self._pause
            self.kept = self._half()

    def _half(self) -> Limits:
        preferred, wait_s = self.kept.preferred_envs // 2, self.kept.wait_s / 2
        return Limits(preferred, wait_s) if preferred and wait_s >= _LEAST_WAIT_S else Limits()

    def _decide(self) -> None:
        """A window without many late requests has ended."""
        if self._trial is not None:
            self._trial.add(self._envs, self._seconds)
            if self._trial.passed is not None:
                self._end_trial(passed=self._trial.passed)
            return
        self._left -= 1
        if self._left <= 0:
            less = self.kept.wait_s > 0 and not self._down
            self._trial = _Trial(self._half(), 1.0) if less else self._more()
            self._down = less

    def _end_trial(self, *, passed: bool) -> None:
        assert self._trial is not None
        if passed:
            self.kept = self._trial.limits
            self._pause = _PAUSES[0]
            self._failed = 0
        else:
            self._pause, self._failed = min(2 * self._pause, _PAUSES[1]), self._failed + 1
        self._trial, self._left = None, self._pause

    def _more(self) -> _Trial | None:
        """A trial of a longer wait, if the last window leaves room for it."""
        room = _ROOM * self._target_s
        p99 = sorted(self._latencies)[math.ceil(0.99 * len(self._latencies)) - 1]
        if p99 > room or self._acting_s < _BUSY * self._seconds:
            return None
        # What the oldest requests wait anyway, and half of the room.
        wait = self._waited / self._batches + (room - p99) / 2
        mean = self._envs / self._batches
        wanted = _GROWTH[self._failed % len(_GROWTH)] * mean
        size = min(wanted, self._acting.largest_within(room - wait))
        preferred = math.floor(size + 1e-6)
        if wait < _LEAST_WAIT_S or preferred <= mean:  # no larger batch fits the target
            return None
        return _Trial(Limits(preferred, wait), _GAIN)
