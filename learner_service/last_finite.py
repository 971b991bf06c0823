"""The last finite state of an algorithm, to go back to after an update that turned not finite."""

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from learner_service.learning.base import Algorithm


class LastFinite:
    """A copy of all that an update changes, on the same device. Used by the thread that learns.

    Whole updates are undone, not single steps of optimisers: what is not finite also spoils running
    statistics and targets, and so no algorithm has to know of it. Nothing here waits for the
    device. Tensors are written in place, so a captured CUDA graph still works on them. Random
    numbers and the loss scaler continue: the next update draws others, at a lower scale.
    """

    def __init__(self, algorithm: Algorithm[Any]) -> None:
        """Keep nothing yet."""
        self._algorithm = algorithm
        self._tensors: list[Tensor] = []
        self._copies: list[Tensor] = []
        self._counts: dict[str, float] = {}

    @torch.no_grad()
    def keep(self) -> None:
        """Copy the state. Call it before an update."""
        tensors = [*self._weights(), *self._momenta()]
        if len(tensors) == len(self._copies):
            torch._foreach_copy_(self._copies, tensors)
        else:  # at first, and when optimisers have made their state
            self._copies = [t.clone() for t in tensors]
        self._tensors, self._counts = tensors, dict(self._algorithm.counts)

    @torch.no_grad()
    def total(self) -> Tensor:
        """A sum over all weights, a scalar on the device: finite only if every weight is."""
        numbers = [w for w in self._weights() if w.is_floating_point()]
        if numbers[0].is_cuda:  # one kernel for many tensors
            sums = torch._foreach_norm(numbers, float("inf"))
        else:  # ten times as fast as the norm
            sums = tuple(w.sum() for w in numbers)
        return torch.stack([x.float() for x in sums]).sum()

    @torch.no_grad()
    def restore(self) -> None:
        """Put the copy back."""
        torch._foreach_copy_(self._tensors, self._copies)
        kept = {id(tensor) for tensor in self._tensors}
        for momentum in self._momenta():
            if id(momentum) not in kept:  # made by the update itself, its first
                momentum.zero_()  # as Adam's begin
        self._algorithm.counts.update(self._counts)

    def _weights(self) -> Iterator[Tensor]:
        """Parameters and buffers of all networks."""
        for part in self._algorithm.parts.values():
            if isinstance(part, nn.Module):
                yield from part.parameters()
                yield from part.buffers()

    def _momenta(self) -> Iterator[Tensor]:
        """Yield the tensors that the optimisers keep of each parameter."""
        for part in self._algorithm.parts.values():
            if isinstance(part, torch.optim.Optimizer):
                for state in part.state.values():
                    yield from (x for x in state.values() if isinstance(x, Tensor))


def named_weights(algorithm: Algorithm[Any]) -> dict[str, Tensor]:
    """Return parameters and buffers of all networks, by name."""
    return {
        f"{name}.{of}": tensor
        for name, part in algorithm.parts.items()
        if isinstance(part, nn.Module)
        for of, tensor in chain(part.named_parameters(), part.named_buffers())
    }
