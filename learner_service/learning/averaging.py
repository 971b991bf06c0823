"""An exponential moving average of a network's weights, which evaluations and exports use."""

import copy
from typing import TypeVar

import torch
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)
_SOON = 10  # updates after which the average spans half of the updates so far


def averaged(network: M) -> M:
    """A copy that will hold the average; it is never trained itself."""
    return copy.deepcopy(network).eval().requires_grad_(False)


def decay_after(updates: float, decay: float) -> float:
    """Share of the average that an update keeps: min(decay, (1 + n) / (10 + n)).

    Small at first, so that the random weights of the beginning are soon forgotten.
    """
    return min(decay, (1 + updates) / (_SOON + updates))


@torch.no_grad()
def follow(average: nn.Module, network: nn.Module, share: Tensor) -> None:
    """Move the average towards the network: average += share (network - average).

    Args:
        average: changed in place.
        network: network to follow; its buffers are copied.
        share: scalar on the device, 1 - decay.
    """
    mine: list[Tensor] = list(average.parameters())
    theirs: list[Tensor] = list(network.parameters())
    apart = torch._foreach_sub(theirs, mine)
    torch._foreach_mul_(apart, share)
    torch._foreach_add_(mine, list(apart))
    for buffer, new in zip(average.buffers(), network.buffers(), strict=True):
        buffer.copy_(new)
