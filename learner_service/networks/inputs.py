"""Networks by name, and what goes into them, derived from the run's EnvSpec.

A network plug-in is a module `learner_service/networks/<name>.py` that has

    Config                                     a frozen pydantic model
    build(config, shape, num_outputs, slices)  -> nn.Module

The module maps (image, vector) to [R, num_outputs]. Rows have the agent innermost; `slices` says
which set of weights each agent uses (see learner_service.networks.stacked). It may have a method
twice(image, vector, change), which saves work where rows are valued for two actions: see
`forward_agents_twice`, which does without, too. With the option
`recurrent` in its Config a network of any kind is given a GRU
(see learner_service.networks.recurrent).

`auto` is `cnn` if the environment observes images ([C, H, W] arrays), else `mlp`.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from learner_service.networks.recurrent import Past, Recurrent
from learner_service.runtime.precision import Precision
from shared.config import PluginConfig, validate
from shared.errors import ConfigError, SpecError
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
_CHUNK_ROWS = 4096
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

    def repeated(self, times: int) -> "Inputs":
        """Every row so many times in a row, for twin networks: [times * R, ...]."""
        if times == 1:
            return self
        return Inputs(
            None if self.image is None else self.image.repeat_interleave(times, 0),
            None if self.vector is None else self.vector.repeat_interleave(times, 0),
        )


@dataclass(frozen=True)
class InputOptions:
    """What a network's Config may say about its inputs.

    Attributes:
        agent_id: append the agent's number as a one-hot vector (for shared parameters).
        centred: channels of the agents' maps that are given once more, agent in the middle.
        centred_state: the same of the state's maps, for the critic.
    """

    agent_id: bool = False
    centred: tuple[int, ...] = ()
    centred_state: tuple[int, ...] = ()


def _plugin(config: PluginConfig, images: bool) -> tuple[ModuleType, Any]:
    """The network's module and its checked options."""
    name = config.name
    if name == "auto":
        name = "cnn" if images else "mlp"
    module = load_plugin(FOLDER, GROUP, name)
    return module, validate(module.Config, config.options, "network")


def input_options(config: PluginConfig, spec: EnvSpec) -> InputOptions:
    """What the configured network wants to be fed.

    Raises:
        ConfigError: for an unknown network or option.
    """
    _, options = _plugin(config, any(o.per_agent and len(o.shape) == 3 for o in spec.observations))
    return InputOptions(
        options.agent_id,
        getattr(options, "centred", ()),
        getattr(options, "centred_state", ()),
    )


def build_network(
    config: PluginConfig,
    shape: InputShape,
    num_outputs: int,
    slices: tuple[int, ...] = (0,),
    *,
    may_remember: bool = False,
) -> nn.Module:
    """The configured network for these inputs, a `Recurrent` one if so configured.

    Args:
        config: name and options.
        shape: what it is fed.
        num_outputs: outputs of a row.
        slices: the slice of each agent, as `resolve_sharing` gives it; (0,): one for all.
        may_remember: whether the algorithm can work with recurrent networks.

    Raises:
        ConfigError: for an unknown network or option, or one that the algorithm cannot work with.
    """
    module, options = _plugin(config, shape.image is not None)
    width: int = getattr(options, "recurrent", 0)
    if width and not may_remember:
        raise ConfigError(
            f"network.recurrent = {width}, but this algorithm has no use for memory; set it to 0, "
            "or use algorithm 'coma' or 'mappo'"
        )
    network: nn.Module = module.build(options, shape, width or num_outputs, slices)
    return Recurrent(network, slices, width, num_outputs) if width else network


def forward(
    network: nn.Module, inputs: Inputs, past: Past | None = None
) -> tuple[Tensor, Tensor | None]:
    """[R, outputs], and what is remembered after it if the network remembers."""
    if isinstance(network, Recurrent):
        out, memory = network(inputs.image, inputs.vector, past)
        return out, memory
    return network(inputs.image, inputs.vector), None


def forward_agents(
    network: nn.Module, inputs: Inputs, precision: Precision, num_agents: int, twins: int = 1
) -> Tensor:
    """[B, A, twins * outputs] float32 of rows [B * A, ...], each fed to so many twin slices."""
    inputs = inputs.repeated(twins)
    with precision.autocast():
        out: Tensor = network(inputs.image, inputs.vector)
    return out.float().view(-1, num_agents, twins * out.shape[-1])


