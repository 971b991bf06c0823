"""How much memory there is, and the refusal of what would take more."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

import psutil
import torch

from shared.errors import SpecError

_CGROUP = Path("/sys/fs/cgroup")
_GIB = 2**30
_limit: ContextVar[float] = ContextVar("limit", default=0.0)


@contextmanager
def limited(gib: float) -> Iterator[None]:
    """Sets learner.memory_limit_gib for `require_room`; 0: what is free."""
    token = _limit.set(gib)
    try:
        yield
    finally:
        _limit.reset(token)


def free_bytes(device: torch.device) -> int:
    """Memory that is free on a device; on the host, what its container may still take."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free: int = psutil.virtual_memory().available
    try:
        most = (_CGROUP / "memory.max").read_text().strip()
        if most != "max":
            free = min(free, int(most) - int((_CGROUP / "memory.current").read_text()))
    except (OSError, ValueError):  # no control group of version 2
        pass
    return max(free, 0)


def require_room(needed: float, what: str, advice: str, device: torch.device) -> None:
    """Refuse what does not fit, before it is allocated.

    Args:
        needed: bytes.
        what: takes them, for example "network 'cnn'".
        advice: what to change.
        device: where.

    Raises:
        SpecError: naming both figures.
    """
    limit = _limit.get()
    room = limit * _GIB if limit else free_bytes(device)
    if needed > room:
        source = "learner.memory_limit_gib allows" if limit else f"free on {device.type}:"
        raise SpecError(
            f"{what} would take {needed / _GIB:.1f} GiB; {source} {room / _GIB:.1f} GiB; {advice}"
        )
