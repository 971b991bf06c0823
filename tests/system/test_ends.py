"""How a run ends that is told to: by every signal, on a full disk, by a lost lock or folder."""

import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.chaos.cases import Case
from tests.chaos.cases_ends import (
    CASES,
    SMALL,
    checkpoints,
    ended,
    hang_up,
    train_once,
    training,
    updates,
)
from tests.waiting import wait_until

pytestmark = pytest.mark.long


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case_ends_as_documented(tmp_path: Path, case: Case) -> None:
    if case.act(tmp_path).get("skipped"):
        pytest.skip("no disk can be mounted here")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGQUIT", "SIGUSR1"])
def test_a_signal_ends_a_run_with_a_checkpoint(tmp_path: Path, name: str) -> None:
    hang_up(tmp_path, name)


def test_a_run_under_nohup_survives_its_terminal(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with training(run, "nohup") as process:
        process.send_signal(signal.SIGHUP)
        before = updates(run)
        wait_until(lambda: updates(run) > before + 1, "updates")
        process.send_signal(signal.SIGTERM)
        assert ended(process)[0] == 130


def has_ipv6() -> bool:
    """Whether this machine has an IPv6 loopback address."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("host", ["::1", "[::1]", "127.0.0.2", "localhost"])
def test_a_run_connects_to_the_address_it_listens_on(tmp_path: Path, host: str) -> None:
    if ":" in host and not has_ipv6():
        pytest.skip("this machine has no IPv6")
    train_once(tmp_path / "run", learner__host=host, learner__metrics_host=host)


API = """
import os, signal, sys, threading, time
import murmur

run = murmur.train("spread", {settings!r}, run={folder!r}, wait=False)
while not (list(run._folder.records("progress")) or [{{}}])[-1].get("updates"):
    time.sleep(0.1)
{end}
"""
ENDS = {
    "the script's end": ("", 0),
    "SIGTERM": ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(100)", -signal.SIGTERM),
    "SIGHUP": ("os.kill(os.getpid(), signal.SIGHUP); time.sleep(100)", -signal.SIGHUP),
    "a forked child's end before": (
        """
child = os.fork()
if not child:
    try:
        run.wait()
    except murmur.MurmurError as error:
        assert "trained by another process" in str(error)
        sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert run.running
""",
        0,
    ),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_training_in_the_background_ends_with_its_process(tmp_path: Path, name: str) -> None:
    end, code = ENDS[name]
    run = tmp_path / "run"
    script = API.format(settings=SMALL, folder=str(run), end=textwrap.dedent(end))
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=150, check=False
    )
    assert (done.returncode, len(checkpoints(run))) == (code, 1), done.stderr
