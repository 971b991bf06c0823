"""Inputs of networks, derived from the run's EnvSpec: arrays, maps, what others do."""

import dataclasses
import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from murmur.learner_service.layers.distributions import one_hot
from murmur.shared.process.errors import ConfigError, SpecError
from murmur.shared.wire.derived_maps import Channel, DerivedMap
from murmur.shared.wire.spec import (
    AGENT_CELL,
    AGENT_MASK,
    NO_INPUTS,
    STATE,
    TURN_MASK,
    ArraySpec,
    Discrete,
    EnvSpec,
)

_LARGE_IMAGE = 4096  # bytes of an image from which it is not kept as float32


def others_action_map(cell: Tensor, action: Tensor, num_actions: int, h: int, w: int) -> Tensor:
    """Draw every other agent's action at its cell: (action + 1) / K, else 0.

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
    # Whole numbers until the end: their sums are exact in whatever order a GPU forms them.
    value = (action + 1).float()
    every = torch.zeros(b, h * w, device=action.device).scatter_add_(1, flat, value)
    others = every.unsqueeze(1).repeat(1, a, 1)
    others.scatter_add_(2, flat.unsqueeze(-1), -value.unsqueeze(-1))
    return others.div_(num_actions).view(b, a, 1, h, w)


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
    which = torch.arange(maps.shape[0], device=maps.device)
    windows = padded.unfold(2, h, 1).unfold(3, w, 1)  # a view: [R, C, H, W, H, W]
    return windows[which, :, cell[:, 0], cell[:, 1]]


def centered(maps: Tensor, channels: tuple[int, ...], cell: Tensor) -> Tensor:
    """Some channels of maps, shifted so that each agent's cell lies in the middle.

    By slices: a list of channels as an index would be copied to the device in every call.

    Args:
        maps: [B, A, C, H, W].
        channels: indices of the channels to shift.
        cell: [B, A, 2] (row, column).
    """
    first, count = channels[0], len(channels)
    if channels == tuple(range(first, first + count)):
        some = maps.narrow(2, first, count)
    else:
        some = torch.cat([maps.narrow(2, channel, 1) for channel in channels], 2)
    cell = cell.long().flatten(0, 1)  # long() leaves nothing for flatten to copy
    return centre(some.flatten(0, 1), cell).view_as(some)


def check_centred(
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


def stacked_shape(images: list[ArraySpec]) -> tuple[int, int, int] | None:
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


class Derivation:
    """Replaces the sources of derived maps by the maps.

    Attributes:
        spec: spec that networks see: derived maps as float32 observations, none of their sources.
    """

    def __init__(self, spec: EnvSpec) -> None:
        """Plan the computation."""
        self._maps = spec.derived
        self._num_agents = spec.num_agents
        self._sources = {source for derived in self._maps for source in derived.sources}
        self._constants: dict[tuple[int, torch.device], dict[tuple[str, int], Tensor]] = {}
        seen = [spec.derived_array(derived) for derived in self._maps]
        seen += [o for o in spec.observations if o.name not in self._sources]
        self.spec = dataclasses.replace(spec, observations=tuple(seen), derived=(), symmetries=())
        self._shapes: dict[str, ArraySpec] = {array.name: array for array in seen}

    def __call__(self, observation: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Observations by name, [B, A, ...] or [B, ...], as `spec` lists them."""
        seen = {n: x for n, x in observation.items() if n not in self._sources}
        return {m.name: self._compute(m, observation) for m in self._maps} | seen

    def _compute(self, derived: DerivedMap, observation: Mapping[str, Tensor]) -> Tensor:
        """[B, A, C, H, W], or [B, C, H, W] of a map that agents share."""
        first = observation[next(derived.sources)]
        array = self._shapes[derived.name]
        height, width = array.shape[1:]
        leading = (first.shape[0], *((self._num_agents,) * array.per_agent))
        parts = []
        for start, run in _runs(derived.channels):
            kind, source, count = run[0].kind, run[0].source, len(run)
            if kind == "constant":
                values = self._constant(derived, start, run, first.device)  # [A, n], or [n]
                part = values[..., None, None].expand(*leading, count, height, width)
            else:
                axis = -1 if kind == "fill" else -3
                part = observation[source].narrow(axis, run[0].index, count)
                if kind == "fill":
                    part = part[..., None, None].expand(*leading, count, height, width)
                elif kind == "entropy":
                    part = weighted_entropy(part, *run[0].values)
            parts.append(part)
        return torch.cat(parts, -3)

    def _constant(
        self, derived: DerivedMap, start: int, run: list[Channel], device: torch.device
    ) -> Tensor:
        """Values of adjacent constant channels; a copy per thread, as each has its own stream."""
        known = self._constants.setdefault((threading.get_ident(), device), {})
        key = derived.name, start
        if key not in known:
            with torch.inference_mode(False):
                values = torch.tensor([channel.values for channel in run]).T  # [A or 1, n]
                if self._shapes[derived.name].per_agent:
                    values = values.expand(self._num_agents, -1)
                else:
                    values = values[0]
                values = values.contiguous()
                if device.type == "cuda":
                    values = values.pin_memory().to(device, non_blocking=True)
            if type(values) is not Tensor:  # one that only traces
                return values
            known[key] = values
        return known[key]


