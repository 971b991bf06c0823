"""Measure the memory that a network takes, without allocating it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from learner_service.layers.inputs import InputShape

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
    build: Callable[[], nn.Module], shape: InputShape, num_agents: int
) -> Footprint | None:
    """The footprint of what `build` makes; None if that does not work without memory.

    Args:
        build: makes the network; called on the device `meta`, where tensors hold nothing.
        shape: shape of the network's inputs.
        num_agents: agents of a joint row.
    """

    def feed(network: nn.Module) -> int:
        image = None if shape.image is None else torch.empty(_ROWS, num_agents, *shape.image)
        vector = torch.empty(_ROWS, num_agents, shape.vector) if shape.vector else None
        network(image, vector)
        return sum(x.nbytes for x in (image, vector) if x is not None)

    return _weighed(build, feed, _ROWS * num_agents)


def dense_footprint(
    build: Callable[[], nn.Module],
    size: tuple[int, int],
    loss: Callable[[Tensor], Tensor] | None = None,
) -> Footprint | None:
    """As `footprint`, of a dense network; a row is an image.

    Args:
        build: maker of the network, as in `footprint`.
        size: height and width of the images.
        loss: loss of logits [B, K, H, W], if the memory that it keeps is to count too.
    """

    def feed(network: nn.Module) -> int:
        image = torch.empty(_ROWS, 3, *size)
        logits = network(image)
        if loss is not None:
            loss(logits)
        return image.nbytes

    return _weighed(build, feed, _ROWS)


def _weighed(
    build: Callable[[], nn.Module], feed: Callable[[nn.Module], int], rows: int
) -> Footprint | None:
    """Measure the memory that `feed`, called on device `meta`, keeps for the backward pass.

    Args:
        build: maker of the network, as in `footprint`.
        feed: makes a pass over `rows` rows; returns their bytes.
        rows: number of rows in the pass.
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
                given = feed(network)
    except Exception:  # built once more, with memory, it may do, or says what is wrong
        return None
    for own in (*network.parameters(), *network.buffers()):
        kept.pop(own.untyped_storage()._cdata, None)
    weights = sum(p.numel() for p in network.parameters())
    return Footprint(weights, max(sum(kept.values()), given) // rows)
