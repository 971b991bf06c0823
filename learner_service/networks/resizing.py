"""Resizing of images and logits as two matrix products.

Their gradient is a matrix product as well. That of `F.interpolate` is a sum by atomic operations
on a GPU, in any order, so that two runs differ.
"""

import torch
from torch import Tensor, nn


def resize_weights(source: int | Tensor, target: int | Tensor, like: Tensor) -> Tensor:
    """[target, source] weights of linear interpolation; each row sums to 1.

    Enlarging, the weights are those of `F.interpolate(mode="bilinear", align_corners=False)`;
    shrinking, the triangle is as wide as the scale, as with antialias=True, so that every pixel of
    the source counts. w(i, j) = max(0, 1 - |x_i - j| / s), x_i = (i + 1/2) source / target - 1/2,
    s = max(1, source / target), then divided by their sum.

    Args:
        source: pixels of one side.
        target: pixels of that side afterwards.
        like: device and dtype of the result.
    """
    scale = source / target
    rows = torch.arange(target, device=like.device, dtype=like.dtype)  # type: ignore[arg-type]
    columns = torch.arange(source, device=like.device, dtype=like.dtype)  # type: ignore[arg-type]
    centre = ((rows + 0.5) * scale - 0.5).clamp(min=0)
    centre = torch.minimum(centre, columns[-1]) if source < target else centre  # edges repeat
    width = max(1.0, scale)
    weights = (1 - (centre.unsqueeze(1) - columns).abs() / width).clamp(min=0)
    return weights / weights.sum(1, keepdim=True)


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
            weights = resize_weights(source[side], target[side], torch.zeros(()))
            self.register_buffer(name, weights, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., h, w] -> [..., H, W]."""
        return x if self._same else resize(x, self.rows, self.columns)
