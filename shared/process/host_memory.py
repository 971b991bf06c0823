"""Free memory of this machine or control group, and the kernel's out-of-memory kills."""

from pathlib import Path

import psutil

from murmur.shared.process.control_groups import ControlGroup, own_groups
from murmur.shared.process.files import size_text

# Limit, use, and what of that the kernel takes back when it is needed, by the groups' version.
_LIMITS = {1: ("memory.limit_in_bytes",), 2: ("memory.max", "memory.high")}
_USED = {1: "memory.usage_in_bytes", 2: "memory.current"}
_RECLAIMABLE = {1: "total_inactive_file", 2: "inactive_file"}
_KILLS = {1: "memory.oom_control", 2: "memory.events"}
_NO_LIMIT = 1 << 60  # version 1 has no word for it but a number that no machine has


def available_bytes(root: Path = Path("/")) -> int:
    """Return the bytes that processes may still take: of the host, or a control group if less.

    Args:
        root: folder that contains proc and sys.
    """
    left: int = psutil.virtual_memory().available
    for group in own_groups("memory", root):
        limit, used = _limit(group), group.number(_USED[group.version])
        if limit is not None and used is not None:
            cache = group.number("memory.stat", _RECLAIMABLE[group.version]) or 0
            left = min(left, limit - max(used - cache, 0))
    return max(left, 0)


def total_bytes(root: Path = Path("/")) -> int:
    """Return the bytes of the host's memory, or a control group's limit if it is less."""
    limits = [_limit(group) for group in own_groups("memory", root)]
    return min([psutil.virtual_memory().total, *(x for x in limits if x is not None)])


def _limit(group: ControlGroup) -> int | None:
    """Return the group's limit, bytes; None if it has none."""
    limits = [group.number(file) for file in _LIMITS[group.version]]
    return min((x for x in limits if x is not None and x < _NO_LIMIT), default=None)


class MemoryKills:
    """The kernel's counts of processes that it killed for memory, to explain a SIGKILL.

    Take the counts before a process starts; compare them when it was killed.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        """Take the counts.

        Args:
            root: folder that contains proc and sys.
        """
        self._root = root
        self._before = self._counts()

    def explanation(self) -> str:
        """Explain a kill for memory since the counts were taken; "" if none was counted."""
        before, now = self._before, self._counts()
        for folder, (count, limit) in now.items():
            if count <= before.get(folder, (0, None))[0]:
                continue
            if limit is None:
                return "out of memory: the system had none left"
            return f"out of memory: control group {folder} allows {size_text(limit)}"
        return ""

    def _counts(self) -> dict[str, tuple[int, int | None]]:
        """Return (kills, limit in bytes) by group; those of the whole machine last, as ""."""
        groups = [*own_groups("memory", self._root)]
        counts = {
            str(group.folder): (group.number(_KILLS[group.version], "oom_kill") or 0, _limit(group))
            for group in groups
        }
        machine = ControlGroup(self._root / "proc", 2).number("vmstat", "oom_kill")
        return {k: v for k, v in counts.items() if v[1] is not None} | {"": (machine or 0, None)}
