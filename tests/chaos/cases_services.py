"""The faults of services as a cluster sees them, each with real processes."""

import os
import signal
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from tests.chaos.cases import Case
from tests.chaos.faults import experiment
from tests.chaos.stack import Stack
from tests.waiting import wait_until

_STALLED_AFTER_S = 2.0  # a first update on a busy machine takes one


def health(port: int) -> tuple[int, str]:
    """Status and words of GET /healthz."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def learner_hangs(folder: Path) -> dict[str, Any]:
    """A file does not answer: the thread that reads it hangs, and the learner's health says so.

    The file is a pipe without a writer, in place of a request to profile. Before that no
    environment server is there, then one that is paused: the learner waits, longer than a thread
    may hang, and is healthy.
    """
    control = folder / "control"
    control.mkdir()
    with Stack(folder, experiment(control)) as stack:
        stack.start_learner(f"learner.stalled_after_s={_STALLED_AFTER_S}")
        server = stack.start_server()
        _stays_healthy(stack)
        wait_until(lambda: stack.metric("updates_total") > 3, "updates")
        server.send(signal.SIGSTOP)
        _stays_healthy(stack)
        server.send(signal.SIGCONT)

        (stack.run / "profile").mkdir(exist_ok=True)
        pipe = stack.run / "profile" / "hangs.request"
        os.mkfifo(pipe)
        hung = time.monotonic()
        wait_until(lambda: health(stack.metrics_port)[0] == 503, "the health fails", 30)
        noticed = time.monotonic() - hung
        why = health(stack.metrics_port)[1]
        assert "stalled: thread 'learner' is in state 'log' for" in why, why
        assert f"learner.stalled_after_s={_STALLED_AFTER_S:g}" in why, why
        pipe.write_text("no number")
        wait_until(lambda: health(stack.metrics_port)[0] == 200, "the health is back", 30)
    return {"noticed_s": noticed}


def _stays_healthy(stack: Stack) -> None:
    """Assert that the learner is healthy for longer than a thread may hang."""
    end = time.monotonic() + 1.5 * _STALLED_AFTER_S
    while time.monotonic() < end:
        assert health(stack.metrics_port) == (200, "ok\n")
        time.sleep(0.1)


CASES = [Case("a thread of the learner hangs", learner_hangs)]
