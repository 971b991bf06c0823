"""Rows of a batch on their way: from messages to unrolls and the policy, actions back.

A row is a time step of one environment.

On the host rows are written straight into their unrolls. For a device see
learner_service.serving.packed.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from learner_service.algorithms.base import Policy
from learner_service.serving.slot_memory import SlotMemory
from learner_service.storage.unroll import OBSERVATION, Unroll
from shared.timestep import Array, StepType, TimeStep

_FIRST = int(StepType.FIRST)


class RowTarget(NamedTuple):
    """A time step of each environment of one session, and where they go.

    Attributes:
        timestep: [n, ...] rows.
        unroll: they belong to; None: they are not stored.
        row: time step of the unroll.
        first_slot: of their environments.
    """

    timestep: TimeStep
    unroll: Unroll | None = None
    row: int = 0
    first_slot: int = -1

    @property
    def num_envs(self) -> int:
        """How many rows: n."""
        return len(self.timestep.step_type)


def write_rows(arrays: Mapping[str, Array], at: int | slice, timestep: TimeStep) -> None:
    """Write what the environments sent, [n, ...], to arrays by name, where `at` selects n rows."""
    arrays["step_type"][at] = timestep.step_type
    arrays["reward"][at] = timestep.reward
    arrays["discount"][at] = timestep.discount
    for name, array in timestep.observation.items():
        arrays[OBSERVATION + name][at] = array


class Staging(ABC):
    """Brings batches to where the policy acts. Used by the inference thread.

    A batch is loaded; then it is acted on, or stored without that, or shown.
    """

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
    def act(
        self, policy: Policy, generator: torch.Generator, memory: SlotMemory | None
    ) -> Tensor | None:
        """Act on the rows and store them with the actions and what else the policy gives.

        Args:
            policy: acts.
            generator: randomness of exploration.
            memory: what the policy remembers, if it does.

        Returns:
            [B, A, H] what the policy remembered before, if it remembers.
        """

    @abstractmethod
    def prepare(
        self,
        policy: Policy,
        generator: torch.Generator,
        memory: SlotMemory | None,
        most_rows: int,
    ) -> None:
        """Do beforehand what the first acts would take time for. No random number is used up.

        Args:
            policy: that will act.
            generator: see `act`.
            memory: see `act`.
            most_rows: of a batch.
        """

    @abstractmethod
    def actions(self) -> Array:
        """[B, A] or [B, A, U] actions of `act` on the host, until the next act; waits for them."""

    @abstractmethod
    def observation(self) -> dict[str, Tensor]:
        """Name -> [B, ...] of the rows to act on, until the next batch is loaded."""

    @abstractmethod
    def step_type(self) -> Tensor:
        """[B] of the rows to act on."""

    @abstractmethod
    def gather(self, parts: Sequence[TimeStep]) -> dict[str, Tensor]:
        """Name -> [B, ...] of rows that others act on, side by side, until the next call."""

    @abstractmethod
    def to_host(self, action: Tensor) -> Array:
        """What others act, on the host, until the next call; waits for it."""


class HostStaging(Staging):
    """Where the policy acts on the host: rows are stored at once, and gathered to act on."""

    def __init__(self) -> None:
        self._acting: Sequence[RowTarget] = ()
        self._actions: Array | None = None
        self._gathered: dict[str, tuple[Array, Tensor]] = {}

    @override
    def load(self, acting: Sequence[RowTarget], others: Sequence[RowTarget] = ()) -> None:
        for timestep, unroll, row, _ in (*acting, *others):
            if unroll is not None:
                write_rows(unroll.host, row, timestep)
        self._acting = acting

    def store(self) -> None:
        """See Staging: they are stored."""

    def prepare(
        self,
        policy: Policy,
        generator: torch.Generator,
        memory: SlotMemory | None,
        most_rows: int,
    ) -> None:
        """See Staging: there is nothing to do."""

    @override
    def act(
        self, policy: Policy, generator: torch.Generator, memory: SlotMemory | None
    ) -> Tensor | None:
        before = None
        if memory is not None:
            slots = np.concatenate([np.arange(p.num_envs) + p.first_slot for p in self._acting])
            places = torch.from_numpy(memory.places(slots))
            before = memory.load(places, self.step_type() == _FIRST)
        acted = policy.act(self.observation(), generator, before)
        if memory is not None:
            memory.remember(places, acted.pop("memory"))
        self._keep({name: value.numpy() for name, value in acted.items()}, before)
        self._actions = acted["action"].numpy()
        return before

    @override
    def actions(self) -> Array:
        assert self._actions is not None
        return self._actions

    def _keep(self, acted: dict[str, Array], memory: Tensor | None) -> None:
        """Store what the policy gave."""
        before = None if memory is None else memory.numpy()
        stop = 0
        for timestep, unroll, row, _ in self._acting:
            start, stop = stop, stop + len(timestep.step_type)
            assert unroll is not None
            for name, array in acted.items():
                unroll.host[name][row] = array[start:stop]
            if before is not None and row == 0:
                unroll.host["memory"][0] = before[start:stop]

    def observation(self) -> dict[str, Tensor]:
        """See Staging. Gathered: how memory is aligned must not depend on the unroll."""
        acting = self._acting
        return {
            name: self._gather(name, [p.timestep.observation[name] for p in acting])
            for name in acting[0].timestep.observation
        }

    @override
    def step_type(self) -> Tensor:
        return self._gather("", [p.timestep.step_type for p in self._acting])

    @override
    def gather(self, parts: Sequence[TimeStep]) -> dict[str, Tensor]:
        return {
            name: self._gather(f"other {name}", [part.observation[name] for part in parts])
            for name in parts[0].observation
        }

    @override
    def to_host(self, action: Tensor) -> Array:
        array: Array = action.numpy()
        return array

    def _gather(self, name: str, parts: Sequence[Array]) -> Tensor:
        """Arrays of several sessions side by side, [B, ...]."""
        total = sum(map(len, parts))
        known = self._gathered.get(name)
        if known is None or len(known[0]) < total:
            dtype = torch.from_numpy(np.empty(0, parts[0].dtype)).dtype
            tensor = torch.empty((total, *parts[0].shape[1:]), dtype=dtype)  # aligned
            known = self._gathered[name] = tensor.numpy(), tensor
        array, tensor = known
        stop = 0
        for part in parts:
            start, stop = stop, stop + len(part)
            array[start:stop] = part
        return tensor[:total]
