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

    def __init__(self, device: torch.device) -> None:
        """Nothing to wait for yet."""
        on_gpu = device.type == "cuda"
        self._event = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]
        self._device = device

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


class Turns:
    """Memory that threads use in turns, each from its own stream: no turn overtakes another.

        with turns.take():
            memory.copy_(rows)  # the device comes to it when it is through with earlier turns

    The lock is held while a turn's kernels are launched, not while they run.
    """

    def __init__(self, device: torch.device) -> None:
        """No stream has had a turn."""
        self._turn = _Turn(device) if device.type == "cuda" else nullcontext()

    def take(self) -> AbstractContextManager[Any]:
        """A context for what uses the memory; a thread may nest them."""
        return self._turn


class _Turn:
    def __init__(self, device: torch.device) -> None:
        self._lock, self._fence = threading.RLock(), Fence(device)

    def __enter__(self) -> None:
        self._lock.acquire()
        self._fence.wait()

    def __exit__(self, *_: object) -> None:
        self._fence.mark()
        self._lock.release()
