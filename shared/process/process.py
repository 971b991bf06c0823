"""Basics of every murmur process: logging, signals, scheduling, threads."""

import _thread
import asyncio
import contextlib
import ctypes
import json
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any, NoReturn, TypeVar

from murmur.shared.process.errors import ConfigError, ConnectionLostError, MurmurError
from murmur.shared.process.files import disk_error

T = TypeVar("T")

logger = logging.getLogger("murmur")

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")

# Images and services set it for metrics of their own, and murmur's would go to their folder.
FOREIGN_VARIABLES = ("PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir")


# Ask a process to end in order. Batch systems such as Slurm send SIGUSR1 to warn a job of its end,
# a closed terminal SIGHUP, Ctrl-\\ SIGQUIT.
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)


class _TextFormatter(logging.Formatter):
    """Formatter of one line per message: control characters in a message are escaped."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - of the base class
        record.message = _CONTROL.sub(_escaped, record.message)
        return super().formatMessage(record)


def _escaped(found: re.Match[str]) -> str:
    """Return a control character as Python's escape sequence."""
    return found[0].encode("unicode_escape").decode()


class _JsonFormatter(logging.Formatter):
    """Formatter of one JSON object per line, for log collectors."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname,
            "process": record.processName,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry)


def process_began(pid: int) -> int | None:
    """Return the start time of a process, in the kernel's ticks since boot; None if unknown.

    Unlike its wall-clock time, no jump of the clock changes it: proc_pid_stat(5), field 22.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def configure_logging(role: str) -> None:
    """Log to standard error, as text or, with MURMUR_LOG=json, as JSON lines.

    MURMUR_LOG_LEVEL, one of LEVELS, is the least level that is logged; INFO without it.

    Args:
        role: name of the process in every line, for example "learner" or "worker-0".

    Raises:
        ConfigError: for another level.
    """
    level = os.environ.get("MURMUR_LOG_LEVEL") or "INFO"
    if level.upper() not in LEVELS:
        raise ConfigError(
            f"environment variable MURMUR_LOG_LEVEL={level}: write one of {', '.join(LEVELS)}"
        )
    handler = logging.StreamHandler(sys.stderr)
    if os.environ.get("MURMUR_LOG") == "json":
        handler.setFormatter(_JsonFormatter())
    else:
        handler.setFormatter(
            _TextFormatter(f"%(asctime)s {role}: %(levelname)s %(message)s", "%H:%M:%S")
        )
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    threading.excepthook = _report_thread_error


def _report_thread_error(args: threading.ExceptHookArgs) -> None:
    """Log the error that ended a library's thread; a disk error in one line."""
    if isinstance(args.exc_value, OSError) and (known := disk_error(args.exc_value)):
        logger.error("%s", known)
    else:
        threading.__excepthook__(args)


