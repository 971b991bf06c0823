"""Signals that ask a process to end, while it supervises others."""

import os
import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType

from murmur.shared.process.process import ENDING_SIGNALS, drop_lost_terminal, handled


def stopped_by_signals() -> AbstractContextManager[None]:
    """Raise KeyboardInterrupt on signals that ask for the end; only in the main thread.

    A second Ctrl-C or SIGTERM raises it again. A second SIGHUP does not: a terminal that is closed
    sends it, and so does the shell. Under nohup SIGHUP stays ignored.
    """
    told = False

    def handle(number: int, _frame: FrameType | None) -> None:
        nonlocal told
        if number == signal.SIGHUP:
            drop_lost_terminal()
            if told:
                return
        told = True
        raise KeyboardInterrupt

    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    # A shell's background job ignores SIGINT, and is to be stopped by it all the same.
    return handled((n for n in ENDING_SIGNALS if not (ignored and n == signal.SIGHUP)), handle)


_ends: list[Callable[[], None]] = []  # of trainings in the background of this process


def end_before_signals(end: Callable[[], None]) -> None:
    """Call `end` before SIGTERM or SIGHUP ends this process by its default action.

    A handler of the caller's own is left alone, and so is everything if this is not the main
    thread, the only one that Python lets set handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    _ends.append(end)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _end_and_die)


def _end_and_die(number: int, _frame: FrameType | None) -> None:
    """End trainings in the background, then this process as if it had no handler."""
    signal.signal(number, signal.SIG_DFL)  # a second signal ends it at once
    while _ends:
        _ends.pop()()
    os.kill(os.getpid(), number)
