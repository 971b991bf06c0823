"""Layers that hold one set of weights for each agent, or one for all.

Rows are [R, ...] with the agent innermost, R = B * A. With one slice the agents are just more rows.
With A slices all agents go through one batched kernel: torch.baddbmm and grouped convolution, not
vmap over modules, which loses autocast (pytorch/pytorch#192617).
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class StackedLinear(nn.Module):
    """A linear layer per slice: [R, I] -> [R, O]; initialised as nn.Linear."""

    def __init__(self, num_slices: int, in_features: int, out_features: int) -> None:
        super().__init__()
        bound = 1 / math.sqrt(in_features)
        self.weight = nn.Parameter(torch.empty(num_slices, in_features, out_features))  # [S, I, O]
        self.bias = nn.Parameter(torch.empty(num_slices, 1, out_features))
        nn.init.uniform_(self.weight, -bound, bound)
        nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        """[R, I] -> [R, O]."""
        slices = len(self.weight)
        if slices == 1:
            return F.linear(x, self.weight[0].T, self.bias[0, 0])
        x = x.view(-1, slices, x.shape[-1]).transpose(0, 1)  # [S, B, I]
        return torch.baddbmm(self.bias, x, self.weight).transpose(0, 1).flatten(0, 1)


class StackedConv2d(nn.Conv2d):
    """A convolution without padding per slice: [R, C, H, W] -> [R, O, H', W']."""

    def __init__(
        self, num_slices: int, channels: int, out: int, kernel: tuple[int, int], stride: int
    ) -> None:
        super().__init__(num_slices * channels, num_slices * out, kernel, stride, groups=num_slices)

    def forward(self, x: Tensor) -> Tensor:
        """[R, C, H, W] -> [R, O, H', W']."""
        if self.groups == 1 and x.shape[-2:] == self.kernel_size:
            # A linear layer, then: the same sum, on a CPU in half the time
            # (benchmarks/coma_update.py).
            return F.linear(x.flatten(1), self.weight.flatten(1), self.bias)[..., None, None]
        out = super().forward(x.reshape(-1, self.in_channels, *x.shape[2:]))
        return out.reshape(len(x), -1, *out.shape[2:])
