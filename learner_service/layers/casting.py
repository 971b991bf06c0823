"""Weights in the type of a pass: of snapshots, cast when they are published; else cast together.

All weights of a pass are cast by one kernel each way, where autocast takes one a weight.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from murmur.learner_service.device.precision import Precision

# Layers of which autocast casts all weights. Of others, also of their subclasses, it may cast none:
# a LayerNorm works in fp32. Layers of ours are added where they are defined.
CAST: set[type[nn.Module]] = {nn.Linear, nn.Bilinear, nn.Conv1d, nn.Conv2d, nn.Conv3d}
CAST_TO_LEARN = set(CAST)
M = TypeVar("M", bound=nn.Module)


def snapshot(network: M, precision: Precision) -> M:
    """A frozen copy that gives, under autocast, what the network gives under autocast.

    Weights that autocast would cast in every forward pass are stored in its type.

    Args:
        network: network with weights in fp32.
        precision: precision of forward passes.
    """
    copied = copy.deepcopy(network).eval().requires_grad_(False)
    if precision.dtype != torch.float32:
        for layer in copied.modules():
            if type(layer) in CAST:
                for weight in layer.parameters(recurse=False):
                    weight.data = weight.data.to(precision.dtype)
    return copied


@torch.no_grad()
def publish(network: nn.Module, to: nn.Module) -> None:
    """Copy the weights and buffers of a network into its snapshot."""
    torch._foreach_copy_(list(to.parameters()), list(network.parameters()))
    for mine, theirs in zip(to.buffers(), network.buffers(), strict=True):
        mine.copy_(theirs)


Slot = tuple[dict[str, Any], str]  # where a layer keeps a weight: its `_parameters`, and the name
_slots_of: WeakKeyDictionary[nn.Module, list[Slot]] = WeakKeyDictionary()


@contextmanager
def cast_weights(precision: Precision, *networks: nn.Module) -> Iterator[None]:
    """Autocast, within which the networks have their weights in its type.

    Gradients of the cast weights reach the parameters in fp32. Weights that are in the type
    already, as those of snapshots, are left alone, and so is a network that torch.compile has: its
    kernels cast by themselves. fp32: nothing is done.

    Args:
        precision: precision of the pass.
        networks: networks that take part in the pass.
    """
    if precision.dtype == torch.float32:
        yield
        return
    slots = [slot for network in networks for slot in weight_slots(network)]
    slots = [(held, name) for held, name in slots if held[name].dtype == torch.float32]
    weights: list[Tensor] = [held[name] for held, name in slots]
    cast = _cast(weights, precision.dtype) if weights else ()
    try:
        for (held, name), weight in zip(slots, cast, strict=True):
            held[name] = weight
        with precision.autocast():
            yield
    finally:
        for (held, name), weight in zip(slots, weights, strict=True):
            held[name] = weight


@contextmanager
def frozen(network: nn.Module) -> Iterator[None]:
    """Freezes the parameters, also within `cast_weights`; gradients still reach the inputs."""
    cast = [(held, name, held[name]) for held, name in weight_slots(network)]
    cast = [(held, name, weight) for held, name, weight in cast if not weight.is_leaf]
    for held, name, weight in cast:
        held[name] = weight.detach()
    network.requires_grad_(False)
    try:
        yield
    finally:
        network.requires_grad_(True)
        for held, name, weight in cast:
            held[name] = weight


def weight_slots(network: nn.Module) -> list[Slot]:
    """The weights that autocast casts in every pass; none of a network that torch.compile has."""
    slots = _slots_of.get(network)
    if slots is None:
        layers = list(network.modules())
        compiled = any(layer._compiled_call_impl is not None for layer in layers)
        slots = [
            (layer._parameters, name)
            for layer in layers
            if type(layer) in CAST_TO_LEARN and not compiled
            for name, weight in layer._parameters.items()
            if weight is not None
        ]
        _slots_of[network] = slots
    return slots


def _cast(weights: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The weights in another type."""
    if not (torch.is_grad_enabled() and any(weight.requires_grad for weight in weights)):
        return _copies(weights, dtype)
    cast: tuple[Tensor, ...] = _Cast.apply(dtype, *weights)  # type: ignore[no-untyped-call]
    return cast


@torch.no_grad()
def _copies(weights: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    copies = [torch.empty_like(weight, dtype=dtype) for weight in weights]
    torch._foreach_copy_(copies, weights)
    return tuple(copies)


class _Cast(torch.autograd.Function):
    """`_copies`, and back: gradients in the weights' type and layout."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's own
        dtype: torch.dtype,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        """Copies of the weights."""
        ctx.set_materialize_grads(False)
        ctx.like = [(weight.dtype, weight.stride()) for weight in weights]
        return _copies(list(weights), dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        """One kernel for all gradients that lie in memory as their weights do."""
        found: list[Tensor | None] = []
        together: tuple[list[Tensor], list[Tensor]] = [], []
        for grad, (dtype, stride) in zip(grads, ctx.like, strict=True):
            if grad is None:
                found.append(None)
                continue
            out = torch.empty_strided(grad.shape, stride, dtype=dtype, device=grad.device)
            found.append(out)
            if grad.stride() == stride:
                together[0].append(out)
                together[1].append(grad)
            else:  # with one of another layout, torch copies all one by one
                out.copy_(grad)
        if together[0]:
            torch._foreach_copy_(*together)
        return None, *found
