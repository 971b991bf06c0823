"""Processes that environments start: found and ended with their worker.

An environment may start simulators, shells and daemons. A worker that is killed cannot end them,
so its parent does. It recognizes them by the session that each worker leads, or by the variable
that they inherit; on Linux it adopts orphans, so that those are among its descendants.
"""

import contextlib
import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

VARIABLE = "MURMUR_WORKER"  # inherited by all that a worker starts
_SET_CHILD_SUBREAPER = 36  # of <linux/prctl.h>
_ROUNDS = 20  # a process may fork while it is being found
_KILLED_S = 1.0  # for a killed process to be gone


def adopt_orphans() -> None:
    """Adopt descendants after their parent ends (Linux); elsewhere do nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1)


@contextlib.contextmanager
def marked(mark: str, **more: str) -> Iterator[None]:
    """Set VARIABLE = mark, and `more`, for processes that are started in the block."""
    added = {VARIABLE: mark, **more}
    before = {name: os.environ.get(name) for name in added}
    os.environ.update(added)
    try:
        yield
    finally:
        for name, old in before.items():
            if old is None:
                del os.environ[name]
            else:
                os.environ[name] = old


def lead_session() -> None:
    """Make this process the leader of a session of its own, away from the terminal."""
    with contextlib.suppress(PermissionError):  # it is one already
        os.setsid()


def end_descendants(leader: int, mark: str) -> int:
    """Kill the processes that a worker left behind when it ended.

    Args:
        leader: process id of the worker.
        mark: value of VARIABLE in its environment.

    Returns:
        number of processes killed.
    """
    return _end_all(
        lambda: [p for p in _candidates() if p.pid != leader and _belongs(p, leader, mark)]
    )


def end_strangers(own: set[int]) -> int:
    """Kill all descendants but `own`, also those without session or mark; return their number.

    Call it when no worker runs.
    """
    if sys.platform != "linux":
        return 0
    return _end_all(lambda: [p for p in _descendants() if p.pid not in own])


def reap_orphans(own: set[int]) -> None:
    """Reap adopted children that have ended, but not `own`, which their creator waits for."""
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess, ChildProcessError):
            if child.pid not in own and child.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(child.pid, os.WNOHANG)


def child_ids() -> set[int]:
    """Return the process ids of this process's children."""
    return {child.pid for child in psutil.Process().children()}


def _descendants() -> list[psutil.Process]:
    try:
        return psutil.Process().children(recursive=True)
    except psutil.Error:
        return []


def _candidates() -> Iterator[psutil.Process]:
    """Yield processes that a worker may have started: descendants; all if none are adopted."""
    yield from _descendants() if sys.platform == "linux" else psutil.process_iter()


def _belongs(process: psutil.Process, leader: int, mark: str) -> bool:
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        if os.getsid(process.pid) == leader:
            return True
        return process.environ().get(VARIABLE) == mark
    except (psutil.Error, OSError):
        return False


def _end_all(find: Callable[[], list[psutil.Process]]) -> int:
    """Kill processes until `find` finds none; return the number killed."""
    ended: set[int] = set()
    for _ in range(_ROUNDS):
        found = find()
        if not found:
            break
        ended.update(p.pid for p in found)
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(found, _KILLED_S)  # reaps adopted processes
    return len(ended)


class Guardian:
    """A small process that ends the workers' descendants if this process is killed (Linux).

    It waits for the end of its standard input, which only this process can write to.
    """

    def __init__(self, mark: str) -> None:
        """Start the process.

        Args:
            mark: prefix of all workers' values of VARIABLE.
        """
        self._process: subprocess.Popen[bytes] | None = None
        if sys.platform == "linux":
            script = Path(__file__).with_name("guardian.py")
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(script), f"{VARIABLE}={mark}"],
                stdin=subprocess.PIPE,
                start_new_session=True,
            )

    def close(self) -> None:
        """End the process, after all workers have ended."""
        if self._process is not None:
            self._process.terminate()
            self._process.communicate()
