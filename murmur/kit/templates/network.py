"""skeleton.py: attention over agents, so that each one hears what the others observe."""

import torch
from pydantic import Field
from torch import Tensor, nn

from murmur.learner_service.layers.inputs import InputShape
from murmur.shared.config import Section
from murmur.shared.process.errors import ConfigError


class Skeleton(nn.Module):
    """An encoder for each agent's vector, one round of attention, a linear layer."""

    class Config(Section):
        """Options that a configuration sets beside the network's name."""

        width: int = Field(64, ge=1, description="features of an agent")

    def __init__(
        self, config: Config, shape: InputShape, num_outputs: int, slices: tuple[int, ...]
    ) -> None:
        """Build the layers for vectors of shape.vector numbers.

        Raises:
            ConfigError: if images are observed.
        """
        super().__init__()
        if shape.image is not None:
            raise ConfigError("this network takes vectors, not images; use network cnn")
        self.encode = nn.Linear(shape.vector, config.width)
        self.attend = nn.Linear(config.width, 3 * config.width)
        self.decide = nn.Linear(2 * config.width, num_outputs)

    def forward(self, image: Tensor | None, vector: Tensor) -> Tensor:
        """Map vectors [B, A, F] to outputs [B, A, num_outputs] for B environments of A agents."""
        own = self.encode(vector).relu()  # [B, A, W]
        query, key, value = self.attend(own).chunk(3, -1)
        score = query @ key.transpose(1, 2) / query.shape[-1] ** 0.5  # [B, A, A]
        heard = score.softmax(-1) @ value  # [B, A, W]
        out: Tensor = self.decide(torch.cat([own, heard], -1))
        return out