def forward_agents_twice(
    network: nn.Module,
    inputs: Inputs,
    change: Tensor,
    precision: Precision,
    num_agents: int,
    twins: int = 1,
) -> tuple[Tensor, Tensor]:
    """`forward_agents`, and the same with the last inputs changed, for critics of another action.

    Gradient of the second goes to the change alone.

    Args:
        network: from `build_network`.
        inputs: of `forward_agents`.
        change: [B * A, U] what is added to the last U numbers of each row's vector.
        precision: that of the pass.
        num_agents: A.
        twins: slices that each row is fed to.

    Returns:
        Two of [B, A, twins * outputs] float32.
    """
    inputs, change = inputs.repeated(twins), change.repeat_interleave(twins, 0)
    twice = getattr(network, "twice", None)
    with precision.autocast():
        if twice is not None:
            first, second = twice(inputs.image, inputs.vector, change)
        else:
            assert inputs.vector is not None
            same = inputs.vector.shape[1] - change.shape[1]
            first = network(inputs.image, inputs.vector)
            with frozen(network):
                second = network(inputs.image, inputs.vector + F.pad(change, (same, 0)))
    shape = -1, num_agents, twins * first.shape[-1]
    return first.float().view(shape), second.float().view(shape)


@contextmanager
def frozen(network: nn.Module) -> Iterator[None]:
    """What is computed meanwhile passes gradient through the network, and leaves none in it."""
    network.requires_grad_(False)
    try:
        yield
    finally:
        network.requires_grad_(True)


