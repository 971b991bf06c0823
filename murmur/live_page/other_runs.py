"""Other runs in the folder of runs, whose curves the page lays over those of its own run."""

import time
from collections.abc import Iterator
from pathlib import Path
from threading import Lock
from typing import Any

from murmur.live_page.curves import Curves
from murmur.runs.run_folder import ProgressTail, RunFolder

MOST_RUNS = 200  # in the list, the newest
_KEPT = 4  # runs whose curves stay in memory
_LIST_S = 5.0  # between two looks at the folder, however many pages are open


class OtherRuns:
    """Runs beside a run, those of sweeps among them. Used by any thread."""

    def __init__(self, run: RunFolder) -> None:
        """Look beside `run`; nothing is read yet."""
        self._own = run.path.resolve()
        parent = self._own.parent
        self._top = parent.parent if (parent / "sweep.json").is_file() else parent
        self._lock = Lock()
        self._runs: dict[str, Path] = {}
        self._listed = float("-inf")
        self._readers: dict[str, _Reader] = {}

    def names(self) -> list[str]:
        """Return the runs' folders relative to the folder of runs, the newest first."""
        with self._lock:
            return [*self._list()]

    def _list(self) -> dict[str, Path]:
        if time.monotonic() - self._listed < _LIST_S:
            return self._runs
        found = []
        for pattern in ("*/progress.jsonl", "*/*/progress.jsonl"):
            for file in self._top.glob(pattern):
                if file.parent == self._own or file.parent.name.startswith("begun-"):
                    continue
                try:
                    found.append((file.stat().st_mtime, file.parent))
                except OSError:  # it was deleted meanwhile
                    continue
        newest = sorted(found, reverse=True)[:MOST_RUNS]
        self._runs = {str(path.relative_to(self._top)): path for _, path in newest}
        self._listed = time.monotonic()
        return self._runs

    def curves(self, name: str, cursor: str, longest_s: float) -> dict[str, Any] | None:
        """Return a run's curves after a reader's cursor; None if `names` does not have it.

        Args:
            name: folder as `names` gives it; only those are read, whatever is asked for.
            cursor: cursor of the reader, see `Curves.since`.
            longest_s: longest time to read for [s]; `behind` says if that was too short.
        """
        with self._lock:
            path = self._list().get(name)
            if path is None:
                return None
            reader = self._readers.pop(name, None)
            if reader is None or reader.replaced():
                reader = _Reader(path / "progress.jsonl")
            self._readers[name] = reader  # the newest last
            for oldest in list(self._readers)[:-_KEPT]:
                del self._readers[oldest]
            behind = reader.read(longest_s)
            return {"behind": behind, "curves": reader.curves.since(cursor)}


class _Reader:
    """Reader of one run's curves."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._tail = ProgressTail(file)
        self._reading: Iterator[None] | None = None
        self._had = file_identity(file)
        self.curves = Curves()

    def replaced(self) -> bool:
        """Return whether the file was written again from its start."""
        had, self._had = self._had, file_identity(self._file)
        return was_replaced(had, self._had)

    def read(self, longest_s: float) -> bool:
        """Read new records; return whether there are more."""
        started = time.monotonic()
        if self._reading is None:
            self._reading = self._all_that_is_new()
        for _ in self._reading:
            if time.monotonic() - started > longest_s:
                return True
        self._reading = None
        return False

    def _all_that_is_new(self) -> Iterator[None]:
        for record in self._tail:
            self.curves.take(record)
            yield


def file_identity(file: Path) -> tuple[int, int]:
    """Return inode and size of a file; zeros if it does not exist."""
    try:
        status = file.stat()
    except OSError:
        return 0, 0
    return status.st_ino, status.st_size


def was_replaced(had: tuple[int, int], now: tuple[int, int]) -> bool:
    """Return whether a file that grows was replaced between two looks at its identity."""
    return bool(had[0] and now[0]) and (had[0] != now[0] or now[1] < had[1])
