"""Measure how long the device worked, without ever waiting for it."""

import threading
import time
from collections import deque
from typing import cast

import torch

_REBASE_S = 60.0  # elapsed_time() is a float32 of milliseconds: after a minute still exact to 4 us
_MANY_PIECES = 256  # are looked at without a request
# Made at the start. An event's first use makes it in the driver, which waits with the interpreter's
# lock held while another thread's copy to pageable memory is under way.
_EVENTS = 4 * _MANY_PIECES


class DeviceClock:
    """Seconds in which the device worked for us, on what, and how long on two things at once.

    On CUDA a pair of events on the calling thread's stream brackets each piece of work; pairs are
    read later, once the device has passed them, and used again. A piece includes the device's own
    waits for the host to launch the next kernel: compare with NVML's utilisation. On the CPU the
    host's clock brackets the pieces. Pieces that overlap, of two threads, count once in the total.
    """

    def __init__(self, device: torch.device) -> None:
        """Begin at zero."""
        self.cuda = device.type == "cuda"
        self._lock = threading.Lock()
        self._pieces: deque[_Work] = deque()  # that are not counted yet
        self._seconds: dict[str, float] = {}
        self._any = self._beside = 0.0
        self._until = 0.0  # the total counts up to here
        self._zero: torch.cuda.Event | None = None
        self._zero_s = 0.0  # when it was
        self._free: list[torch.cuda.Event] = []
        if self.cuda:
            self._free = [torch.cuda.Event(enable_timing=True) for _ in range(_EVENTS)]  # type: ignore[no-untyped-call]
            for event in self._free:
                event.record()

    def working(self, kind: str) -> "_Work":
        """A context: count the work that is begun in it as `kind`."""
        return _Work(self, kind)

    def seconds(self) -> tuple[float, dict[str, float]]:
        """Busy seconds, and those of each kind."""
        with self._lock:
            self._count()
            return self._any, dict(self._seconds)

    def beside(self) -> float:
        """Seconds in which the device worked on two pieces at once."""
        with self._lock:
            self._count()
            return self._beside

    def add(self, piece: "_Work") -> None:
        """A piece of work begins."""
        self._pieces.append(piece)
        if len(self._pieces) > _MANY_PIECES:
            self.seconds()

    def mark(self) -> "float | torch.cuda.Event":
        """This moment of the host, or of the calling thread's stream."""
        if not self.cuda:
            return time.perf_counter()
        try:
            event = self._free.pop()
        except IndexError:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _count(self) -> None:
        """Count pieces that have ended, in the order of their beginnings; the lock is held."""
        waiting: list[_Work] = []
        over: list[_Work] = []
        for _ in range(len(self._pieces)):
            piece = self._pieces.popleft()
            (over if piece.over else waiting).append(piece)
        done = [(self._time(p.begun), self._time(cast("float", p.ended)), p) for p in over]
        # Asked after `over`: what has not begun by now begins later than all that is done.
        under_way = [self._time(p.begun) for p in waiting if _passed(p.begun)]
        first = min(under_way, default=float("inf"))
        for begun, ended, piece in sorted(done, key=lambda times: times[:2]):
            if begun > first:
                waiting.append(piece)
                continue
            took, alone = ended - begun, max(0.0, ended - max(begun, self._until))
            self._seconds[piece.kind] = self._seconds.get(piece.kind, 0.0) + took
            self._any += alone
            self._beside += took - alone
            self._until = max(self._until, ended)
            for mark in (piece.begun, piece.ended):
                if isinstance(mark, torch.cuda.Event) and mark is not self._zero:
                    self._free.append(mark)
        self._pieces.extend(waiting)

    def _time(self, mark: "float | torch.cuda.Event") -> float:
        """When a mark was, in seconds from some moment on."""
        if isinstance(mark, float):
            return mark
        if self._zero is None:
            self._zero = mark
        seconds = self._zero_s + float(self._zero.elapsed_time(mark)) / 1e3
        if seconds - self._zero_s > _REBASE_S:
            self._zero, self._zero_s = mark, seconds
        return seconds


class _Work:
    """One piece of work. A class: a generator's context takes half as long again."""

    __slots__ = ("_clock", "begun", "ended", "kind")

    def __init__(self, clock: DeviceClock, kind: str) -> None:
        self._clock, self.kind = clock, kind
        self.ended: float | torch.cuda.Event | None = None

    @property
    def over(self) -> bool:
        """Whether the device has passed its end."""
        return self.ended is not None and _passed(self.ended)

    def __enter__(self) -> None:
        self.begun = self._clock.mark()
        self._clock.add(self)

    def __exit__(self, *_: object) -> None:
        self.ended = self._clock.mark()


def _passed(mark: "float | torch.cuda.Event") -> bool:
    return isinstance(mark, float) or bool(mark.query())  # type: ignore[no-untyped-call]