def derivation(spec: EnvSpec) -> tuple[Derivation | None, EnvSpec]:
    """Return what computes derived maps, None without any, and the spec that networks see."""
    derive = Derivation(spec)
    return derive if spec.derived else None, derive.spec


def weighted_entropy(probability: Tensor, p_min: float, low: float, high: float) -> Tensor:
    """Binary entropy in bits times a weight: 0 below `low`, 1 above `high`, 0.5 between.

    Args:
        probability: probabilities of any shape, float32.
        p_min: probabilities are clamped to [p_min, 1 - p_min] first.
        low: probability below which the weight is 0.
        high: probability above which the weight is 1.
    """
    p = probability.clamp(p_min, 1 - p_min)
    weight = ((p > high).float() + (p >= low).float()) / 2
    q = 1 - p
    return -weight * (p * p.log2() + q * q.log2())


def _runs(channels: tuple[Channel, ...]) -> list[tuple[int, list[Channel]]]:
    """Channels that one operation computes, with the number of the first of them."""
    numbered = list(enumerate(channels))

    def key(item: tuple[int, Channel]) -> object:
        number, channel = item
        if channel.kind == "constant":
            return channel.kind
        return channel.kind, channel.source, channel.index - number, channel.values

    return [
        (run[0][0], [channel for _, channel in run])
        for run in ([*group] for _, group in groupby(numbered, key))
    ]


@dataclass(frozen=True)
class InputShape:
    """Shape of a network's inputs for each agent.

    Attributes:
        image: (C, H, W), or None.
        vector: F, may be 0.
        arrays: observations that the vector begins with, in their order, each flattened.
    """

    image: tuple[int, int, int] | None
    vector: int
    arrays: tuple[ArraySpec, ...] = field(default=(), compare=False)


@dataclass
class Inputs:
    """A batch for a network: joint rows, and in each of them every agent's row.

    Attributes:
        stored: images [B, A, C, H, W], or None; large ones stay bytes until a network is fed them.
        vector: vectors [B, A, F], or None.
    """

    stored: Tensor | None
    vector: Tensor | None

    @property
    def image(self) -> Tensor | None:
        """The images as a network is fed them: float32, bytes scaled to 0..1."""
        return None if self.stored is None else to_float(self.stored)

    def rows(self, start: int, stop: int) -> "Inputs":
        """Some of the joint rows."""
        return self.each(lambda x: x[start:stop])

    def grouped(self, agents: int) -> "Inputs":
        """The same rows as [B * A / agents, agents, ...]."""
        return self.each(lambda x: x.reshape(-1, agents, *x.shape[2:]))

    def each(self, change: Callable[[Tensor], Tensor]) -> "Inputs":
        """The same with all tensors changed."""
        return Inputs(
            None if self.stored is None else change(self.stored),
            None if self.vector is None else change(self.vector),
        )


