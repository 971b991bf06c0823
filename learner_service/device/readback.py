"""Reads of the device's values that hold up no other thread.

A copy to pageable memory, as `.tolist()`, `.item()` and `.cpu()` make it, waits inside the driver,
and other threads' launches wait with it. Here values are copied to pinned memory behind what the
stream has to do, and the host waits for an event.
"""

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from murmur.learner_service.device.streams import Fence

_ALIGNED = 16  # bytes, between tensors that are read together
_MOST_BYTES = 32 << 20  # of pinned memory, for copies
T = TypeVar("T")


class Readback:
    """Pinned memory of one thread that values come back to. On the host nothing is copied."""

    def __init__(self, device: torch.device, *, sleeps: bool = True) -> None:
        """Allocate nothing yet.

        Args:
            device: device of the values.
            sleeps: whether a waiting thread sleeps; see Fence.
        """
        self._pinned = device.type == "cuda"
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._came = Fence(device, sleeps=sleeps)
        self._sent: list[Tensor] = []

    def send(self, *tensors: Tensor) -> None:
        """Copy tensors behind what the current stream has to do."""
        if not self._pinned:
            self._sent = list(tensors)
            return
        size = sum(_bytes(x) for x in tensors)
        self.reserve(size)
        self._sent, at = [], 0
        for x in tensors:
            own = self._buffer[at : at + x.nbytes].view(x.dtype).view(x.shape)
            own.copy_(x, non_blocking=True)
            self._sent.append(own)
            at += _bytes(x)
        self._came.mark()

    def reserve(self, size: int) -> None:
        """Have pinned memory for this number of bytes: to allocate it takes a while."""
        if self._pinned and len(self._buffer) < size:
            self._buffer = torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def wait(self) -> list[Tensor]:
        """Wait for the values that were sent last; they are valid until more is sent."""
        if self._pinned:
            self._came.reached()
        return self._sent

    def read(self, x: Tensor) -> Tensor:
        """A tensor's values, valid until the next are read."""
        self.send(x.detach())
        return self.wait()[0]


def to_host(tree: T) -> T:
    """The same nested containers with copies of all tensors that are on a device, on the host."""
    leaves, how = tree_flatten(tree)
    away = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.is_cuda]
    if not away:
        return tree
    together: list[int] = []
    size = 0
    for i in away:
        size += _bytes(leaves[i])
        if together and size > _MOST_BYTES:
            _copy_out(leaves, together)
            together, size = [], _bytes(leaves[i])
        together.append(i)
    _copy_out(leaves, together)
    found: T = tree_unflatten(leaves, how)
    return found


def _copy_out(leaves: list[Tensor], which: Sequence[int]) -> None:
    """Replace some tensors by copies on the host."""
    readback = Readback(leaves[which[0]].device)  # torch keeps the pinned memory for the next
    readback.send(*(leaves[i].detach() for i in which))
    for i, came in zip(which, readback.wait(), strict=True):
        leaves[i] = came.clone()


def _bytes(x: Tensor) -> int:
    return -(-x.nbytes // _ALIGNED) * _ALIGNED
