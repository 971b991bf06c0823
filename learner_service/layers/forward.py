"""Passes through networks: of joint rows, of many in chunks, for two actions at once."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from murmur.learner_service.device.precision import Precision
from murmur.learner_service.layers.casting import cast_weights, frozen
from murmur.learner_service.layers.encoded import Encoded
from murmur.learner_service.layers.inputs import Inputs
from murmur.learner_service.layers.recurrent import Recurrent, RecurrentState, keep_mask

_ROWS_ON_CPU, _ROWS_ON_DEVICE = 4096, 8192  # of agents, that a network is fed at once
_CHUNK_PIXELS = 1 << 24  # of images as float32: 64 MiB


class Alone(nn.Module):
    """Feeds a network one agent's row at a time: A is 1, so that it cannot mix agents.

    For critics: what one agent's critic is fed holds the other agents' actions, which a network
    over agents would show to those agents' critics.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, image: Tensor | None, vector: Tensor | None) -> Tensor:
        """[B, A, ...] -> [B, A, outputs]."""
        some = image if image is not None else vector
        assert some is not None
        alone = Inputs(image, vector).grouped(1)
        out: Tensor = self.network(alone.image, alone.vector)
        return out.reshape(*some.shape[:2], -1)


class Twins(nn.Module):
    """Several networks side by side, where one stack of weights cannot hold them.

    Their gradients are clipped by one norm.
    """

    def __init__(self, each: list[nn.Module]) -> None:
        super().__init__()
        self.each = nn.ModuleList(each)

    def forward(self, image: Tensor | None, vector: Tensor | None) -> Tensor:
        """[B, A, ...] -> [B, A, twins * outputs]."""
        return torch.cat([network(image, vector) for network in self.each], -1)