@dataclass(frozen=True)
class InputOptions:
    """Options of a network's Config about its inputs.

    Attributes:
        agent_id: append the agent's number as a one-hot vector, with or without shared parameters.
        centered: channels of the agents' maps that are given once more, agent in the middle.
        centered_state: channels of the state's maps that the critic gets once more, centered.
        alive: append whether the agent is there, for networks that let agents hear each other.
    """

    agent_id: bool = False
    centered: tuple[int, ...] = ()
    centered_state: tuple[int, ...] = ()
    alive: bool = False


def to_float(x: Tensor, leading: int | None = None) -> Tensor:
    """Convert wire dtype to float32; bytes become 0..1.

    Args:
        x: array of an observation.
        leading: number of dimensions to keep, with all others as one, [..., F]; None: all.
    """
    if leading is not None:
        x = x.unsqueeze(-1).flatten(leading)  # F is 1 of an observation ()
    return x.float().div_(255) if x.dtype == torch.uint8 else x.float()


def _pixels(x: Tensor) -> Tensor:
    """Small images as float32; large ones as they are, to be converted a minibatch at a time."""
    return x if math.prod(x.shape[-3:]) >= _LARGE_IMAGE else to_float(x)


def _split(spec: EnvSpec, *, per_agent: bool) -> tuple[list[ArraySpec], list[ArraySpec]]:
    """Images and everything else of what each agent observes, or of what all of them share.

    A state of each agent is neither: see `own_state`.
    """
    left_out = (*NO_INPUTS, STATE) if per_agent else NO_INPUTS
    known = [o for o in spec.observations if o.per_agent == per_agent and o.name not in left_out]
    return [o for o in known if len(o.shape) == 3], [o for o in known if len(o.shape) != 3]


def _width(arrays: list[ArraySpec]) -> int:
    """Numbers of some arrays in one vector."""
    return sum(math.prod(array.shape) for array in arrays)


def _joined_shape(
    own: tuple[int, int, int] | None, state: tuple[int, int, int] | None
) -> tuple[int, int, int] | None:
    """The agents' maps and the state's, stacked by channel."""
    if own is None or state is None:
        return own or state
    if state[1:] != own[1:]:
        raise SpecError(f"state maps are {state[1:]}, the agents' maps {own[1:]}")
    return (own[0] + state[0], *own[1:])


def own_state(spec: EnvSpec) -> ArraySpec | None:
    """Return the state that the environment gives each agent; None: it gives none of that kind."""
    state = spec.observation(STATE)
    return state if state is not None and state.per_agent else None


class StateInputs:
    """Inputs of a mixing network: the global state as one vector, images flattened.

    Where each agent has a state of its own, those of all agents.

    Where the environment gives no `state`, all that all agents observe stands for it.

    Attributes:
        size: S.
    """

    def __init__(self, spec: EnvSpec) -> None:
        """Decide what goes in."""
        self._derive, spec = derivation(spec)
        known = [o for o in spec.observations if o.name not in NO_INPUTS]
        shared = [o for o in known if o.name == STATE or not o.per_agent]
        self._arrays = shared if spec.observation(STATE) else known
        self.size = sum(
            math.prod(o.shape) * (spec.num_agents if o.per_agent else 1) for o in self._arrays
        )

    def __call__(self, observation: Mapping[str, Tensor]) -> Tensor:
        """[B, S] of observations [B, ...]."""
        if self._derive is not None:
            observation = self._derive(observation)
        parts = [to_float(observation[o.name], 1) for o in self._arrays]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


