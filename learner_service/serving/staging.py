"""Rows of a batch on their way: from messages to unrolls and the policy, actions back.

A row is a time step of one environment. On the host rows are written straight into their unrolls.
For a device see murmur.learner_service.serving.packed. Recurrent states stay on the device, by
slot.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from murmur.learner_service.device.cuda_graph import Graphs
from murmur.learner_service.learning.base import Policy
from murmur.learner_service.serving.session import EnvSession
from murmur.learner_service.storage.storage import DTYPES, Unroll
from murmur.shared.wire.dataset import OBSERVATION
from murmur.shared.wire.timestep import Array, StepType, TimeStep

_FIRST = int(StepType.FIRST)


class SlotMemory:
    """One row for each slot: read and written by index, whatever the number of sessions.

    Used by the inference thread. A session's `memory` is a view of its slots' rows.

    Attributes:
        table: [1 + slots, A, Z]; row 0 belongs to no slot.
    """

    def __init__(self, num_agents: int, size: int, device: torch.device) -> None:
        """Begin with an empty table.

        Args:
            num_agents: number of agents, A.
            size: numbers that an agent's policy remembers, Z.
            device: device of the table.
        """
        self.table = torch.zeros((1, num_agents, size), device=device)
        self._sessions: list[EnvSession] = []

    def admit(self, session: EnvSession) -> None:
        """Take up a session, with what its `memory` holds if it resumes."""
        stop = 1 + session.first_slot + session.num_envs
        if stop > len(self.table):
            self._grow(stop)
        resumed = session.memory
        session.memory = self._rows(session)
        if resumed is None:
            session.memory.zero_()
        else:
            session.memory.copy_(resumed)
        self._sessions.append(session)

    def dismiss(self, session: EnvSession) -> None:
        """Remove a session that has ended."""
        if session in self._sessions:
            self._sessions.remove(session)

    @staticmethod
    def places(slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the table's rows of slots."""
        return slots + 1

    def load(self, places: Tensor, begins: Tensor) -> Tensor:
        """Return rows of the table, [B, A, Z], zero where an episode begins."""
        return self.table.index_select(0, places).masked_fill_(begins.view(-1, 1, 1), 0)

    def remember(self, places: Tensor, memory: Tensor) -> None:
        """Write recurrent states [B, A, Z] to rows of the table."""
        self.table.index_copy_(0, places, memory)

    def _grow(self, at_least: int) -> None:
        old = self.table
        self.table = old.new_zeros((max(at_least, 2 * len(old)), *old.shape[1:]))
        self.table[: len(old)] = old
        for session in self._sessions:
            session.memory = self._rows(session)

    def _rows(self, session: EnvSession) -> Tensor:
        first = 1 + session.first_slot
        return self.table[first : first + session.num_envs]


class RowTarget(NamedTuple):
    """A time step of each environment of one session, and its place in an unroll.

    Attributes:
        timestep: [n, ...] rows.
        unroll: the rows' unroll; None: they are not stored.
        step: index of the time step in the unroll.
        first_slot: slot of the first environment.
    """

    timestep: TimeStep
    unroll: Unroll | None = None
    step: int = 0
    first_slot: int = -1

    @property
    def num_envs(self) -> int:
        """Return the number of rows, n."""
        return len(self.timestep.step_type)


class ForwardRows(NamedTuple):
    """Rows that a policy acts on without storing them: those of evaluations and of opponents.

    Attributes:
        policy: policy that acts.
        rows: time steps of some sessions, [B, ...] side by side.
        memory: [B, A, Z] recurrent state before the rows; None: of zeros, or the policy has none.
    """

    policy: Policy
    rows: Sequence[TimeStep]
    memory: Tensor | None