def forward_rows(
    network: nn.Module,
    inputs: Inputs,
    precision: Precision,
    num_agents: int,
    past: Past | None = None,
) -> Tensor:
    """[R, outputs] float32 for many rows, in chunks of whole joint rows: bounds memory."""
    if isinstance(network, Recurrent):
        assert past is not None
        features = forward_rows(network.body, inputs, precision, num_agents)
        with precision.autocast():
            out, _ = network.remember(features, past)
        return out.float()
    some = inputs.image if inputs.image is not None else inputs.vector
    assert some is not None
    step = max(1, _CHUNK_ROWS // num_agents) * num_agents
    outputs = []
    for start in range(0, len(some), step):
        part = inputs.rows(slice(start, start + step))
        with precision.autocast():
            outputs.append(network(part.image, part.vector).float())
    return torch.cat(outputs)


def to_float(x: Tensor) -> Tensor:
    """Wire dtype to float32; bytes become 0..1."""
    if x.dtype == torch.uint8:
        return x.float().div_(255)
    return x.float()


def _numbers(x: Tensor, leading: int) -> Tensor:
    """All but the leading dimensions as one, [..., F] float32; F is 1 of an observation ()."""
    return to_float(x).unsqueeze(-1).flatten(leading)


def _split(arrays: list[ArraySpec]) -> tuple[list[ArraySpec], list[ArraySpec]]:
    """Images and everything else."""
    images = [a for a in arrays if len(a.shape) == 3]
    return images, [a for a in arrays if len(a.shape) != 3]


class StateInputs:
    """What a mixing network sees: the global state as one vector, images flattened.

    Where the environment gives no `state`, all that all agents observe stands for it.

    Attributes:
        size: S.
    """

    def __init__(self, spec: EnvSpec) -> None:
        """Decide what goes in."""
        known = [o for o in spec.observations if o.name not in _RESERVED]
        shared = [o for o in known if not o.per_agent]
        self._arrays = shared if spec.observation(STATE) else known
        self.size = sum(
            math.prod(o.shape) * (spec.num_agents if o.per_agent else 1) for o in self._arrays
        )

    def __call__(self, observation: Mapping[str, Tensor]) -> Tensor:
        """[B, S] of observations [B, ...]."""
        parts = [_numbers(observation[o.name], 1) for o in self._arrays]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


class ActorInputs:
    """Each agent's own observations: images stacked by channel, the rest as one vector.

    Attributes:
        shape: what the actor network is fed.
    """

    def __init__(self, spec: EnvSpec, options: InputOptions) -> None:
        """Decide what goes where.

        Raises:
            SpecError: if images of different size would have to be stacked.
            ConfigError: if maps are to be centred that are not there.
        """
        own = [o for o in spec.observations if o.per_agent and o.name not in _RESERVED]
        self._images, self._vectors = _split(own)
        self._num_agents = spec.num_agents
        self._agent_id = options.agent_id and spec.num_agents > 1
        vector = sum(math.prod(v.shape) for v in self._vectors)
        vector += spec.num_agents if self._agent_id else 0
        image = _stacked_shape(self._images)
        self._centred = options.centred
        _check_centred("centred", options.centred, image, spec)
        if image is not None:
            image = (image[0] + len(self._centred), *image[1:])
        self.shape = InputShape(image, vector)

    def __call__(self, observation: Mapping[str, Tensor]) -> Inputs:
        """Rows [B * A, ...] of observations [B, A, ...], agents innermost."""
        images = [to_float(observation[i.name]).flatten(0, 1) for i in self._images]
        if self._centred:
            cell = observation[AGENT_CELL].flatten(0, 1).long()
            stacked = torch.cat(images, 1)
            images = [stacked, centre(stacked[:, self._centred], cell)]
        vectors = [_numbers(observation[v.name], 2).flatten(0, 1) for v in self._vectors]
        if self._agent_id:
            any_array = next(iter(observation.values()))
            eye = torch.eye(self._num_agents, device=any_array.device)
            vectors.append(eye.repeat(any_array.shape[0], 1))
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

    def __init__(self, spec: EnvSpec, options: InputOptions, *, actions: bool = True) -> None:
        """Decide what goes where.

        Args:
            spec: the run's spec.
            options: what the network wants to be fed.
            actions: whether the others' actions are among the inputs.

        Raises:
            SpecError: if images of different size would have to be stacked, or actions are wanted
                that are not discrete.
            ConfigError: if maps are to be centred that are not there.
        """
        self._num_actions = 0
        if actions:
            if not isinstance(spec.action, Discrete):
                raise SpecError("a critic over counterfactual actions needs discrete actions")
            self._num_actions = spec.action.num_actions
        self._actor = ActorInputs(spec, options)
        self._num_agents = spec.num_agents
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
        standing = own.image is not None and spec.observation(AGENT_CELL) is not None
        self._action_map = actions and standing
        image, extra = own.image, _stacked_shape(self._state_images)
        self._centred = options.centred_state
        _check_centred("centred_state", self._centred, extra, spec)
        if extra is not None:
            extra = (extra[0] + len(self._centred), *extra[1:])
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

    def __call__(self, observation: Mapping[str, Tensor], action: Tensor | None = None) -> Inputs:
        """Rows [B * A, ...] of observations [B, A, ...] and the joint action [B, A] int64."""
        b, a = len(next(iter(observation.values()))), self._num_agents
        own = self._actor(observation)
        images = [] if own.image is None else [own.image]
        vectors = [] if own.vector is None else [own.vector]
        if self._state_images:
            state = torch.cat([to_float(observation[i.name]) for i in self._state_images], 1)
            state = state.unsqueeze(1).expand(b, a, *state.shape[1:]).flatten(0, 1)
            images.append(state)
            if self._centred:
                cell = observation[AGENT_CELL].flatten(0, 1).long()
                images.append(centre(state[:, self._centred], cell))
        shared = [_numbers(observation[v.name], 1) for v in self._state_vectors]
        shared += [_numbers(observation[v.name], 1) for v in self._joint]
        vectors += [s.unsqueeze(1).expand(b, a, s.shape[1]).flatten(0, 1) for s in shared]
        if action is None:
            return Inputs(_cat(images), _cat(vectors))
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


class JointInputs:
    """What a critic of joint actions is fed for each agent, but for that agent's own action.

    Centralised: the agent's own inputs, the environment's state, or the vectors that the other
    agents observe where it gives none, and the other agents' actions; the others come in turn, the
    next agent first. So the critic of agent a sees all that is observed and done, from where a
    stands, and agents that share a network are told apart. Otherwise the agent's own inputs alone.

    The own action is left out: a critic of discrete actions has an output for each; one of
    continuous actions gets it by `with_action`; the rest serves for any own action.

    Attributes:
        shape: what this gives.
        with_action_shape: the same, own action added.
    """

    def __init__(self, spec: EnvSpec, options: InputOptions, *, centralised: bool = True) -> None:
        """Decide what goes where.

        Args:
            spec: the run's spec.
            options: what the network wants to be fed.
            centralised: false: own inputs alone.

        Raises:
            SpecError: if images of different size would have to be stacked.
            ConfigError: if maps are to be centred that are not there, or the state's maps.
        """
        if options.centred_state:
            raise ConfigError(
                f"network.centred_state = {list(options.centred_state)} is for critics of "
                "counterfactual actions; leave it out"
            )
        self._actor, self._centralised = ActorInputs(spec, options), centralised
        self._num_agents = spec.num_agents
        mine = [o for o in spec.observations if o.name not in _RESERVED]
        self._state_images, self._state_vectors = _split([o for o in mine if not o.per_agent])
        others = [] if spec.observation(STATE) else _split([o for o in mine if o.per_agent])[1]
        self._others = others
        size = spec.action.num_actions if isinstance(spec.action, Discrete) else spec.action.size
        own = self._actor.shape
        image, vector = own.image, own.vector
        if centralised:
            extra = _stacked_shape(self._state_images)
            if image is None or extra is None:
                image = image or extra
            elif image[1:] != extra[1:]:
                raise SpecError(f"state maps are {extra[1:]}, the agents' maps {image[1:]}")
            else:
                image = (image[0] + extra[0], *image[1:])
            vector += sum(math.prod(v.shape) for v in self._state_vectors)
            width = size + sum(math.prod(v.shape) for v in others)
            vector += (spec.num_agents - 1) * width
        self.shape = InputShape(image, vector)
        self.with_action_shape = InputShape(image, vector + size)

    def __call__(self, observation: Mapping[str, Tensor], action: Tensor) -> Inputs:
        """Rows [B * A, ...], agents innermost.

        Args:
            observation: name -> [B, A, ...] or [B, ...].
            action: [B, A, U] float32, or [B, A, K] one-hot or probabilities; no gradient reaches
                it.
        """
        own, a = self._actor(observation), self._num_agents
        if not self._centralised:
            return own
        b = len(action)
        images = [] if own.image is None else [own.image]
        for i in self._state_images:
            image = to_float(observation[i.name])
            images.append(image.unsqueeze(1).expand(b, a, *image.shape[1:]).flatten(0, 1))
        vectors = [] if own.vector is None else [own.vector]
        for v in self._state_vectors:
            state = _numbers(observation[v.name], 1)
            vectors.append(state.unsqueeze(1).expand(b, a, state.shape[1]).flatten(0, 1))
        if a > 1:
            parts = [_numbers(observation[v.name], 2) for v in self._others]
            each = torch.cat([*parts, action.detach()], 2)  # [B, A, F + U]
            # Row a of the windows: a, a + 1, ..., and round to a - 1.
            windows = torch.cat([each, each[:, :-1]], 1).unfold(1, a, 1)  # [B, A, F + U, A]
            vectors.append(windows[..., 1:].transpose(2, 3).flatten(2).flatten(0, 1))
        return Inputs(_cat(images), _cat(vectors))


def with_action(inputs: Inputs, action: Tensor) -> Inputs:
    """Rows [R, ...] and each row's own action [R, U], which carries gradient if it has one."""
    vector = action if inputs.vector is None else torch.cat([inputs.vector, action], 1)
    return Inputs(inputs.image, vector)


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


def centre(maps: Tensor, cell: Tensor) -> Tensor:
    """Shift maps so that the given cell lies in the middle; what comes in from outside is zero.

    A convolution then meets what surrounds the agent always at the same place, wherever the agent
    stands.

    Args:
        maps: [R, C, H, W].
        cell: [R, 2] int64 (row, column).

    Returns:
        [R, C, H, W]; [r, :, H // 2, W // 2] is maps[r, :, row, column].
    """
    _, _, h, w = maps.shape
    up, left = h // 2, w // 2
    padded = F.pad(maps, (left, w - 1 - left, up, h - 1 - up))
    rows = cell[:, 0, None] + torch.arange(h, device=maps.device)  # [R, H]
    columns = cell[:, 1, None] + torch.arange(w, device=maps.device)  # [R, W]
    which = torch.arange(maps.shape[0], device=maps.device)[:, None, None]
    shifted = padded[which, :, rows[:, :, None], columns[:, None, :]]  # [R, H, W, C]
    return shifted.permute(0, 3, 1, 2)


def _check_centred(
    key: str, channels: tuple[int, ...], image: tuple[int, int, int] | None, spec: EnvSpec
) -> None:
    """Refuse to centre maps that are not there."""
    if not channels:
        return
    if spec.observation(AGENT_CELL) is None:
        raise ConfigError(
            f"network.{key} needs an environment that says where its agents stand "
            f"('{AGENT_CELL}'); '{spec.name}' does not"
        )
    count = image[0] if image else 0
    if max(channels) >= count or min(channels) < 0:
        raise ConfigError(f"network.{key} = {list(channels)}, but there are {count} maps")


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
