"""Resizing of images and logits as two matrix products.

Their gradient is a matrix product as well. That of `F.interpolate` is a sum by atomic operations
on a GPU, in any order, so that two runs differ.
"""

import torch
from torch import Tensor, nn


def resize_weights(source: int, target: int) -> Tensor:
    """[target, source] weights of linear interpolation; each row sums to 1.

    Those of `F.interpolate(mode="bilinear", align_corners=False, antialias=True)`: shrinking, the
    triangle is as wide as the scale, so that every pixel of the source counts.
    w(i, j) = max(0, 1 - |x_i - j| / s), x_i = (i + 1/2) source / target - 1/2,
    s = max(1, source / target), then divided by their sum.

    Args:
        source: pixels of one side.
        target: pixels of that side afterwards.
    """
    scale = source / target
    centre = ((torch.arange(target) + 0.5) * scale - 0.5).unsqueeze(1)
    weights = (1 - (centre - torch.arange(source)).abs() / max(1.0, scale)).clamp(min=0)
    return weights / weights.sum(1, keepdim=True)


def picture_weights(source: Tensor, target: Tensor) -> Tensor:
    """[target, source] weights that resize as sample sources do with OpenCV; rows sum to 1.

    Shrinking averages areas: the share of pixel j in the stretch [i, i + 1) source / target.
    Growing interpolates linearly between centres. Both are computed and one is chosen on the
    device, so that an exported program takes any size.

    Args:
        source: [h] anything; its length is the number of pixels of one side.
        target: [H] the same of that side afterwards.
    """
    old = torch.ones_like(source, dtype=torch.float32).cumsum(0) - 1  # 0, 1, ...
    new = torch.ones_like(target, dtype=torch.float32).cumsum(0) - 1
    scale = (old[-1] + 1) / (new[-1] + 1)
    begin = (new * scale).unsqueeze(1)
    overlap = torch.minimum(begin + scale, old + 1) - torch.maximum(begin, old)
    areas = overlap.clamp(min=0) / scale
    centre = torch.minimum(((new + 0.5) * scale - 0.5).clamp(min=0), old[-1])
    linear = (1 - (centre.unsqueeze(1) - old).abs()).clamp(min=0)
    return torch.where(scale >= 1, areas, linear)


def resize(x: Tensor, height: Tensor, width: Tensor) -> Tensor:
    """[..., h, w] -> [..., H, W] with the weights [H, h] of rows and [W, w] of columns."""
    return height.to(x.dtype) @ x @ width.to(x.dtype).T


class Resize(nn.Module):
    """Bilinear resizing between two fixed sizes; weights are made once and not saved."""

    rows: Tensor
    columns: Tensor

    def __init__(self, source: tuple[int, int], target: tuple[int, int]) -> None:
        super().__init__()
        self._same = source == target
        for name, side in (("rows", 0), ("columns", 1)):
            weights = resize_weights(source[side], target[side])
            self.register_buffer(name, weights, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., h, w] -> [..., H, W]."""
        return x if self._same else resize(x, self.rows, self.columns)
