"""CPU seconds of this machine's programs: of all, and of a process with those it started."""

import contextlib
import os

import psutil


def machine_busy_seconds() -> float:
    """Return CPU seconds of any program, since boot, on the processors this process may use."""
    times = psutil.cpu_times(percpu=True)
    with contextlib.suppress(AttributeError, IndexError):  # not Linux; a processor is switched off
        times = [times[i] for i in os.sched_getaffinity(0)]
    # Of Linux alone: `iowait` is idle time, and `guest` is counted in `user`.
    return sum(sum(t[:8]) - t.idle - getattr(t, "iowait", 0.0) for t in times)


def tree_cpu_seconds(root: psutil.Process) -> float:
    """Return CPU seconds of a process and all below it, those that ended included.

    Args:
        root: process at the top; 0 is returned if it has ended.
    """
    total = 0.0
    with contextlib.suppress(psutil.Error):
        for process in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.Error):  # it has just ended
                t = process.cpu_times()
                total += t.user + t.system + t.children_user + t.children_system
    return total
