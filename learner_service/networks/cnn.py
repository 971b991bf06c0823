"""Convolutions over image observations, then linear layers over the result and the vectors."""

from typing import TYPE_CHECKING

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from learner_service.networks.mlp import MLP
from learner_service.networks.stacked import StackedConv2d
from shared.config import Section
from shared.errors import ConfigError

if TYPE_CHECKING:
    from learner_service.networks.inputs import InputShape

STACKED = True


class Config(Section):
    """Options of the `cnn` network; the defaults are those of the terrain system's authors."""

    channels: tuple[int, ...] = Field((256, 256, 256), description="output channels of each layer")
    kernels: tuple[int, ...] = Field(
        (5, 4, 4), description="kernel sizes; one larger than what is left of the map is cut to it"
    )
    strides: tuple[int, ...] = Field((1, 1, 1), description="strides of each layer")
    hidden: tuple[int, ...] = Field((256,), description="widths of the linear layers that follow")
    centred: tuple[int, ...] = Field(
        (),
        description="channels of the agents' maps given once more, shifted so that the agent "
        "stands in the middle; for environments that say where agents stand (agent_cell)",
    )
    centred_state: tuple[int, ...] = Field(
        (), description="the same for channels of the state's maps; for critics"
    )
    recurrent: int = Field(
        0,
        ge=0,
        description="width of a GRU between these layers and the outputs, with which an agent "
        "remembers its episode; 0: none",
    )
    agent_id: bool = Field(False, description="feed the agent's number as a one-hot vector")

    @model_validator(mode="after")
    def _equal_lengths(self) -> "Config":
        if not len(self.channels) == len(self.kernels) == len(self.strides):
            raise ValueError(
                f"channels {self.channels}, kernels {self.kernels} and strides {self.strides} "
                "must be equally long"
            )
        return self


class CNN(nn.Module):
    """Convolutions without padding, ReLU after each; flatten; join the vector; an MLP."""

    def __init__(
        self, config: Config, shape: "InputShape", num_outputs: int, slices: tuple[int, ...]
    ) -> None:
        super().__init__()
        assert shape.image is not None
        c, h, w = shape.image
        layers: list[nn.Module] = []
        for out, kernel, stride in zip(
            config.channels, config.kernels, config.strides, strict=True
        ):
            size = (min(kernel, h), min(kernel, w))
            layers += [StackedConv2d(slices, c, out, size, stride), nn.ReLU()]
            c, h, w = out, (h - size[0]) // stride + 1, (w - size[1]) // stride + 1
        self.convolutions = nn.Sequential(*layers)
        self.head = MLP([c * h * w + shape.vector, *config.hidden, num_outputs], slices)

    def forward(self, image: Tensor, vector: Tensor | None) -> Tensor:
        """[B, A, C, H, W] and [B, A, F] -> [B, A, outputs]."""
        return self.head.of_rows(self._features(image, vector)).view(*image.shape[:2], -1)

    def twice(self, image: Tensor, vector: Tensor, change: Tensor) -> tuple[Tensor, Tensor]:
        """See MLP: the convolutions are common, `change` is of the last inputs of `vector`."""
        features = self._features(image, vector)
        first, second = self.head.twice_of_rows(features, change.flatten(0, 1))
        shape = *image.shape[:2], first.shape[-1]
        return first.view(shape), second.view(shape)

    def _features(self, image: Tensor, vector: Tensor | None) -> Tensor:
        """[B * A, F'] what the linear layers are fed."""
        x: Tensor = self.convolutions(image.flatten(0, 1)).flatten(1)
        return x if vector is None else torch.cat([x, vector.flatten(0, 1).to(x.dtype)], 1)


def build(config: Config, shape: "InputShape", num_outputs: int, slices: tuple[int, ...]) -> CNN:
    """Build the network.

    Raises:
        ConfigError: if there is no image.
    """
    if shape.image is None:
        raise ConfigError("network 'cnn' needs images, the environment observes none; use 'mlp'")
    return CNN(config, shape, num_outputs, slices)
