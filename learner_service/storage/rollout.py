"""Rollouts: unrolls are taken whole, each once; dropped only whole, and counted."""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from learner_service.storage.storage import OBSERVATION, Storage, Unroll
from shared.spec import AGENT_MASK, EnvSpec
from shared.timestep import StepType


@dataclass
class Batch:
    """Whole unrolls side by side: what one update learns from.

    Attributes:
        arrays: name -> [L + 1, B, ...]; "memory", if there is one, [1, B, A, H].
        version: [B] oldest policy version of each unroll's rows.
        padding: rows that only fill up unrolls of sessions that ended.
    """

    arrays: dict[str, Tensor]
    version: list[int]
    padding: int = 0

    @property
    def rows(self) -> int:
        """L x B, less the padding."""
        length, num_unrolls = self.arrays["step_type"].shape
        return (length - 1) * num_unrolls - self.padding

    def observation(self) -> dict[str, Tensor]:
        """Name -> [L + 1, B, ...]."""
        return {
            k.removeprefix(OBSERVATION): v
            for k, v in self.arrays.items()
            if k.startswith(OBSERVATION)
        }


class RolloutStorage(Storage[Batch]):
    """Unrolls being filled, and full ones waiting for the learner.

    How far acting may run ahead of learning is bounded by `may_begin`, so memory is too.
    """

    def __init__(
        self,
        spec: EnvSpec,
        length: int,
        rows_per_update: int,
        max_policy_lag: int | None,
        device: torch.device,
        extras: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
        memory_size: int = 0,
    ) -> None:
        """Make an empty storage.

        Args:
            spec: the run's spec.
            length: L, transitions of one unroll.
            rows_per_update: agent-transitions one update learns from, at least.
            max_policy_lag: how many updates old a row may be when it is learned from; None: any
                (the caller alternates acting and learning itself).
            device: where rows live.
            extras: see Algorithm.
            memory_size: see Algorithm.
        """
        super().__init__(spec, length, device, extras, memory_size)
        # LAST rows hold no action: an unroll of whole episodes has fewer transitions than rows.
        last_rows = length // (spec.max_episode_steps + 1) if spec.max_episode_steps else 0
        self._rows_per_env = (length - last_rows) * spec.num_agents
        self._unrolls_per_update = math.ceil(rows_per_update / self._rows_per_env)
        self._max_lag = max_policy_lag
        if max_policy_lag is not None:  # see may_begin
            self.environments_limit = (max_policy_lag + 1) * self._unrolls_per_update
        self._open: list[Unroll] = []
        self._early: list[Unroll] = []  # closed before they were full, behind older open ones
        self._ready: deque[Unroll] = deque()
        self._ready_envs = 0
        self._taken_of_first = 0  # environments of _ready[0] that an update has had already
        self._in_order = 0  # unrolls of _ready that keep their place: they have waited for one
        self.learning = False  # an update is under way

    def may_begin(self) -> bool:
        """Whether rows acted now would be young enough when their turn comes to be learned from.

        Their lag is the number of updates that finish before theirs starts: those fed by unrolls
        that wait already or were begun earlier, and the one running now.
        """
        if self._max_lag is None:
            return True
        with self._changed:
            ahead = self._ready_envs + self._open_envs
            before = ahead // self._unrolls_per_update + int(self.learning)
        return before <= self._max_lag

    def begin(self, num_envs: int, first_slot: int, sequence: int) -> Unroll:
        """See Storage."""
        unroll = super().begin(num_envs, first_slot, sequence)
        with self._changed:
            self._open.append(unroll)
        return unroll

    def put(self, unroll: Unroll) -> None:
        """Hand over a full unroll."""
        assert unroll.full
        with self._changed:
            self._open.remove(unroll)
            self._line_up(unroll)
            self._let_in_early()

    def put_open(self, unroll: Unroll) -> int:
        """See Storage. It waits its turn: older ones, still being filled, would become too old."""
        if not unroll.teaches:
            self.release(unroll)
            return 0
        unroll.close()
        with self._changed:
            self._open.remove(unroll)
            self._early.append(unroll)
            self._let_in_early()
        return unroll.num_envs * unroll.rows

    def release(self, unroll: Unroll) -> None:
        """See Storage."""
        with self._changed:
            self._open.remove(unroll)
            super().release(unroll)
            self._let_in_early()

    def _let_in_early(self) -> None:
        """Line up those that no older open unroll is still to be learned from before."""
        acted = [u.first_version for u in self._open if u.first_version >= 0]
        for unroll in sorted(self._early, key=lambda u: u.first_version):
            if self._max_lag is None or unroll.first_version <= min(acted, default=math.inf):
                self._early.remove(unroll)
                self._line_up(unroll)

    def _line_up(self, unroll: Unroll) -> None:
        """Those that were begun first are learned from first; the lock is held."""
        at = len(self._ready)
        if self._max_lag is not None:
            first = int(self._taken_of_first > 0)  # what is begun is learned from to its end
            while at > first and self._ready[at - 1].first_version > unroll.first_version:
                at -= 1
        self._ready.insert(at, unroll)
        self._ready_envs += unroll.num_envs
        self._open_envs -= unroll.num_envs
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
            rows = sum(u.num_envs * u.rows for u in (*self._ready, *self._early))
            return rows - (self._taken_of_first * self._ready[0].rows if self._ready else 0)

    @property
    def waiting_rows(self) -> int:
        """The same: each is learned from once."""
        return self.ready_rows

    def take(self, version: int, timeout_s: float) -> tuple[Batch | None, int]:
        """Unrolls for one update, oldest first, copied out of the storage.

        Args:
            version: the current policy version; unrolls that are too old are dropped.
            timeout_s: longest wait, seconds.

        Returns:
            a batch, or None if there is not enough; and the number of environment rows dropped
            because they were older than max_policy_lag.
        """
        dropped = 0
        with self._changed:
            if not self._changed.wait_for(lambda: self.ready, timeout_s):
                return None, 0
            dropped = self._drop_stale(version)
            if not self.ready:
                batch = None
            else:
                batch = self._collect()
                self.learning = True
        self.on_room()
        return batch, dropped

    def done(self, batch: Batch) -> None:
        """The update that `take` started has ended."""
        self.learning = False
        self.on_room()

    def state_dict(self) -> dict[str, Any]:
        """See Storage: the unrolls that wait, without what an update has had of them."""
        with self._changed:
            waiting, taken = [*self._ready, *self._early], self._taken_of_first
        saved = []
        for unroll in waiting:
            arrays = {name: array[:, taken:].cpu().clone() for name, array in unroll.arrays.items()}
            taken = 0  # only the first one is begun
            saved.append(
                {
                    "arrays": arrays,
                    "rows": unroll.rows,
                    "first_version": unroll.first_version,
                    "first_slot": unroll.first_slot,
                }
            )
        return {"ready": saved}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See Storage; unrolls that no longer fit, since options have changed, are left out."""
        for saved in state.get("ready", []):
            arrays = saved["arrays"]
            unroll = self.begin(arrays["step_type"].shape[1], saved["first_slot"], 0)
            if {k: v.shape for k, v in arrays.items()} != {
                k: v.shape for k, v in unroll.arrays.items()
            }:
                self.release(unroll)
                continue
            for name, array in unroll.arrays.items():
                array.copy_(arrays[name])
            unroll.cursor, unroll.rows = self.length + 1, saved["rows"]
            unroll.first_version = saved["first_version"]
            self.put(unroll)
            self._in_order += 1

    def _drop_stale(self, version: int) -> int:
        if self._max_lag is None:
            return 0
        dropped = 0
        while self._ready and version - self._ready[0].first_version > self._max_lag:
            dropped += self._pop_first()
        return dropped

    def _pop_first(self) -> int:
        """Remove what is left of the oldest unroll; returns its environment rows."""
        unroll = self._ready.popleft()
        left = unroll.num_envs - self._taken_of_first
        self._ready_envs -= left
        self._taken_of_first = 0
        self._in_order = max(0, self._in_order - 1)
        self._give_back(unroll)
        return left * unroll.rows

    def _collect(self) -> Batch:
        if self._max_lag is None:  # lockstep: the order of arrival must not matter
            waited = [self._ready.popleft() for _ in range(self._in_order)]
            fresh = sorted(self._ready, key=lambda u: (u.sequence, u.first_slot))
            self._ready = deque(waited + fresh)
            self._in_order = len(self._ready)
        wanted = self._unrolls_per_update
        parts: list[dict[str, Tensor]] = []
        versions: list[int] = []
        padding = 0
        while wanted > 0:
            unroll = self._ready[0]
            start = self._taken_of_first
            count = min(wanted, unroll.num_envs - start)
            parts.append({k: v[:, start : start + count] for k, v in unroll.arrays.items()})
            versions += [unroll.first_version] * count
            padding += (self.length - unroll.rows) * count
            wanted -= count
            if start + count == unroll.num_envs:
                self._pop_first()
            else:
                self._taken_of_first += count
                self._ready_envs -= count
        # torch.cat of one part copies too: the unroll is free for new rows from here on.
        arrays = {k: torch.cat([p[k] for p in parts], 1) for k in parts[0]}
        return Batch(arrays, versions, padding)


@dataclass
class Transitions:
    """(o_t, a_t, r_{t+1}, o_{t+1}) of a batch: the shift by one row has its only home here.

    Attributes:
        reward: [L, B, A] r_{t+1}.
        discount: [L, B, A], or [L, B, 1] where agents do not die: d_{t+1}, and 0 for an agent that
            is dead on row t+1. Its life has ended, nothing of it is to come.
        next_is_last: [L, B] bool, row t+1 is the last that there is of its episode: it is LAST, or
            the environment failed after it. In the second case its discount is 1, so that its
            value stands for what would have come.
        valid: [L, B] bool, the action of row t was taken and led to row t+1: row t is not LAST,
            and neither is VOID.
    """

    reward: Tensor
    discount: Tensor
    next_is_last: Tensor
    valid: Tensor


def transitions(batch: Batch) -> Transitions:
    """Pair every row's action with the next row's reward, discount and step type."""
    step_type = batch.arrays["step_type"]
    void = step_type == int(StepType.VOID)
    next_is_last = step_type[1:] == int(StepType.LAST)
    next_is_last[:-1] |= void[2:]
    discount = batch.arrays["discount"][1:].unsqueeze(-1)
    alive = batch.arrays.get(OBSERVATION + AGENT_MASK)
    if alive is not None:
        discount = discount * (alive[1:] != 0)
    return Transitions(
        reward=batch.arrays["reward"][1:],
        discount=discount,
        next_is_last=next_is_last,
        valid=(step_type[:-1] < int(StepType.LAST)) & ~void[1:],
    )
