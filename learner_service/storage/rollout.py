"""Rollouts: every unroll is learned from once, while it is young enough.

An update takes the oldest unrolls that make it due, and all that the next update would find too
old, also from unrolls that are still being filled. Example: with max_policy_lag 1 the update of
version 4 takes every time step that version 3 acted on: version 5 would find it 2 updates old.
Transitions are dropped, and counted, only where one environment step takes longer than
`max_policy_lag` updates.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from murmur.learner_service.device.readback import to_host
from murmur.learner_service.ranks.group import ALONE, Group
from murmur.learner_service.storage.demonstrations import Demonstrations
from murmur.learner_service.storage.flight import (
    Demand,
    Flight,
    Speed,
    plan,
    transitions_in,
    unmeasured,
)
from murmur.learner_service.storage.frames import Frames
from murmur.learner_service.storage.storage import Batch as AnyBatch
from murmur.learner_service.storage.storage import (
    Unroll,
    UnrollStorage,
    array_bytes,
    is_transition,
    side_by_side,
    time_step_layout,
)
from murmur.shared.wire.dataset import OBSERVATION
from murmur.shared.wire.spec import AGENT_MASK, TURN_MASK, EnvSpec
from murmur.shared.wire.timestep import StepType


@dataclass
class Rollout(AnyBatch):
    """Whole unrolls side by side: what one update learns from.

    Attributes:
        arrays: name -> [L + 1, B, ...]; "memory", if there is one, [1, B, A, Z].
        version: [B] policy version that chose each unroll's first action, its oldest.
        padding: time steps that only fill up unrolls of sessions that ended.
        times: ratio of transitions in this batch to the configured minimum, at least 1: more where
            there are more environments than an update needs, or a time step would be too old for
            the next one.
    """

    version: list[int]
    padding: int = 0
    times: float = 1.0

    @property
    def size(self) -> int:
        """Number of time steps, padding and each unroll's last one left out: at most L x B.

        A step from LAST to FIRST counts, though nothing is learned from it: an episode of 25 steps
        takes 26. `env_steps` leaves it out.
        """
        length, num_unrolls = self.arrays["step_type"].shape
        return (length - 1) * num_unrolls - self.padding

    def env_steps(self) -> Tensor:
        """Count the environment steps that it holds: a number on the device."""
        return is_transition(self.arrays["step_type"]).sum()


class DemonstratedRollout(Rollout):
    """A rollout that no environment of the run has played."""

    @override
    def env_steps(self) -> Tensor:
        return torch.zeros((), dtype=torch.long, device=self.arrays["step_type"].device)


Batch = Rollout  # the name that plug-ins import; the tree says Rollout


@dataclass
class Transitions:
    """(o_t, a_t, r_{t+1}, o_{t+1}) of a rollout: the shift by one time step has its only home here.

    Attributes:
        reward: [L, B, A] r_{t+1}.
        discount: [L, B, A] (or [L, B, 1] where agents do not die) d_{t+1}, and 0 for an agent that
            is dead at t+1. Its life has ended, nothing of it is to come.
        next_is_last: [L, B] bool, time step t+1 is the last that there is of its episode: it is
            LAST, or the environment failed after it. In the second case its discount is 1, so that
            its value stands for what would have come.
        valid: [L, B] bool, the action of t was taken and led to t+1: see `is_transition`.
        weight: [L, B, A] mask, 1 where an alive agent's action was taken and led to t+1. Where
            agents take turns, 0 for those that waited, and for moves that are `unfinished`.
        waits: [L, B, A] bool, the episode continues at t+1, and it is not the agent's turn there:
            what it earns next is still the result of its last move. None: all agents always act.
        unfinished: [L, B, A] bool, the rollout ends before the agent's next turn after t, so that
            the result of its last move is not known. None as `waits`.
    """

    reward: Tensor
    discount: Tensor
    next_is_last: Tensor
    valid: Tensor
    weight: Tensor
    waits: Tensor | None = None
    unfinished: Tensor | None = None


def transitions(batch: Rollout) -> Transitions:
    """Pair every action with the next time step's reward, discount and step type."""
    step_type = batch.arrays["step_type"]
    next_is_last = step_type[1:] == int(StepType.LAST)
    next_is_last[:-1] |= step_type[2:] == int(StepType.ABORTED)
    discount = batch.arrays["discount"][1:].unsqueeze(-1)
    reward, valid = batch.arrays["reward"][1:], is_transition(step_type)
    weight = valid.unsqueeze(-1).expand_as(reward).float()
    alive = batch.arrays.get(OBSERVATION + AGENT_MASK)
    if alive is not None:
        discount = discount * (alive[1:] != 0)
        weight = weight * (alive[:-1] != 0)
    turn = batch.arrays.get(OBSERVATION + TURN_MASK)
    if turn is None:
        return Transitions(reward, discount, next_is_last, valid, weight)
    lasts = (step_type[1:] < int(StepType.LAST)).unsqueeze(-1)
    waits = lasts & (turn[1:] == 0)
    if alive is not None:
        waits = waits & (alive[1:] != 0)
    unfinished = _unfinished(waits, next_is_last)
    weight = weight * (turn[:-1] != 0) * ~unfinished
    return Transitions(reward, discount, next_is_last, valid, weight, waits, unfinished)


