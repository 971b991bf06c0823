"""Recurrent states of the episodes under way, by slot, on the device."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from learner_service.serving.session import EnvSession


class SlotMemory:
    """One row for each slot: read and written by index, whatever the number of sessions.

    Used by the inference thread. A session's `memory` is a view of its slots' rows.

    Attributes:
        table: [1 + slots, A, H]; row 0 belongs to no slot.
        grown: number of times that the table was moved.
    """

    def __init__(self, num_agents: int, size: int, device: torch.device) -> None:
        """Begin with an empty table.

        Args:
            num_agents: number of agents, A.
            size: numbers that an agent's policy remembers, H.
            device: device of the table.
        """
        self.table = torch.zeros((1, num_agents, size), device=device)
        self.grown = 0
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
        """Return rows of the table, [B, A, H], zero where an episode begins."""
        return self.table.index_select(0, places).masked_fill_(begins.view(-1, 1, 1), 0)

    def remember(self, places: Tensor, memory: Tensor) -> None:
        """Write recurrent states [B, A, H] to rows of the table."""
        self.table.index_copy_(0, places, memory)

    def _grow(self, at_least: int) -> None:
        old = self.table
        self.table = old.new_zeros((max(at_least, 2 * len(old)), *old.shape[1:]))
        self.table[: len(old)] = old
        self.grown += 1
        for session in self._sessions:
            session.memory = self._rows(session)

    def _rows(self, session: EnvSession) -> Tensor:
        first = 1 + session.first_slot
        return self.table[first : first + session.num_envs]
