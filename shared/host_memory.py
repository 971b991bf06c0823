"""How much memory this machine, or this container, has left."""

from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")


def available_bytes() -> int:
    """Memory that processes may still take: of the host, or of the control group if it is less."""
    free: int = psutil.virtual_memory().available
    try:
        most = (_CGROUP / "memory.max").read_text().strip()
        if most != "max":
            free = min(free, int(most) - int((_CGROUP / "memory.current").read_text()))
    except (OSError, ValueError):  # no control group of version 2
        pass
    return max(free, 0)
