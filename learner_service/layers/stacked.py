"""Layers with one parameter group for all agents, one for each, or one for each group of them.

Rows are [R, ...] with the agent innermost, R = B * A: here a row is one agent's. A parameter group
is a set of agents that share networks; its slice is its part [s] of the stacked weights [S, ...].
`slices` names the slice of each agent: (0, 0, 0) one for all, (0, 1, 2) one each, (0, 0, 1) two of
a kind and one of another; `sharing` [S, A] says the same as 1 and 0. With one slice the agents are
just more rows. Otherwise all agents go through one batched kernel: torch.baddbmm and grouped
convolution, not vmap over modules, which loses autocast (pytorch/pytorch#192617).
"""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from murmur.learner_service.layers import toom_cook
from murmur.learner_service.layers.casting import CAST, CAST_TO_LEARN, frozen
from murmur.shared.config import Section
from murmur.shared.process.errors import ConfigError

Sharing = bool | tuple[int, ...]  # which agents share weights, as an algorithm's option says it
_WIDE = 16  # columns of a matrix from which a CPU multiplies it at full speed
Activation = Literal["relu", "elu", "gelu", "silu", "tanh"]
Initialisation = Literal["uniform", "orthogonal", "he"]


def resolve_sharing(sharing: Sharing, num_agents: int, option: str) -> tuple[int, ...]:
    """The slice of each agent: one for all (true), one each (false), or as listed.

    Args:
        sharing: value of the option.
        num_agents: number of agents of the environment.
        option: the option's dotted name, for messages.

    Raises:
        ConfigError: if a list names not every agent's slice, or leaves a number out.
    """
    if sharing is True:
        return (0,) * num_agents
    if sharing is False:
        return tuple(range(num_agents))
    written = f"{option} = {list(sharing)}"
    if len(sharing) != num_agents:
        raise ConfigError(
            f"{written} names the networks of {len(sharing)} agents, the environment has "
            f"{num_agents}; give one number for each agent"
        )
    if set(sharing) != set(range(max(sharing) + 1)):
        raise ConfigError(
            f"{written} must number the networks 0, 1, 2, … and use each of them; "
            f"here they are {sorted(set(sharing))}"
        )
    return sharing


def count_slices(slices: tuple[int, ...]) -> int:
    """Count the parameter groups."""
    return max(slices) + 1


def sharing_agents(slices: tuple[int, ...], device: torch.device) -> Tensor:
    """Return [S, A] 1 where an agent uses a parameter group, else 0.

    Args:
        slices: parameter group of each agent, of `resolve_sharing`.
        device: device of the result.
    """
    groups = torch.arange(count_slices(slices), device=device)
    return (torch.tensor(slices, device=device) == groups.unsqueeze(1)).float()


def per_agent(stacked: Tensor, slices: tuple[int, ...]) -> Tensor:
    """Each agent's slice, [S, ...] -> [A, ...]; [1, ...] stays, since it broadcasts.

    The gradients of agents that use one slice add up, always in the same order: an index_select
    would add them by atomic operations on a GPU, in any order.
    """
    if len(stacked) == 1 or slices == tuple(range(len(stacked))):
        return stacked
    parts = stacked.unbind(0)
    return torch.stack([parts[s] for s in slices])


