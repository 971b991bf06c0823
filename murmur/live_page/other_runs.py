"""Other runs in the folder of runs, whose curves the page lays over those of its own run."""

import time
from pathlib import Path
from threading import Lock
from typing import Any

from murmur.live_page.curves import CurveReader
from murmur.runs.run_folder import RunFolder

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
        self._readers: dict[str, CurveReader] = {}

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
                reader = CurveReader(path / "progress.jsonl")
            self._readers[name] = reader  # the newest last
            for oldest in list(self._readers)[:-_KEPT]:
                del self._readers[oldest]
            behind = reader.read(longest_s)
            return {"behind": behind, "curves": reader.curves.since(cursor)}
