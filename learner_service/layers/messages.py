"""Messages between the agents of a team, along the edges of a dense graph."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from murmur.learner_service.layers.entities import apply, attend, linear
from murmur.learner_service.layers.stacked import LayersConfig

Aggregate = Literal["attention", "mean", "sum", "max"]


class Messages(nn.Module):
    """A round of messages: h'_i = norm(h_i + relu(U h_i + V m_i)), m_i of the h_j that i hears.

    m_i is the mean, sum or largest of W h_j, or their average by attention, as in Jiang et al.
    2018, "Graph Convolutional Reinforcement Learning" (DGN, arXiv:1810.09202). It is 0 for an agent
    that hears none.
    """

    def __init__(self, width: int, aggregate: Aggregate, heads: int, config: LayersConfig) -> None:
        super().__init__()
        self._aggregate, self._heads = aggregate, heads
        wanted = 3 if aggregate == "attention" else 1
        self.send = linear(width, wanted * width, config)
        self.own = linear(width, width, config)
        self.heard = linear(width, width, config)
        self.norm = nn.LayerNorm(width)

    def forward(self, h: Tensor, edges: Tensor) -> Tensor:
        """Return [B, A, W] of features [B, A, W] and edges [B, A, A], true where the row hears."""
        message = self._received(apply(self.send, h), edges)
        changed = F.relu(apply(self.own, h) + apply(self.heard, message))
        out: Tensor = self.norm(h + changed)
        return out

    def _received(self, sent: Tensor, edges: Tensor) -> Tensor:
        if self._aggregate == "attention":
            query, key, value = sent.chunk(3, -1)
            return attend(query, key, value, edges, self._heads)
        if self._aggregate == "max":
            heard = sent.unsqueeze(1).masked_fill(~edges.unsqueeze(-1), -1e4)  # fp16 holds it
            return heard.amax(2) * edges.any(2, keepdim=True)
        weights = edges.to(sent.dtype)
        total = weights @ sent
        if self._aggregate == "sum":
            return total
        return total / weights.sum(2, keepdim=True).clamp_min(1)


class Rounds(nn.Module):
    """Rounds of messages, after which an agent knows what those up to as many steps away do."""

    def __init__(
        self, rounds: int, width: int, aggregate: Aggregate, heads: int, config: LayersConfig
    ) -> None:
        super().__init__()
        self.each = nn.ModuleList(Messages(width, aggregate, heads, config) for _ in range(rounds))

    def forward(self, h: Tensor, edges: Tensor) -> Tensor:
        """Return [B, A, 2 W]: an agent's own features, and those after all rounds."""
        x = h
        for messages in self.each:
            x = messages(x, edges)
        return torch.cat([h, x.to(h.dtype)], -1)
