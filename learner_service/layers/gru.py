"""A gated recurrent unit through time, in as few kernels as a step can take.

Two kernels go forward through a step, and two back: what does not depend on the order of time is
done for all steps at once.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.library import Library

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
        x: [R, 3H] the inputs' part, for r, z and n.
        s: [R, 3H] the state's part.
        h: [R, H] the state.

    Returns:
        [R, H] the next state, and [R, 5H]: r, z, n, h, s_n.
    """
    out, kept = torch.ops.murmur.gru_cell(x, s, h)
    return out, kept


def reset_by_inputs(x: Tensor, keep: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs with which a step gives what it gives for a state of zero, whatever the state is.

    For a state of zero h' = (1 - z) n, with r, z and n of the inputs and the biases alone. So does
    a step with r = z = 0 and n = h'.

    Args:
        x: [T, S, B, 3H] the inputs' part.
        keep: [T, S, B, 1] mask, 0 where the state is to be zero.
        bias: [S, 1, 3H] bias of the state's part.

    Returns:
        [T, S, B, 3H] x, changed where keep is 0, and [T, S, B, 5H] the r, z, n, h and s_n there.
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


class Unrolled(torch.autograd.Function):
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
            x: [T, S, B, 3H] the inputs' part.
            state: [S, B, H] state before the first step.
            keep: [T, S, B, 1] mask: 1, or 0 where the step begins with a state of zero.
            weight: [S, H, 3H] weights of the state.
            bias: [S, 1, 3H] bias added to the state's part.

        Returns:
            [T, S, B, H].
        """
        sets, rows, width = state.shape
        x = x.contiguous()
        by_inputs = x.device.type != "cpu"  # a kernel less in each step
        gates = reset_by_inputs(x, keep, bias)[0] if by_inputs else x
        states, cells, h = [], [], state
        with torch.autocast(x.device.type, enabled=False):
            from_state = bias.expand(len(x), -1, rows, -1).clone()  # its products are added to it
            for t in range(len(x)):
                h = h if by_inputs else h * keep[t]
                s = from_state[t].baddbmm_(h, weight)
                flat = s.view(-1, 3 * width), h.view(-1, width)
                after, cell = gru_cell(gates[t].view(-1, 3 * width), *flat)
                h = after.view(sets, rows, width)
                states.append(h)
                cells.append(cell)
        if any(ctx.needs_input_grad):
            kept = torch.stack(cells)
            if by_inputs:
                kept = kept.view(len(x), sets, rows, -1)
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
        length, sets, rows, width = grad.shape
        cells = cells.view(length, sets, rows, 5, width)
        r, z, n, h, s = cells.unbind(3)
        off = 1 - cells[..., :2, :]  # 1 - r, 1 - z
        slope_r, slope_z = (cells[..., :2, :] * off).unbind(3)
        of_new = off[..., 1, :] * (1 - n * n)  # d h' / d (x_n + r s_n)
        factors = torch.stack([of_new * s * slope_r, (h - n) * slope_z, of_new * r], 3)
        onward = torch.cat([factors, z.unsqueeze(3)], 3) * keep.unsqueeze(3)  # [T, S, B, 4, H]
        unit = torch.eye(width, device=weight.device, dtype=weight.dtype)
        back = torch.cat([weight.transpose(1, 2), unit.expand(sets, -1, -1)], 1)  # [S, 4H, H]
        d = grad.clone(memory_format=torch.contiguous_format)  # [T, S, B, H]
        for t in range(length - 1, 0, -1):
            through = (d[t].unsqueeze(2) * onward[t]).view(sets, rows, -1)
            d[t - 1].baddbmm_(through, back)
        of_state = None
        if ctx.needs_input_grad[1]:
            through = (d[0].unsqueeze(2) * onward[0]).view(sets, rows, -1)
            of_state = torch.bmm(through, back)
        gates = (d.unsqueeze(3) * factors).flatten(3)  # [T, S, B, 3H]
        of_x = torch.cat([gates[..., : 2 * width], d * of_new], 3)
        by_set = gates.transpose(0, 1).reshape(sets, -1, 3 * width)
        of_weight = torch.bmm(h.transpose(0, 1).reshape(sets, -1, width).transpose(1, 2), by_set)
        return of_x, of_state, None, of_weight, by_set.sum(1, keepdim=True)
