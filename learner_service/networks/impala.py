"""The residual convolutions of IMPALA: learn more from a step than `nature`, at six times the work.

Espeholt et al. 2018, "IMPALA: Scalable Distributed Deep-RL with Importance Weighted Actor-Learner
Architectures" (arXiv:1802.01561), figure 3, right: three stages, each a 3 x 3 convolution, max
pooling that halves the image, and two residual blocks; then ReLU and a linear layer of 256.
"""

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from murmur.learner_service.layers.images import ImageConfig, image_network
from murmur.learner_service.layers.stacked import StackedConv2d

STACKED = True
_KERNEL = 3, 3


class Config(ImageConfig):
    """Options of the `impala` network."""

    channels: tuple[int, ...] = Field(
        (16, 32, 32), min_length=1, description="channels of each stage, which halves the image"
    )
    hidden: tuple[int, ...] = Field((256,), description="widths of the linear layers that follow")


class Residual(nn.Module):
    """x + conv(relu(conv(relu(x)))), the convolutions 3 x 3 with padding."""

    def __init__(self, slices: tuple[int, ...], channels: int) -> None:
        super().__init__()
        self.first, self.second = (
            StackedConv2d(slices, channels, channels, _KERNEL, 1, padding=1) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        """[R, C, H, W] -> the same."""
        changed: Tensor = self.second(F.relu(self.first(F.relu(x))))
        return x + changed


def convolve(
    config: Config, image: tuple[int, int, int], slices: tuple[int, ...]
) -> tuple[nn.Module, int]:
    """The convolutions for images [C, H, W], and how many numbers they give."""
    c, h, w = image
    layers: list[nn.Module] = []
    for out in config.channels:
        layers += [
            StackedConv2d(slices, c, out, _KERNEL, 1, padding=1),
            nn.MaxPool2d(3, stride=2, padding=1),
            Residual(slices, out),
            Residual(slices, out),
        ]
        c, h, w = out, (h + 1) // 2, (w + 1) // 2
    return nn.Sequential(*layers, nn.ReLU()), c * h * w


build = image_network("impala", convolve)
