"""The convolutions of the Nature paper: for images from 36 pixels a side, fast and small.

Mnih et al. 2015, "Human-level control through deep reinforcement learning", Nature 518, methods:
32 kernels of 8 x 8 with stride 4, 64 of 4 x 4 with stride 2, 64 of 3 x 3, ReLU after each, then a
linear layer of 512.
"""

from pydantic import Field
from torch import nn

from murmur.learner_service.layers.images import ImageConfig, image_network
from murmur.learner_service.networks import cnn
from murmur.shared.process.errors import ConfigError

STACKED = True
_LAYERS = cnn.Config(channels=(32, 64, 64), kernels=(8, 4, 3), strides=(4, 2, 1))
_SMALLEST = 36  # pixels a side


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
    if min(image[1:]) < _SMALLEST:
        raise ConfigError(
            f"network 'nature' needs images of 36 x 36 or more, these are {image[1]} x "
            f"{image[2]}; use network 'cnn' or 'impala'"
        )
    return cnn.convolve(_LAYERS, image, slices)


build = image_network("nature", convolve)