class ActorInputs:
    """Each agent's own observations: images stacked by channel, the rest as one vector.

    Inputs of critics derive from it: they add what all agents share, then what the others do.

    Attributes:
        shape: inputs of the network for an agent.
        vectors: specs of the observations that are no images.
    """

    def __init__(self, spec: EnvSpec, options: InputOptions) -> None:
        """Decide what goes where.

        Args:
            spec: spec of the run.
            options: options of the network about its inputs.

        Raises:
            SpecError: if images of different size would have to be stacked.
            ConfigError: if maps are to be centered that are not there.
        """
        self._derive, spec = derivation(spec)
        self._images, self.vectors = _split(spec, per_agent=True)
        if options.alive and (mask := spec.observation(AGENT_MASK)):
            self.vectors.append(mask)
        self._num_agents = spec.num_agents
        self._agent_id = options.agent_id and spec.num_agents > 1
        self._numbers: dict[tuple[int, torch.device], Tensor] = {}
        # What all agents share; of those without shape [C, H, W] all numbers go to each agent.
        self._shared_images: list[ArraySpec] = []
        self._shared: list[ArraySpec] = []
        self._own_state: ArraySpec | None = None
        self._centred_state: tuple[int, ...] = ()
        self._sees_others = False
        self._sees_turns = False
        vector = _width(self.vectors) + (spec.num_agents if self._agent_id else 0)
        image = stacked_shape(self._images)
        self._centred = options.centered
        check_centred("centered", options.centered, image, spec)
        if image is not None:
            image = (image[0] + len(self._centred), *image[1:])
        self.shape = InputShape(image, vector, tuple(self.vectors))

    def __call__(
        self,
        observation: Mapping[str, Tensor],
        action: Tensor | None = None,
        own: Inputs | None = None,
        *,
        whole: bool = False,
    ) -> Inputs:
        """Return inputs [B, A, ...].

        Args:
            observation: name -> [B, A, ...] or [B, ...].
            action: joint action, as the class wants it; no gradient reaches it.
            own: inputs that ActorInputs makes of the observation, if that is known.
            whole: flag to append each agent's own action, as `with_action` does.
        """
        if self._derive is not None:
            observation = self._derive(observation)
        # 1. Each agent's own observations.
        if own is None:
            images = [_pixels(observation[i.name]) for i in self._images]
            if self._centred:
                stacked = torch.cat([to_float(image) for image in images], 2)
                images = [stacked, centered(stacked, self._centred, observation[AGENT_CELL])]
            vectors = [to_float(observation[v.name], 2) for v in self.vectors]
            if self._agent_id:
                some = next(iter(observation.values()))
                key = threading.get_ident(), some.device
                numbers = self._numbers.get(key)
                if numbers is None:
                    numbers = self._agent_numbers(*key)
                vectors.append(numbers.expand(some.shape[0], -1, -1))
        else:
            images = [] if own.stored is None else [own.stored]
            vectors = [] if own.vector is None else [own.vector]
        # 2. Each agent's state, and what all agents share.
        if self._own_state is not None:
            own_state = observation[STATE]
            if len(self._own_state.shape) == 3:
                images.append(_pixels(own_state))
            else:
                vectors.append(to_float(own_state, 2))
        if self._shared_images:
            state = _cat([_pixels(observation[i.name]) for i in self._shared_images], 1)
            assert state is not None
            state = state.unsqueeze(1).expand(-1, self._num_agents, -1, -1, -1)
            images.append(state)
            if self._centred_state:
                cell = observation[AGENT_CELL]
                images.append(centered(to_float(state), self._centred_state, cell))
        for v in self._shared:
            numbers = to_float(observation[v.name], 1)
            vectors.append(numbers.unsqueeze(1).expand(-1, self._num_agents, -1))
        if self._sees_turns:
            turn = observation[TURN_MASK].float()  # [B, A]
            vectors.append(turn.unsqueeze(1).expand(-1, self._num_agents, -1))
        # 3. What the other agents do.
        if action is not None:
            action = action.detach()
            if self._sees_others:
                others = self._of_others(observation, action)
                (images if others.dim() == 5 else vectors).append(others)
            if whole:
                vectors.append(action)
        return Inputs(_cat(images), _cat(vectors))

    def _of_others(self, observation: Mapping[str, Tensor], action: Tensor) -> Tensor:
        """Return what agents are shown of the others, [B, A, 1, H, W] or [B, A, F]."""
        raise NotImplementedError

    def _with_own_state(self, spec: EnvSpec) -> InputShape:
        """Add the state that each agent has, if it has one; return the shape with it."""
        self._own_state, own = own_state(spec), self.shape
        state = self._own_state
        if state is None:
            return own
        if len(state.shape) == 3:
            return dataclasses.replace(own, image=_joined_shape(own.image, stacked_shape([state])))
        return dataclasses.replace(own, vector=own.vector + _width([state]))

    def _agent_numbers(self, thread: int, device: torch.device) -> Tensor:
        """Make one-hot numbers [A, A]; a copy for each thread, which has a stream of its own."""
        with torch.inference_mode(False):
            numbers = torch.eye(self._num_agents, device=device)
        if type(numbers) is Tensor:  # not one that only traces
            self._numbers[thread, device] = numbers
        return numbers


