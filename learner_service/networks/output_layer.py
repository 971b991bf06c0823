"""The linear layer that a network's outputs come from."""

import torch
from torch import Tensor, nn

from learner_service.networks.inputs import InputShape
from learner_service.networks.recurrent import Recurrent
from learner_service.networks.stacked import StackedLinear, count_slices

OutputLayer = StackedLinear | nn.Linear


def output_layer(
    network: nn.Module, shape: InputShape, slices: tuple[int, ...]
) -> OutputLayer | None:
    """The layer whose outputs are the network's, as they are; None if there is none.

    The last linear layer is tried: if it gives 2 y + 1 in place of y, so must the network. A
    plug-in's network need not declare it.

    Args:
        network: on any device.
        shape: what it is fed.
        slices: the slice of each agent; each must have weights of its own.
    """
    if isinstance(network, Recurrent):
        return network.head
    layers = [m for m in network.modules() if isinstance(m, StackedLinear | nn.Linear)]
    if not layers or layers[-1].bias is None:
        return None
    layer, device, agents = layers[-1], layers[-1].weight.device, len(slices)
    if (len(layer.weight) if isinstance(layer, StackedLinear) else 1) != count_slices(slices):
        return None

    def outputs() -> Tensor:
        image = None if shape.image is None else torch.full((1, agents, *shape.image), 0.5)
        vector = torch.full((1, agents, shape.vector), 0.5) if shape.vector else None
        found: Tensor = network(*(x if x is None else x.to(device) for x in (image, vector)))
        return found

    trained = network.training
    network.eval()
    with torch.no_grad():
        weight, bias = layer.weight.clone(), layer.bias.clone()
        before = outputs()
        layer.weight.mul_(2)
        layer.bias.mul_(2).add_(1)
        after = outputs()
        layer.weight.copy_(weight)
        layer.bias.copy_(bias)
    network.train(trained)
    return layer if torch.allclose(after, 2 * before + 1, rtol=1e-4, atol=1e-4) else None


@torch.no_grad()
def rescale_last(layer: OutputLayer, scale: Tensor, shift: Tensor) -> None:
    """Make the last output y of each parameter group scale * y + shift; both are [S]."""
    if isinstance(layer, StackedLinear):  # [S, I, O] and [S, 1, O]
        layer.weight[..., -1].mul_(scale[:, None])
        layer.bias[..., -1].mul_(scale[:, None]).add_(shift[:, None])
    else:
        layer.weight[-1].mul_(scale)
        layer.bias[-1:].mul_(scale).add_(shift)
