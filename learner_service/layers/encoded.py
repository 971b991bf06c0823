"""One encoder of images for several networks; one of them trains it.

Yarats et al. 2021, "Mastering Visual Continuous Control: Improved Data-Augmented Reinforcement
Learning" (arXiv:2107.09645), section 3.1: actor and critic share the convolutions, and only the
critic's gradient reaches them.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from murmur.learner_service.layers.inputs import Inputs
    from murmur.learner_service.layers.stacked import MLP


class Encoder(nn.Module):
    """Convolutions that give a vector for each agent.

    Attributes:
        features: numbers of the vector.
    """

    def __init__(self, convolutions: nn.Module, features: int) -> None:
        super().__init__()
        self.convolutions, self.features = convolutions, features

    def forward(self, image: Tensor) -> Tensor:
        """[B, A, C, H, W] -> [B, A, features]."""
        x: Tensor = self.convolutions(image.flatten(0, 1))
        return x.reshape(*image.shape[:2], -1)


class Encoded(nn.Module):
    """Linear layers over an encoder's output and the vectors.

    Attributes:
        encoder: shared with other networks.
        head: the linear layers.
        trains: whether gradients of this network reach the encoder.
    """

    def __init__(self, encoder: Encoder, head: "MLP", trains: bool) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = head
        self.trains = trains

    def forward(self, image: Tensor, vector: Tensor | None) -> Tensor:
        """[B, A, C, H, W] and [B, A, F] -> [B, A, outputs]."""
        out: Tensor = self.head(None, self._joined(image, vector))
        return out

    def encode(self, inputs: "Inputs") -> "Inputs":
        """The inputs of the head."""
        image = inputs.image
        assert image is not None
        return type(inputs)(None, self._joined(image, inputs.vector))

    def _joined(self, image: Tensor, vector: Tensor | None) -> Tensor:
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.trains):
            features = self.encoder(image)
        return features if vector is None else torch.cat([features, vector.to(features.dtype)], 2)


def learned_parameters(network: nn.Module) -> list[nn.Parameter]:
    """All parameters but those of encoders that another network trains."""
    borrowed = {
        id(parameter)
        for module in network.modules()
        if isinstance(module, Encoded) and not module.trains
        for parameter in module.encoder.parameters()
    }
    return [p for p in network.parameters() if id(p) not in borrowed]