class CriticInputs(ActorInputs):
    """Inputs of a centralized critic for each agent: own inputs, state, others' actions.

    Each part is there in one of these cases:

        own inputs        always: of spread 18 observed and 3 of agent_id, 21
        state             the spec has `state`: one for all agents, or each one's own
                          ("agent-specific" in Yu et al. 2022)
        all observations  it has none: vectors, no images; of spread 3 x 18 = 54, in all 21 + 54
        others' actions   `actions`, with maps and `agent_cell`: (action + 1) / K at each other
                          agent's cell of one more map
                          `actions`, without: one-hot vectors [B, A * K], the own one zero
        whose turn it is  agents take turns: one-hot [B, A]

    The joint action is [B, A] int64.
    """

    def __init__(self, spec: EnvSpec, options: InputOptions, *, actions: bool = True) -> None:
        """Decide what goes where.

        Args:
            spec: spec of the run.
            options: options of the network about its inputs.
            actions: whether the others' actions are among the inputs.

        Raises:
            SpecError: if images of different size would have to be stacked, or actions are wanted
                that are not discrete.
            ConfigError: if maps are to be centered that are not there.
        """
        super().__init__(spec, options)
        _, spec = derivation(spec)
        self._sees_others, self._num_actions = actions, 0
        if actions:
            if not isinstance(spec.action, Discrete):
                raise SpecError("a critic over counterfactual actions needs discrete actions")
            self._num_actions = spec.action.num_actions
        own, num_agents = self._with_own_state(spec), spec.num_agents
        self._shared_images, self._shared = _split(spec, per_agent=False)
        standing = self.shape.image is not None and spec.observation(AGENT_CELL) is not None
        self._action_map = actions and standing
        image, extra = own.image, stacked_shape(self._shared_images)
        self._centred_state = options.centered_state
        check_centred("centered_state", self._centred_state, extra, spec)
        if extra is not None:
            extra = (extra[0] + len(self._centred_state), *extra[1:])
        image = _joined_shape(image, extra)
        if image is not None:
            image = (image[0] + int(self._action_map), *image[1:])
        vector = own.vector + _width(self._shared)
        if not spec.observation(STATE):
            self._shared = [*self._shared, *self.vectors]
            vector += num_agents * _width(self.vectors)
        self._sees_turns = spec.takes_turns
        vector += num_agents if self._sees_turns else 0
        vector += 0 if self._action_map else num_agents * self._num_actions
        self.shape = InputShape(image, vector, own.arrays)

    @override
    def _of_others(self, observation: Mapping[str, Tensor], action: Tensor) -> Tensor:
        b, a = action.shape
        if self._action_map:
            assert self.shape.image is not None
            _, h, w = self.shape.image
            cell = observation[AGENT_CELL].long()
            return others_action_map(cell, action, self._num_actions, h, w)
        each = one_hot(action, self._num_actions)  # [B, A, K]
        joint = each.unsqueeze(1).expand(b, a, a, self._num_actions)
        others = 1 - torch.eye(a, device=action.device).view(1, a, a, 1)
        return (joint * others).flatten(2)


