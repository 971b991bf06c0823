"""torch's Adam without the import of torch's compiler."""

import inspect
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn


def _plain(method: object) -> Any:  # noqa: ANN401 - a method of any signature
    """Return the function that torch wraps to keep its compiler out."""
    return inspect.unwrap(cast(Any, method))


class Adam(torch.optim.Adam):
    """`torch.optim.Adam`, the same bit for bit, for code that is not compiled.

    torch wraps the methods for `torch.compile`; the wrappers import torch._dynamo at their first
    call: 1.3 CPU-seconds and 73 MB in each learner. These are the functions without them.
    """

    add_param_group = _plain(torch.optim.Optimizer.add_param_group)
    load_state_dict = _plain(torch.optim.Optimizer.load_state_dict)
    state_dict = _plain(torch.optim.Optimizer.state_dict)
    zero_grad = _plain(torch.optim.Optimizer.zero_grad)
    step = torch.no_grad()(_plain(torch.optim.Adam.step))


@torch.no_grad()
def step_together(optimizers: Sequence[Adam]) -> None:
    """Step several fused optimisers, the same bit for bit; one kernel counts the steps of all."""
    groups = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            lists: tuple[list[torch.Tensor], ...] = ([], [], [], [], [], [])
            # Parameters, gradients, moments, steps.
            optimizer._init_group(group, *lists)  # type: ignore[no-untyped-call]
            if lists[0]:
                groups.append((group, getattr(optimizer, "grad_scale", None), lists))
    torch._foreach_add_([step for _, _, (*_, steps) in groups for step in steps], 1)
    for group, grad_scale, lists in groups:
        torch._fused_adam_(
            *lists,
            amsgrad=group["amsgrad"],
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
            grad_scale=grad_scale,
            found_inf=None,
        )


def decayed(network: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups: matrices and kernels decay, biases and norms do not."""
    weights = [p for p in network.parameters() if p.ndim > 1]
    others = [p for p in network.parameters() if p.ndim <= 1]
    groups = [{"params": weights, "weight_decay": weight_decay}]
    return [*groups, {"params": others, "weight_decay": 0.0}] if others else groups
