"""Model of the learner's storages without rows: who may act, and when an update is due.

The rules are those of murmur.learner_service.storage, where each is explained:
RolloutStorage.may_begin, sample and _cut_open, ReplayStorage.may_begin and _due.
"""

import math
from collections import deque
from dataclasses import dataclass, field

from murmur.learner_service.storage.flight import Flight


@dataclass(frozen=True)
class Replays:
    """Settings of learning from a replay.

    Attributes:
        unroll_steps: transitions of an unroll, L.
        start_rows: rows of one rank before the first update.
        interval: rows of one rank from one burst of updates to the next; may be a fraction.
        updates: updates of a burst.
        batch_rows: rows of one rank that an update draws.
        ahead: unrolls that acting may be ahead in every environment; None: any, sync.
    """

    unroll_steps: int
    start_rows: float
    interval: float
    updates: int
    batch_rows: float
    ahead: int | None


@dataclass(slots=True, eq=False)
class Unroll:
    """Rows of a session that are being filled in.

    Attributes:
        envs: environments of the session.
        cursor: rows written.
        start: first row that is still to be learned from.
        versions: policy version of each row's action.
        taken: environments that were learned from.
    """

    envs: int
    cursor: int = 0
    start: int = 0
    taken: int = 0
    versions: list[int] = field(default_factory=list)

    def act(self, version: int) -> None:
        """Note the policy version of the newest row's action."""
        self.versions.append(version)

    @property
    def first_version(self) -> int:
        """Policy version that acted on the row `start`; -1: none yet."""
        return self.versions[self.start] if self.start < len(self.versions) else -1

    def cut(self) -> int:
        """Learn from the transitions so far; return how many there are of each environment."""
        rows = max(0, len(self.versions) - 1 - self.start)
        self.start += rows
        return rows


class RolloutModel:
    """RolloutStorage's decisions.

    Attributes:
        length: transitions of an unroll, L.
        lag: mean policy lag of the last update's rows, in updates.
    """

    def __init__(self, settings: Flight) -> None:
        """Empty."""
        self.length = settings.unroll_steps
        self._wanted, self._lag = settings.unrolls_per_update, settings.max_policy_lag
        self._open: list[Unroll] = []
        self._ready: deque[Unroll] = deque()
        self._open_envs = self._ready_envs = 0
        self.learning = False
        self.lag = 0.0

    @property
    def ready(self) -> bool:
        """Return whether an update's environments are full."""
        return self._ready_envs >= self._wanted

    def may_begin(self, filled: int, rows: int) -> bool:
        """Return whether a session may begin an unroll; those filled are still counted as open."""
        if self._lag is None:
            return True
        ahead = self._ready_envs + self._open_envs
        return ahead // self._wanted + int(self.learning) <= self._lag

    def begin(self, envs: int, filled: int) -> Unroll:
        """Begin an unroll, and count its environments as open."""
        unroll = Unroll(envs)
        self._open.append(unroll)
        self._open_envs += envs
        return unroll

    def add(self, unroll: Unroll) -> None:
        """Add a full unroll; those begun first are learned from first."""
        self._open.remove(unroll)
        self._open_envs -= unroll.envs
        at = len(self._ready)
        if self._lag is not None:
            while at and self._ready[at - 1].first_version > unroll.first_version:
                at -= 1
        self._ready.insert(at, unroll)
        self._ready_envs += unroll.envs

    def sample(self, version: int) -> float:
        """Take an update's rows and those that the next would find too old; return the number."""
        rows, lags, oldest = 0, 0.0, None if self._lag is None else version - self._lag
        # 1. Open unrolls that the next update would find too old: their rows so far.
        for unroll in self._open if oldest is not None else ():
            if 0 <= unroll.first_version <= (oldest or 0):
                age = version - unroll.first_version
                cut = unroll.cut() * unroll.envs
                rows, lags = rows + cut, lags + age * cut
        # 2. Full unrolls, the oldest first: as many as wanted, and all that are overdue.
        wanted = self._wanted
        while self._ready:
            unroll = self._ready[0]
            left = unroll.envs - unroll.taken
            overdue = oldest is not None and unroll.first_version <= oldest
            count = left if overdue else min(wanted, left)
            if count <= 0:
                break
            taken = count * (self.length - unroll.start)
            rows, lags = rows + taken, lags + taken * (version - unroll.first_version)
            wanted -= count
            unroll.taken += count
            self._ready_envs -= count
            if count == left:
                self._ready.popleft()
        self.learning = True
        self.lag = lags / rows if rows else 0.0
        return rows

    def done(self) -> None:
        """End the update."""
        self.learning = False


class ReplayModel:
    """ReplayStorage's decisions.

    Attributes:
        length: transitions of an unroll, L.
        lag: policy lag, always 0: rows are never too old.
    """

    def __init__(self, settings: Replays) -> None:
        """Empty."""
        self.length, self._settings = settings.unroll_steps, settings
        self._inserted = self._updates = 0
        self._open_envs = self._peak_open = 0
        self.lag = 0.0

    @property
    def ready(self) -> bool:
        """Return whether an update is due."""
        return self._due(0) > 0

    def _due(self, new: int) -> int:
        s = self._settings
        bursts = max(0, 1 + math.floor((self._inserted + new - s.start_rows) / s.interval))
        return bursts * s.updates - self._updates

    def may_begin(self, filled: int, rows: int) -> bool:
        """Return whether acting may go further ahead of the updates that are due."""
        s = self._settings
        if s.ahead is None:
            return True
        bursts = math.ceil(s.ahead * self._peak_open * self.length / s.interval)
        return self._due(rows) <= bursts * s.updates

    def begin(self, envs: int, filled: int) -> Unroll:
        """Begin an unroll, and note the most environments that were open at once."""
        self._open_envs += envs
        self._peak_open = max(self._peak_open, self._open_envs - filled)
        return Unroll(envs)

    def add(self, unroll: Unroll) -> None:
        """Add a full unroll to the inserted rows."""
        self._open_envs -= unroll.envs
        self._inserted += unroll.envs * self.length

    def sample(self, version: int) -> float:
        """Count an update; return the rows that it draws."""
        self._updates += 1
        return self._settings.batch_rows

    def done(self) -> None:
        """Do nothing: `sample` has counted the update."""


def make_storage(settings: Flight | Replays) -> RolloutModel | ReplayModel:
    """Build the storage of an algorithm."""
    return RolloutModel(settings) if isinstance(settings, Flight) else ReplayModel(settings)
