"""Linear layers one after another: their options, activations and initial weights."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Literal

import torch
from pydantic import Field
from torch import nn

from learner_service.layers.stacked import StackedLayerNorm, StackedLinear
from shared.config import Section

Activation = Literal["relu", "elu", "gelu", "silu", "tanh"]
Initialisation = Literal["uniform", "orthogonal", "he"]
# In place where that is exact: neither layer needs what was there before.
_ACTIVATIONS: dict[Activation, Callable[[], nn.Module]] = {
    "relu": lambda: nn.ReLU(inplace=True),
    "elu": lambda: nn.ELU(inplace=True),
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
}


class LayersConfig(Section):
    """Options of the linear layers of a network."""

    hidden: tuple[int, ...] = Field((64, 64), description="widths of the hidden linear layers")
    activation: Activation = Field("relu", description="function after each hidden linear layer")
    layer_norm: bool = Field(
        False, description="normalise each hidden linear layer's outputs before the activation"
    )
    initialization: Initialisation = Field(
        "uniform",
        description="weights of linear layers at the start: uniform, as in PyTorch; orthogonal "
        "(Saxe et al. 2014) or he (He et al. 2015), both with biases of 0",
    )
    output_gain: float = Field(
        1.0,
        gt=0,
        description="orthogonal and he: scale of the last layer's weights; with 0.01 a policy "
        "starts close to uniform",
    )


class NetworkConfig(LayersConfig):
    """Those, and options of what such a network is fed and remembers."""

    recurrent: int = Field(
        0,
        ge=0,
        description="width of a GRU between these layers and the outputs, with which an agent "
        "remembers its episode; 0: none",
    )
    agent_id: bool = Field(False, description="feed the agent's number as a one-hot vector")
    normalize_observations: bool = Field(
        False,
        description="bring all observations that are no images to mean 0 and variance 1 by "
        "running statistics",
    )


def linear_layers(
    widths: list[int], slices: tuple[int, ...], config: LayersConfig
) -> nn.Sequential:
    """Linear layers from each width to the next, with what the options put between them.

    Args:
        widths: widths of the inputs, of each hidden layer, and of the outputs.
        slices: the slice of each agent, see StackedLinear.
        config: `hidden` is not looked at.
    """
    layers: list[nn.Module] = []
    for i, (size, width) in enumerate(pairwise(widths), 2):
        last = i == len(widths)
        relu = config.activation == "relu" and not config.layer_norm and not last
        linear = StackedLinear(slices, size, width, relu=relu)
        initialize(linear, config, last)
        layers.append(linear)
        if not last and config.layer_norm:
            layers.append(StackedLayerNorm(slices, width))
        if relu:  # numbers of layers, and so names of weights, are those of any activation
            layers.append(nn.Identity())
        elif not last:
            layers.append(_ACTIVATIONS[config.activation]())
    return nn.Sequential(*layers)


@torch.no_grad()
def initialize(linear: StackedLinear, config: LayersConfig, last: bool) -> None:
    """Overwrite PyTorch's initial weights, if the options say so.

    Args:
        linear: a new layer.
        config: options of the layers; see LayersConfig.
        last: whether its outputs are the network's.
    """
    if config.initialization == "uniform":
        return
    # sqrt(2) makes up for the half that ReLU cuts off; its smooth relatives are treated alike.
    hidden_gain = 5 / 3 if config.activation == "tanh" else math.sqrt(2)
    gain = config.output_gain if last else hidden_gain
    for weight in linear.weight:  # [I, O] of one parameter group
        if config.initialization == "orthogonal":
            nn.init.orthogonal_(weight, gain)
        else:
            nn.init.normal_(weight, std=gain / math.sqrt(len(weight)))
    linear.bias.zero_()