class StackedLinear(nn.Module):
    """A linear layer per slice: [R, I] -> [R, O]; initialised as nn.Linear.

    Layers that follow one another pass [A, B, I] -> [A, B, O] on, as the batched kernel has it:
    that saves a copy between them.
    """

    def __init__(
        self,
        slices: tuple[int, ...],
        in_features: int,
        out_features: int,
        *,
        relu: bool = False,
    ) -> None:
        """Draw the weights.

        Args:
            slices: parameter group of each agent.
            in_features: I.
            out_features: O.
            relu: whether ReLU follows; a shared layer on a GPU does both by one kernel.
        """
        super().__init__()
        self._slices, s = slices, count_slices(slices)
        self.relu = relu
        bound = 1 / math.sqrt(in_features)
        self.weight = nn.Parameter(torch.empty(s, in_features, out_features))  # [S, I, O]
        self.bias = nn.Parameter(torch.empty(s, 1, out_features))
        nn.init.uniform_(self.weight, -bound, bound)
        nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor, *, before_relu: bool = False) -> Tensor:
        """Return [R, O] of [R, I], or [A, B, O] of [A, B, I].

        Args:
            x: inputs.
            before_relu: flag to leave out the ReLU.
        """
        relu = self.relu and not before_relu
        on_cpu = x.device.type == "cpu" and not torch.is_autocast_enabled("cpu")
        # A CPU multiplies a matrix of few columns, and forms its weights' gradient, at a fifth of
        # the speed of one of few rows: the product of the transposed matrices is faster.
        narrow = on_cpu and 1 < self.weight.shape[2] < _WIDE
        if len(self.weight) == 1:
            weight, bias = self.weight.squeeze(0), self.bias.view(-1)
            if relu and not on_cpu and _fuses_relu(x, weight):
                return linear_relu(x, weight, bias)
            if narrow:
                out = torch.addmm(bias.unsqueeze(1), weight.T.contiguous(), x.T).T.contiguous()
            else:
                out = F.linear(x, weight.T, bias)
            return out.relu_() if relu else out
        weight, bias = per_agent(self.weight, self._slices), per_agent(self.bias, self._slices)
        stacked = x if x.dim() == 3 else x.view(-1, len(weight), x.shape[-1]).transpose(0, 1)
        if weight.shape[2] == 1 and on_cpu:
            # On a CPU a batch of matrices one column wide takes seven times as long.
            out = (stacked * weight.transpose(1, 2)).sum(2, keepdim=True) + bias
        elif narrow:
            bias, weight = bias.transpose(1, 2), weight.transpose(1, 2).contiguous()
            out = torch.baddbmm(bias, weight, stacked.transpose(1, 2)).transpose(1, 2).contiguous()
        else:
            out = torch.baddbmm(bias, stacked, weight)
        if x.dim() == 2:
            out = out.transpose(0, 1).flatten(0, 1)
        return out.relu_() if relu else out


def linear_relu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """relu(x weight + bias) of x [R, I], weight [I, O] and bias [O], on CUDA by one kernel."""
    if torch.is_grad_enabled():
        out: Tensor = _LinearReLU.apply(x, weight, bias)  # type: ignore[no-untyped-call]
        return out
    return torch._addmm_activation(bias, x.to(weight.dtype), weight)


class _LinearReLU(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's own
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
    ) -> Tensor:
        """Return ReLU(x W + b) in the weight's dtype, as `linear_relu` does."""
        rows = x.to(weight.dtype)
        out = torch._addmm_activation(bias, rows, weight)
        ctx.save_for_backward(rows, weight, out)
        ctx.dtype = x.dtype
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        """Gradients as those of the layer and of ReLU."""
        x, weight, out = ctx.saved_tensors
        grad = torch.ops.aten.threshold_backward(grad, out, 0)
        of_x = (grad @ weight.T).to(ctx.dtype) if ctx.needs_input_grad[0] else None
        of_weight = None
        if ctx.needs_input_grad[1]:  # in the weight's layout
            turned = weight.stride(0) < weight.stride(1)
            of_weight = (grad.T @ x).T if turned else x.T @ grad
        return of_x, of_weight, grad.sum(0) if ctx.needs_input_grad[2] else None


def _fuses_relu(x: Tensor, weight: Tensor) -> bool:
    """Whether a layer and ReLU are one kernel: on CUDA, weights in the type of the product."""
    if x.device.type != "cuda" or x.dim() not in (2, 4) or torch.compiler.is_compiling():
        return False
    half = torch.is_autocast_enabled("cuda")
    return weight.dtype == (torch.get_autocast_dtype("cuda") if half else x.dtype)