def forward(
    network: nn.Module,
    inputs: Inputs,
    hidden: RecurrentState | None = None,
    precision: Precision | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the outputs [B, A, outputs] of a network and, if it is recurrent, its next state.

    Args:
        network: module from `build_network`, or twins [B, A, twins * outputs] from `build_twins`.
        inputs: inputs [B, A, ...].
        hidden: recurrent state before them, of a recurrent network; of twins [B, A * twins, Z].
        precision: precision of the pass, which then gives float32; None: the caller has set it.
    """
    if precision is not None:
        with cast_weights(precision, network):
            out, memory = forward(network, inputs, hidden)
        return out.float(), memory
    twins = number_of_twins(network)
    if isinstance(network, Recurrent):
        if twins == 1:
            out, memory = network(inputs.image, inputs.vector, hidden)
            return out, memory
        assert hidden is not None
        out, memory = network.remember(_features(network, inputs, twins), hidden)
        return torch.unflatten(out, 1, (-1, twins)).flatten(2), memory
    if twins == 1:
        return network(inputs.image, inputs.vector), None
    network, inputs = _side_by_side(network, inputs, twins)
    out = network(inputs.image, inputs.vector)
    return torch.unflatten(out, 1, (-1, twins)).flatten(2), None  # [B, A, twins * outputs]


def forward_history(
    network: Recurrent, inputs: Inputs, first: Tensor, precision: Precision
) -> tuple[Tensor, Tensor]:
    """Return a critic's outputs along sequences, and its states, which are zero at the start.

    Args:
        network: critic that remembers, of `build_network` or `build_twins`.
        inputs: inputs [T * B, A, ...], time outermost.
        first: [T, B] bool, rows that begin an episode.
        precision: precision of the pass.

    Returns:
        [T * B, A, twins * outputs] float32, and [T + 1, B, A * twins, Z]: the state before each row
        and after the last.
    """
    twins = number_of_twins(network)
    with cast_weights(precision, network):
        features = _features(network, inputs, twins)
        shape = first.shape[1], features.shape[1], network.memory_size
        start = torch.zeros(shape, device=first.device)
        out, states = network.unroll(features, RecurrentState(start, first))
    every = torch.cat([start.unsqueeze(0), states.view(-1, *shape)])
    return torch.unflatten(out.float(), 1, (-1, twins)).flatten(2), every


def _features(network: Recurrent, inputs: Inputs, twins: int) -> Tensor:
    """[B, A * twins, Y] that the recurrent units of twins are fed."""
    if isinstance(network.body, Twins):
        each: Tensor = network.body(inputs.image, inputs.vector)  # [B, A, twins * Y]
        return each.reshape(each.shape[0], each.shape[1] * twins, -1)
    body, inputs = _side_by_side(network.body, inputs, twins)
    out: Tensor = body(inputs.image, inputs.vector)
    return out


def forward_both(
    networks: tuple[nn.Module, nn.Module],
    inputs: tuple[Inputs, Inputs],
    states: tuple[RecurrentState | None, RecurrentState | None],
) -> tuple[Tensor, Tensor]:
    """As two of `forward`; networks that remember go through time together: half the kernels.

    The networks must have the same slices, their units the same kind and width, and their recurrent
    states the same first rows.
    """
    first, second = networks
    if not (isinstance(first, Recurrent) and isinstance(second, Recurrent)):
        return forward(first, inputs[0])[0], forward(second, inputs[1])[0]
    features, units = [], []
    for network, x, state in zip((first, second), inputs, states, strict=True):
        assert state is not None
        features.append(network.body(x.image, x.vector))  # [T * B, A, Y]
        rows = F.relu(features[-1].flatten(0, 1))
        units.append((network.unit, rows, state.memory.flatten(0, 1)))
    assert states[0] is not None
    keep = keep_mask(states[0])
    assert keep is not None
    after = first.unit.together(units, keep)
    return first.read(after[0], features[0]), second.read(after[1], features[1])


def forward_twice(
    network: nn.Module, inputs: Inputs, change: Tensor, precision: Precision
) -> tuple[Tensor, Tensor]:
    """`forward`, and the same with the last inputs changed, for critics of another action.

    The second pass moves no weights; only `change` gets gradient.

    Args:
        network: module from `build_network` or `build_twins`.
        inputs: inputs [B, A, ...].
        change: [B, A, U] summand of the last U numbers of each agent's vector.
        precision: precision of the pass.

    Returns:
        Two of [B, A, twins * outputs] float32.
    """
    twins = number_of_twins(network)
    with cast_weights(precision, network):
        if twins > 1:
            network, inputs = _side_by_side(network, inputs, twins)
            change = change.repeat_interleave(twins, 1)
        twice: Any = getattr(network, "twice", None)
        if twice is not None:
            first, second = twice(inputs.image, inputs.vector, change)
        else:
            assert inputs.vector is not None
            same = inputs.vector.shape[-1] - change.shape[-1]
            first = network(inputs.image, inputs.vector)
            with frozen(network):
                second = network(inputs.image, inputs.vector + F.pad(change, (same, 0)))
    first, second = (torch.unflatten(x.float(), 1, (-1, twins)).flatten(2) for x in (first, second))
    return first, second


def number_of_twins(network: nn.Module) -> int:
    """Return the number of networks that a stack has for each agent, see `build_twins`."""
    return getattr(network, "twins", 1)


def _side_by_side(network: nn.Module, inputs: Inputs, twins: int) -> tuple[nn.Module, Inputs]:
    """Feed each agent's row to each of its twins, which a stack has as agents side by side.

    A shared encoder sees each row once: returned is what follows it, and its inputs.
    """
    if isinstance(network, Encoded):
        inputs, network = network.encode(inputs), network.head
    return network, inputs.each(lambda x: x.repeat_interleave(twins, 1))


def chunk_of(image: tuple[int, ...] | None, device: torch.device) -> int:
    """Return the number of agents' rows that a network is fed at once where there are many.

    Args:
        image: shape [C, H, W] of an agent's image; None: vectors alone.
        device: device of the rows.
    """
    most = _ROWS_ON_CPU if device.type == "cpu" else _ROWS_ON_DEVICE
    return most if image is None else min(most, _CHUNK_PIXELS // math.prod(image))


def forward_rows(
    network: nn.Module,
    inputs: Inputs,
    precision: Precision,
    hidden: RecurrentState | None = None,
) -> Tensor:
    """Return [B, A, outputs] float32 for many joint rows, in chunks: bounds memory.

    Args:
        network: module from `build_network`.
        inputs: inputs [B, A, ...].
        precision: precision of the pass.
        hidden: recurrent state before them, of a recurrent network.
    """
    some = inputs.stored if inputs.stored is not None else inputs.vector
    assert some is not None
    rows, agents = some.shape[:2]
    image = None if inputs.stored is None else inputs.stored.shape[-3:]
    step = max(1, chunk_of(image, some.device) // agents)
    # With memory rows are of whole environments, on a GPU no more than those of a minibatch.
    if rows <= step or (hidden is not None and some.device.type != "cpu"):
        return forward(network, inputs, hidden, precision)[0]
    if isinstance(network, Recurrent):
        assert hidden is not None
        features = forward_rows(network.body, inputs, precision)
        with cast_weights(precision, network.unit, network.head):
            out, _ = network.remember(features, hidden)
        return out.float()
    with cast_weights(precision, network):
        outputs = [
            forward(network, inputs.rows(start, start + step))[0].float()
            for start in range(0, rows, step)
        ]
    return torch.cat(outputs)