def stop_on_signals() -> threading.Event:
    """Return an event that ENDING_SIGNALS set; a second signal ends the process at once.

    A second SIGHUP does not: a terminal that is closed sends it, and so does the shell. Under nohup
    SIGHUP stays ignored.
    """
    stop = threading.Event()

    def handle(number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            drop_lost_terminal()
        if stop.is_set() and number != signal.SIGHUP:
            os._exit(128 + number)
        # In a thread of its own: here `set` would wait for ever if the signal has interrupted the
        # event's `wait`, which holds its lock. This call, unlike Thread's, takes no lock itself.
        _thread.start_new_thread(stop.set, ())

    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    for number in ENDING_SIGNALS:
        if not (ignored and number == signal.SIGHUP):
            signal.signal(number, handle)
    return stop


def drop_lost_terminal() -> None:
    """Redirect standard output and error to /dev/null if their terminal was closed.

    Otherwise the next print raises while the process ends.
    """
    for descriptor in (1, 2):
        try:
            os.write(descriptor, b"")
        except OSError:
            with contextlib.suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


@contextlib.contextmanager
def handled(
    numbers: Iterable[signal.Signals],
    handler: Callable[[int, FrameType | None], None] | signal.Handlers,
) -> Iterator[None]:
    """Set a handler of signals for the block, then restore those before it.

    On a thread other than the main one nothing changes.

    Args:
        numbers: signals to handle.
        handler: function, SIG_IGN or SIG_DFL, as `signal.signal` takes it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier or signal.SIG_DFL)


def ended_by_signals() -> contextlib.AbstractContextManager[None]:
    """Let ENDING_SIGNALS end the process at once during the block, without their handlers.

    Python runs handlers between its own instructions, not while a C++ function waits. On a thread
    other than the main one nothing changes.
    """
    numbers = [n for n in ENDING_SIGNALS if signal.getsignal(n) is not signal.SIG_IGN]
    return handled(numbers, signal.SIG_DFL)


def die_with_parent(parent: int) -> None:
    """Ask Linux to kill this process when its parent dies; elsewhere do nothing.

    Args:
        parent: process id of the parent, to notice that it died before this call.
    """
    if sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG of <linux/prctl.h>
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def wake_without_preempting() -> None:
    """Schedule this thread, and those it starts, without preempting others when they wake.

    A message passes through four threads of two processes. By default each hand-over interrupts
    a thread that is about to finish, which costs two switches and cold caches; benchmarks/
    transport.py has the figures. Linux's SCHED_BATCH says not to; the share of the cores stays the
    same. A policy chosen by the parent process is kept.
    """
    if sys.platform == "linux" and os.sched_getscheduler(0) == os.SCHED_OTHER:
        try:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        except OSError as error:  # a sandbox may forbid it
            logger.info("cannot set SCHED_BATCH (%s); messages cost more", error.strerror)


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Make an event loop: uvloop's where it is installed, else Python's own, which costs more."""
    try:
        import uvloop
    except ImportError:
        logger.info("uvloop is not installed: messages cost more; pip install uvloop")
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def run_coroutine(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, in another thread if this one already runs an event loop.

    Raises:
        BaseException: any exception of the coroutine; KeyboardInterrupt after cancelling it.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    tasks: list[asyncio.Task[Any]] = []

    async def watched() -> T:
        task = asyncio.current_task()
        assert task is not None
        tasks.append(task)
        return await coroutine

    with ThreadPoolExecutor(1, "murmur-asyncio") as pool:
        future = pool.submit(asyncio.run, watched())
        try:
            return future.result()
        except KeyboardInterrupt:
            for task in tasks:
                with contextlib.suppress(RuntimeError):  # its loop has just ended
                    task.get_loop().call_soon_threadsafe(task.cancel)
            raise


def end_process(code: int) -> NoReturn:
    """End the process now, without waiting for its other threads."""
    with contextlib.suppress(Exception):  # an environment may have closed the files
        logging.shutdown()
        sys.stdout.flush()
    os._exit(code)


def critical_thread_works() -> bool:
    """Return whether a CriticalThread is alive."""
    return any(isinstance(thread, CriticalThread) for thread in threading.enumerate())


def leave(end: SystemExit) -> NoReturn:
    """End the process on request; at once if a critical thread still works.

    The interpreter would end such a thread inside C++ code that must not be left that way: the
    process would abort, with "terminate called without an active exception".

    Raises:
        SystemExit: the one given, if no such thread works.
    """
    if critical_thread_works() and isinstance(end.code, int | None):
        end_process(end.code or 0)
    raise end


def exit_code(error: MurmurError) -> int:
    """Return 2 if a restart does not help, 1 if a peer is gone and a restart may help."""
    return 1 if isinstance(error, ConnectionLostError) else 2


def _name_thread(name: str) -> None:
    """Set the calling thread's name in the system, for top -H, py-spy and traces."""
    if sys.platform == "linux":
        set_name = 15  # PR_SET_NAME of <linux/prctl.h>; of the name it keeps 15 bytes
        ctypes.CDLL(None).prctl(set_name, name.encode())


class CriticalThread(threading.Thread):
    """A thread that ends the process if it dies, so that no server survives without it.

    A MurmurError is logged in one line, anything else with its traceback; the exit code is that
    of `exit_code` for the first and 1 for the second.
    """

    def __init__(self, name: str, target: Callable[[], None]) -> None:
        """Name the thread and its outermost function."""
        super().__init__(name=name, daemon=True)
        self._run_target = target

    def run(self) -> None:
        """Run the target; end the process if it raises."""
        _name_thread(self.name)
        try:
            self._run_target()
        except MurmurError as error:
            logger.error("%s", error)
            end_process(exit_code(error))
        except BaseException as error:
            if isinstance(error, OSError) and (known := disk_error(error)):
                logger.error("%s", known)
                end_process(2)
            logger.exception("thread '%s' died; the process ends", self.name)
            end_process(1)


class Backoff:
    """Pauses that double up to a limit, with jitter; `reset` after a success."""

    def __init__(self, first_s: float, longest_s: float, random: Callable[[], float]) -> None:
        """Set the shortest and longest pause; `random` returns numbers in [0, 1)."""
        self._first = first_s
        self._longest = longest_s
        self._random = random
        self.reset()

    def reset(self) -> None:
        """Start again from the shortest pause."""
        self._next = self._first

    def pause_s(self) -> float:
        """Return the next pause, s, between half and all of its nominal length."""
        pause = self._next * (0.5 + 0.5 * self._random())
        self._next = min(2 * self._next, self._longest)
        return pause
