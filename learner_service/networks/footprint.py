"""What a network takes in memory, found without taking it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from learner_service.networks.inputs import InputShape

_COPIES = 4  # of each weight: itself, its gradient, Adam's two moments
_ROWS = 2


@dataclass(frozen=True)
class Footprint:
    """Memory of a network.

    Attributes:
        weights: how many there are.
        activation_bytes: what a forward pass keeps of one agent's row for the backward pass, and
            the row itself as float32.
    """

    weights: int
    activation_bytes: int

    def learning_bytes(self, rows: int) -> int:
        """Bytes of weights, gradients and moments, and of a pass over `rows` agents' rows."""
        return _COPIES * 4 * self.weights + rows * self.activation_bytes


def footprint(
    build: Callable[[], nn.Module], shape: InputShape, num_agents: int
) -> Footprint | None:
    """The footprint of what `build` makes; None if that does not work without memory.

    Args:
        build: makes the network; called on the device `meta`, where tensors hold nothing.
        shape: what it is fed.
        num_agents: agents of a joint row.
    """
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        kept[storage._cdata] = storage.nbytes()
        alive.append(x)  # else another storage could get its address
        return x

    alive: list[Tensor] = []
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            network = build()
            image = None if shape.image is None else torch.empty(_ROWS, num_agents, *shape.image)
            vector = torch.empty(_ROWS, num_agents, shape.vector) if shape.vector else None
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
                network(image, vector)
    except Exception:  # built once more, with memory, it may do, or says what is wrong
        return None
    for parameter in network.parameters():
        kept.pop(parameter.untyped_storage()._cdata, None)
    given = sum(x.nbytes for x in (image, vector) if x is not None)
    rows = _ROWS * num_agents
    weights = sum(p.numel() for p in network.parameters())
    return Footprint(weights, max(sum(kept.values()), given) // rows)
