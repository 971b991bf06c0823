"""Dropout from a generator of the algorithm, so that a resumed run draws the same numbers."""

import torch
from torch import Tensor, nn


class Dropout(nn.Module):
    """Zeroes each number with probability `p` while training, and scales the others by 1 / (1 - p).

    Attributes:
        generator: source of random numbers on the network's device; None: torch's own.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        self.generator: torch.Generator | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Any shape, kept."""
        if not self.training or self.p == 0:
            return x
        kept = torch.empty_like(x).bernoulli_(1 - self.p, generator=self.generator)
        return x * kept.div_(1 - self.p)


def draw_from(network: nn.Module, generator: torch.Generator) -> None:
    """Let all dropout layers of a network draw from a generator."""
    for layer in network.modules():
        if isinstance(layer, Dropout):
            layer.generator = generator
