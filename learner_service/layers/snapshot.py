"""Frozen copies of networks to act with: weights are cast once, when they are published."""

import copy
from typing import TypeVar

import torch
from torch import nn

from learner_service.device.precision import Precision
from learner_service.layers.stacked import StackedConv2d, StackedGRU, StackedLinear

# Layers of which autocast casts all weights. Of others, also of their subclasses, it may cast none:
# a LayerNorm works in fp32.
CAST = {
    *(nn.Linear, nn.Bilinear, nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(StackedLinear, StackedConv2d, StackedGRU),
}
M = TypeVar("M", bound=nn.Module)


def snapshot(network: M, precision: Precision) -> M:
    """A frozen copy that gives, under autocast, what the network gives under autocast.

    Weights that autocast would cast in every forward pass are stored in its type.

    Args:
        network: network with weights in fp32.
        precision: precision of forward passes.
    """
    frozen = copy.deepcopy(network).eval().requires_grad_(False)
    if precision.dtype != torch.float32:
        for layer in frozen.modules():
            if type(layer) in CAST:
                for weight in layer.parameters(recurse=False):
                    weight.data = weight.data.to(precision.dtype)
    return frozen


@torch.no_grad()
def publish(network: nn.Module, to: nn.Module) -> None:
    """Copy the weights and buffers of a network into its snapshot."""
    torch._foreach_copy_(list(to.parameters()), list(network.parameters()))
    for mine, theirs in zip(to.buffers(), network.buffers(), strict=True):
        mine.copy_(theirs)
