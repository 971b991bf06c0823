"""Counts that outlive the process: a small file of the run's folder, mapped into memory.

What a process has written to a mapped page is in the file however the process ends. So a count is
exact to the last row, for the price of a store to memory. There are 256 slots; a run whose metrics
have more labels ends with an error that says so.
"""

import json
import threading
from pathlib import Path

import numpy as np

from murmur.shared.process.errors import ResourceError
from murmur.shared.process.files import write_whole

_SLOT = np.dtype([("name", "S120"), ("value", "<f8")])
_NUM_SLOTS = 256


def counters_of(run_dir: Path, rank: int, size: int) -> "PersistentCounters":
    """The counts of a rank; those of ranks that are gone are added to one that is there.

    Args:
        run_dir: the run's folder.
        rank: rank of this learner.
        size: number of learners.

    Raises:
        ResourceError: see PersistentCounters.
    """
    kept = PersistentCounters(run_dir / (f"counters-{rank}.bin" if rank else "counters.bin"))
    for path in run_dir.glob("counters-*.bin"):
        number = path.stem.partition("-")[2]
        if not number.isdecimal() or int(number) < size or int(number) % size != rank:
            continue
        # Renamed first: whatever happens from here on, it is not added twice.
        gone = PersistentCounters(path.rename(path.with_suffix(".added")))
        for name, count in gone.items().items():
            kept[kept.slot(name)] += count
        path.with_suffix(".added").unlink()
    return kept


class PersistentCounters:
    """Named numbers. Each has one writing thread."""

    def __init__(self, path: Path) -> None:
        """Open the file; make it if there is none.

        Raises:
            ResourceError: if it cannot be written, or something else than murmur wrote it.
        """
        size = _NUM_SLOTS * _SLOT.itemsize
        try:
            if not path.exists() or not path.stat().st_size:
                # Written, not only lengthened: a full disk must show now and not at a page fault.
                write_whole(path, bytes(size))
            if path.stat().st_size != size:
                raise _damaged(path)
            # As a plain array: a memmap makes an object of its class at every look.
            slots = np.asarray(np.memmap(path, _SLOT, "r+", shape=(_NUM_SLOTS,)))
        except OSError as error:
            raise ResourceError(f"cannot write {path}: {error.strerror}") from None
        self._names, self._values = slots["name"], slots["value"]
        names = self._names.tolist()
        if not all(_names_count(name) for name in names if name) or not (
            np.isfinite(self._values).all() and (self._values >= 0).all()
        ):
            raise _damaged(path)
        self._slot = {n.decode(): i for i, n in enumerate(names) if n}
        self._lock = threading.Lock()

    def items(self) -> dict[str, float]:
        """All counts. Called by any thread, while others add names."""
        with self._lock:
            return {name: float(self._values[i]) for name, i in self._slot.items()}

    def slot(self, name: str) -> int:
        """Return the index of a count's slot, and assign one if it has none."""
        with self._lock:
            if name not in self._slot:
                i = len(self._slot)
                if i == _NUM_SLOTS or len(name.encode()) > _SLOT["name"].itemsize:
                    raise ValueError(f"no room for count '{name}'")
                self._names[i] = name.encode()
                self._slot[name] = i
            return self._slot[name]

    def __getitem__(self, slot: int) -> float:
        """A count, by its slot."""
        return float(self._values.item(slot))

    def __setitem__(self, slot: int, value: float) -> None:
        """Set a count."""
        self._values[slot] = value


def _names_count(name: bytes) -> bool:
    """Whether a name is a metric's and its labels, as metrics.py writes them."""
    try:
        metric, labels = json.loads(name)
    except (ValueError, TypeError):
        return False
    return isinstance(metric, str) and isinstance(labels, dict)


def _damaged(path: Path) -> ResourceError:
    return ResourceError(
        f"{path} holds no counters of murmur's: it is damaged; delete it, and the counters of "
        "/metrics start from the checkpoint"
    )
