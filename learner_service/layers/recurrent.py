"""Networks that remember: a GRU over time between any network and its outputs."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from learner_service.layers.stacked import StackedGRU, StackedLinear, unroll_together
from learner_service.storage.rollout import Batch
from shared.wire.timestep import StepType


@dataclass
class RecurrentState:
    """The recurrent state before the first of the rows that a network is given.

    Attributes:
        memory: [B, A, H] recurrent state before the first of the rows.
        first: [T, B] bool, rows that begin an episode, on which nothing is remembered; None: there
            is one row of each environment (T = 1), and its memory is as it should be.
    """

    memory: Tensor
    first: Tensor | None = None

    def columns(self, index: Tensor | slice) -> "RecurrentState":
        """The recurrent state of some of the environments."""
        return RecurrentState(
            self.memory[index], None if self.first is None else self.first[:, index]
        )

    def without_last(self) -> "RecurrentState":
        """The recurrent state of all rows but the last."""
        assert self.first is not None
        return RecurrentState(self.memory, self.first[:-1])


def recurrent_states(batch: Batch) -> tuple[RecurrentState, RecurrentState] | tuple[None, None]:
    """Initial states of policy and critic for a batch; None if the policy is not recurrent.

    The policy starts from the state that it had when it acted. A critic does not act, so it starts
    from zeros at the unroll's first row.
    """
    memory = batch.arrays.get("memory")
    if memory is None:
        return None, None
    first = batch.arrays["step_type"] == int(StepType.FIRST)
    return RecurrentState(memory[0], first), RecurrentState(torch.zeros_like(memory[0]), first)


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
        self, image: Tensor | None, vector: Tensor | None, hidden: RecurrentState
    ) -> tuple[Tensor, Tensor]:
        """[T * B, A, ...] -> [T * B, A, outputs], and what is remembered then, [B, A, H]."""
        return self.remember(self.body(image, vector), hidden)

    def remember(self, features: Tensor, hidden: RecurrentState) -> tuple[Tensor, Tensor]:
        """As forward, from the body's outputs [T * B, A, H]."""
        memory = hidden.memory
        rows = F.relu(features.flatten(0, 1))
        states = self.gru(rows, memory.flatten(0, 1), _keep(hidden))  # [T, B * A, H]
        return self._read(states, features), states[-1].view(memory.shape)

    def _read(self, states: Tensor, features: Tensor) -> Tensor:
        """[T * B, A, outputs] of the states [T, B * A, H]."""
        out: Tensor = self.head(states.flatten(0, 1))
        return out.view(*features.shape[:2], -1)

    def together(
        self,
        features: Tensor,
        hidden: RecurrentState,
        other: "Recurrent",
        features_too: Tensor,
        other_state: RecurrentState,
    ) -> tuple[Tensor, Tensor]:
        """Outputs of two networks that go through time side by side; see `remember`.

        Their units must have the same width and slices, their recurrent states the same first rows.
        """
        keep = _keep(hidden)
        assert keep is not None
        units = [
            (unit.gru, F.relu(x.flatten(0, 1)), its.memory.flatten(0, 1))
            for unit, x, its in (
                (self, features, hidden),
                (other, features_too, other_state),
            )
        ]
        if all(isinstance(unit, StackedGRU) for unit, _, _ in units):
            states = unroll_together(units, keep)
        else:
            states = [unit(x, memory, keep) for unit, x, memory in units]
        return self._read(states[0], features), other._read(states[1], features_too)


def _keep(hidden: RecurrentState) -> Tensor | None:
    """[T, B * A] 0 where an episode begins, else 1."""
    if hidden.first is None:
        return None
    agents = hidden.memory.shape[1]
    # As numbers at once: a negation and a conversion would be two kernels.
    keep = torch.logical_not(hidden.first, out=torch.empty_like(hidden.first, dtype=torch.float32))
    return keep.unsqueeze(-1).expand(-1, -1, agents).flatten(1)


def memory_size(network: nn.Module) -> int:
    """H of a network that remembers, also of one built around it; 0 of another."""
    return next((m.memory_size for m in network.modules() if isinstance(m, Recurrent)), 0)