class StackedLayerNorm(nn.Module):
    """Layer normalisation with scales and shifts per slice, after a StackedLinear.

    Ba et al. 2016, "Layer Normalization" (arXiv:1607.06450).
    """

    def __init__(self, slices: tuple[int, ...], width: int) -> None:
        super().__init__()
        self._slices, s = slices, count_slices(slices)
        self.weight = nn.Parameter(torch.ones(s, 1, width))
        self.bias = nn.Parameter(torch.zeros(s, 1, width))

    def forward(self, x: Tensor) -> Tensor:
        """[R, F] or [A, B, F] -> the same shape, in fp32."""
        width = x.shape[-1:]
        if len(self.weight) == 1:
            return F.layer_norm(x.float(), width, self.weight.view(-1), self.bias.view(-1))
        weight, bias = per_agent(self.weight, self._slices), per_agent(self.bias, self._slices)
        if x.dim() == 3:
            return torch.addcmul(bias, F.layer_norm(x.float(), width), weight)
        rows = F.layer_norm(x.float(), width).view(-1, len(weight), *width)
        return torch.addcmul(bias.squeeze(1), rows, weight.squeeze(1)).flatten(0, 1)


class StackedConv2d(nn.Conv2d):
    """A convolution per slice: [R, C, H, W] -> [R, O, H', W']."""

    def __init__(
        self,
        slices: tuple[int, ...],
        channels: int,
        out: int,
        kernel: tuple[int, int],
        stride: int,
        padding: int = 0,
        *,
        relu: bool = False,
    ) -> None:
        """Draw the weights.

        Args:
            slices: parameter group of each agent.
            channels: C.
            out: O.
            kernel: height and width of the kernel.
            stride: step of the kernel, pixels.
            padding: pixels of zeros on each side.
            relu: whether ReLU follows, see StackedLinear.
        """
        s = count_slices(slices)
        super().__init__(s * channels, s * out, kernel, stride, padding, groups=s)
        self._slices = slices
        self.relu = relu

    def forward(self, x: Tensor) -> Tensor:
        """Return [R, O, H', W'] of [R, C, H, W]."""
        assert self.bias is not None
        unpadded = self.padding == (0, 0)
        if self.groups == 1 and unpadded and x.shape[-2:] == self.kernel_size:
            # The kernel is as large as the map. A linear layer is the same sum, on a CPU in half
            # the time (murmur/benchmarks/coma_update.py).
            rows, weight = x.flatten(1), self.weight.flatten(1)
            if self.relu and _fuses_relu(x, weight):
                return linear_relu(rows, weight.T, self.bias)[..., None, None]
            out = F.linear(rows, weight, self.bias)[..., None, None]
        elif self.groups > 1:
            out = self._grouped(x, self.bias)
        elif unpadded and (pieces := toom_cook.pieces(x, self.weight, self.stride)):
            out = toom_cook.conv2d(x, self.weight, self.bias, pieces)
        else:
            out = super().forward(x)
        return out.relu() if self.relu else out

    def _grouped(self, x: Tensor, bias: Tensor) -> Tensor:
        """Convolve by one kernel for all agents, each with the weights of its slice."""
        weight = per_agent(self.weight.view(self.groups, -1, *self.weight.shape[1:]), self._slices)
        bias = per_agent(bias.view(self.groups, -1), self._slices).flatten()
        agents = len(weight)
        joint = x.reshape(-1, agents * x.shape[1], *x.shape[2:])
        weight = weight.flatten(0, 1)
        out = F.conv2d(joint, weight, bias, self.stride, self.padding, groups=agents)
        return out.reshape(x.shape[0], -1, *out.shape[2:])


CAST |= {StackedLinear, StackedConv2d}
CAST_TO_LEARN |= {StackedLinear, StackedConv2d}


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


class RecurrentConfig(LayersConfig):
    """Options of layers, of memory and of the agent's number."""

    recurrent: int = Field(
        0,
        ge=0,
        description="width of a recurrent unit between these layers and the outputs, with which an "
        "agent remembers its episode; 0: none",
    )
    recurrent_cell: Literal["gru", "lstm"] = Field("gru", description="kind of the recurrent unit")
    agent_id: bool = Field(False, description="feed the agent's number as a one-hot vector")


