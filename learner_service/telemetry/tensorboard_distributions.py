"""Distributions of weights, gradients and actions, for TensorBoard."""

from collections.abc import Mapping

from torch import Tensor, nn

MOST_VALUES = 1 << 16  # of a parameter, or of actions; of more, evenly spread ones are taken

_MOST_ACTIONS = 16  # histograms of a vector's numbers


def distributions(parts: Mapping[str, object], action: Tensor | None) -> dict[str, Tensor]:
    """Return values of an update for histograms, by name, where they are.

    Args:
        parts: parts of an algorithm; networks that learn nothing, such as targets, are left out.
        action: [..., A] integers or [..., A, U] numbers of the update's batch; None: it has none.
    """
    found: dict[str, Tensor] = {}
    for name, part in parts.items():
        for of, p in part.named_parameters() if isinstance(part, nn.Module) else ():
            if p.grad is not None:
                found[f"weights/{name}.{of}"] = _sampled(p)
                found[f"gradients/{name}.{of}"] = _sampled(p.grad)
    if action is None:
        return found
    if not action.is_floating_point():
        return found | {"actions/chosen": _sampled(action)}
    size = min(action.shape[-1], _MOST_ACTIONS)
    return found | {f"actions/{u}": _sampled(action[..., u]) for u in range(size)}


def _sampled(tensor: Tensor) -> Tensor:
    """At most MOST_VALUES of a tensor's values, as floats."""
    flat = tensor.detach().reshape(-1)
    return flat[:: -(-len(flat) // MOST_VALUES)].float()
