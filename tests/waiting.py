"""Waiting for a condition, the only way in which tests wait for something."""

import time
from collections.abc import Callable


def wait_until(
    condition: Callable[[], object],
    what: str | Callable[[], str] = "",
    timeout_s: float = 60.0,
    *,
    poll_s: float = 0.01,
) -> float:
    """Poll for a condition; returns how long it took, in seconds.

    Args:
        condition: what must become true; it may raise to end the wait.
        what: what is waited for, for the message; a function is called for it.
        timeout_s: longest wait, seconds.
        poll_s: pause between two looks, seconds.

    Raises:
        TimeoutError: naming what was waited for.
    """
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > timeout_s:
            raise TimeoutError(f"{what() if callable(what) else what}: not within {timeout_s:g} s")
        time.sleep(poll_s)
    return time.monotonic() - began
