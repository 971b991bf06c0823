"""The convolutions of the Nature paper: for images from 36 pixels a side, fast and small.

Mnih et al. 2015, "Human-level control through deep reinforcement learning", Nature 518, methods:
32 kernels of 8 x 8 with stride 4, 64 of 4 x 4 with stride 2, 64 of 3 x 3, ReLU after each, then a
linear layer of 512.
"""

from pydantic import Field
from torch import nn

from murmur.learner_service.layers.images import ImageConfig, image_network
from murmur.learner_service.layers.stacked import StackedConv2d
from murmur.shared.process.errors import ConfigError

STACKED = True
_LAYERS = ((32, 8, 4), (64, 4, 2), (64, 3, 1))  # channels, kernel, stride


class Config(ImageConfig):
    """Options of the `nature` network."""

    hidden: tuple[int, ...] = Field((512,), description="widths of the linear layers that follow")


def convolve(
    config: Config, image: tuple[int, int, int], slices: tuple[int, ...]
) -> tuple[nn.Module, int]:
    """The convolutions for images [C, H, W], and how many numbers they give.

    Raises:
        ConfigError: if the images are too small for them.
    """
    c, h, w = image
    layers: list[nn.Module] = []
    for out, kernel, stride in _LAYERS:
        if min(h, w) < kernel:
            raise ConfigError(
                f"network 'nature' needs images of 36 x 36 or more, these are {image[1]} x "
                f"{image[2]}; use network 'cnn' or 'impala'"
            )
        convolution = StackedConv2d(slices, c, out, (kernel, kernel), stride, relu=True)
        layers += [convolution, nn.Identity()]
        c, h, w = out, (h - kernel) // stride + 1, (w - kernel) // stride + 1
    return nn.Sequential(*layers), c * h * w


build = image_network("nature", convolve)
