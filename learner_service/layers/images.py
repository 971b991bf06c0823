"""Base of image networks: convolutions, then linear layers over their output and the vectors."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from murmur.learner_service.layers.stacked import MLP, NetworkConfig, linear_layers
from murmur.shared.process.errors import ConfigError

if TYPE_CHECKING:
    from murmur.learner_service.layers.inputs import InputShape


Convolve = Callable[[Any, tuple[int, int, int], tuple[int, ...]], tuple[nn.Module, int]]


class ImageConfig(NetworkConfig):
    """Options that image networks share."""

    frame_stack: int = Field(
        1,
        ge=1,
        le=16,
        description="images of the agent's last steps that it sees at once, as channels, oldest "
        "first; each is sent and stored once and stacked on the learner; an episode begins with "
        "copies of its first",
    )


class ImageNetwork(nn.Module):
    """Convolutions; flatten; join the vector; an MLP."""

    def __init__(
        self,
        convolutions: nn.Module,
        features: int,
        config: ImageConfig,
        shape: "InputShape",
        num_outputs: int,
        slices: tuple[int, ...],
    ) -> None:
        """Put the parts together.

        Args:
            convolutions: [R, C, H, W] -> anything of `features` numbers a row.
            features: number of features that the convolutions give for a row.
            config: options of the linear layers that follow.
            shape: shape of the network's inputs.
            num_outputs: number of outputs for each agent.
            slices: the slice of each agent, see StackedLinear.
        """
        super().__init__()
        self.convolutions = convolutions
        widths = [features + shape.vector, *config.hidden, num_outputs]
        self.head = MLP(linear_layers(widths, slices, config), slices)

    def forward(self, image: Tensor, vector: Tensor | None) -> Tensor:
        """[B, A, C, H, W] and [B, A, F] -> [B, A, outputs]."""
        out: Tensor = self.head(None, self._features(image, vector))
        return out

    def twice(self, image: Tensor, vector: Tensor, change: Tensor) -> tuple[Tensor, Tensor]:
        """Run as `MLP.twice` on common convolutions; `change` is of the last inputs of `vector`."""
        return self.head.twice(None, self._features(image, vector), change)

    def _features(self, image: Tensor, vector: Tensor | None) -> Tensor:
        """Return the inputs [B, A, F'] of the linear layers."""
        x: Tensor = self.convolutions(image.flatten(0, 1)).flatten(1)
        if vector is not None:
            x = torch.cat([x, vector.flatten(0, 1).to(x.dtype)], 1)
        return x.view(*image.shape[:2], -1)


def image_network(name: str, convolve: Convolve) -> Callable[..., ImageNetwork]:
    """Return the `build` of a network plug-in that begins with convolutions.

    Args:
        name: name of the network.
        convolve: (config, [C, H, W], slices) -> convolutions, and how many numbers they give.
    """

    def build(
        config: Any,  # noqa: ANN401 - the plug-in's own
        shape: "InputShape",
        num_outputs: int,
        slices: tuple[int, ...],
    ) -> ImageNetwork:
        if shape.image is None:
            raise ConfigError(
                f"network '{name}' needs images, the environment observes none; use 'mlp'"
            )
        convolutions, features = convolve(config, shape.image, slices)
        return ImageNetwork(convolutions, features, config, shape, num_outputs, slices)

    return build
