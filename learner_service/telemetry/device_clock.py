"""How long the device worked, without ever waiting for it."""

import threading
import time
from collections import deque

import torch

_ANY = "any"


class DeviceClock:
    """Seconds in which the device worked for us, and on what.

    On CUDA a pair of events brackets each piece of work; pairs are read later, once the device has
    passed them. A piece includes the device's own waits for the host to launch the next kernel:
    compare with NVML's utilisation. On the CPU the host's clock brackets the pieces. Pieces of two
    threads that overlap count once in the total.
    """

    def __init__(self, device: torch.device) -> None:
        """Begin at zero."""
        self._cuda = device.type == "cuda"
        self._lock = threading.Lock()
        self._seconds: dict[str, float] = {_ANY: 0.0}
        self._depth = 0
        self._since: float | torch.cuda.Event = 0.0  # when the first of the pieces under way began
        self._pending: deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = deque()

    def working(self, kind: str) -> "_Work":
        """A context: count the work that is begun in it as `kind`."""
        return _Work(self, kind)

    def begin(self) -> "float | torch.cuda.Event":
        """A piece of work begins; returns when."""
        with self._lock:
            begun = self._mark()
            if self._depth == 0:
                self._since = begun
            self._depth += 1
        return begun

    def end(self, kind: str, begun: "float | torch.cuda.Event") -> None:
        """A piece of work ends."""
        with self._lock:
            ended = self._mark()
            self._depth -= 1
            self._note(kind, begun, ended)
            if self._depth == 0:
                self._note(_ANY, self._since, ended)

    def seconds(self) -> tuple[float, dict[str, float]]:
        """Busy seconds, and those of each kind."""
        with self._lock:
            while self._pending and self._pending[0][2].query():  # type: ignore[no-untyped-call]
                kind, begun, ended = self._pending.popleft()
                self._add(kind, begun.elapsed_time(ended) / 1e3)
            kinds = dict(self._seconds)
        return kinds.pop(_ANY), kinds

    def _mark(self) -> "float | torch.cuda.Event":
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _note(
        self, kind: str, begun: "float | torch.cuda.Event", ended: "float | torch.cuda.Event"
    ) -> None:
        if isinstance(begun, float):
            assert isinstance(ended, float)
            self._add(kind, ended - begun)
        else:
            assert not isinstance(ended, float)
            self._pending.append((kind, begun, ended))

    def _add(self, kind: str, seconds: float) -> None:
        self._seconds[kind] = self._seconds.get(kind, 0.0) + seconds


class _Work:
    """One piece of work. A class: a generator's context takes half as long again."""

    __slots__ = ("_begun", "_clock", "_kind")

    def __init__(self, clock: DeviceClock, kind: str) -> None:
        self._clock, self._kind = clock, kind

    def __enter__(self) -> None:
        self._begun = self._clock.begin()

    def __exit__(self, *_: object) -> None:
        self._clock.end(self._kind, self._begun)
