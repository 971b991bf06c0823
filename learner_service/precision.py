"""Mixed precision: autocast, loss scaling, clipping and the optimiser step, in one place."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from shared.ledger import enter

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """fp32, bf16 or fp16 arithmetic; weights, losses, returns and optimisers stay in fp32.

    Only fp16 needs its loss scaled: bf16 has the exponent range of fp32 (Micikevicius et al. 2018,
    "Mixed Precision Training", arXiv:1710.03740).
    """

    def __init__(self, name: str, device: torch.device) -> None:
        """Name is fp32, bf16 or fp16."""
        self.name = name
        self._device = device
        self.scaler = torch.amp.GradScaler(device.type, enabled=name == "fp16")

    def autocast(self) -> AbstractContextManager[Any]:
        """Run forward passes within this."""
        if self.name == "fp32":
            return nullcontext()
        return torch.autocast(self._device.type, dtype=_DTYPES[self.name])

    def step(
        self,
        loss: Tensor,
        optimizer: torch.optim.Optimizer,
        parameters: Iterable[nn.Parameter],
        max_norm: float,
        num_slices: int = 1,
    ) -> Tensor:
        """Backward, unscale, clip the gradient's norm, step.

        Args:
            loss: scalar, fp32.
            optimizer: of these parameters.
            parameters: whose gradients are clipped together.
            max_norm: largest norm of the gradient; 0: no clipping.
            num_slices: agents with weights of their own, stacked along the parameters' first
                dimension: each agent's gradient is clipped by its own norm.

        Returns:
            the gradient's norm before clipping (the largest agent's), a scalar on the device (no
            synchronisation); 0 where fp16 overflowed, which skips the step and lowers the scale.
        """
        enter("backward")
        optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        enter("optimize")
        self.scaler.unscale_(optimizer)
        norm = clip_gradients(list(parameters), max_norm or float("inf"), num_slices)
        self.scaler.step(optimizer)
        self.scaler.update()
        enter("forward")
        return norm.where(norm.isfinite(), 0.0) if self.scaler.is_enabled() else norm


def clip_gradients(parameters: list[nn.Parameter], max_norm: float, num_slices: int) -> Tensor:
    """Scale gradients down to a norm, each slice's by its own; returns the largest norm before."""
    if num_slices == 1:
        return nn.utils.clip_grad_norm_(parameters, max_norm, foreach=True)
    grads = [p.grad.view(num_slices, -1) for p in parameters if p.grad is not None]
    norms = torch.stack([g.square().sum(1) for g in grads]).sum(0).sqrt()  # [S]
    scale = (max_norm / (norms + 1e-6)).clamp(max=1.0).unsqueeze(1)
    torch._foreach_mul_(grads, [scale] * len(grads))
    return norms.max()
