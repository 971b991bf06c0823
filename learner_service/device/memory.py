"""Measure free memory, and refuse what would take more."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple

import torch

from murmur.shared.process.errors import SpecError
from murmur.shared.process.host_memory import available_bytes

_GIB = 2**30


@dataclass
class _Limit:
    """Limit that `limited` sets.

    Attributes:
        bytes: learner.memory_limit_gib; 0: what is free.
        asked: bytes that `require_room` and `count` have granted so far.
    """

    bytes: float = 0.0
    asked: float = 0.0


_limit: ContextVar[_Limit | None] = ContextVar("limit", default=None)


class Learning(NamedTuple):
    """Batch that networks built now will learn from at once.

    Attributes:
        rows: agents' rows, or images; 0: not known.
        device: device of the networks.
        itemsize: bytes of a number of a forward pass.
    """

    rows: int
    device: torch.device
    itemsize: int


_learning: ContextVar[Learning | None] = ContextVar("learning", default=None)


@contextmanager
def limited(gib: float) -> Iterator[None]:
    """Sets learner.memory_limit_gib for `require_room`; 0: what is free."""
    token = _limit.set(_Limit(gib * _GIB))
    try:
        yield
    finally:
        _limit.reset(token)


@contextmanager
def learning_from(rows: int, device: torch.device, itemsize: int = 4) -> Iterator[None]:
    """Sets what `learning` returns; see Learning."""
    token = _learning.set(Learning(rows, device, itemsize))
    try:
        yield
    finally:
        _learning.reset(token)


def learning() -> Learning:
    """Return what `learning_from` has set; by default nothing is known."""
    return _learning.get() or Learning(0, torch.device("cpu"), 4)


def room(device: torch.device) -> float:
    """Bytes that may still be asked for."""
    limit = _limit.get()
    if limit is None or not limit.bytes:
        return free_bytes(device)
    return max(limit.bytes - limit.asked, 0)


def free_bytes(device: torch.device) -> int:
    """Memory that is free on a device; on the host, what its container may still take."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_bytes()


def require_room(needed: float, what: str, advice: str, device: torch.device) -> None:
    """Refuse what does not fit, before it is allocated; with a limit all that was asked for counts.

    Args:
        needed: bytes.
        what: takes them, for example "network 'cnn'".
        advice: change to make, for the message.
        device: device of the memory.

    Raises:
        SpecError: naming both figures.
    """
    limit, left = _limit.get(), room(device)
    if needed > left:
        told = bool(limit and limit.bytes)
        source = "learner.memory_limit_gib allows" if told else f"free on {device.type}:"
        whole = limit.bytes if limit and told else left
        others = f", {limit.asked / _GIB:.1f} GiB of it for the rest" if limit and told else ""
        raise SpecError(
            f"{what} would take {needed / _GIB:.1f} GiB; {source} {whole / _GIB:.1f} GiB{others}; "
            f"{advice}"
        )
    count(needed)


def count(needed: float) -> None:
    """Count bytes against the limit that something else has checked.

    Args:
        needed: bytes.
    """
    limit = _limit.get()
    if limit is not None:
        limit.asked += needed
