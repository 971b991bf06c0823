"""Message passing between agents, along the adjacency that the environment gives in each step.

Dense, with batches of adjacency matrices. An agent acts on what agents up to `rounds` steps away
observe, so execution is centralized or needs messages. Weights do not depend on the number of
agents.
"""

from typing import ClassVar, Self

from pydantic import Field, model_validator
from torch import Tensor, nn

from murmur.learner_service.layers.entities import (
    VectorLayout,
    apply,
    encoder,
    require_adjacency,
)
from murmur.learner_service.layers.inputs import InputShape
from murmur.learner_service.layers.messages import Aggregate, Rounds
from murmur.learner_service.layers.stacked import RecurrentConfig, linear_layers
from murmur.shared.process.errors import ConfigError
from murmur.shared.wire.spec import ADJACENCY


class Config(RecurrentConfig):
    """Options of the `graph` network."""

    communicates: ClassVar[bool] = True

    hidden: tuple[int, ...] = Field((64,), description="widths of the linear layers that follow")
    width: int = Field(64, ge=1, description="features of an agent, and numbers of a message")
    rounds: int = Field(2, ge=1, description="rounds of messages: steps that news travel")
    aggregate: Aggregate = Field(
        "attention", description="how an agent joins the messages that it gets in a round"
    )
    heads: int = Field(4, ge=1, description="attention heads")

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is no multiple of its {self.heads} heads")
        return self


class GraphNetwork(nn.Module):
    """Linear layers for each agent, rounds of messages, linear layers."""

    def __init__(self, config: Config, shape: InputShape, num_outputs: int) -> None:
        super().__init__()
        self._layout = VectorLayout(shape, entities=(), hears=True)
        width = config.width
        self.encode = encoder(self._layout.width, width, config)
        self.rounds = Rounds(config.rounds, width, config.aggregate, config.heads, config)
        self.decide = linear_layers([2 * width, *config.hidden, num_outputs], (0,), config)

    def forward(self, image: Tensor | None, vector: Tensor) -> Tensor:
        """Return [B, A, outputs] of [B, A, F]."""
        own = apply(self.encode, self._layout.plain(vector))
        return apply(self.decide, self.rounds(own, self._layout.edges(vector)))


def build(
    config: Config, shape: InputShape, num_outputs: int, slices: tuple[int, ...]
) -> GraphNetwork:
    """Build the network.

    Raises:
        ConfigError: if there are images, or the environment gives no adjacency.
    """
    if shape.image is not None:
        raise ConfigError(f"network 'graph' takes no images, here {shape.image}; use 'cnn'")
    found = next((array for array in shape.arrays if array.name == ADJACENCY), None)
    require_adjacency(found, len(slices), "graph")
    return GraphNetwork(config, shape, num_outputs)
