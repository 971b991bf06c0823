"""Attention over the entities that an agent observes, and over agents if they may communicate.

Baker et al. 2019 (arXiv:1909.07528), appendix B: entities and the agent itself are tokens; masked
residual self-attention among them; their mean beside the agent's own token. Neither the order
of entities nor absent ones change the result, and the weights do not depend on their number.
"""

from typing import Self

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from murmur.learner_service.layers.entities import (
    SelfAttention,
    VectorLayout,
    apply,
    encoder,
    linear,
    require_adjacency,
    sets_of,
)
from murmur.learner_service.layers.inputs import InputShape
from murmur.learner_service.layers.messages import Rounds
from murmur.learner_service.layers.stacked import RecurrentConfig, linear_layers
from murmur.shared.process.errors import ConfigError
from murmur.shared.wire.spec import ADJACENCY


class Config(RecurrentConfig):
    """Options of the `attention` network."""

    hidden: tuple[int, ...] = Field((64,), description="widths of the linear layers that follow")
    width: int = Field(64, ge=1, description="features of an entity and of an agent")
    heads: int = Field(4, ge=1, description="attention heads")
    layers: int = Field(1, ge=1, description="layers of attention among entities")
    entities: tuple[str, ...] = Field(
        (),
        description="observations [E, D] that are sets of entities, each with `<name>_mask` if "
        "some may be missing; []: all of two dimensions",
    )
    communication: bool = Field(
        False,
        description="agents attend to each other, along `adjacency` if the environment gives it: "
        "execution is then centralized or needs messages",
    )
    rounds: int = Field(1, ge=1, description="communication: rounds of messages")

    @property
    def communicates(self) -> bool:
        """Return whether agents hear each other."""
        return self.communication

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is no multiple of its {self.heads} heads")
        if len(set(self.entities)) < len(self.entities):
            raise ValueError(f"entities {list(self.entities)} names a set twice")
        return self


class AttentionNetwork(nn.Module):
    """Tokens of the agent and its entities, attention among them, messages, linear layers."""

    def __init__(self, config: Config, shape: InputShape, num_outputs: int) -> None:
        super().__init__()
        entities = config.entities or tuple(sets_of(shape))
        self._layout = VectorLayout(shape, entities=entities, hears=config.communication)
        width = config.width
        self.encode = encoder(self._layout.width, width, config)
        self.context = linear(width, width, config)
        self.embed = nn.ModuleList(linear(of.width, width, config) for of in self._layout.sets)
        blocks = config.layers if self._layout.sets else 0
        self.attention = nn.ModuleList(
            SelfAttention(width, config.heads, config) for _ in range(blocks)
        )
        self.join = linear(2 * width, width, config)
        self.rounds: Rounds | None = None
        if config.communication:
            self.rounds = Rounds(config.rounds, width, "attention", config.heads, config)
        features = 2 * width if config.communication else width
        self.decide = linear_layers([features, *config.hidden, num_outputs], (0,), config)

    def forward(self, image: Tensor | None, vector: Tensor) -> Tensor:
        """Return [B, A, outputs] of [B, A, F]."""
        own = apply(self.encode, self._layout.plain(vector))  # [B, A, W]
        features = self._of_entities(own, vector) if self._layout.sets else own
        if self.rounds is not None:
            features = self.rounds(features, self._layout.edges(vector))
        return apply(self.decide, features)

    def _of_entities(self, own: Tensor, vector: Tensor) -> Tensor:
        """Return [B, A, W]: what the agent makes of its entities.

        Args:
            own: [B, A, W] features of what it observes beside them.
            vector: [B, A, F].
        """
        context = apply(self.context, own).unsqueeze(2)
        tokens = [own.unsqueeze(2)]
        there = [torch.ones_like(own[..., :1], dtype=torch.bool)]
        for embed, of in zip(self.embed, self._layout.sets, strict=True):
            entities, present = self._layout.entities(vector, of)
            tokens.append(F.relu(apply(embed, entities) + context))
            there.append(present)
        x, seen = torch.cat(tokens, 2).flatten(0, 1), torch.cat(there, 2).flatten(0, 1)
        for attention in self.attention:
            x = attention(x, seen)  # [B * A, 1 + entities, W]
        weight = seen.to(x.dtype).unsqueeze(1)
        mean = (weight @ x).squeeze(1) / weight.sum(-1)
        joined = F.relu(self.join(torch.cat([x[:, 0], mean], -1)))
        return joined.view(*own.shape[:2], -1)


def build(
    config: Config, shape: InputShape, num_outputs: int, slices: tuple[int, ...]
) -> AttentionNetwork:
    """Build the network.

    Raises:
        ConfigError: if there are images, or nothing to attend to.
    """
    if shape.image is not None:
        raise ConfigError(f"network 'attention' takes no images, here {shape.image}; use 'cnn'")
    if not (config.communication or sets_of(shape)):
        raise ConfigError(
            "network 'attention' finds no set of entities: an observation [E, D] of each agent, E "
            "entities of D numbers (of PettingZoo and Gymnasium named in environment.arrays); or "
            "set network.communication=true to attend to other agents, or use 'mlp'"
        )
    adjacency = next((array for array in shape.arrays if array.name == ADJACENCY), None)
    if config.communication and adjacency is not None:
        require_adjacency(adjacency, len(slices), "attention")
    return AttentionNetwork(config, shape, num_outputs)