@dataclass(eq=False)
class Staging(ABC):
    """Brings batches to where the policy acts. Used by the inference thread.

    A batch is loaded; then it is acted on and its actions are read, or it is stored without that.

    Attributes:
        generator: randomness of exploration.
        memory: recurrent states of the training sessions; None: the policy has none.
        graphs: CUDA graphs of the inference thread.
    """

    generator: torch.Generator
    memory: SlotMemory | None
    graphs: Graphs

    @abstractmethod
    def prepare(self, policy: Policy) -> None:
        """Do beforehand what the first acts would take time for. No random number is used up."""

    @abstractmethod
    def load(self, acting: Sequence[RowTarget], others: Sequence[RowTarget] = ()) -> None:
        """Take a batch.

        Args:
            acting: rows to act on.
            others: rows that are only to be stored: they are when this returns.
        """

    @abstractmethod
    def store(self) -> None:
        """Store the rows to act on: they will not be acted on after all."""

    @abstractmethod
    def act(self, policy: Policy) -> Tensor | None:
        """Act on the rows; store them with the actions and the policy's other outputs.

        Returns:
            [B, A, Z] recurrent state before the rows; None: the policy has none.
        """

    @abstractmethod
    def actions(self) -> Array:
        """Wait for the actions of `act`, [B, A] or [B, A, U] on the host, valid until the next."""

    def forward_rows(
        self, groups: Sequence[ForwardRows], generator: torch.Generator | None
    ) -> tuple[Array, list[Tensor | None]]:
        """Act with several policies on rows that are not stored, and wait for the actions.

        Args:
            groups: policies with their rows.
            generator: randomness of the actions; None: they are greedy.

        Returns:
            [B, A] or [B, A, U] actions of all groups side by side on the host, valid until the
            next call; and of each group its recurrent state now, None if its policy has none.
        """
        observation, step_type = self._gather([row for group in groups for row in group.rows])
        actions: list[Tensor] = []
        memories: list[Tensor | None] = []
        stop = 0
        for policy, rows, memory in groups:
            start, stop = stop, stop + sum(len(row.step_type) for row in rows)
            own = {name: array[start:stop] for name, array in observation.items()}
            if policy.memory_size:
                begins = (step_type[start:stop] == _FIRST).view(-1, 1, 1)
                if memory is None:
                    shape = stop - start, rows[0].reward.shape[1], policy.memory_size
                    memory = torch.zeros(shape, device=begins.device)
                memory = memory.masked_fill(begins, 0)
            with self.graphs.eager("rows", stop - start, generator is None):
                acted = policy.act(own, generator, memory)
            actions.append(acted["action"])
            memories.append(acted.get("memory"))
        together = actions[0] if len(actions) == 1 else torch.cat(actions)
        return self._to_host(together), memories

    @abstractmethod
    def _gather(self, rows: Sequence[TimeStep]) -> tuple[dict[str, Tensor], Tensor]:
        """Copy rows side by side to where policies act; valid until the next call.

        Returns:
            observation name -> [B, ...]; and [B] step types.
        """

    @abstractmethod
    def _to_host(self, action: Tensor) -> Array:
        """Wait for actions that are not stored, on the host, valid until the next call."""


class HostStaging(Staging):
    """Staging of a policy that acts on the host: rows are stored at once, and gathered to act."""

    def __post_init__(self) -> None:
        """Load nothing yet."""
        self._acting: Sequence[RowTarget] = ()
        self._actions: Array | None = None
        # Name and shape of a row -> [rows, ...] of the largest batch so far, as a tensor and for
        # NumPy: opponents may be shown more agents than the run's policy.
        self._gathered: dict[tuple[str, tuple[int, ...]], tuple[Tensor, Array]] = {}

    def prepare(self, policy: Policy) -> None:
        """Do nothing: acting on the host needs no preparation."""

    @override
    def load(self, acting: Sequence[RowTarget], others: Sequence[RowTarget] = ()) -> None:
        for timestep, unroll, step, _ in (*acting, *others):
            assert unroll is not None
            arrays = unroll.host
            arrays["step_type"][step] = timestep.step_type
            arrays["reward"][step] = timestep.reward
            arrays["discount"][step] = timestep.discount
            for name, array in timestep.observation.items():
                arrays[OBSERVATION + name][step] = array
        self._acting = acting

    def store(self) -> None:
        """Do nothing: `load` has stored the rows."""

    @override
    def act(self, policy: Policy) -> Tensor | None:
        acting, memory, before = self._acting, self.memory, None
        observation, step_type = self._gather([target.timestep for target in acting])
        if memory is not None:
            slots = [np.arange(target.num_envs) + target.first_slot for target in acting]
            places = torch.from_numpy(memory.places(np.concatenate(slots)))
            before = memory.load(places, step_type == _FIRST)
        acted = policy.act(observation, self.generator, before)
        if memory is not None:
            memory.remember(places, acted.pop("memory"))
        # The actions are stored beside their rows. Of the recurrent state the unroll keeps what its
        # first row was acted on with.
        outputs: dict[str, Array] = {name: value.numpy() for name, value in acted.items()}
        stop = 0
        for timestep, unroll, step, _ in acting:
            start, stop = stop, stop + len(timestep.step_type)
            assert unroll is not None
            for name, array in outputs.items():
                unroll.host[name][step] = array[start:stop]
            if before is not None and step == 0:
                unroll.host["memory"][0] = before[start:stop].numpy()
        self._actions = outputs["action"]
        return before

    @override
    def actions(self) -> Array:
        assert self._actions is not None
        return self._actions

    @override
    def _gather(self, rows: Sequence[TimeStep]) -> tuple[dict[str, Tensor], Tensor]:
        # A second copy, beside the one to the unroll: acting reads torch's own memory, side by side
        # and always aligned alike. Sums depend on alignment, and an unroll's columns vary in it.
        step_type = np.concatenate([row.step_type for row in rows])
        total, observation = len(step_type), {}
        for name, first in rows[0].observation.items():
            key = name, first.shape[1:]
            known = self._gathered.get(key)
            if known is None or len(known[0]) < total:
                tensor = torch.empty((total, *first.shape[1:]), dtype=DTYPES[first.dtype.name])
                known = self._gathered[key] = tensor, tensor.numpy()
            tensor, array = known
            np.concatenate([row.observation[name] for row in rows], out=array[:total])
            observation[name] = tensor[:total]
        return observation, torch.from_numpy(step_type)

    @override
    def _to_host(self, action: Tensor) -> Array:
        array: Array = action.numpy()
        return array
