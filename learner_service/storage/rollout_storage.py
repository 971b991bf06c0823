"""Where every unroll is learned from once, while it is young enough.

No row becomes too old because others were learned from before it: an update takes, beside the
unrolls that make it due, all those that the next one would find too old, also from unrolls that
are still being filled. Rows are dropped, and counted, only where one environment step takes longer
than `max_policy_lag` updates.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from typing_extensions import override

from learner_service.group.group import ALONE, Group
from learner_service.runtime.readback import to_host
from learner_service.storage.flight import (
    Demand,
    Flight,
    Speed,
    plan,
    transitions_in,
    unmeasured,
)
from learner_service.storage.frames import Frames
from learner_service.storage.joining import part_of, side_by_side
from learner_service.storage.rollout import Batch
from learner_service.storage.storage import OBSERVATION, Storage, Unroll
from shared.spec import EnvSpec


class RolloutStorage(Storage[Batch]):
    """Unrolls being filled, and full ones waiting for the learner.

    How far acting may run ahead of learning is bounded by `may_begin`, so memory is too.
    """

    learns_once = True

    def __init__(
        self,
        spec: EnvSpec,
        length: int,
        rows_per_update: int,
        max_policy_lag: int | None,
        device: torch.device,
        extras: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
        memory_size: int = 0,
        unrolls_per_update: int = 0,
        frames: Frames | None = None,
    ) -> None:
        """Make an empty storage.

        Args:
            spec: the run's spec.
            length: L, transitions of one unroll; 0: `unroll_length` for the environments there
                are. An update then takes one unroll of each of them, or more.
            rows_per_update: agent-transitions one update learns from, at least.
            max_policy_lag: how many updates old a row may be when it is learned from; None: any
                (the caller alternates acting and learning itself).
            device: where rows live.
            extras: see Algorithm.
            memory_size: see Algorithm.
            unrolls_per_update: unrolls that an update takes, or more if it needs them for its
                rows; 0: as many as it needs or, if unrolls are not of a given length, at least
                one of each environment there is.
            frames: see Algorithm.
        """
        super().__init__(spec, length, device, extras, memory_size, frames)
        self._given = Flight(length, unrolls_per_update, max_policy_lag)
        self._speed: Speed | None = None
        self._rows_wanted = math.ceil(rows_per_update / spec.num_agents)  # joint transitions
        self._max_lag = max_policy_lag
        self._expected = 0
        self._connected = 0
        self._largest_session = 0
        self._resize()
        self._open: list[Unroll] = []
        self._ready: deque[Unroll] = deque()
        self._ready_envs = 0
        self._in_order = 0  # unrolls of _ready that keep their place: they have waited for one
        self.learning = False  # an update is under way

    def expect(self, environments: int) -> None:
        """Note how many environments will train, as far as that is known beforehand."""
        with self._changed:
            self._expected = environments
            self._resize()

    def connect(self, environments: int) -> None:
        """See Storage. In the sync pipeline those expected alone count: they come before a row."""
        with self._changed:
            self._connected = environments
            self._resize()
            self._changed.notify_all()

    def measured(self, speed: Speed, *, any_lag: bool, group: Group = ALONE) -> Flight:
        """Choose what is not configured by what was measured; from now on it follows `connect`.

        Args:
            speed: of environments and learner.
            any_lag: whether to choose max_policy_lag, too; it stays as chosen here.
            group: all of its ranks call this, and have the largest lag of all.
        """
        with self._changed:
            self._speed = speed
            if any_lag:
                self._given = replace(self._given, max_policy_lag=None)
                lag = plan(speed, self._demand(), self._given).max_policy_lag or 0
                self._max_lag = round(group.agree({"lag": lag}, "max")["lag"])
            self._resize()
            flight = Flight(self.length, self._unrolls_per_update, self._max_lag)
        self.on_room()
        return flight

    def _demand(self) -> Demand:
        """What unrolls must fit, once environments are connected."""
        return Demand(
            self._rows_wanted,
            self._connected,
            max(1, self._largest_session),
            self.spec.max_episode_steps,
            self._memory_size > 0,
        )

    @property
    @override
    def _expected_envs(self) -> int:
        return self._expected

    def _resize(self) -> None:
        """Choose what is not configured; the lock is held, but in the constructor."""
        given, steps = self._given, self.spec.max_episode_steps
        measured = self._speed is not None and self._connected > 0
        if self._speed is not None and measured:
            flight = plan(self._speed, self._demand(), given)
        else:
            flight = self._unmeasured()
        self.length, self._unrolls_per_update = flight.unroll_steps, flight.unrolls_per_update
        self._rows_enough = math.ceil(self._rows_wanted / transitions_in(self.length, steps))
        self._rows_enough *= self.length  # transitions of that number of whole unrolls
        fixed = given.unrolls_per_update or (given.unroll_steps and not measured)
        if self._max_lag is not None:  # see may_begin
            limit = (self._max_lag + 1) * self._unrolls_per_update
            self.environments_limit = limit if fixed else 0

    def _unmeasured(self) -> Flight:
        """What is chosen by the number of environments alone."""
        sync = self._max_lag is None
        known = self._expected if sync else max(self._expected, self._connected)
        demand = replace(self._demand(), environments=known)
        return unmeasured(demand, self._given, self._expected if sync else self._connected)

    @property
    def fixed_unrolls(self) -> int:
        """Unrolls of an update where their number is configured; else 0."""
        return self._unrolls_per_update if self._given.unrolls_per_update else 0

    @property
    @override
    def chosen(self) -> dict[str, int]:
        return {
            "environments": self._connected,
            "unroll_steps": self.length,
            "unrolls_per_update": self._unrolls_per_update,
            **({} if self._max_lag is None else {"max_policy_lag": self._max_lag}),
        }

    def may_begin(self, filled: Sequence[Unroll] = ()) -> bool:
        """Whether rows acted now would be young enough when their turn comes to be learned from.

        Their lag is the number of updates that finish before theirs starts: those fed by unrolls
        that wait already or were begun earlier, those just filled included, and the one running
        now.
        """
        if self._max_lag is None:
            return True
        with self._changed:
            ahead = self._ready_envs + self._open_envs
            before = ahead // self._unrolls_per_update + int(self.learning)
        return before <= self._max_lag

    @override
    def begin(
        self, num_envs: int, first_slot: int, sequence: int, filled: Sequence[Unroll] = ()
    ) -> Unroll:
        unroll = super().begin(num_envs, first_slot, sequence, filled)
        with self._changed:
            self._open.append(unroll)
            self._largest_session = max(self._largest_session, num_envs)
        return unroll

    def add(self, unroll: Unroll) -> None:
        """Hand over a full unroll."""
        assert unroll.full
        with self._changed:
            self._open.remove(unroll)
            self._open_envs -= unroll.num_envs
            self._line_up(unroll)

    @override
    def release(self, unroll: Unroll) -> None:
        with self._changed:
            self._open.remove(unroll)
            super().release(unroll)

    def _line_up(self, unroll: Unroll) -> None:
        """Those that were begun first are learned from first; the lock is held."""
        at = len(self._ready)
        if self._max_lag is not None:
            while at and self._ready[at - 1].first_version > unroll.first_version:
                at -= 1
        self._ready.insert(at, unroll)
        self._ready_envs += unroll.num_envs
        self._changed.notify_all()

    @property
    def envs_per_update(self) -> int:
        """Environments whose unrolls make an update."""
        return self._unrolls_per_update

    @property
    def ready(self) -> bool:
        """Whether there is enough for an update."""
        return self._ready_envs >= self._unrolls_per_update

    @property
    def ready_rows(self) -> int:
        """Environment rows that wait to be learned from."""
        with self._changed:
            return sum((u.num_envs - u.taken) * u.rows for u in self._ready)

    @property
    def waiting_rows(self) -> int:
        """The same: each is learned from once."""
        return self.ready_rows

    def sample(self, version: int, timeout_s: float) -> tuple[Batch | None, int]:
        """Unrolls for one update, oldest first, copied out of the storage.

        Args:
            version: the current policy version; rows that are too old are dropped.
            timeout_s: longest wait, seconds.

        Returns:
            a batch, or None if there is not enough; and the number of environment rows dropped
            because they were older than max_policy_lag.
        """
        dropped = 0
        with self._changed:
            if not self._changed.wait_for(lambda: self.ready, timeout_s):
                return None, 0
            oldest = None if self._max_lag is None else version - self._max_lag
            if oldest is not None:
                dropped = self._drop_stale(oldest)
            if not self.ready:
                batch = None
            else:
                with self.turns.take():
                    heads = [] if oldest is None else self._cut_open(oldest)
                    dropped += sum(self._skip_stale(head, oldest) for head in heads)
                    batch = self._collect(oldest, [head for head in heads if head.rows])
                self.learning = True
        self.on_room()
        if batch is not None and self._frames is not None:
            self._frames.stack_batch(batch.arrays, self._memory_size, OBSERVATION)
        return batch, dropped

    def due(self, version: int, timeout_s: float) -> tuple[bool, int]:
        """See Storage: rows that are too old are dropped here, before the ranks agree."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.ready, timeout_s):
                return False, 0
            dropped = 0 if self._max_lag is None else self._drop_stale(version - self._max_lag)
            ready = self.ready
        if dropped:
            self.on_room()
        return ready, dropped

    def done(self, batch: Batch) -> None:
        """The update that `sample` started has ended."""
        self.learning = False
        self.on_room()

    def state_dict(self) -> dict[str, Any]:
        """See Storage: the unrolls that wait, without what an update has had of them."""
        with self._changed:
            waiting = list(self._ready)
        saved = []
        for unroll in waiting:
            with self.turns.take():
                part = part_of(unroll, unroll.taken, unroll.num_envs)
                copies = {name: array.clone() for name, array in part.items()}
            saved.append(
                {
                    "arrays": to_host(copies),
                    "rows": unroll.rows,
                    "first_version": unroll.first_version,
                    "first_slot": unroll.first_slot,
                }
            )
        return {"ready": saved}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See Storage; unrolls of arrays that are others now, by changed options, are lost."""
        for saved in state.get("ready", []):
            rows, arrays = saved["rows"], saved["arrays"]
            unroll = self._new(rows, arrays["step_type"].shape[1])
            arrays = {k: v if k == "memory" else v[: rows + 1] for k, v in arrays.items()}
            if {k: v.shape for k, v in arrays.items()} != {
                k: v.shape for k, v in unroll.arrays.items()
            }:
                continue
            for name, array in unroll.arrays.items():
                array.copy_(arrays[name])
            unroll.begin(saved["first_slot"], 0)
            unroll.cursor, unroll.first_version = rows + 1, saved["first_version"]
            with self._changed:
                self._line_up(unroll)
            self._in_order += 1

    def _cut_open(self, oldest: int) -> list[Unroll]:
        """What open unrolls hold that the next update would find too old."""
        overdue = [u for u in self._open if 0 <= u.first_version <= oldest]
        return [head for unroll in overdue if (head := unroll.cut()) is not None]

    @staticmethod
    def _skip_stale(unroll: Unroll, oldest: int | None) -> int:
        """Leave out what was acted by policies before `oldest`; returns its environment rows."""
        if oldest is None or unroll.first_version >= oldest:
            return 0
        return (unroll.num_envs - unroll.taken) * unroll.skip_older(oldest)

    def _drop_stale(self, oldest: int) -> int:
        """The same of all that wait."""
        dropped, ready = 0, deque[Unroll]()
        for unroll in self._ready:
            dropped += self._skip_stale(unroll, oldest)
            if unroll.rows:
                ready.append(unroll)
                continue
            self._ready_envs -= unroll.num_envs - unroll.taken
            self._give_back(unroll)
        self._ready = ready
        return dropped

    def _collect(self, oldest: int | None, heads: list[Unroll]) -> Batch:
        """Copy the unrolls of an update, and those that the next one would find too old: `heads`.

        Args:
            oldest: the oldest version that may be learned from now; None: any.
            heads: learned from in addition.
        """
        if self._max_lag is None:  # lockstep: the order of arrival must not matter
            waited = [self._ready.popleft() for _ in range(self._in_order)]
            fresh = sorted(self._ready, key=lambda u: (u.sequence, u.first_slot))
            self._ready = deque(waited + fresh)
            self._in_order = len(self._ready)
        wanted = self._unrolls_per_update
        parts = [part_of(head, 0, head.num_envs) for head in heads]
        versions = [head.first_version for head in heads for _ in range(head.num_envs)]
        while self._ready:
            unroll = self._ready[0]
            left = unroll.num_envs - unroll.taken
            overdue = oldest is not None and unroll.first_version <= oldest
            count = left if overdue else min(wanted, left)
            if count <= 0:
                break
            parts.append(part_of(unroll, unroll.taken, unroll.taken + count))
            versions += [unroll.first_version] * count
            wanted -= count
            unroll.taken += count
            self._ready_envs -= count
            if count == left:
                self._ready.popleft()
                self._in_order = max(0, self._in_order - 1)
                self._give_back(unroll)
        arrays, padding = side_by_side(parts)
        batch = Batch(arrays, versions, padding)
        batch.times = max(1.0, batch.rows / self._rows_enough)
        return batch
