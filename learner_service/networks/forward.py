"""Passes through networks: of agents' rows, of many rows in chunks, for two actions at once."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from learner_service.networks.inputs import Inputs
from learner_service.networks.recurrent import Past, Recurrent
from learner_service.runtime.precision import Precision

_CHUNK_ROWS = 4096


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