def _unfinished(waits: Tensor, next_is_last: Tensor) -> Tensor:
    """Find where an agent's next turn, or its end, is not in the rollout.

    Args:
        waits: [L, B, A] see Transitions.
        next_is_last: [L, B] see Transitions.

    Returns:
        [L, B, A] bool.
    """
    ends = next_is_last.unsqueeze(-1).expand_as(waits).clone()
    ends[-1] = True
    # The first step from t on that leads to the agent's next turn, or after which there is nothing.
    step = torch.arange(len(waits), device=waits.device).view(-1, 1, 1)
    stop = step.where(ends | ~waits, len(waits)).flip(0).cummin(0).values.flip(0)
    return (waits & ends).gather(0, stop)


class RolloutStorage(UnrollStorage[Rollout]):
    """Unrolls being filled, and full ones waiting for the learner.

    `may_begin` bounds how far acting may run ahead of learning, and so the memory.

    Attributes, beside those of an UnrollStorage:
        envs_per_update: environments whose unrolls make an update.
        demonstrations: source of the first updates, during which no environment acts; None from
            then on, and where there is none.
    """

    learns_once = True
    demonstrations: Demonstrations | None = None

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
            spec: spec of the run.
            length: L, transitions of one unroll; 0: `unroll_length` for the environments there
                are. An update then takes one unroll of each of them, or more.
            rows_per_update: agent-transitions one update learns from, at least.
            max_policy_lag: updates that a transition may be old when it is learned from; None: any
                number (the caller alternates acting and learning itself).
            device: device of the unrolls.
            extras: name -> shape of the policy's outputs beside the action.
            memory_size: numbers of an agent's recurrent state.
            unrolls_per_update: unrolls that an update takes, or more if it needs them for its
                transitions; 0: as many as it needs or, if unrolls are not of a given length, at
                least one of each environment there is.
            frames: images to stack, if any.
        """
        super().__init__(spec, length, device, extras, memory_size, frames)
        self._extras = extras
        self._given = Flight(length, unrolls_per_update, max_policy_lag)
        self._speed: Speed | None = None
        self._wanted = math.ceil(rows_per_update / spec.acting_agents)  # see Rollout.size
        self._max_lag = max_policy_lag
        self._connected = 0
        self._resize()
        self._ready: list[Unroll] = []
        self._ready_envs = 0
        self._in_order = 0  # unrolls of _ready that keep their place: they have waited for one
        self._due_at: int | None = None  # policy version whose update is due

    # --- how much is in flight

    def expect(self, environments: int) -> None:
        """Note how many environments will train, as far as that is known beforehand."""
        with self._changed:
            self._expected = environments
            self._resize()

    def connect(self, environments: int) -> None:
        """Note how many environments train; in the sync pipeline those expected alone count."""
        with self._changed:
            self._connected = environments
            self._resize()
            self._changed.notify_all()

    def measured(self, speed: Speed, *, any_lag: bool, group: Group = ALONE) -> Flight:
        """Choose what is not configured by what was measured; from now on it follows `connect`.

        Args:
            speed: speed of environments and learner.
            any_lag: whether to choose max_policy_lag, too; it stays as chosen here.
            group: all of its ranks call this, and have the largest lag of all.
        """
        with self._changed:
            self._speed = speed
            if any_lag:
                self._given = replace(self._given, max_policy_lag=None)
                lag = self._resize().max_policy_lag or 0
                self._max_lag = round(group.agree({"lag": lag}, "max")["lag"])
            self._resize()
            flight = Flight(self.length, self.envs_per_update, self._max_lag)
        self.on_room()
        return flight

    def _resize(self) -> Flight:
        """Choose what is not configured; the lock is held, but in the constructor."""
        given, steps, sync = self._given, self.spec.max_episode_steps, self._max_lag is None
        demand = Demand(
            self._wanted,
            self._connected,
            max(1, self._largest_session),
            steps,
            self._memory_size > 0,
        )
        measured = self._speed is not None and self._connected > 0
        if self._speed is not None and measured:
            flight = plan(self._speed, demand, given)
        else:  # the number of environments alone chooses; sync: of those expected
            known = self._expected if sync else max(self._expected, self._connected)
            demand = replace(demand, environments=known)
            flight = unmeasured(demand, given, self._expected if sync else self._connected)
        self.length, self.envs_per_update = flight.unroll_steps, flight.unrolls_per_update
        # Transitions of whole unrolls that are enough for an update.
        self._enough = self.length * math.ceil(self._wanted / transitions_in(self.length, steps))
        if self._max_lag is not None:  # see may_begin
            fixed = given.unrolls_per_update > 0 or (given.unroll_steps > 0 and not measured)
            self.environments_limit = (self._max_lag + 1) * self.envs_per_update if fixed else 0
        return flight

    @property
    def fixed_unrolls(self) -> int:
        """Unrolls of an update where their number is configured; else 0."""
        return self.envs_per_update if self._given.unrolls_per_update else 0

    @property
    @override
    def chosen(self) -> dict[str, int]:
        return {
            "environments": self._connected,
            "unroll_steps": self.length,
            "unrolls_per_update": self.envs_per_update,
            **({} if self._max_lag is None else {"max_policy_lag": self._max_lag}),
        }

    def memory_bytes(self, environments: int, unrolls: int) -> int:
        """Return bytes of an unroll of each environment, and of an update's, in order and shuffled.

        Args:
            environments: number that train.
            unrolls: unrolls of an update.
        """
        spec = self.spec if self._frames is None else self._frames.stacked_spec(self.spec)
        kept = sum(array_bytes(self._layout).values())
        learned = sum(array_bytes(time_step_layout(spec, self._extras)).values())
        return (self.length + 1) * (kept * environments + 2 * learned * unrolls)

    # --- acting

    def may_begin(self, filled: Sequence[Unroll] = ()) -> bool:
        """Tell whether time steps acted on now will be young enough when they are learned from.

        Their lag is the number of updates that finish before theirs starts: those fed by unrolls
        that wait already or were begun earlier, those just filled included, and the one running
        now.
        """
        if self._max_lag is None:
            return True
        if self.demonstrations is not None:
            return False
        with self._changed:
            ahead = self._ready_envs + self._open_envs
            before = ahead // self.envs_per_update + int(self.updating)
        return before <= self._max_lag

    def add(self, unroll: Unroll) -> None:
        """Hand over a full unroll: those that were begun first are learned from first."""
        assert unroll.full
        with self._changed:
            self._open.remove(unroll)
            self._open_envs -= unroll.num_envs
            at = len(self._ready)
            if self._max_lag is not None:
                while at and self._ready[at - 1].first_version > unroll.first_version:
                    at -= 1
            self._ready.insert(at, unroll)
            self._ready_envs += unroll.num_envs
            self._changed.notify_all()

    # --- learning

    @property
    def ready(self) -> bool:
        """Whether there is enough for an update."""
        return self._ready_envs >= self.envs_per_update or self.demonstrations is not None

    @property
    @override
    def settled(self) -> bool:
        return self.demonstrations is not None or not self.ready

    @property
    def ready_rows(self) -> int:
        """Transitions that wait to be learned from."""
        with self._changed:
            return sum((u.num_envs - u.taken) * u.transitions for u in self._ready)

    @property
    def waiting_rows(self) -> int:
        """The same: each is learned from once."""
        return self.ready_rows

    def due(self, version: int, timeout_s: float) -> bool:
        """Drop transitions that are too old, and wait until an update is due; see Storage."""
        if self.demonstrations is not None:
            if version < self.demonstrations.updates:
                return True
            self.demonstrations = None
            self.on_room()
        before = self.dropped
        with self._changed:
            decided = self._due_at == version  # more environments may have connected since
            if not decided and not self._changed.wait_for(lambda: self.ready, timeout_s):
                return False
            if self._max_lag is not None:
                for unroll in self._ready.copy():
                    self.dropped += unroll.drop_older(version - self._max_lag)
                    if not unroll.transitions:
                        self._ready.remove(unroll)
                        self._ready_envs -= unroll.num_envs - unroll.taken
                        self._free.setdefault(unroll.num_envs, []).append(unroll)
            if due := decided or self.ready:
                self._due_at = version
        if self.dropped > before:
            self.on_room()
        return due

    def sample(self, version: int, timeout_s: float) -> Rollout | None:
        """Copy the unrolls of one update out of the storage, oldest first.

        Args:
            version: current policy version; what is older than max_policy_lag is dropped.
            timeout_s: longest wait, seconds.
        """
        if not self.due(version, timeout_s):
            return None
        if self.demonstrations is not None:
            return self._demonstrated(self.demonstrations, version)
        oldest = -math.inf if self._max_lag is None else version - self._max_lag
        parts: list[tuple[Unroll, int, int]] = []
        with self._changed, self.memory_lock:
            # The next update would find them too old: what open unrolls hold so far.
            for unroll in self._open:
                if not 0 <= unroll.first_version <= oldest or (head := unroll.cut()) is None:
                    continue
                self.dropped += head.drop_older(oldest)
                if head.transitions:
                    parts.append((head, 0, head.num_envs))
            if self._max_lag is None:  # lockstep: the order of arrival must not matter
                arrived = self._ready[self._in_order :]
                arrived.sort(key=lambda u: (u.sequence, u.first_slot))
                self._ready[self._in_order :] = arrived
                self._in_order = len(self._ready)
            # As many environments as make an update, and full unrolls as old as the open ones.
            wanted, used = self.envs_per_update, 0
            for unroll in self._ready:
                left = unroll.num_envs - unroll.taken
                count = left if unroll.first_version <= oldest else min(wanted, left)
                if count <= 0:
                    break
                parts.append((unroll, unroll.taken, unroll.taken + count))
                wanted -= count
                unroll.taken += count
                self._ready_envs -= count
                if count < left:
                    break
                used += 1
                self._free.setdefault(unroll.num_envs, []).append(unroll)
            del self._ready[:used]
            self._in_order = max(0, self._in_order - used)
            arrays, padding = side_by_side(parts)
            versions = [u.first_version for u, first, last in parts for _ in range(first, last)]
            self._due_at, self.updating = None, True
        self.on_room()
        batch = Rollout(arrays, versions, padding)
        batch.times = max(1.0, batch.size / self._enough)
        return batch

    def _demonstrated(self, demonstrations: Demonstrations, version: int) -> Rollout:
        """Return a batch of demonstrations, as large as one of environments."""
        length, envs = self.length, self.envs_per_update
        arrays = demonstrations.sample(version, length, envs)
        batch = DemonstratedRollout(arrays, [version] * envs)
        batch.times = max(1.0, batch.size / self._enough)
        self.updating = True
        return batch

    def done(self, batch: Rollout) -> None:
        """End the update that `sample` began."""
        self.updating = False
        self.on_room()

    # --- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the unrolls that wait, without what an update has had of them."""
        with self._changed:
            waiting = list(self._ready)
        saved = []
        for unroll in waiting:
            with self.memory_lock:
                arrays, _ = side_by_side([(unroll, unroll.taken, unroll.num_envs)])
            saved.append(
                {
                    "arrays": to_host(arrays),
                    "rows": unroll.transitions,
                    "first_version": unroll.first_version,
                    "first_slot": unroll.first_slot,
                }
            )
        return {"ready": saved}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load unrolls that waited; those whose arrays changed, by options, are lost."""
        for saved in state.get("ready", []):
            length, arrays = saved["rows"], saved["arrays"]
            num_envs = arrays["step_type"].shape[1]
            arrays = {k: v if k == "memory" else v[: length + 1] for k, v in arrays.items()}
            with self._changed, self.memory_lock:
                unroll = self.arena.allocate(num_envs, length, self._expected)
                if {k: v.shape for k, v in arrays.items()} != {
                    k: v.shape for k, v in unroll.arrays.items()
                }:
                    continue
                for name, array in unroll.arrays.items():
                    array.copy_(arrays[name])
                unroll.begin(saved["first_slot"], 0)
                unroll.cursor, unroll.first_version = length + 1, saved["first_version"]
                self._open.append(unroll)
                self._open_envs += num_envs
                self.add(unroll)
                self._in_order += 1
