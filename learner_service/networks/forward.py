"""Passes through networks: of joint rows, of many in chunks, for two actions at once."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from learner_service.networks.casting import cast_weights, frozen
from learner_service.networks.encoded import Encoded
from learner_service.networks.inputs import Inputs
from learner_service.networks.recurrent import Recurrent, RecurrentState
from learner_service.runtime.precision import Precision

_CHUNK_ROWS = 4096
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
    network: nn.Module, inputs: Inputs, hidden: RecurrentState | None = None
) -> tuple[Tensor, Tensor | None]:
    """[B, A, outputs], and what is remembered after it if the network remembers."""
    if isinstance(network, Recurrent):
        out, memory = network(inputs.image, inputs.vector, hidden)
        return out, memory
    return network(inputs.image, inputs.vector), None


def forward_both(
    networks: tuple[nn.Module, nn.Module],
    inputs: tuple[Inputs, Inputs],
    states: tuple[RecurrentState | None, RecurrentState | None],
) -> tuple[Tensor, Tensor]:
    """As two of `forward`; networks that remember go through time together: half the kernels.

    The networks must have the same slices, and their memories the same width.
    """
    first, second = networks
    if isinstance(first, Recurrent) and isinstance(second, Recurrent):
        assert states[0] is not None
        assert states[1] is not None
        features = [
            network.body(x.image, x.vector)
            for network, x in ((first, inputs[0]), (second, inputs[1]))
        ]
        return first.together(features[0], states[0], second, features[1], states[1])
    return forward(first, inputs[0])[0], forward(second, inputs[1])[0]


def forward_agents(
    network: nn.Module, inputs: Inputs, precision: Precision, num_agents: int, twins: int = 1
) -> Tensor:
    """[B, A, twins * outputs] float32 of inputs [B, A, ...], from each agent's `twins` networks."""
    with cast_weights(precision, network):
        network, inputs = _encoded(network, inputs)
        inputs = _for_twins(network, inputs, twins)
        out: Tensor = network(inputs.image, inputs.vector)
    return out.float().reshape(inputs.batch, num_agents, -1)


def _encoded(network: nn.Module, inputs: Inputs) -> tuple[nn.Module, Inputs]:
    """After a shared encoder, which twins have in common: what follows it, and its inputs."""
    if isinstance(network, Encoded):
        return network.head, network.encode(inputs)
    return network, inputs


def _for_twins(network: nn.Module, inputs: Inputs, twins: int) -> Inputs:
    """In a stack twins are agents side by side: each row is there once for each of them."""
    return inputs if isinstance(network, Twins) else inputs.repeated(twins)


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
        change: [B, A, U] what is added to the last U numbers of each agent's vector.
        precision: that of the pass.
        num_agents: A.
        twins: networks of each agent.

    Returns:
        Two of [B, A, twins * outputs] float32.
    """
    if not isinstance(network, Twins):
        change = change.repeat_interleave(twins, 1)
    with cast_weights(precision, network):
        network, inputs = _encoded(network, inputs)
        inputs = _for_twins(network, inputs, twins)
        twice = getattr(network, "twice", None)
        if twice is not None:
            first, second = twice(inputs.image, inputs.vector, change)
        else:
            assert inputs.vector is not None
            same = inputs.vector.shape[-1] - change.shape[-1]
            first = network(inputs.image, inputs.vector)
            with frozen(network):
                second = network(inputs.image, inputs.vector + F.pad(change, (same, 0)))
    shape = inputs.batch, num_agents, -1
    return first.float().reshape(shape), second.float().reshape(shape)


def chunk_rows(inputs: Inputs, most: int = _CHUNK_ROWS) -> int:
    """Agents' rows that a network is fed at once where there are many, `most` at most."""
    return chunk_of(None if inputs.stored is None else inputs.stored.shape[-3:], most)


def chunk_of(image: tuple[int, ...] | None, most: int) -> int:
    """`chunk_rows` of images of this shape [C, H, W]; None: of vectors alone."""
    return most if image is None else min(most, _CHUNK_PIXELS // math.prod(image))


def forward_rows(
    network: nn.Module,
    inputs: Inputs,
    precision: Precision,
    num_agents: int,
    hidden: RecurrentState | None = None,
    most: int = _CHUNK_ROWS,
) -> Tensor:
    """[B, A, outputs] float32 for many joint rows, `most` agents' rows at once: bounds memory."""
    if isinstance(network, Recurrent):
        assert hidden is not None
        features = forward_rows(network.body, inputs, precision, num_agents, None, most)
        with cast_weights(precision, network.gru, network.head):
            out, _ = network.remember(features, hidden)
        return out.float()
    step = max(1, chunk_rows(inputs, most) // num_agents)
    outputs = []
    with cast_weights(precision, network):
        for start in range(0, inputs.batch, step):
            part = inputs.rows(slice(start, start + step))
            outputs.append(network(part.image, part.vector).float())
    return torch.cat(outputs) if len(outputs) > 1 else outputs[0]
