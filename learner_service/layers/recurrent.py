"""Networks that remember: a GRU or an LSTM over time between any network and its outputs.

Through time a GRU goes in as few kernels as a step can take, two forward and two back: what does
not depend on the order of time is done for all steps at once.

LSTM: Hochreiter and Schmidhuber 1997, "Long Short-Term Memory", with the forget gate of Gers et al.
2000, as torch.nn.LSTMCell. Columns of its gates stand in the order i, f, o, g, so that one kernel
takes the sigmoid of the first three. Its state is [..., 2Y]: the output h, then the cell c.
"""

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.library import Library
from typing_extensions import override

from murmur.learner_service.layers.casting import CAST
from murmur.learner_service.layers.stacked import StackedLinear, count_slices, per_agent

CellKind = Literal["gru", "lstm"]
_CLOSED = -1e9  # what a gate is fed that is to be 0
_LIBRARY: Any = Library("murmur", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define("gru_cell(Tensor x, Tensor s, Tensor h) -> (Tensor, Tensor)")


def _fused_cell(x: Tensor, s: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """On CUDA: one kernel, that of nn.GRUCell."""
    out, kept = torch.ops.aten._thnn_fused_gru_cell(x, s, h)
    return out, kept


def _plain_cell(x: Tensor, s: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """The same in plain operations."""
    width = h.shape[1]
    reset, update = (x[:, : 2 * width] + s[:, : 2 * width]).sigmoid_().chunk(2, 1)
    from_state = s[:, 2 * width :]
    new = torch.addcmul(x[:, 2 * width :], reset, from_state).tanh_()
    return torch.lerp(new, h, update), torch.cat([reset, update, new, h, from_state], 1)


_LIBRARY.impl("gru_cell", _plain_cell, "CPU")
_LIBRARY.impl("gru_cell", _fused_cell, "CUDA")


def gru_cell(x: Tensor, s: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """One step, without gradient.

    r = sigmoid(x_r + s_r), z = sigmoid(x_z + s_z), n = tanh(x_n + r s_n), h' = (1 - z) n + z h.

    Args:
        x: [R, 3Y] the inputs' part, for r, z and n.
        s: [R, 3Y] the state's part.
        h: [R, Y] the state.

    Returns:
        [R, Y] the next state, and [R, 5Y]: r, z, n, h, s_n.
    """
    out, kept = torch.ops.murmur.gru_cell(x, s, h)
    return out, kept


def reset_by_inputs(x: Tensor, keep: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs with which a step gives what it gives for a state of zero, whatever the state is.

    For a state of zero h' = (1 - z) n, with r, z and n of the inputs and the biases alone. So does
    a step with r = z = 0 and n = h'.

    Args:
        x: [T, S, B, 3Y] the inputs' part.
        keep: [T, S, B, 1] mask, 0 where the state is to be zero.
        bias: [S, 1, 3Y] bias of the state's part.

    Returns:
        [T, S, B, 3Y] x, changed where keep is 0, and [T, S, B, 5Y] the r, z, n, h and s_n there.
    """
    width = x.shape[-1] // 3
    gates = (x[..., : 2 * width] + bias[..., : 2 * width]).sigmoid_()
    reset, update = gates.chunk(2, -1)
    of_new = bias[..., 2 * width :].expand_as(reset)
    new = torch.addcmul(x[..., 2 * width :], reset, of_new).tanh_()
    after = torch.addcmul(new, update, new, value=-1)
    changed = torch.cat([torch.full_like(gates, _CLOSED), after.atanh_()], -1)
    cell = torch.cat([gates, new, torch.zeros_like(new), of_new], -1)
    return torch.where(keep > 0, x, changed), cell


class UnrolledGRU(torch.autograd.Function):
    """All steps, in fp32."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's own
        x: Tensor,
        state: Tensor,
        keep: Tensor,
        weight: Tensor,
        bias: Tensor,
    ) -> Tensor:
        """States after each step.

        Args:
            ctx: torch's context, which keeps tensors for `backward`.
            x: [T, S, B, 3Y] the inputs' part.
            state: [S, B, Y] state before the first step.
            keep: [T, S, B, 1] mask: 1, or 0 where the step begins with a state of zero.
            weight: [S, Y, 3Y] weights of the state.
            bias: [S, 1, 3Y] bias added to the state's part.

        Returns:
            [T, S, B, Y].
        """
        slices, rows, width = state.shape
        x = x.contiguous()
        by_inputs = x.device.type != "cpu"  # a kernel less in each step
        gates = reset_by_inputs(x, keep, bias)[0] if by_inputs else x
        states, cells, h = [], [], state
        with torch.autocast(x.device.type, enabled=False):
            from_state = bias.expand(len(x), -1, rows, -1).clone()  # its products are added to it
            for t in range(len(x)):
                h = h if by_inputs else h * keep[t]
                s = from_state[t].baddbmm_(h, weight)
                from_input = gates[t].view(-1, 3 * width)
                after, cell = gru_cell(from_input, s.view(-1, 3 * width), h.view(-1, width))
                h = after.view(slices, rows, width)
                states.append(h)
                cells.append(cell)
        if any(ctx.needs_input_grad):
            kept = torch.stack(cells)
            if by_inputs:
                kept = kept.view(len(x), slices, rows, -1)
                kept = torch.where(keep > 0, kept, reset_by_inputs(x, keep, bias)[1])
            ctx.save_for_backward(kept, keep, weight)
        return torch.stack(states)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        """Back through time.

        With D_t the gradient of h_t, that of what comes of the state is D_t F_t, where F_t, of r, z
        and s_n, is known for all t beforehand; so is the rest of the way to h_{t-1}, which goes
        through the product as if by one more gate, with the unit matrix as its weights.
        """
        cells, keep, weight = ctx.saved_tensors
        length, slices, rows, width = grad.shape
        cells = cells.view(length, slices, rows, 5, width)
        r, z, n, h, s = cells.unbind(3)
        off = 1 - cells[..., :2, :]  # 1 - r, 1 - z
        slope_r, slope_z = (cells[..., :2, :] * off).unbind(3)
        of_new = off[..., 1, :] * (1 - n * n)  # d h' / d (x_n + r s_n)
        factors = torch.stack([of_new * s * slope_r, (h - n) * slope_z, of_new * r], 3)
        onward = torch.cat([factors, z.unsqueeze(3)], 3) * keep.unsqueeze(3)  # [T, S, B, 4, Y]
        unit = torch.eye(width, device=weight.device, dtype=weight.dtype)
        back = torch.cat([weight.transpose(1, 2), unit.expand(slices, -1, -1)], 1)  # [S, 4Y, Y]
        d = grad.clone(memory_format=torch.contiguous_format)  # [T, S, B, Y]
        for t in range(length - 1, 0, -1):
            through = (d[t].unsqueeze(2) * onward[t]).view(slices, rows, -1)
            d[t - 1].baddbmm_(through, back)
        of_state = None
        if ctx.needs_input_grad[1]:
            through = (d[0].unsqueeze(2) * onward[0]).view(slices, rows, -1)
            of_state = torch.bmm(through, back)
        gates = (d.unsqueeze(3) * factors).flatten(3)  # [T, S, B, 3Y]
        of_x = torch.cat([gates[..., : 2 * width], d * of_new], 3)
        by_slice = gates.transpose(0, 1).reshape(slices, -1, 3 * width)
        of_weight = torch.bmm(
            h.transpose(0, 1).reshape(slices, -1, width).transpose(1, 2), by_slice
        )
        return of_x, of_state, None, of_weight, by_slice.sum(1, keepdim=True)


def lstm_step(gates: Tensor, cell: Tensor) -> Tensor:
    """Compute one step's state.

    c' = sigmoid(f) c + sigmoid(i) tanh(g), h' = sigmoid(o) tanh(c').

    Args:
        gates: [..., 4Y] sums of the inputs' part and the output's part, in the order i, f, o, g.
        cell: [..., Y] the cell c.

    Returns:
        [..., 2Y] h' and c'.
    """
    width = cell.shape[-1]
    i, f, o = gates[..., : 3 * width].sigmoid().chunk(3, -1)
    after = torch.addcmul(i * gates[..., 3 * width :].tanh(), f, cell)
    return torch.cat([o * after.tanh(), after], -1)


class UnrolledLSTM(torch.autograd.Function):
    """All steps, in fp32."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's own
        x: Tensor,
        state: Tensor,
        keep: Tensor,
        weight: Tensor,
        bias: Tensor,
    ) -> Tensor:
        """Compute the state after each step.

        Args:
            ctx: torch's context, which keeps tensors for `backward`.
            x: [T, S, B, 4Y] the inputs' part.
            state: [S, B, 2Y] state before the first step.
            keep: [T, S, B, 1] mask: 1, or 0 where the step begins with a state of zero.
            weight: [S, Y, 4Y] weights of the output h.
            bias: [S, 1, 4Y] bias added to its part.

        Returns:
            [T, S, B, 2Y].
        """
        width = weight.shape[1]
        states, now = [], state
        with torch.autocast(x.device.type, enabled=False):
            gates = x + bias  # the output's products are added to it, then activated in place
            for t in range(len(x)):
                h, c = (now * keep[t]).chunk(2, -1)
                gates[t].baddbmm_(h, weight)
                i, f, o = gates[t, ..., : 3 * width].sigmoid_().chunk(3, -1)
                after = torch.addcmul(i * gates[t, ..., 3 * width :].tanh_(), f, c)
                now = torch.cat([o * after.tanh(), after], -1)
                states.append(now)
        out = torch.stack(states)
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(gates, out, state, keep, weight)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        """Go back through time.

        With D the gradient of c_t, that of h_t included, and H that of h_t, the gates i, f, g get
        D times a factor and o gets H times one; all factors are known beforehand.
        """
        gates, out, state, keep, weight = ctx.saved_tensors
        i, f, o, g = gates.chunk(4, -1)
        before = torch.cat([state.unsqueeze(0), out[:-1]]) * keep  # [T, S, B, 2Y]
        h, c = before.chunk(2, -1)
        through = out.chunk(2, -1)[1].tanh()
        into_cell = o * (1 - through * through)  # d h / d c
        slopes = [g * i * (1 - i), c * f * (1 - f), through * o * (1 - o), i * (1 - g * g)]
        factors = torch.cat(slopes, -1)  # [T, S, B, 4Y]
        kept = f * keep  # d c_t / d c_{t-1}
        back = weight.transpose(1, 2)
        of_gates = torch.empty_like(gates)
        of_h, of_c = torch.zeros_like(state).chunk(2, -1)  # what later steps pass back
        for t in range(len(gates) - 1, -1, -1):
            by_h, by_c = grad[t].chunk(2, -1)
            of_h = by_h + of_h
            of_c = torch.addcmul(by_c + of_c, of_h, into_cell[t])
            torch.mul(torch.cat([of_c, of_c, of_h, of_c], -1), factors[t], out=of_gates[t])
            of_h = torch.bmm(of_gates[t], back) * keep[t]
            of_c = of_c * kept[t]
        by_slice = of_gates.transpose(0, 1).flatten(1, 2)  # [S, T * B, 4Y]
        of_weight = torch.bmm(h.transpose(0, 1).flatten(1, 2).transpose(1, 2), by_slice)
        of_state = torch.cat([of_h, of_c], -1) if ctx.needs_input_grad[1] else None
        return of_gates, of_state, None, of_weight, by_slice.sum(1, keepdim=True)


@dataclass
class RecurrentState:
    """The recurrent state before the first of the rows that a network is given.

    Attributes:
        memory: [B, A, Z] recurrent state before the first of the rows; of a GRU Z is its width.
        first: [T, B] bool, rows that begin an episode, on which nothing is remembered; None: there
            is one row of each environment (T = 1), and its memory is as it should be.
    """

    memory: Tensor
    first: Tensor | None = None

    def columns(self, index: Tensor | slice) -> "RecurrentState":
        """The recurrent state of some of the environments."""
        return RecurrentState(
            self.memory[index], None if self.first is None else self.first[:, index]
        )

    @classmethod
    def of_rows(cls, states: Tensor, first: Tensor) -> "RecurrentState":
        """Take each row of sequences as one step: states before it [T, B, A, Z], first [T, B]."""
        return cls(states.flatten(0, 1), first.reshape(1, -1))

    def without_last(self) -> "RecurrentState":
        """The recurrent state of all rows but the last."""
        assert self.first is not None
        return RecurrentState(self.memory, self.first[:-1])


def _by_agent(x: Tensor, length: int, agents: int) -> Tensor:
    """[T * R, F] as [T, A, B, F]."""
    return x.view(length, -1, agents, x.shape[-1]).transpose(1, 2)


class StackedCell(nn.Module):
    """A recurrent unit per slice, over T steps; weights at the start as those of torch's cells.

    The state stays in fp32 whatever the precision.

    Attributes:
        GATES: columns of the weights, in widths of the unit.
        STATES: numbers of the recurrent state Z, in widths Y of the unit.
        UNROLLED: function of all steps; see UnrolledGRU.
    """

    GATES: ClassVar[int]
    STATES: ClassVar[int] = 1
    UNROLLED: ClassVar[type[torch.autograd.Function]]

    def __init__(self, slices: tuple[int, ...], in_features: int, width: int) -> None:
        super().__init__()
        self._slices, s = slices, count_slices(slices)
        columns = self.GATES * width
        self.input = StackedLinear(slices, in_features, columns)
        self.weight = nn.Parameter(torch.empty(s, width, columns))  # [S, Y, GATES * Y]
        self.bias = nn.Parameter(torch.empty(s, 1, columns))
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -1 / math.sqrt(width), 1 / math.sqrt(width))

    def forward(self, x: Tensor, state: Tensor, keep: Tensor | None) -> Tensor:
        """All states, one step after the other.

        Args:
            x: [T * R, I].
            state: [R, Z] state before the first step.
            keep: [T, R] mask: 1, or 0 where the step begins with a state of zero; None: 1, T is 1.

        Returns:
            [T, R, Z] the state after each step.
        """
        if keep is not None:
            return self.together([(self, x, state)], keep)[0]
        return self._one(x, state)

    @abstractmethod
    def _one(self, x: Tensor, state: Tensor) -> Tensor:
        """Compute one step of x [R, I] from a state [R, Z]: [1, R, Z]."""

    @staticmethod
    def together(units: "list[tuple[StackedCell, Tensor, Tensor]]", keep: Tensor) -> list[Tensor]:
        """All states of units of one kind, width and slices, which go through time side by side.

        Args:
            units: each with its inputs [T * R, I] and its state [R, Z] before the first step.
            keep: [T, R] mask: 1, or 0 where the step begins with a state of zero.

        Returns:
            [T, R, Z] of each unit: the state after each step.
        """
        length, (rows, width) = len(keep), units[0][2].shape
        weights, biases = zip(*(unit.by_agent() for unit, _, _ in units), strict=True)
        agents = len(weights[0])
        inputs = [_by_agent(unit.input(x).float(), length, agents) for unit, x, _ in units]
        first = [_by_agent(state, 1, agents)[0] for _, _, state in units]
        keeps = _by_agent(keep.reshape(-1, 1), length, agents)
        states = units[0][0].UNROLLED.apply(  # type: ignore[no-untyped-call]
            torch.cat(inputs, 1),
            torch.cat(first),
            keeps.repeat(1, len(units), 1, 1),
            torch.cat(weights),
            torch.cat(biases),
        )  # [T, units * A, B, Z]
        parts = states.view(length, len(units), agents, -1, width).unbind(1)
        return [part.transpose(1, 2).reshape(length, rows, width) for part in parts]

    def read(self, states: Tensor) -> Tensor:
        """Return the unit's outputs [..., Y] of states [..., Z]."""
        return states

    def by_agent(self) -> tuple[Tensor, Tensor]:
        """The weights and biases of the state, of each agent or one for all: [A, Y, GATES * Y]."""
        return per_agent(self.weight, self._slices), per_agent(self.bias, self._slices)


class StackedGRU(StackedCell):
    """A gated recurrent unit per slice; initialised and defined as nn.GRUCell.

    r = sigmoid(W_r x + b_r + U_r h + c_r), z in the same way, n = tanh(W_n x + b_n + r (U_n h +
    c_n)), h' = (1 - z) n + z h. Cho et al. 2014 (arXiv:1406.1078), in the variant of nn.GRU, which
    has r outside the product.
    """

    GATES = 3  # r, z, n
    UNROLLED = UnrolledGRU

    @override
    def _one(self, x: Tensor, state: Tensor) -> Tensor:
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
        """One step of x [B, A, I] without gradient, by the fused cell: [1, B * A, Y]."""
        rows, width = state.shape
        h = state.view(-1, len(weight), width).transpose(0, 1)  # [A, B, Y]
        from_input = self.input(x.squeeze(1) if len(weight) == 1 else x.transpose(0, 1))
        from_state = torch.baddbmm(bias, h, weight)  # [A, B, 3Y]
        with torch.autocast(x.device.type, enabled=False):
            after, _ = gru_cell(
                from_input.float().view(-1, 3 * width),
                from_state.float().view(-1, 3 * width),
                h.flatten(0, 1),
            )
        return after.view(len(weight), -1, width).transpose(0, 1).reshape(1, rows, width)


class StackedLSTM(StackedCell):
    """A long short-term memory per slice, as nn.LSTMCell with its gates in the order i, f, o, g.

    Its state is the output h and the cell c side by side.
    """

    GATES, STATES = 4, 2
    UNROLLED = UnrolledLSTM

    @override
    def _one(self, x: Tensor, state: Tensor) -> Tensor:
        weight, bias = self.by_agent()
        agents = len(weight)
        from_input = _by_agent(self.input(x).float(), 1, agents)[0]
        h, c = _by_agent(state, 1, agents)[0].chunk(2, -1)
        gates = from_input + torch.baddbmm(bias, h, weight).float()
        return lstm_step(gates, c).transpose(0, 1).reshape(1, *state.shape)

    @override
    def read(self, states: Tensor) -> Tensor:
        return states.chunk(2, -1)[0]


CELLS: dict[CellKind, type[StackedCell]] = {"gru": StackedGRU, "lstm": StackedLSTM}
CAST |= {StackedGRU, StackedLSTM}  # while they learn they multiply by their own weights in fp32


class Recurrent(nn.Module):
    """A network, a recurrent unit that is fed its outputs, and a linear layer that reads the unit.

    Attributes:
        memory_size: Z, numbers that an agent remembers.
        gru: the unit, if it is a GRU; else the module has an attribute "lstm".
    """

    gru: StackedGRU

    def __init__(
        self,
        body: nn.Module,
        slices: tuple[int, ...],
        width: int,
        num_outputs: int,
        kind: CellKind = "gru",
    ) -> None:
        """`body` has `width` outputs; so has the unit."""
        super().__init__()
        unit, self._kind = CELLS[kind], kind
        self.memory_size = unit.STATES * width
        self.body = body
        self.add_module(kind, unit(slices, width, width))
        self.head = StackedLinear(slices, width, num_outputs)

    @property
    def unit(self) -> StackedCell:
        """The recurrent unit."""
        return cast(StackedCell, self._modules[self._kind])

    def forward(
        self, image: Tensor | None, vector: Tensor | None, hidden: RecurrentState
    ) -> tuple[Tensor, Tensor]:
        """[T * B, A, ...] -> [T * B, A, outputs], and what is remembered then, [B, A, Z]."""
        return self.remember(self.body(image, vector), hidden)

    def remember(self, features: Tensor, hidden: RecurrentState) -> tuple[Tensor, Tensor]:
        """As forward, from the body's outputs [T * B, A, Y]."""
        out, states = self.unroll(features, hidden)
        return out, states[-1].view(hidden.memory.shape)

    def unroll(self, features: Tensor, hidden: RecurrentState) -> tuple[Tensor, Tensor]:
        """As remember, with the states after all steps [T, B * A, Z]."""
        rows = F.relu(features.flatten(0, 1))
        states = self.unit(rows, hidden.memory.flatten(0, 1), keep_mask(hidden))
        return self.read(states, features), states

    def read(self, states: Tensor, features: Tensor) -> Tensor:
        """[T * B, A, outputs] of the states [T, B * A, Z]."""
        out: Tensor = self.head(self.unit.read(states).flatten(0, 1))
        return out.view(*features.shape[:2], -1)


def keep_mask(hidden: RecurrentState) -> Tensor | None:
    """[T, B * A] 0 where an episode begins, else 1."""
    if hidden.first is None:
        return None
    agents = hidden.memory.shape[1]
    # As numbers at once: a negation and a conversion would be two kernels.
    keep = torch.logical_not(hidden.first, out=torch.empty_like(hidden.first, dtype=torch.float32))
    return keep.unsqueeze(-1).expand(-1, -1, agents).flatten(1)


def memory_size(network: nn.Module) -> int:
    """Z of a network that remembers, also of one built around it; 0 of another."""
    return next((m.memory_size for m in network.modules() if isinstance(m, Recurrent)), 0)
