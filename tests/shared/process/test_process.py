"""What every process needs, tried with real processes and a real port."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from murmur.shared.process.process import ENDING_SIGNALS, Backoff, CriticalThread

ROOT = Path(__file__).parents[3]


def start(code: str, **environ: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_backoff_doubles_up_to_a_limit_with_jitter() -> None:
    half, full = Backoff(1.0, 5.0, lambda: 0.0), Backoff(1.0, 5.0, lambda: 1.0)
    assert [half.pause_s() for _ in range(5)] == [0.5, 1.0, 2.0, 2.5, 2.5]
    assert [full.pause_s() for _ in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    half.reset()
    assert half.pause_s() == 0.5


@pytest.mark.skipif(sys.platform != "linux", reason="names of threads are Linux's")
def test_the_system_knows_a_thread_by_its_name() -> None:
    names: list[str] = []

    def look() -> None:
        names.append(Path(f"/proc/self/task/{threading.get_native_id()}/comm").read_text().strip())

    for name in ("inference", "one-of-more-than-15-bytes"):
        thread = CriticalThread(name, look)
        thread.start()
        thread.join()
    assert names == ["inference", "one-of-more-tha"]


SCHEDULING = """
import os, threading
from murmur.shared.process.process import wake_without_preempting
os.sched_setscheduler(0, os.{before}, os.sched_param(0))
wake_without_preempting()
thread = threading.Thread(target=lambda: print(os.sched_getscheduler(0)))
thread.start()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux's scheduling policies")
@pytest.mark.parametrize(
    ("before", "after"), [("SCHED_OTHER", "SCHED_BATCH"), ("SCHED_IDLE", "SCHED_IDLE")]
)
def test_threads_wake_without_preempting_unless_told_otherwise(before: str, after: str) -> None:
    out, errors = start(SCHEDULING.format(before=before)).communicate(timeout=60)
    assert int(out) == getattr(os, after), errors


LOOP = """
import time
from murmur.shared.process.process import stop_on_signals
stop = stop_on_signals()
print("ready", flush=True)
stop.wait()
print("stopped", flush=True)
while {again}:
    time.sleep(0.01)
"""


@pytest.mark.parametrize("number", ENDING_SIGNALS)
def test_a_signal_sets_the_event(number: int) -> None:
    process = start(LOOP.format(again=False))
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert (out, process.returncode) == ("stopped\n", 0)


INTERRUPTED = """
import signal
from murmur.shared.process.process import stop_on_signals
stop = stop_on_signals()
with stop._cond:  # as within `wait`, for some instructions
    signal.raise_signal(signal.SIGTERM)
stop.wait()
"""


def test_a_signal_that_interrupts_the_wait_sets_the_event() -> None:
    process = start(INTERRUPTED)
    try:
        process.communicate(timeout=60)
    finally:
        process.kill()  # a second SIGTERM would wait for the lock too
    assert process.returncode == 0


def test_a_second_signal_ends_the_process() -> None:
    process = start(LOOP.format(again=True))
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "stopped\n"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM


def test_a_second_hang_up_does_not_end_the_process() -> None:
    process = start(LOOP.format(again=True))
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGHUP)
    assert process.stdout.readline() == "stopped\n"
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM


def test_under_nohup_a_hang_up_is_ignored() -> None:
    ignoring = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)"
    process = start(ignoring + LOOP.format(again=False))
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGUSR1)
    out, _ = process.communicate(timeout=60)
    assert (out, process.returncode) == ("stopped\n", 0)


DYING = """
import time
from murmur.shared.process.errors import ConfigError
from murmur.shared.process.process import CriticalThread, configure_logging
configure_logging("tester")
def fail():
    raise {error}("too many cooks")
CriticalThread("cook", fail).start()
time.sleep(600)
"""


def test_a_dead_thread_ends_its_process() -> None:
    process = start(DYING.format(error="KeyError"))
    _, log = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "thread 'cook' died" in log
    assert "Traceback" in log


def test_a_users_error_ends_the_process_in_one_line() -> None:
    process = start(DYING.format(error="ConfigError"))
    _, log = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "tester: ERROR too many cooks" in log
    assert "Traceback" not in log


WORKING = """
import threading, torch
from murmur.shared.process.process import CriticalThread, leave
started = threading.Event()
def learn():
    weights = torch.randn(64, 64, requires_grad=True)
    while True:
        (weights @ weights).sum().backward()
        started.set()
CriticalThread("learner", learn).start()
started.wait()
leave(SystemExit(3))
"""


def test_a_thread_that_computes_does_not_abort_the_process() -> None:
    process = start(WORKING, OMP_NUM_THREADS="1")
    _, log = process.communicate(timeout=60)
    assert (process.returncode, log) == (3, "")


def test_a_process_without_threads_of_its_own_ends_as_usual() -> None:
    process = start(
        "import atexit, sys\nfrom murmur.shared.process.process import leave\n"
        "atexit.register(lambda: sys.stderr.write('in order'))\nleave(SystemExit(4))"
    )
    _, log = process.communicate(timeout=60)
    assert (process.returncode, log) == (4, "in order")


def test_the_least_level_of_a_log_is_that_of_the_variable() -> None:
    code = (
        "from murmur.shared.process.process import configure_logging, logger\n"
        "configure_logging('one')\nlogger.info('told')\nlogger.warning('warned')"
    )
    for level, words in (("", "told warned"), ("warning", "warned"), ("loud", "LEVEL=loud: write")):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "MURMUR_LOG_LEVEL": level},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert all(word in done.stderr for word in words.split()), level
        assert ("told" in done.stderr) == (level == "")


def test_logs_are_json_if_asked_for() -> None:
    process = start(DYING.format(error="KeyError"), MURMUR_LOG="json")
    _, log = process.communicate(timeout=60)
    entry = json.loads(log.splitlines()[0])
    assert entry["level"] == "ERROR"
    assert "KeyError" in entry["traceback"]
