"""CUDA streams: acting and learning have one each, and order their work by events alone.

Work of one stream runs in order; between streams there is no order but that of fences. Elsewhere
than on CUDA all of it does nothing.
"""

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def enter_stream(device: torch.device, *, urgent: bool = False) -> None:
    """Give the calling thread a stream of its own, behind all that the default stream has to do.

    Args:
        device: the run's.
        urgent: the device runs its kernels before those of other streams.
    """
    if device.type != "cuda":
        return
    stream = torch.cuda.Stream(device, priority=-1 if urgent else 0)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.default_stream(device))
    torch.cuda.set_stream(stream)


class Fence:
    """A point in the work of one stream that others do not overtake.

    One thread marks it, any waits. A wait costs the host nothing: the device waits.
    """

    def __init__(self, device: torch.device, *, sleeps: bool = False) -> None:
        """Nothing to wait for yet.

        Args:
            device: device of the streams.
            sleeps: `reached` leaves the processor to others, and wakes some 50 us late.
        """
        on_gpu = device.type == "cuda"
        event = torch.cuda.Event(blocking=sleeps) if on_gpu else None  # type: ignore[no-untyped-call]
        if event is not None:
            event.record(torch.cuda.current_stream(device))  # makes it: see DeviceClock
        self._event, self._device = event, device

    def mark(self) -> None:
        """Let others wait for all that the calling thread's stream was given so far."""
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        """Let what the calling thread's stream is given from here on come after the last mark."""
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)

    def reached(self) -> None:
        """Wait, on the host, until the device has passed the last mark."""
        if self._event is not None:
            self._event.synchronize()


class Pace:
    """Keeps a thread at most a few pieces of work ahead of the device.

    What the device was given it does first, whatever other streams ask for meanwhile: copies of
    theirs wait in the queues of the same copy engine. So acting waits a few milliseconds at most.
    """

    def __init__(self, device: torch.device, ahead: int = 8) -> None:
        """Nothing was given yet.

        Args:
            device: device that does the work.
            ahead: pieces that may be under way or wait.
        """
        self._fences = [Fence(device, sleeps=True) for _ in range(ahead)]
        self._next = 0

    def given(self) -> None:
        """A piece of work was given to the calling thread's stream: wait until few are left."""
        fence = self._fences[self._next]
        fence.mark()
        self._next = (self._next + 1) % len(self._fences)
        self._fences[self._next].reached()


def stream_lock(device: torch.device) -> AbstractContextManager[Any]:
    """Make a lock of memory that several threads use, each from its own stream.

        with memory_lock:  # a thread may nest them
            memory.copy_(rows)  # the device waits until earlier holders' kernels have run

    It is held while kernels are launched, not while they run. On a CPU it does nothing.
    """
    return _StreamLock(device) if device.type == "cuda" else nullcontext()


class _StreamLock:
    def __init__(self, device: torch.device) -> None:
        self._lock, self._fence = threading.RLock(), Fence(device)

    def __enter__(self) -> None:
        self._lock.acquire()
        self._fence.wait()

    def __exit__(self, *_: object) -> None:
        self._fence.mark()
        self._lock.release()
