"""Ctrl-C and SIGTERM as KeyboardInterrupt while processes are supervised."""

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM raise KeyboardInterrupt; Python allows it in the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)  # a shell's background job ignores SIGINT
    before = [signal.signal(number, signal.default_int_handler) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
