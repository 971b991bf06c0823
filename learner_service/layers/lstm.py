"""The LSTM's arithmetic: one step, and all steps of sequences with their gradient by formula.

Hochreiter and Schmidhuber 1997, "Long Short-Term Memory", with the forget gate of Gers et al. 2000,
as torch.nn.LSTMCell. Columns of gates stand in the order i, f, o, g, so that one kernel takes the
sigmoid of the first three. The state is [..., 2Y]: the output h, then the cell c.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


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
