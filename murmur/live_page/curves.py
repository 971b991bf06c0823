"""Curves of a run, and of those beside it, in bounded memory.

However long a run is, it has a few hundred points with their spread.
"""

import math
import os
import secrets
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from threading import Lock
from typing import Any

from murmur.runs.run_folder import LineTail, RunFolder
from murmur.shared.process.ledger import since

MOST_POINTS = 512  # then two neighbors become one
MOST_EVALUATIONS = 1024
_MOST_RUNS = 200  # in the list of other runs, the newest
_RUNS_KEPT = 4  # other runs whose curves stay in memory
_LIST_S = 5.0  # between two looks at the folder of runs, however many pages are open
_AT = ("time", "seconds", "env_steps", "updates")
_FIGURES = ("return", "agent_steps_per_s", "policy_lag")

Point = dict[str, Any]


class Curves:
    """Points of progress and evaluations, added one after the other.

    A point stands for `stride` neighboring records: minimum, mean and maximum of each value, and
    the seconds of each state of the ledger, so neither a spike nor a second is lost. Of more than
    MOST_EVALUATIONS evaluations every second one is dropped.

    A reader holds a cursor, "<version>:<points>:<evaluations>", and gets what changed since.

    Attributes:
        points: points, the oldest first; `at` says where a point ends.
        evaluations: evaluations, the oldest first.
    """

    def __init__(self) -> None:
        """Start without points."""
        self.points: list[Point] = []
        self.evaluations: list[Point] = []
        self._stride = 1
        self._ledger: Mapping[str, Mapping[str, float]] = {}
        self._renew()

    def _renew(self) -> None:
        """Invalidate every reader's cursor: its points are no longer the beginning of these."""
        self._version = secrets.token_hex(4)

    def take(self, record: Mapping[str, Any]) -> None:
        """Add a record of progress.jsonl."""
        if record.get("kind") == "evaluation":
            self.add_evaluation(record)
        elif record.get("kind") == "progress":
            self.add(record)

    def add(self, record: Mapping[str, Any]) -> None:
        """Add a record of kind "progress"."""
        self._rewind(self.points, record)
        spent = _spent(self._ledger, record.get("ledger") or {})
        self._ledger = record.get("ledger") or {}
        new: Point = {
            "records": 1,
            "at": {name: record.get(name) for name in _AT},
            "values": {name: [v, v, v, 1] for name, v in _values(record)},
            "ledger": spent,
        }
        if self.points and self.points[-1]["records"] < self._stride:
            self.points[-1] = _merged(self.points[-1], new)
            return
        self.points.append(new)
        if len(self.points) > MOST_POINTS:
            old = self.points
            self.points = [_merged(*old[i : i + 2]) for i in range(0, len(old) - 1, 2)]
            self.points += old[len(old) - len(old) % 2 :]
            self._stride *= 2
            self._renew()

    def add_evaluation(self, record: Mapping[str, Any]) -> None:
        """Add a record of kind "evaluation"."""
        self._rewind(self.evaluations, record, again=True)
        metrics = {
            name: [_finite(x) for x in (m.get("mean"), *(m.get("ci95") or (None, None)))]
            for name, m in (record.get("metrics") or {}).items()
        }
        self.evaluations.append({"at": {n: record.get(n) for n in _AT}, "metrics": metrics})
        if len(self.evaluations) > MOST_EVALUATIONS:
            self.evaluations = [*self.evaluations[:-1:2], self.evaluations[-1]]
            self._renew()

    def _rewind(
        self, points: list[Point], record: Mapping[str, Any], *, again: bool = False
    ) -> None:
        """Drop points that a resumed run makes again."""
        steps = record.get("env_steps") or 0
        had = (points[-1]["at"]["env_steps"] or 0) if points else -1
        if had < steps or (had == steps and not again):
            return
        while points and (points[-1]["at"]["env_steps"] or 0) >= steps:
            points.pop()
        self._renew()

    def since(self, cursor: str) -> dict[str, Any]:
        """Return the points after a reader's cursor; all of them if it is "" or outdated."""
        version, _, counts = cursor.partition(":")
        first, _, evaluation = counts.partition(":")
        known = version == self._version and first.isdecimal() and evaluation.isdecimal()
        # The last point may have grown since.
        start = max(0, min(int(first), len(self.points)) - 1) if known else 0
        begin = min(int(evaluation), len(self.evaluations)) if known else 0
        return {
            "cursor": f"{self._version}:{len(self.points)}:{len(self.evaluations)}",
            "from": start,
            "points": [_shown(point) for point in self.points[start:]],
            "evaluations_from": begin,
            "evaluations": [{**e["at"], "metrics": e["metrics"]} for e in self.evaluations[begin:]],
        }


