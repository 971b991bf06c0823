"""Transitions that an update learns from, sampled from a replay."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from learner_service.runtime.cuda_graph import copy_all
from learner_service.storage.storage import OBSERVATION


@dataclass
class ReplayBatch:
    """Transitions, B of them; of a SequenceReplay, whose arrays are of sequences, B = L * S.

    Attributes:
        arrays: name -> [B, ...] row t: observations with the prefix OBSERVATION, action, extras.
        next_arrays: name -> [B, ...] observations of row t + k, with the prefix OBSERVATION.
        reward: [B, A] discounted sum of r_{t+1} ... r_{t+k}; but for a team, those of an agent that
            dies end with the step in which it does.
        discount: [B, A], or [B, 1] for a team or where agents do not die: gamma^k, 0 if the episode
            or the agent's life ended: the weight of row t + k's value.
        weight: [B] importance weights, at most 1.
        index: [B] where each came from.
        age: [B] of the ring's column, to tell whether it was overwritten meanwhile.
        td_error: [B] set by the algorithm: |error| of its values, the new priorities.
        version: empty; any policy's rows will do.
        largest_weight: scalar, that weights were divided by.
        error_memory: [B] what td_error is written to, of a batch whose tensors are the memory of
            all batches in turn, so that graphs read and write them where they are; else None.
    """

    arrays: dict[str, Tensor]
    next_arrays: dict[str, Tensor]
    reward: Tensor
    discount: Tensor
    weight: Tensor
    index: Tensor
    age: Tensor
    td_error: Tensor | None = None
    version: tuple[int, ...] = ()
    largest_weight: Tensor = field(default_factory=lambda: torch.ones(()))
    error_memory: Tensor | None = None

    @property
    def rows(self) -> int:
        """Joint transitions: B."""
        return len(self.index)

    def observation(self) -> dict[str, Tensor]:
        """Name -> [B, ...] of row t."""
        return _observations(self.arrays)

    def next_observation(self) -> dict[str, Tensor]:
        """Name -> [B, ...] of row t + k."""
        return _observations(self.next_arrays)

    def _tensors(self) -> list[Tensor]:
        """All that a draw sets."""
        rows = [*self.arrays.values(), *self.next_arrays.values()]
        more = self.reward, self.discount, self.weight, self.index, self.age, self.largest_weight
        return [x for x in (*rows, *more) if x.numel()]

    def lasting(self) -> "ReplayBatch":
        """A copy, to be the memory of batches like this one."""

        def cloned(arrays: dict[str, Tensor]) -> dict[str, Tensor]:
            return {name: x.clone() for name, x in arrays.items()}

        names = "reward", "discount", "weight", "index", "age", "largest_weight"
        return ReplayBatch(
            cloned(self.arrays),
            cloned(self.next_arrays),
            **{name: getattr(self, name).clone() for name in names},
            error_memory=torch.zeros(len(self.index), device=self.index.device),
        )

    def copy_(self, other: "ReplayBatch") -> None:
        """Take in a batch of the same shapes, but for what an update has set."""
        copy_all(self._tensors(), other._tensors())

    def fresh(self) -> "ReplayBatch":
        """The same tensors, without what an update has set."""
        return replace(self, td_error=None)

    def to(self, device: torch.device) -> "ReplayBatch":
        """The same on a device, without what an update has set."""
        return ReplayBatch(
            {name: array.to(device) for name, array in self.arrays.items()},
            {name: array.to(device) for name, array in self.next_arrays.items()},
            self.reward.to(device),
            self.discount.to(device),
            self.weight.to(device),
            self.index.to(device),
            self.age.to(device),
            largest_weight=self.largest_weight.to(device),
        )


def _observations(arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {k.removeprefix(OBSERVATION): v for k, v in arrays.items() if k.startswith(OBSERVATION)}
