"""Sets of entities and neighbors within an agent's vector, and attention among what is there.

An observation [E, D] of an agent is a set of E entities of D numbers each. `<name>_mask` [E] marks
present entities; the numbers of absent ones have no effect.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from murmur.learner_service.layers.distributions import ILLEGAL
from murmur.learner_service.layers.inputs import InputShape
from murmur.learner_service.layers.stacked import (
    LayersConfig,
    StackedLinear,
    hidden_gain,
    initialize,
    linear_layers,
)
from murmur.shared.process.errors import ConfigError
from murmur.shared.wire.spec import ADJACENCY, AGENT_MASK, ArraySpec


@dataclass(frozen=True)
class EntitySet:
    """Place of a set of entities in an agent's vector.

    Attributes:
        start: first number of the set.
        count: E, number of entities.
        width: D, numbers of an entity.
        mask: first of the E flags of the entities that are there; None: all are.
    """

    start: int
    count: int
    width: int
    mask: int | None


class VectorLayout:
    """Places of entity sets, of neighbors and of all other numbers in an agent's vector.

    Attributes:
        sets: the entity sets.
        width: numbers that `plain` returns for an agent.
    """

    def __init__(self, shape: InputShape, *, entities: tuple[str, ...], hears: bool) -> None:
        """Find the places.

        Args:
            shape: inputs of the network.
            entities: names of the observations [E, D] that are sets.
            hears: whether agents hear each other, along `adjacency` if there is one.

        Raises:
            ConfigError: for a set that is not observed, or that has a mask of another size.
        """
        known: dict[str, tuple[ArraySpec, int]] = {}  # observations with their first numbers
        at = 0
        for array in shape.arrays:
            known[array.name] = array, at
            at += math.prod(array.shape)
        taken: list[tuple[int, int]] = []  # (start, stop) of what is not plain

        def take(name: str) -> int:
            array, start = known[name]
            taken.append((start, start + math.prod(array.shape)))
            return start

        found = []
        for name in entities:
            dimensions = known[name][0].shape if name in known else ()
            if len(dimensions) != 2:
                what = f"of shape {dimensions}" if name in known else "not observed"
                raise ConfigError(
                    f"network.entities names '{name}', which is {what}; a set of entities is an "
                    f"observation [E, D] of each agent, here {sets_of(shape)}"
                )
            mask, (count, width) = f"{name}_mask", dimensions
            if mask in known and known[mask][0].shape != (count,):
                raise ConfigError(
                    f"observation '{mask}' has shape {known[mask][0].shape}; '{name}' has {count} "
                    f"entities, so it must be ({count},): 1 for each that is there, else 0"
                )
            found.append(EntitySet(take(name), count, width, take(mask) if mask in known else None))
        self.sets = tuple(found)
        self._alive = take(AGENT_MASK) if hears and AGENT_MASK in known else None
        self._adjacency = take(ADJACENCY) if hears and ADJACENCY in known else None
        bounds = [0, *(x for place in sorted(taken) for x in place), shape.vector]
        self._plain = [(a, b) for a, b in zip(bounds[::2], bounds[1::2], strict=True) if a < b]
        self.width = sum(b - a for a, b in self._plain) or 1

    def plain(self, vector: Tensor) -> Tensor:
        """Return all other numbers [..., width] of vectors [..., F]; without any, a constant 1."""
        parts = [vector[..., start:stop] for start, stop in self._plain]
        return torch.cat(parts, -1) if parts else torch.ones_like(vector[..., :1])

    def entities(self, vector: Tensor, of: EntitySet) -> tuple[Tensor, Tensor]:
        """Return a set's entities [..., E, D] and which are there, [..., E] bool."""
        x = vector[..., of.start : of.start + of.count * of.width]
        x = x.view(*x.shape[:-1], of.count, of.width)
        if of.mask is None:
            return x, torch.ones_like(x[..., 0], dtype=torch.bool)
        return x, vector[..., of.mask : of.mask + of.count] > 0

    def edges(self, vector: Tensor) -> Tensor:
        """Return which agents hear each other, [B, A, A] bool: the row's hears the column's.

        None hears itself, an absent one, or anything while it is absent itself. An agent that is
        fed alone, with A = 1, hears nothing.

        Args:
            vector: [B, A, F] of all agents.
        """
        rows, agents = vector.shape[:2]
        others = ~torch.eye(agents, dtype=torch.bool, device=vector.device)
        edges = others.expand(rows, -1, -1)
        if self._adjacency is not None and agents > 1:
            edges = edges & (vector[..., self._adjacency : self._adjacency + agents] > 0)
        if self._alive is not None:
            there = vector[..., self._alive] > 0
            edges = edges & there.unsqueeze(1) & there.unsqueeze(2)
        return edges


