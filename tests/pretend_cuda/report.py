"""Faults and synchronisations, each with the line of murmur that caused it."""

import collections
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import FrameType

# Before Python 3.12 these are functions of their own.
_COMPREHENSION = re.compile(r"(\.<locals>\.<(listcomp|dictcomp|setcomp|genexpr|lambda)>)+$")

_WAITING = ("Fence.", "Readback.", "to_host", "_copy_out")


class Kind(StrEnum):
    """Kinds of faults.

    Attributes:
        MIX: tensors, or a tensor and a generator, of two devices in one operation.
        SYNC: a synchronisation in a function that is not allowed to synchronise.
        GRAPH: an operation that is illegal during the capture of a graph.
        RACE: two streams use the same memory, one writes, and nothing orders them.
        REUSE: memory is reused while an operation of another stream may still use it.
        HOST: the host uses pinned memory before an asynchronous copy was awaited.
        POOL: what a graph returned is read after another graph of its memory pool was replayed.
    """

    MIX = "mixing"
    SYNC = "sync"
    GRAPH = "in a graph"
    RACE = "race"
    REUSE = "reuse"
    HOST = "host memory"
    POOL = "pool"


@dataclass(frozen=True)
class Site:
    """A line of murmur or of its tests."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} ({self.function})"


@dataclass(frozen=True)
class Fault:
    """A finding."""

    kind: Kind
    what: str
    site: Site

    def __str__(self) -> str:
        return f"{self.kind}: {self.what} at {self.site}"


class Report:
    """Faults and allowed synchronisations, counted.

    Attributes:
        faults: with how often each was met.
        syncs: what was waited for where that is allowed.
    """

    def __init__(self, allowed: Mapping[str, str], folders: tuple[str, ...]) -> None:
        """Make an empty report.

        Args:
            allowed: qualified names of functions that may synchronise, with the reason; with
                "*" behind the name also what they call; with ": Event.synchronize" behind that,
                this kind alone.
            folders: folders of source files; the innermost frame in one of them is reported.
        """
        self.faults: collections.Counter[Fault] = collections.Counter()
        self.syncs: collections.Counter[tuple[str, Site]] = collections.Counter()
        self._allowed = frozenset(allowed)
        self._beneath = frozenset(name.removesuffix("*") for name in allowed if "*" in name)
        self._folders = folders
        self._ours: dict[str, str | None] = {}  # file name -> its short name, None: not ours

    def fault(self, kind: Kind, what: str, site: Site | None = None) -> None:
        """Add a fault; site: where; None: the innermost line of ours."""
        self.faults[Fault(kind, what, site or self.site())] += 1

    def sync(self, what: str) -> None:
        """Add a synchronisation: a fault unless the function is allowed to synchronise."""
        site = self.site()
        names = {site.function, f"{site.function}: {what}"}
        callers = (name for caller in _callers() for name in (caller, f"{caller}*: {what}"))
        if not self._allowed.isdisjoint(names) or any(name in self._beneath for name in callers):
            self.syncs[what, site] += 1
        else:
            self.fault(Kind.SYNC, what, site)

    def site(self) -> Site:
        """The innermost frame in our folders, but for those that wait for others."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            short = self._short(frame)
            if short and not frame.f_code.co_qualname.startswith(_WAITING):
                return Site(short, frame.f_lineno, _COMPREHENSION.sub("", frame.f_code.co_qualname))
            frame = frame.f_back
        return Site("?", 0, "?")

    def _short(self, frame: FrameType) -> str | None:
        name = frame.f_code.co_filename
        if name not in self._ours:
            parts = name.split("/")
            at = [i for i, part in enumerate(parts[:-1]) if part in self._folders]
            here = "site-packages" in parts or parts[-2:-1] == ["pretend_cuda"]
            ours = bool(at) and (not here or parts[-1].startswith("test_"))
            self._ours[name] = "/".join(parts[at[-1] :]) if ours else None
        return self._ours[name]

    def of(self, kind: Kind) -> list[Fault]:
        """The faults of a kind."""
        return [fault for fault in self.faults if fault.kind is kind]

    def lines(self) -> list[str]:
        """One line per fault, with its count."""
        return sorted(f"{count} x {fault}" for fault, count in self.faults.items())


def _callers() -> Iterator[str]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame.f_code.co_qualname
        frame = frame.f_back