class NetworkConfig(RecurrentConfig):
    """Options of layers, memory and normalized observations."""

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
        gain = config.output_gain if last else hidden_gain(config.activation)
        initialize(linear, config.initialization, gain)
        layers.append(linear)
        if not last and config.layer_norm:
            layers.append(StackedLayerNorm(slices, width))
        if relu:  # numbers of layers, and so names of weights, are those of any activation
            layers.append(nn.Identity())
        elif not last:
            layers.append(_ACTIVATIONS[config.activation]())
    return nn.Sequential(*layers)


def hidden_gain(activation: Activation) -> float:
    """Return the scale of first weights that keeps the spread of numbers across a hidden layer.

    sqrt(2) makes up for the half that ReLU cuts off; its smooth relatives are treated alike.
    """
    return 5 / 3 if activation == "tanh" else math.sqrt(2)


@torch.no_grad()
def initialize(linear: StackedLinear, initialization: Initialisation, gain: float) -> None:
    """Overwrite PyTorch's initial weights, unless the initialization is uniform.

    Args:
        linear: a new layer.
        initialization: distribution of the weights; see LayersConfig.
        gain: scale of the weights.
    """
    if initialization == "uniform":
        return
    for weight in linear.weight:  # [I, O] of one parameter group
        if initialization == "orthogonal":
            nn.init.orthogonal_(weight, gain)
        else:
            nn.init.normal_(weight, std=gain / math.sqrt(len(weight)))
    linear.bias.zero_()


class MLP(nn.Module):
    """Linear layers for joint rows."""

    def __init__(self, layers: nn.Sequential, slices: tuple[int, ...]) -> None:
        """Keep the layers.

        Args:
            layers: layers of `linear_layers`.
            slices: the slice of each agent in these layers, see StackedLinear.
        """
        super().__init__()
        self._agents = len(slices) if count_slices(slices) > 1 else 1
        self._slices = slices
        self.layers = layers

    def forward(self, image: Tensor | None, vector: Tensor) -> Tensor:
        """Return [B, A, outputs] of [B, A, F].

        Layers that stand side by side want agents outermost, [A, B, F].
        """
        if self._agents == 1:
            out: Tensor = self.layers(vector.flatten(0, 1))
            return out.view(*vector.shape[:2], -1)
        stacked = vector.reshape(-1, self._agents, vector.shape[2]).transpose(0, 1)
        out = self.layers(stacked).transpose(0, 1)
        if vector.device.type == "cpu":  # which reads them faster in order
            out = out.contiguous()
        return out.reshape(*vector.shape[:2], -1)

    def twice(self, image: Tensor | None, vector: Tensor, change: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs of the inputs, and of the same with the last of them changed.

        The first layer's sums are formed once, then the change's part is added. What comes second
        passes gradient on to the change alone: weights and rows are constants there.

        Args:
            image: None.
            vector: [B, A, F] inputs.
            change: [B, A, U] summand of the last U of the F inputs.

        Returns:
            Two of [B, A, outputs].
        """
        first, rest = self.layers[0], self.layers[1:]
        assert isinstance(first, StackedLinear)
        shared, last = self._agents == 1, change.shape[2]
        rows, moved = (
            x.flatten(0, 1) if shared else x.reshape(-1, self._agents, x.shape[2]).transpose(0, 1)
            for x in (vector, change)
        )
        sums = first(rows, before_relu=True)
        weight = per_agent(first.weight.detach()[:, -last:], self._slices)  # [A, U, O], or [1, ...]
        if shared:
            changed = torch.addmm(sums.detach(), moved, weight.squeeze(0))
        else:
            changed = torch.baddbmm(sums.detach(), moved, weight)
        with frozen(self):
            second = rest(changed.relu_() if first.relu else changed)
        # In this order: the sums are overwritten.
        outputs = [rest(sums.relu_() if first.relu else sums), second]
        if not shared:
            outputs = [out.transpose(0, 1) for out in outputs]
        if vector.device.type == "cpu":
            outputs = [out.contiguous() for out in outputs]
        same, other = (out.reshape(*vector.shape[:2], -1) for out in outputs)
        return same, other
