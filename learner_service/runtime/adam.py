"""torch's Adam without the import of torch's compiler."""

import inspect
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


def decayed(network: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups: matrices and kernels decay, biases and norms do not."""
    weights = [p for p in network.parameters() if p.ndim > 1]
    others = [p for p in network.parameters() if p.ndim <= 1]
    groups = [{"params": weights, "weight_decay": weight_decay}]
    return [*groups, {"params": others, "weight_decay": 0.0}] if others else groups
