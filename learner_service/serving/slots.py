"""The slot table: which session sits in which slots, and where each slot's episodes are."""

import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from murmur.learner_service.checkpoint.parts import SLOTS
from murmur.learner_service.device.readback import to_host
from murmur.learner_service.serving.curriculum import Curriculum
from murmur.learner_service.serving.requests import EnvSession
from murmur.learner_service.telemetry.progress import Progress
from murmur.shared.config.episode_options import Values
from murmur.shared.rpc import rollout_pb2 as pb
from murmur.shared.wire.codec import past_actions
from murmur.shared.wire.episode_options import options_to_proto
from murmur.shared.wire.spec import MAX_ENVS, EnvSpec

# Slots without a session whose next episode is remembered: as many as one session may have.
MAX_REMEMBERED = MAX_ENVS


@dataclass(frozen=True, eq=False)
class OpenEpisode:
    """The episode under way in a slot, as the sync pipeline continues it.

    Attributes:
        actions: actions so far, as sent over the wire.
        memory: [A, Z] recurrent state; None: of zeros, or the policy has none.
        returned: sum of rewards so far, over agents.
        untrained: whether the episode began before the first update.
        values: values of the curriculum that it began with, and those told last; None: there is
            no curriculum.
        counted: whether its slot's next row was counted before the checkpoint.
    """

    actions: bytes = b""
    memory: Tensor | None = None
    returned: float = 0.0
    untrained: bool = False
    values: tuple[Values, Values] | None = None
    counted: bool = False


_NEW = OpenEpisode()


@dataclass(eq=False)
class SlotTable:
    """Slots of the training sessions. Several threads use it; a lock guards it.

    A slot enters the table with the first row that arrives for it, so a Hello alone leaves nothing
    behind. The table is bounded: the least recently used slots leave it. A slot that it
    does not know begins above every episode that it has forgotten, so no seed is played twice.

    Attributes:
        exact: whether a resumed run continues in the middle of episodes (the sync pipeline).
        progress: counts rows that a resumed run cannot continue with.
        max_remembered: slots without a session whose next episode is remembered.
        rank: rank among several learners: its slots are no other's, so no two play one seed.
        curriculum: options of the episodes that begin; None: there are none.
    """

    exact: bool
    progress: Progress
    max_remembered: int = MAX_REMEMBERED
    rank: int = 0
    curriculum: Curriculum | None = None

    def __post_init__(self) -> None:
        """Begin with an empty table."""
        self._offset = self.rank * SLOTS
        self._first_episode = 0  # of a slot that is not in the table
        self._lock = threading.Lock()
        self._sessions: list[EnvSession] = []
        self._next_episode: dict[int, int] = {}
        self._open: dict[int, OpenEpisode] = {}  # of slots without a session

    @property
    def num_envs(self) -> int:
        """Environments of all sessions."""
        with self._lock:
            return sum(s.num_envs for s in self._sessions)

    @property
    def num_counted(self) -> int:
        """Slots whose first row was counted before the checkpoint that the run resumed from."""
        with self._lock:
            return sum(episode.counted for episode in self._open.values())

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
            opened = [self._open.pop(first + i, _NEW) for i in range(n)]
            now = None if self.curriculum is None else self.curriculum.current
            told = next((x.values[1] for x in opened if x.values is not None), now)
            session = EnvSession(hello.worker_id, spec, n, first, episode, values=told)
            session.episode_return[:] = [x.returned for x in opened]
            session.untrained[:] = [x.untrained for x in opened]
            counted = sum(x.counted for x in opened)
            session.resumed = counted == n
            if counted and not session.resumed:  # another share of the slots: a fresh start
                self.progress.drop("restart", counted)
            like = next((x.memory for x in opened if x.memory is not None), None)
            if like is not None:
                zeros = torch.zeros_like(like)
                rows = [zeros if x.memory is None else x.memory for x in opened]
                session.memory = torch.stack(rows)
            self._sessions.append(session)
        replay(session, [x.actions for x in opened])
        starts = [
            pb.SlotStart(episode=int(e), actions=x.actions)
            for e, x in zip(episode, opened, strict=True)
        ]
        for i, x in enumerate(opened):
            if x.values is not None:
                session.begun[i] = x.values[0]
                starts[i].options.extend(options_to_proto(x.values[0].options))
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
                self._open |= _open_episodes(session)  # for another session

    def state_dict(self) -> dict[str, Any]:
        """Per slot: the episode under way; in sync mode its actions so far and what is remembered.

        Memory is saved, not made again from the observations: it is what policies of the past made
        of them.
        """
        found: dict[int, OpenEpisode] = {}
        with self._lock:
            episodes = dict(self._next_episode)
            for session in self._sessions:
                if not session.messages and not session.resumed:
                    continue  # it has only said Hello
                episodes.update(zip(session.slots.tolist(), session.episode.tolist(), strict=True))
                if self.exact:
                    found |= _open_episodes(session)
        values = {s: [asdict(v) for v in x.values] for s, x in found.items() if x.values}
        return {
            "slots": sorted(
                (slot, episode, found.get(slot, _NEW).actions.hex())
                for slot, episode in episodes.items()
            ),
            "first_episode": self._first_episode,
            "memory": {
                slot: to_host(x.memory).clone() for slot, x in found.items() if x.memory is not None
            },
            "returns": {slot: x.returned for slot, x in found.items()},
            "untrained": sorted(slot for slot, x in found.items() if x.untrained),
            "again": sorted(found),
            **({"values": values} if self.curriculum is not None else {}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint; a curriculum is loaded before."""
        self._first_episode = state.get("first_episode", 0)
        untrained, again = (set(state.get(k, ())) for k in ("untrained", "again"))
        for slot, episode, actions in state["slots"]:
            # Only the sync pipeline can continue in the middle of an episode.
            self._next_episode[slot] = episode if self.exact else episode + 1
            if not self.exact:
                continue
            values = None
            if self.curriculum is not None and slot in state.get("values", {}):
                begun, told = (Values(**saved) for saved in state["values"][slot])
                values = self.curriculum.completed(begun), self.curriculum.completed(told)
            self._open[slot] = OpenEpisode(
                bytes.fromhex(actions),
                state.get("memory", {}).get(slot),
                state.get("returns", {}).get(slot, 0.0),
                slot in untrained,
                values,
                slot in again,
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
        for slot in list(self._next_episode)[: len(self._next_episode) - self.max_remembered]:
            self._first_episode = max(self._first_episode, self._next_episode.pop(slot))


def _open_episodes(session: EnvSession) -> dict[int, OpenEpisode]:
    """Return the episodes under way of a session, by slot."""
    return {
        slot: OpenEpisode(
            session.open_actions(i),
            None if session.memory is None else session.memory[i],
            float(session.episode_return[i]),
            bool(session.untrained[i]),
            None if session.values is None else (session.begun[i], session.values),
            counted=True,
        )
        for i, slot in enumerate(session.slots.tolist())
    }


def replay(session: EnvSession, actions: list[bytes]) -> None:
    """Resume a session in the middle of its episodes: its past actions, ends aligned."""
    played = [past_actions(session.spec, data) for data in actions]
    longest = max(map(len, played))
    session.started = np.array([longest - len(own) for own in played])
    taken = np.zeros((longest, len(played), *played[0].shape[1:]), played[0].dtype)
    for i, own in enumerate(played):
        taken[longest - len(own) :, i] = own
    session.taken += list(taken)