class CurveReader:
    """Reader of a run's curves from its progress file, some at a time.

    Attributes:
        curves: curves so far.
        behind: flag of records that the last `read` had no time for.
    """

    def __init__(self, file: Path) -> None:
        """Begin at the file's start; it need not exist yet."""
        self.curves, self.behind = Curves(), False
        self._file, self._tail = file, LineTail(file)
        self._status: os.stat_result | None = None
        self.replaced()
        self._steps = self.steps()

    def replaced(self) -> bool:
        """Return whether the file was written again from its start since the last call."""
        try:
            now = self._file.stat()
        except OSError:
            return False
        had, self._status = self._status or now, now
        return had.st_ino != now.st_ino or now.st_size < had.st_size

    def read(self, longest_s: float) -> bool:
        """Read new records for some seconds; return whether there are more."""
        started = time.monotonic()
        if not self.behind:
            self._steps = self.steps()
        self.behind = True
        for _ in self._steps:
            if time.monotonic() - started > longest_s:
                return True
        self.behind = False
        return False

    def steps(self) -> Iterator[None]:
        """Take all that is new, a step for each record."""
        for record in self._tail.records():
            self.take(record)
            yield

    def take(self, record: Mapping[str, Any]) -> None:
        """Take a record of progress.jsonl."""
        self.curves.take(record)


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
        newest = sorted(found, reverse=True)[:_MOST_RUNS]
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
            for oldest in list(self._readers)[:-_RUNS_KEPT]:
                del self._readers[oldest]
            behind = reader.read(longest_s)
            return {"behind": behind, "curves": reader.curves.since(cursor)}


def _values(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield every finite figure of a record, by its name on the page."""
    sections = {"": {name: record.get(name) for name in _FIGURES}}
    sections |= {f"{name}.": record.get(name) or {} for name in ("metrics", "losses")}
    courses = record.get("curriculum") or {}
    sections["curriculum."] = {name: at["number"] for name, at in courses.items()}
    for prefix, section in sections.items():
        for name, value in section.items():
            if (finite := _finite(value)) is not None:
                yield prefix + name, finite


def _finite(value: object) -> float | None:
    """Return a finite number; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _spent(
    before: Mapping[str, Mapping[str, float]], now: Mapping[str, Mapping[str, float]]
) -> dict[str, dict[str, float]]:
    """Return the seconds by thread and state between two readings of the ledger.

    A restarted learner counts from zero.
    """
    same = {
        t: had for t, had in before.items() if sum(had.values()) <= sum(now.get(t, {}).values())
    }
    return since(same, now)


def _merged(one: Point, two: Point) -> Point:
    """Merge two neighbors."""
    values = dict(one["values"])
    for name, (low, total, high, count) in two["values"].items():
        least, before, most, counted = values.get(name, (low, 0.0, high, 0))
        values[name] = [min(low, least), total + before, max(high, most), count + counted]
    ledger = {
        thread: Counter(one["ledger"].get(thread)) + Counter(two["ledger"].get(thread))
        for thread in one["ledger"] | two["ledger"]
    }
    return {**two, "records": one["records"] + two["records"], "values": values, "ledger": ledger}


def _shown(point: Point) -> Point:
    """Return a point for the page: minimum, mean and maximum, in five digits."""
    return {
        **point["at"],
        "values": {
            name: [_short(low), _short(total / count), _short(high)]
            for name, (low, total, high, count) in point["values"].items()
        },
        "ledger": {
            thread: {state: _short(seconds) for state, seconds in states.items() if seconds}
            for thread, states in point["ledger"].items()
        },
    }


def _short(value: float) -> float:
    return float(f"{value:.5g}")
