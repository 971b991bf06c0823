"""Measure the memory that a network takes, without allocating it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_COPIES = 4  # of each weight: itself, its gradient, Adam's two moments
_ROWS = 2


@dataclass(frozen=True)
class Footprint:
    """Memory of a network.

    Attributes:
        weights: number of weights.
        activation_bytes: bytes that a forward pass keeps of one agent's row for the backward pass,
            and the row itself as float32.
    """

    weights: int
    activation_bytes: int

    def learning_bytes(self, rows: int, itemsize: int = 4, further: int = 0) -> int:
        """Bytes of weights, gradients and moments, and of a pass over `rows` agents' rows.

        Args:
            rows: number of agents' rows in the pass.
            itemsize: bytes of a number of the pass; of fewer than four it is what is kept at least.
            further: copies of the weights that are kept beside these, as an average.
        """
        weights = (_COPIES + further) * 4 * self.weights
        return weights + rows * self.activation_bytes * itemsize // 4


def footprint(
    build: Callable[[], nn.Module],
    agents: int,
    *shapes: tuple[int, ...] | None,
    loss: Callable[[Tensor], Any] = lambda outputs: None,
) -> Footprint | None:
    """Measure what `build` makes, on the device `meta`; None if that does not work without memory.

    Args:
        build: makes the network.
        agents: rows of one joint row; 1: a row is an image.
        shapes: shapes of the network's inputs for one joint row; None: it is fed None.
        loss: loss of the outputs, if the memory that it keeps is to count too.
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
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
                inputs = [None if shape is None else torch.empty(_ROWS, *shape) for shape in shapes]
                loss(network(*inputs))
    except Exception:  # built once more, with memory, it may do, or says what is wrong
        return None
    for own in (*network.parameters(), *network.buffers()):
        kept.pop(own.untyped_storage()._cdata, None)
    weights = sum(p.numel() for p in network.parameters())
    given = sum(x.nbytes for x in inputs if x is not None)
    return Footprint(weights, max(sum(kept.values()), given) // (_ROWS * agents))
