"""Trainings of benchmarks: a stop reaches the process that trains, which saves first."""

import resource
import subprocess
import sys
from collections.abc import Sequence
from typing import IO, Any

from murmur.runs.interrupts import stopped_by_signals

SYNC_LEARNER: dict[str, Any] = {  # section `learner` of a training that repeats on one core
    "pipeline": "sync",
    "device": "cpu",
    "num_threads": 1,
    "port": 0,
    "metrics_port": 0,
}


def run_training(command: Sequence[str], output: IO[str] | None = None) -> None:
    """Run a command that trains to its end; Ctrl-C and SIGTERM are passed on to it.

    The training saves its state, so that the same benchmark resumes it.

    Args:
        command: command line of `murmur train` or `murmur sweep`.
        output: file of its output; None: the terminal.

    Raises:
        CalledProcessError: it failed.
        KeyboardInterrupt: it was stopped and has ended.
    """
    errors = subprocess.STDOUT if output else None
    with stopped_by_signals():
        child = subprocess.Popen(
            command,
            stdout=output,
            stderr=errors,
            start_new_session=True,  # the terminal's Ctrl-C reaches the benchmark alone
        )
        try:
            code = child.wait()
        except KeyboardInterrupt:
            child.terminate()
            child.wait()
            print("stopped: the same command resumes", file=sys.stderr)
            raise
    if code:
        raise subprocess.CalledProcessError(code, command)


def children_cpu_s() -> float:
    """Return the CPU seconds of all processes that were started from here and have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
