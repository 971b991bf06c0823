"""CUDA streams: acting and learning have one each, and order their work by events alone.

Work of one stream runs in order; between streams there is no order but that of fences. Elsewhere
than on CUDA all of it does nothing.
"""

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
