"""The slot table: which session sits in which slots, and where each slot's episodes are."""

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from murmur.learner_service.checkpoint.parts import SLOTS
from murmur.learner_service.device.readback import to_host
from murmur.learner_service.serving.curriculum import (
    Curriculum,
    values_from_state,
    values_to_state,
)
from murmur.learner_service.serving.session import EnvSession
from murmur.learner_service.telemetry.progress import Progress
from murmur.shared.config.episode_options import Values
from murmur.shared.rpc import rollout_pb2 as pb
from murmur.shared.wire.episode_options import options_to_proto
from murmur.shared.wire.spec import MAX_ENVS, EnvSpec, action_layout

# Slots without a session whose next episode is remembered: as many as one session may have.
MAX_REMEMBERED = MAX_ENVS


class SlotTable:
    """Slots of the training sessions. Several threads use it; a lock guards it.

    A slot enters the table with the first row that arrives for it, so a Hello alone leaves nothing
    behind. The table is bounded: the least recently used slots leave it. A slot that it
    does not know begins above every episode that it has forgotten, so no seed is played twice.
    """

    def __init__(
        self,
        exact: bool,
        progress: Progress,
        max_remembered: int = MAX_REMEMBERED,
        rank: int = 0,
        curriculum: Curriculum | None = None,
    ) -> None:
        """An empty table.

        Args:
            exact: whether a resumed run continues in the middle of episodes (the sync pipeline).
            progress: counts rows that a resumed run cannot continue with.
            max_remembered: slots without a session whose next episode is remembered.
            rank: rank among several learners: its slots are no other's, so no two play one seed.
            curriculum: options of the episodes that begin; None: there are none.
        """
        self._offset = rank * SLOTS
        self._exact = exact
        self._progress = progress
        self._max_remembered = max_remembered
        self._first_episode = 0  # of a slot that is not in the table
        self._lock = threading.Lock()
        self._sessions: list[EnvSession] = []
        self._next_episode: dict[int, int] = {}
        self._open_episodes: dict[int, bytes] = {}
        self._memory: dict[int, Tensor] = {}
        self._returns: dict[int, float] = {}
        self._untrained: set[int] = set()  # slots whose episode began before the first update
        self._curriculum = curriculum
        # By slot: values of the curriculum that its episode began with, and those told last.
        self._values: dict[int, tuple[Values, Values]] = {}
        self._again: set[int] = set()  # slots whose first row was counted before the checkpoint

    @property
    def num_envs(self) -> int:
        """Environments of all sessions."""
        with self._lock:
            return sum(s.num_envs for s in self._sessions)

    @property
    def num_counted(self) -> int:
        """Slots whose first row was counted before the checkpoint that the run resumed from."""
        return len(self._again)

    @property
    def all_waiting(self) -> bool:
        """Whether the rows of every session are kept and not answered yet."""
        with self._lock:
            return all(session.waiting for session in self._sessions)

    def admit(self, hello: pb.Hello, spec: EnvSpec) -> tuple[EnvSession, list[pb.SlotStart]]:
        """Slots for a training session: those it prefers if they are free, else the first gap."""
        n = hello.num_envs
        wanted = None
        if hello.HasField("preferred_first_slot"):
            wanted = self._offset + hello.preferred_first_slot % SLOTS
        with self._lock:
            first = self._free_slots(n, wanted)
            known, fresh = self._next_episode, self._first_episode
            episode = np.array([known.get(first + i, fresh) for i in range(n)])
            actions = [self._open_episodes.pop(first + i, b"") for i in range(n)]
            begun = [self._values.pop(first + i, None) for i in range(n)]
            now = None if self._curriculum is None else self._curriculum.current
            told = next((values[1] for values in begun if values is not None), now)
            session = EnvSession(hello.worker_id, spec, n, first, episode, values=told)
            slots = session.slots.tolist()
            session.episode_return[:] = [self._returns.pop(slot, 0.0) for slot in slots]
            session.untrained[:] = [slot in self._untrained for slot in slots]
            self._untrained.difference_update(slots)
            session.resumed = self._again.issuperset(slots)
            counted = self._again.intersection(slots)
            if counted and not session.resumed:  # another share of the slots: a fresh start
                self._progress.drop("restart", len(counted))
            self._again -= counted
            remembered = [self._memory.pop(first + i, None) for i in range(n)]
            like = next((m for m in remembered if m is not None), None)
            if like is not None:
                zeros = torch.zeros_like(like)
                session.memory = torch.stack([zeros if m is None else m for m in remembered])
            self._sessions.append(session)
        replay(session, actions)
        starts = [
            pb.SlotStart(episode=int(e), actions=a) for e, a in zip(episode, actions, strict=True)
        ]
        for i, values in enumerate(begun):
            if values is not None:
                session.begun[i] = values[0]
                starts[i].options.extend(options_to_proto(values[0].options))
        return session, starts

    def end(self, session: EnvSession) -> None:
        """Free the slots of a training session whose stream has ended."""
        with self._lock:
            if session not in self._sessions:
                return
            self._sessions.remove(session)
            if session.messages:
                self._remember(session.slots.tolist(), (session.episode + 1).tolist())
            elif session.resumed:
                self._take_back(session)

    def state_dict(self) -> dict[str, Any]:
        """Per slot: the episode under way; in sync mode its actions so far and what is remembered.

        Memory is saved, not made again from the observations: it is what policies of the past made
        of them.
        """
        memory: dict[int, Tensor] = {}
        returns: dict[int, float] = {}
        untrained: list[int] = []
        values: dict[int, list[dict[str, Any]]] = {}
        with self._lock:
            slots = {slot: (slot, episode, "") for slot, episode in self._next_episode.items()}
            for session in self._sessions:
                if not session.messages and not session.resumed:
                    continue  # it has only said Hello
                for i, slot in enumerate(session.slots.tolist()):
                    actions = session.open_actions(i).hex() if self._exact else ""
                    slots[slot] = (slot, int(session.episode[i]), actions)
                    if not self._exact:
                        continue
                    returns[slot] = float(session.episode_return[i])
                    if session.untrained[i]:
                        untrained.append(slot)
                    if session.values is not None:
                        both = session.begun[i], session.values
                        values[slot] = [values_to_state(x) for x in both]
                    if session.memory is not None:
                        memory[slot] = to_host(session.memory[i]).clone()
        return {
            "slots": sorted(slots.values()),
            "first_episode": self._first_episode,
            "memory": memory,
            "returns": returns,
            "untrained": sorted(untrained),
            "again": sorted(returns),
            **({"values": values} if self._curriculum is not None else {}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint; a curriculum is loaded before."""
        self._first_episode = state.get("first_episode", 0)
        for slot, episode, actions in state["slots"]:
            # Only the sync pipeline can continue in the middle of an episode.
            self._next_episode[slot] = episode if self._exact else episode + 1
            if self._exact:
                self._open_episodes[slot] = bytes.fromhex(actions)
        if self._exact:  # older checkpoints lack what is not found
            self._memory = state.get("memory", {})
            self._returns = state.get("returns", {})
            self._untrained = set(state.get("untrained", ()))
            self._again = set(state.get("again", ()))
            if self._curriculum is not None:
                for slot, (begun, told) in state.get("values", {}).items():
                    self._values[slot] = (
                        self._curriculum.completed(values_from_state(begun)),
                        self._curriculum.completed(values_from_state(told)),
                    )

    def _free_slots(self, n: int, wanted: int | None) -> int:
        taken = sorted((s.first_slot, s.first_slot + s.num_envs) for s in self._sessions)
        if wanted is not None and all(wanted + n <= a or wanted >= b for a, b in taken):
            return wanted
        first = self._offset
        for start, stop in taken:
            if first + n <= start:
                break
            first = max(first, stop)
        return first

    def _remember(self, slots: list[int], episodes: list[int]) -> None:
        """Note the next episodes of slots whose session has ended; drop the oldest slots."""
        for slot, episode in zip(slots, episodes, strict=True):
            self._next_episode.pop(slot, None)  # a dict keeps the order of insertion
            self._next_episode[slot] = episode
        for slot in list(self._next_episode)[: len(self._next_episode) - self._max_remembered]:
            self._first_episode = max(self._first_episode, self._next_episode.pop(slot))

    def _take_back(self, session: EnvSession) -> None:
        """Keep the place of a session that ended before its first row, for another session."""
        for i, slot in enumerate(session.slots.tolist()):
            self._again.add(slot)
            self._open_episodes[slot] = session.open_actions(i)
            self._returns[slot] = float(session.episode_return[i])
            if session.untrained[i]:
                self._untrained.add(slot)
            if session.values is not None:
                self._values[slot] = session.begun[i], session.values
            if session.memory is not None:
                self._memory[slot] = session.memory[i]


def replay(session: EnvSession, actions: list[bytes]) -> None:
    """Resume a session in the middle of its episodes: its past actions, ends aligned."""
    dtype, shape = action_layout(session.spec.action)
    size = dtype.itemsize * session.spec.num_agents * int(np.prod(shape, dtype=np.int64))
    lengths = [len(a) // size for a in actions]
    longest = max(lengths)
    for t in range(longest):
        rows = np.zeros((session.num_envs, session.spec.num_agents, *shape), dtype)
        for i, (length, data) in enumerate(zip(lengths, actions, strict=True)):
            at = t - (longest - length)
            if at >= 0:
                part = np.frombuffer(data[at * size : (at + 1) * size], dtype)
                rows[i] = part.reshape(rows[i].shape)
        session.taken.append(rows)
    session.started = np.array([longest - length for length in lengths])
