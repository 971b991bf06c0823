"""Convolutions over image observations, then linear layers over the result and the vectors."""

from pydantic import Field, model_validator
from torch import nn

from murmur.learner_service.layers.images import ImageConfig, image_network
from murmur.learner_service.layers.stacked import StackedConv2d

STACKED = True


# Cells a side: of maps whose first layers have strides, and of what is left where strides end. A
# linear layer over a whole map would have most of the weights.
_LARGE, _ENOUGH = 16, 8


class Config(ImageConfig):
    """Options of the `cnn` network; [] stands for layers that suit the map's size."""

    channels: tuple[int, ...] = Field(
        (),
        description="output channels of each layer; []: 32, 32, from 16 cells a side 32, 64, 64",
    )
    kernels: tuple[int, ...] = Field(
        (),
        description="kernel sizes; one larger than what is left of the map is cut to it; []: 3 "
        "each, from 16 cells a side 5 first",
    )
    strides: tuple[int, ...] = Field(
        (),
        description="strides of each layer; []: 1 each, from 16 cells a side 2 while more than 8 "
        "are left",
    )
    hidden: tuple[int, ...] = Field((128,), description="widths of the linear layers that follow")
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
        lengths = {len(x) for x in (self.channels, self.kernels, self.strides) if x}
        if len(lengths) > 1:
            raise ValueError(
                f"channels {self.channels}, kernels {self.kernels} and strides {self.strides} "
                "must be equally long"
            )
        return self

    def for_image(self, image: tuple[int, ...]) -> "Config":
        """Return the options with those that are open chosen by the size of the map [C, H, W]."""
        side = min(image[1:])
        large = side >= _LARGE
        usual = (32, 64, 64) if large else (32, 32)
        n = len(self.channels or self.kernels or self.strides or usual)
        kernels = self.kernels or ((5 if large else 3), *(3,) * (n - 1))
        strides = self.strides
        for kernel in () if strides else kernels:
            stride = 2 if large and side > _ENOUGH else 1
            side = (side - min(kernel, side)) // stride + 1
            strides = (*strides, stride)
        channels = self.channels or (*usual, *usual[-1:] * n)[:n]
        chosen = {"channels": channels, "kernels": kernels, "strides": strides}
        return self.model_copy(update=chosen)


def convolve(
    config: Config, image: tuple[int, int, int], slices: tuple[int, ...]
) -> tuple[nn.Module, int]:
    """The convolutions, without padding, for images [C, H, W], and how many numbers they give."""
    config = config.for_image(image)
    c, h, w = image
    layers: list[nn.Module] = []
    for out, kernel, stride in zip(config.channels, config.kernels, config.strides, strict=True):
        size = (min(kernel, h), min(kernel, w))
        layers += [StackedConv2d(slices, c, out, size, stride, relu=True), nn.Identity()]
        c, h, w = out, (h - size[0]) // stride + 1, (w - size[1]) // stride + 1
    return nn.Sequential(*layers), c * h * w


build = image_network("cnn", convolve)
