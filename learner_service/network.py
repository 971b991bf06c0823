"""Networks by name, and what goes into them, derived from the run's EnvSpec.

A network plug-in is a module `learner_service/networks/<name>.py` that has

    Config                             a frozen pydantic model
    build(config, shape, num_outputs)  -> nn.Module: (image, vector) -> [B, num_outputs]

`auto` is `cnn` if the environment observes images ([C, H, W] arrays), else `mlp`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shared.config import PluginConfig, validate
from shared.errors import SpecError
from shared.registry import load_plugin
from shared.spec import (
    ACTION_MASK,
    AGENT_CELL,
    AGENT_MASK,
    STATE,
    ArraySpec,
    Discrete,
    EnvSpec,
)

FOLDER, GROUP = "learner_service.networks", "murmur.networks"
_RESERVED = (ACTION_MASK, AGENT_CELL, AGENT_MASK)


@dataclass(frozen=True)
class InputShape:
    """What a network is fed, per row.

    Attributes:
        image: (C, H, W), or None.
        vector: F, may be 0.
    """

    image: tuple[int, int, int] | None
    vector: int


@dataclass
class Inputs:
    """A batch of rows for a network.

    Attributes:
        image: [R, C, H, W] or None.
        vector: [R, F] or None.
    """

    image: Tensor | None
    vector: Tensor | None

    def rows(self, index: Tensor | slice) -> "Inputs":
        """Some of the rows."""
        return Inputs(
            None if self.image is None else self.image[index],
            None if self.vector is None else self.vector[index],
        )


def build_network(
    config: PluginConfig, spec: EnvSpec, shape: InputShape, num_outputs: int
) -> nn.Module:
    """The configured network for these inputs.

    Raises:
        ConfigError: for an unknown network or option.
    """
    name = config.name
    if name == "auto":
        name = "cnn" if shape.image else "mlp"
    module = load_plugin(FOLDER, GROUP, name)
    options = validate(module.Config, config.options, "network")
    network: nn.Module = module.build(options, shape, num_outputs)
    return network


def to_float(x: Tensor) -> Tensor:
    """Wire dtype to float32; bytes become 0..1."""
    if x.dtype == torch.uint8:
        return x.float().div_(255)
    return x.float()


def _split(arrays: list[ArraySpec]) -> tuple[list[ArraySpec], list[ArraySpec]]:
    """Images and everything else."""
    images = [a for a in arrays if len(a.shape) == 3]
    return images, [a for a in arrays if len(a.shape) != 3]


class ActorInputs:
    """Each agent's own observations: images stacked by channel, the rest as one vector.

    Attributes:
        shape: what the actor network is fed.
    """

    def __init__(self, spec: EnvSpec, agent_id: bool) -> None:
        """Decide what goes where.

        Args:
            spec: the run's spec.
            agent_id: append the agent's number as a one-hot vector (for shared parameters).

        Raises:
            SpecError: if images of different size would have to be stacked.
        """
        own = [o for o in spec.observations if o.per_agent and o.name not in _RESERVED]
        self._images, self._vectors = _split(own)
        self._num_agents = spec.num_agents
        self._agent_id = agent_id and spec.num_agents > 1
        vector = sum(math.prod(v.shape) for v in self._vectors)
        vector += spec.num_agents if self._agent_id else 0
        self.shape = InputShape(_stacked_shape(self._images), vector)

    def __call__(self, observation: Mapping[str, Tensor]) -> Inputs:
        """Rows [B * A, ...] of observations [B, A, ...], agents innermost."""
        images = [to_float(observation[i.name]).flatten(0, 1) for i in self._images]
        vectors = [to_float(observation[v.name]).flatten(0, 1).flatten(1) for v in self._vectors]
        if self._agent_id:
            any_array = next(iter(observation.values()))
            eye = torch.eye(self._num_agents, device=any_array.device)
            vectors.append(eye.repeat(len(any_array), 1))
        return Inputs(_cat(images), _cat(vectors))


class CriticInputs:
    """What a centralised critic sees for each agent: own inputs, global state, others' actions.

    The others' actions come as a map where the environment observes maps and says where each
    agent stands on them (`agent_cell`): (action + 1) / K at each other agent's cell. Elsewhere as
    one-hot vectors, the own one zero. Where the environment gives no `state`, the vectors that all
    agents observe stand for it (but not their images).

    Attributes:
        shape: what the critic network is fed.
    """

    def __init__(self, spec: EnvSpec, agent_id: bool) -> None:
        """Decide what goes where.

        Raises:
            SpecError: if images of different size would have to be stacked, or the actions are
                not discrete.
        """
        if not isinstance(spec.action, Discrete):
            raise SpecError("a critic over counterfactual actions needs discrete actions")
        self._actor = ActorInputs(spec, agent_id)
        self._num_agents, self._num_actions = spec.num_agents, spec.action.num_actions
        state = spec.observation(STATE)
        shared = [o for o in spec.observations if not o.per_agent and o.name not in _RESERVED]
        self._state_images, self._state_vectors = _split(shared)
        self._joint = (
            []
            if state
            else _split([o for o in spec.observations if o.per_agent and o.name not in _RESERVED])[
                1
            ]
        )
        own = self._actor.shape
        self._action_map = own.image is not None and spec.observation(AGENT_CELL) is not None
        image, extra = own.image, _stacked_shape(self._state_images)
        if image is None:
            image = extra
        else:
            if extra is not None and extra[1:] != image[1:]:
                raise SpecError(f"state maps are {extra[1:]}, the agents' maps {image[1:]}")
            image = (image[0] + (extra[0] if extra else 0) + int(self._action_map), *image[1:])
        vector = own.vector + sum(math.prod(v.shape) for v in self._state_vectors)
        vector += spec.num_agents * sum(math.prod(v.shape) for v in self._joint)
        vector += 0 if self._action_map else spec.num_agents * self._num_actions
        self.shape = InputShape(image, vector)

    def __call__(self, observation: Mapping[str, Tensor], action: Tensor) -> Inputs:
        """Rows [B * A, ...] of observations [B, A, ...] and the joint action [B, A] int64."""
        b, a = action.shape
        own = self._actor(observation)
        images = [] if own.image is None else [own.image]
        vectors = [] if own.vector is None else [own.vector]
        for i in self._state_images:
            state = to_float(observation[i.name])  # [B, C, H, W]
            images.append(state.unsqueeze(1).expand(b, a, *state.shape[1:]).flatten(0, 1))
        shared = [to_float(observation[v.name]).flatten(1) for v in self._state_vectors]
        shared += [to_float(observation[v.name]).flatten(1) for v in self._joint]
        vectors += [s.unsqueeze(1).expand(b, a, s.shape[1]).flatten(0, 1) for s in shared]
        if self._action_map:
            assert self.shape.image is not None
            _, h, w = self.shape.image
            cell = observation[AGENT_CELL].long()
            images.append(others_action_map(cell, action, self._num_actions, h, w).flatten(0, 1))
        else:
            one_hot = F.one_hot(action, self._num_actions).float()  # [B, A, K]
            joint = one_hot.unsqueeze(1).expand(b, a, a, self._num_actions)
            others = 1 - torch.eye(a, device=action.device).view(1, a, a, 1)
            vectors.append((joint * others).flatten(0, 1).flatten(1))
        return Inputs(_cat(images), _cat(vectors))


def others_action_map(cell: Tensor, action: Tensor, num_actions: int, h: int, w: int) -> Tensor:
    """What every other agent does, drawn where it stands: (action + 1) / K, else 0.

    Actions of agents on one cell add up.

    Args:
        cell: [B, A, 2] int64 (row, column).
        action: [B, A] int64.
        num_actions: K.
        h: rows of the map.
        w: columns of the map.

    Returns:
        [B, A, 1, h, w] float32.
    """
    b, a = action.shape
    flat = cell[..., 0] * w + cell[..., 1]  # [B, A]
    value = (action + 1).float() / num_actions
    every = torch.zeros(b, h * w, device=action.device).scatter_add_(1, flat, value)
    others = every.unsqueeze(1).repeat(1, a, 1)
    others.scatter_add_(2, flat.unsqueeze(-1), -value.unsqueeze(-1))
    return others.view(b, a, 1, h, w)


def _stacked_shape(images: list[ArraySpec]) -> tuple[int, int, int] | None:
    """Shape of images stacked by channel."""
    if not images:
        return None
    sizes = {i.shape[1:] for i in images}
    if len(sizes) > 1:
        raise SpecError(
            "images of different size cannot be stacked: "
            + ", ".join(f"{i.name} {i.shape}" for i in images)
        )
    return sum(i.shape[0] for i in images), images[0].shape[1], images[0].shape[2]


def _cat(parts: list[Tensor]) -> Tensor | None:
    """Concatenate along dimension 1; nothing is copied where there is one part."""
    if not parts:
        return None
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)
