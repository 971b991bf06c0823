"""Layers with one parameter group for all agents, one for each, or one for each group of them.

Rows are [R, ...] with the agent innermost, R = B * A. `slices` names the parameter group (the
slice) of each agent: (0, 0, 0) one for all, (0, 1, 2) one each, (0, 0, 1) two of a kind and one of
another. With one slice the agents are just more rows. Otherwise all agents go through one batched
kernel: torch.baddbmm and grouped convolution, not vmap over modules, which loses autocast
(pytorch/pytorch#192617).
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from learner_service.layers import toom_cook
from learner_service.layers.gru import Unrolled, gru_cell
from shared.process.errors import ConfigError

Sharing = bool | tuple[int, ...]  # which agents share weights, as an algorithm's option says it
_WIDE = 16  # columns of a matrix from which a CPU multiplies it at full speed


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
    sets = torch.arange(count_slices(slices), device=device)
    return (torch.tensor(slices, device=device) == sets.unsqueeze(1)).float()


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
            if relu and _fuses_relu(x, weight):
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
            columns = weight.transpose(1, 2).contiguous(), stacked.transpose(1, 2)
            out = torch.baddbmm(bias.transpose(1, 2), *columns).transpose(1, 2).contiguous()
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
        bias = per_agent(bias.view(self.groups, -1), self._slices)
        agents = len(weight)
        joint = x.reshape(-1, agents * x.shape[1], *x.shape[2:])
        flat = weight.flatten(0, 1), bias.flatten()
        out = F.conv2d(joint, *flat, self.stride, self.padding, groups=agents)
        return out.reshape(x.shape[0], -1, *out.shape[2:])


class StackedGRU(nn.Module):
    """A gated recurrent unit per slice, over T steps; initialised and defined as nn.GRUCell.

    r = sigmoid(W_r x + b_r + U_r h + c_r), z in the same way, n = tanh(W_n x + b_n + r (U_n h +
    c_n)), h' = (1 - z) n + z h. Cho et al. 2014 (arXiv:1406.1078), in the variant of nn.GRU, which
    has r outside the product. The state stays in fp32 whatever the precision.
    """

    def __init__(self, slices: tuple[int, ...], in_features: int, width: int) -> None:
        super().__init__()
        self._slices, s = slices, count_slices(slices)
        self.input = StackedLinear(slices, in_features, 3 * width)  # r, z, n
        self.weight = nn.Parameter(torch.empty(s, width, 3 * width))  # [S, H, 3H]
        self.bias = nn.Parameter(torch.empty(s, 1, 3 * width))
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -1 / math.sqrt(width), 1 / math.sqrt(width))

    def forward(self, x: Tensor, state: Tensor, keep: Tensor | None) -> Tensor:
        """All states, one step after the other.

        Args:
            x: [T * R, I].
            state: [R, H] state before the first step.
            keep: [T, R] mask: 1, or 0 where the step begins with a state of zero; None: 1, T is 1.

        Returns:
            [T, R, H] the state after each step.
        """
        if keep is not None:
            return unroll_together([(self, x, state)], keep)[0]
        weight, bias = self.by_agent()
        agents, rows, width = len(weight), *state.shape
        if x.device.type != "cpu" and not torch.is_grad_enabled():
            return self._step(x.view(-1, agents, x.shape[-1]), state, weight, bias)
        # Not rows by rows: a policy that is exported would be bound to more than one of them.
        from_input = _by_agent(self.input(x).float(), 1, agents)[0]
        h = _by_agent(state, 1, agents)[0]
        from_state = torch.baddbmm(bias, h, weight).float()
        gates = from_input[..., : 2 * width] + from_state[..., : 2 * width]
        reset, update = gates.sigmoid().chunk(2, -1)
        new = from_input[..., 2 * width :] + reset * from_state[..., 2 * width :]
        h = torch.lerp(new.tanh(), h, update)
        return h.transpose(0, 1).reshape(1, rows, width)

    def _step(self, x: Tensor, state: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """One step of x [B, A, I] without gradient, by the fused cell: [1, B * A, H]."""
        rows, width = state.shape
        h = state.view(-1, len(weight), width).transpose(0, 1)  # [A, B, H]
        from_input = self.input(x.squeeze(1) if len(weight) == 1 else x.transpose(0, 1))
        from_state = torch.baddbmm(bias, h, weight)  # [A, B, 3H]
        with torch.autocast(x.device.type, enabled=False):
            after, _ = gru_cell(
                from_input.float().view(-1, 3 * width),
                from_state.float().view(-1, 3 * width),
                h.flatten(0, 1),
            )
        return after.view(len(weight), -1, width).transpose(0, 1).reshape(1, rows, width)

    def by_agent(self) -> tuple[Tensor, Tensor]:
        """The weights and biases of the state, of each agent or one for all: [A, H, 3H]."""
        return per_agent(self.weight, self._slices), per_agent(self.bias, self._slices)


def _by_agent(x: Tensor, length: int, agents: int) -> Tensor:
    """[T * R, F] as [T, A, B, F]."""
    return x.view(length, -1, agents, x.shape[-1]).transpose(1, 2)


def unroll_together(units: list[tuple[StackedGRU, Tensor, Tensor]], keep: Tensor) -> list[Tensor]:
    """All states of units of the same width and slices, which go through time side by side.

    Args:
        units: each with its inputs [T * R, I] and its state [R, H] before the first step.
        keep: [T, R] mask: 1, or 0 where the step begins with a state of zero.

    Returns:
        [T, R, H] of each unit: the state after each step.
    """
    length, (rows, width) = len(keep), units[0][2].shape
    weights, biases = zip(*(unit.by_agent() for unit, _, _ in units), strict=True)
    agents = len(weights[0])
    inputs = [_by_agent(unit.input(x).float(), length, agents) for unit, x, _ in units]
    first = [_by_agent(state, 1, agents)[0] for _, _, state in units]
    keeps = _by_agent(keep.reshape(-1, 1), length, agents)
    states = Unrolled.apply(  # type: ignore[no-untyped-call]
        torch.cat(inputs, 1),
        torch.cat(first),
        keeps.repeat(1, len(units), 1, 1),
        torch.cat(weights),
        torch.cat(biases),
    )  # [T, units * A, B, H]
    parts = states.view(length, len(units), agents, -1, width).unbind(1)
    return [part.transpose(1, 2).reshape(length, rows, width) for part in parts]
