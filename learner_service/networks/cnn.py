"""Convolutions over image observations, then linear layers over the result and the vectors."""

from pydantic import Field, model_validator
from torch import nn

from murmur.learner_service.layers.images import ImageConfig, image_network
from murmur.learner_service.layers.stacked import StackedConv2d

STACKED = True


class Config(ImageConfig):
    """Options of the `cnn` network; the defaults are those of the terrain system's authors."""

    channels: tuple[int, ...] = Field((256, 256, 256), description="output channels of each layer")
    kernels: tuple[int, ...] = Field(
        (5, 4, 4), description="kernel sizes; one larger than what is left of the map is cut to it"
    )
    strides: tuple[int, ...] = Field((1, 1, 1), description="strides of each layer")
    hidden: tuple[int, ...] = Field((256,), description="widths of the linear layers that follow")
    centered: tuple[int, ...] = Field(
        (),
        description="channels of the agents' maps given once more, shifted so that the agent "
        "stands in the middle; for environments that say where agents stand (agent_cell)",
    )
    centered_state: tuple[int, ...] = Field(
        (), description="the same for channels of the state's maps; for critics"
    )

    @model_validator(mode="after")
    def _equal_lengths(self) -> "Config":
        if not len(self.channels) == len(self.kernels) == len(self.strides):
            raise ValueError(
                f"channels {self.channels}, kernels {self.kernels} and strides {self.strides} "
                "must be equally long"
            )
        return self


def convolve(
    config: Config, image: tuple[int, int, int], slices: tuple[int, ...]
) -> tuple[nn.Module, int]:
    """The convolutions, without padding, for images [C, H, W], and how many numbers they give."""
    c, h, w = image
    layers: list[nn.Module] = []
    for out, kernel, stride in zip(config.channels, config.kernels, config.strides, strict=True):
        size = (min(kernel, h), min(kernel, w))
        layers += [StackedConv2d(slices, c, out, size, stride, relu=True), nn.Identity()]
        c, h, w = out, (h - size[0]) // stride + 1, (w - size[1]) // stride + 1
    return nn.Sequential(*layers), c * h * w


build = image_network("cnn", convolve)
