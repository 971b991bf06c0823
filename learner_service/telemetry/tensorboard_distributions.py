"""Distributions of weights, gradients and actions, for TensorBoard."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

MOST_VALUES = 1 << 16  # of a parameter, or of actions; of more, evenly spread ones are taken

_MOST_ACTIONS = 16  # histograms of a vector's numbers


@dataclass(frozen=True)
class Distributions:
    """Histograms and gradient norms of one update.

    Attributes:
        values: name -> values on the CPU, for a histogram.
        norms: network -> length of its last gradient.
    """

    values: Mapping[str, Tensor]
    norms: Mapping[str, float]


@torch.no_grad()
def distributions(
    parts: Mapping[str, object],
    action: Tensor | None,
    read: Callable[[Tensor], Tensor] = lambda x: x,
) -> Distributions:
    """Weights, gradient norms and actions after an update; one copy from the device for all.

    Args:
        parts: parts of an algorithm; networks that learn nothing, such as targets, are left out.
        action: [..., A] integers or [..., A, U] numbers of the update's batch; None: it has none.
        read: copies a tensor to the host.
    """
    found: dict[str, Tensor] = {}
    norms: dict[str, Tensor] = {}
    for name, part in parts.items():
        if not isinstance(part, nn.Module):
            continue
        learned = [(of, p) for of, p in part.named_parameters() if p.grad is not None]
        found |= {f"weights/{name}.{of}": _sampled(p) for of, p in learned}
        if gradients := [p.grad.float() for _, p in learned if p.grad is not None]:
            norms[name] = torch.stack(torch._foreach_norm(gradients)).norm()
    if action is not None:
        found |= _of_actions(action)
    if not found:
        return Distributions({}, {})
    tensors = [*found.values(), *(norm.reshape(1) for norm in norms.values())]
    copied = torch.split(read(torch.cat(tensors)), [len(t) for t in tensors])  # the one copy
    values = dict(zip(found, copied, strict=False))
    lengths = (float(x) for x in copied[len(found) :])
    return Distributions(values, dict(zip(norms, lengths, strict=True)))


def _of_actions(action: Tensor) -> dict[str, Tensor]:
    if not action.is_floating_point():
        return {"actions/chosen": _sampled(action)}
    size = min(action.shape[-1], _MOST_ACTIONS)
    return {f"actions/{u}": _sampled(action[..., u]) for u in range(size)}


def _sampled(tensor: Tensor) -> Tensor:
    """At most MOST_VALUES of a tensor's values, as floats."""
    flat = tensor.detach().reshape(-1)
    return flat[:: -(-len(flat) // MOST_VALUES)].float()