class JointInputs(ActorInputs):
    """Inputs of a critic of joint actions for each agent, without that agent's own action.

    Centralised: the agent's own inputs, the environment's state, or the vectors that the other
    agents observe where it gives none, and the other agents' actions; the others come in turn, the
    next agent first. So the critic of agent a sees all that is observed and done, from where a
    stands, and agents that share a network are distinguished. Otherwise the agent's own inputs
    alone. The joint action is [B, A, U] float32, or [B, A, K] one-hot or probabilities.

    The own action is left out: a critic of discrete actions has an output for each; one of
    continuous actions gets it by `with_action`; the rest serves for any own action.

    Attributes:
        with_action_shape: `shape`, own action added.
    """

    def __init__(self, spec: EnvSpec, options: InputOptions, *, centralized: bool = True) -> None:
        """Decide what goes where.

        Args:
            spec: spec of the run.
            options: options of the network about its inputs.
            centralized: false: own inputs alone.

        Raises:
            SpecError: if images of different size would have to be stacked.
            ConfigError: if maps are to be centered that are not there, or the state's maps.
        """
        if options.centered_state:
            raise ConfigError(
                f"network.centered_state = {list(options.centered_state)} is for critics of "
                "counterfactual actions; leave it out"
            )
        super().__init__(spec, options)
        _, spec = derivation(spec)
        self._sees_others = centralized and spec.num_agents > 1
        size = spec.action.num_actions if isinstance(spec.action, Discrete) else spec.action.size
        own = self._with_own_state(spec) if centralized else self.shape
        image, vector = own.image, own.vector
        self._others: list[ArraySpec] = [] if spec.observation(STATE) else self.vectors
        if centralized:
            self._shared_images, self._shared = _split(spec, per_agent=False)
            image = _joined_shape(image, stacked_shape(self._shared_images))
            vector += _width(self._shared)
            vector += (spec.num_agents - 1) * (size + _width(self._others))
        arrays = self.shape.arrays
        self.shape = InputShape(image, vector, arrays)
        self.with_action_shape = InputShape(image, vector + size, arrays)

    @override
    def _of_others(self, observation: Mapping[str, Tensor], action: Tensor) -> Tensor:
        parts = [to_float(observation[v.name], 2) for v in self._others]
        each = torch.cat([*parts, action], 2)  # [B, A, F + U]
        # Row a of the windows: a, a + 1, ..., and round to a - 1.
        windows = torch.cat([each, each[:, :-1]], 1).unfold(1, self._num_agents, 1)
        return windows[..., 1:].transpose(2, 3).flatten(2)  # of [B, A, F + U, A]


def with_action(inputs: Inputs, action: Tensor) -> Inputs:
    """[B, A, ...] and each agent's own action [B, A, U], which carries gradient if it has one."""
    vector = action if inputs.vector is None else torch.cat([inputs.vector, action], 2)
    return Inputs(inputs.stored, vector)


def _cat(parts: list[Tensor], dim: int = 2) -> Tensor | None:
    """Concatenate; nothing is copied where there is one contiguous part.

    Bytes stay bytes only where all parts are.
    """
    if not parts:
        return None
    if len(parts) == 1:
        return parts[0].contiguous()
    if any(part.dtype != parts[0].dtype for part in parts):
        parts = [to_float(part) for part in parts]
    return torch.cat(parts, dim)