def sets_of(shape: InputShape) -> list[str]:
    """Return the names of the observations [E, D]."""
    return [array.name for array in shape.arrays if len(array.shape) == 2]


def require_adjacency(array: ArraySpec | None, agents: int, network: str) -> None:
    """Refuse a missing adjacency, or one of another layout.

    Args:
        array: the environment's `adjacency`, if there is one.
        agents: number of agents that are fed together; 1: none hears another.
        network: name of the network.

    Raises:
        ConfigError: naming the fix.
    """
    if array is None:
        raise ConfigError(
            f"network '{network}' needs an environment that gives '{ADJACENCY}', uint8 [A] of each "
            "agent, 1 for an agent that it hears (of PettingZoo named in environment.arrays); "
            "network attention with communication=true lets all hear each other"
        )
    if array.dtype != "uint8" or len(array.shape) != 1 or (agents > 1 and array.shape[0] != agents):
        raise ConfigError(
            f"observation '{ADJACENCY}' is {array.dtype} {array.shape} of each agent; network "
            f"'{network}' for {agents} agents needs uint8 ({agents},): 1 for an agent that it "
            "hears, else 0"
        )


def linear(inputs: int, outputs: int, config: LayersConfig) -> StackedLinear:
    """Build a linear layer for all agents, with the configured first weights."""
    layer = StackedLinear((0,), inputs, outputs)
    initialize(layer, config.initialization, hidden_gain(config.activation))
    return layer


def encoder(inputs: int, width: int, config: LayersConfig) -> nn.Sequential:
    """Build two hidden linear layers with what the options put after each."""
    *hidden, _ = linear_layers([inputs, width, width, 1], (0,), config)
    return nn.Sequential(*hidden)


def apply(layer: nn.Module, x: Tensor) -> Tensor:
    """Return [..., O] of x [..., I], by layers that take rows [R, I]."""
    out: Tensor = layer(x.flatten(0, -2))
    return out.view(*x.shape[:-1], -1)


def attend(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, heads: int) -> Tensor:
    """Average values by attention, softmax(q k / sqrt(d)), over what is seen; 0 where nothing is.

    Vaswani et al. 2017, "Attention Is All You Need" (arXiv:1706.03762), section 3.2.

    Args:
        query: [B, T, W], split among the heads, as key and value.
        key: [B, S, W].
        value: [B, S, W].
        seen: [B, T or 1, S] bool.
        heads: number of heads; d = W / heads.

    Returns:
        [B, T, W].
    """
    q, k, v = (x.view(*x.shape[:2], heads, -1).transpose(1, 2) for x in (query, key, value))
    seen = seen.unsqueeze(1)
    score = (q @ k.transpose(2, 3)).float() / math.sqrt(q.shape[-1])  # [B, heads, T, S]
    weight = score.masked_fill(~seen, ILLEGAL).softmax(-1) * seen
    out: Tensor = (weight.to(v.dtype) @ v).transpose(1, 2).flatten(2)
    return out


class SelfAttention(nn.Module):
    """Residual attention among the tokens that are there, then layer normalization.

    Baker et al. 2019, "Emergent Tool Use From Multi-Agent Autocurricula" (arXiv:1909.07528),
    appendix B: masked residual self-attention over entities.
    """

    def __init__(self, width: int, heads: int, config: LayersConfig) -> None:
        super().__init__()
        self._heads = heads
        self.project = linear(width, 3 * width, config)
        self.out = linear(width, width, config)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, there: Tensor) -> Tensor:
        """Return [R, T, W] of tokens [R, T, W] and which are there, [R, T] bool."""
        query, key, value = apply(self.project, x).chunk(3, -1)
        heard = attend(query, key, value, there.unsqueeze(1), self._heads)
        out: Tensor = self.norm(x + apply(self.out, heard))
        return out
