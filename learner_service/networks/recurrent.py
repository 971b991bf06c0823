"""Networks that remember: a GRU over time between any network and its outputs."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from learner_service.networks.stacked import StackedGRU, StackedLinear, unroll_together
from learner_service.storage.rollout import Batch
from shared.timestep import StepType


@dataclass
class Past:
    """What a network that remembers must know of the rows before those it is given.

    Attributes:
        memory: [B, A, H] what was remembered when the first of the rows came.
        first: [T, B] bool, rows that begin an episode, on which nothing is remembered; None: there
            is one row of each environment (T = 1), and its memory is as it should be.
    """

    memory: Tensor
    first: Tensor | None = None

    def columns(self, index: Tensor | slice) -> "Past":
        """The past of some of the environments."""
        return Past(self.memory[index], None if self.first is None else self.first[:, index])

    def without_last(self) -> "Past":
        """The past of all rows but the last."""
        assert self.first is not None
        return Past(self.memory, self.first[:-1])


def pasts(batch: Batch) -> tuple[Past, Past] | tuple[None, None]:
    """The past of a batch's rows for a policy and for a critic; none if the policy has no memory.

    The policy goes on from what it remembered when it acted. A critic does not take part in acting:
    it begins with nothing at the unroll's first row.
    """
    memory = batch.arrays.get("memory")
    if memory is None:
        return None, None
    first = batch.arrays["step_type"] == int(StepType.FIRST)
    return Past(memory[0], first), Past(torch.zeros_like(memory[0]), first)


class Recurrent(nn.Module):
    """A network, a GRU that is fed its outputs, and a linear layer that reads the GRU.

    Attributes:
        memory_size: H, numbers that an agent remembers.
    """

    def __init__(
        self, body: nn.Module, slices: tuple[int, ...], width: int, num_outputs: int
    ) -> None:
        """`body` has `width` outputs; so has the GRU."""
        super().__init__()
        self.memory_size = width
        self.body, self.gru = body, StackedGRU(slices, width, width)
        self.head = StackedLinear(slices, width, num_outputs)

    def forward(
        self, image: Tensor | None, vector: Tensor | None, past: Past
    ) -> tuple[Tensor, Tensor]:
        """[T * B, A, ...] -> [T * B, A, outputs], and what is remembered then, [B, A, H]."""
        return self.remember(self.body(image, vector), past)

    def remember(self, features: Tensor, past: Past) -> tuple[Tensor, Tensor]:
        """As forward, from the body's outputs [T * B, A, H]."""
        memory = past.memory
        rows = F.relu(features.flatten(0, 1))
        states = self.gru(rows, memory.flatten(0, 1), _keep(past))  # [T, B * A, H]
        return self._read(states, features), states[-1].view(memory.shape)

    def _read(self, states: Tensor, features: Tensor) -> Tensor:
        """[T * B, A, outputs] of the states [T, B * A, H]."""
        out: Tensor = self.head(states.flatten(0, 1))
        return out.view(*features.shape[:2], -1)

    def together(
        self, features: Tensor, past: Past, other: "Recurrent", features_too: Tensor, past_too: Past
    ) -> tuple[Tensor, Tensor]:
        """Outputs of two networks that go through time side by side; see `remember`.

        Their units must have the same width and slices, their pasts the same first rows.
        """
        keep = _keep(past)
        assert keep is not None
        units = [
            (unit.gru, F.relu(x.flatten(0, 1)), its.memory.flatten(0, 1))
            for unit, x, its in ((self, features, past), (other, features_too, past_too))
        ]
        if all(isinstance(unit, StackedGRU) for unit, _, _ in units):
            states = unroll_together(units, keep)
        else:
            states = [unit(x, memory, keep) for unit, x, memory in units]
        return self._read(states[0], features), other._read(states[1], features_too)


def _keep(past: Past) -> Tensor | None:
    """[T, B * A] 0 where an episode begins, else 1."""
    if past.first is None:
        return None
    agents = past.memory.shape[1]
    # As numbers at once: a negation and a conversion would be two kernels.
    keep = torch.logical_not(past.first, out=torch.empty_like(past.first, dtype=torch.float32))
    return keep.unsqueeze(-1).expand(-1, -1, agents).flatten(1)


def memory_size(network: nn.Module) -> int:
    """H of a network that remembers, also of one built around it; 0 of another."""
    return next((m.memory_size for m in network.modules() if isinstance(m, Recurrent)), 0)
