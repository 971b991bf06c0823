"""Networks that remember: a GRU over time between any network and its outputs."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from learner_service.networks.stacked import StackedGRU, StackedLinear
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

    def columns(self, index: Tensor) -> "Past":
        """The past of some of the environments."""
        return Past(self.memory[index], None if self.first is None else self.first[:, index])

    def rows(self, index: Tensor) -> Tensor:
        """Where the T rows of environments [b] lie among the [T * B] joint rows: [T * b]."""
        assert self.first is not None
        length, num_envs = self.first.shape
        start = torch.arange(0, length * num_envs, num_envs, device=index.device)
        return (start.unsqueeze(1) + index).flatten()

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
        num_envs, num_agents, width = memory.shape
        keep = None
        if past.first is not None:
            keep = (~past.first).float().unsqueeze(-1).expand(-1, -1, num_agents).flatten(1)
        rows = F.relu(features.flatten(0, 1))
        states = self.gru(rows, memory.flatten(0, 1), keep)  # [T, B * A, H]
        out: Tensor = self.head(states.flatten(0, 1))
        return out.view(*features.shape[:2], -1), states[-1].view(num_envs, num_agents, width)


def memory_size(network: nn.Module) -> int:
    """H of a network that remembers, 0 of another."""
    return network.memory_size if isinstance(network, Recurrent) else 0
