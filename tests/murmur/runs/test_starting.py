"""How long the start of a learner may take: as long as it gets on."""

import re
import signal
import sys
from pathlib import Path

import pytest

from murmur.runs import starting
from murmur.runs.child import Child
from murmur.runs.run_folder import RunFolder
from murmur.runs.supervisor import wait_for_port
from shared.process.errors import ResourceError

_LISTENS = """
(run / "learner.json").write_text('{"port": 4242}')
time.sleep(60)
"""
BUSY = f"""
import pathlib, sys, time
run = pathlib.Path(sys.argv[1])
while not (run / "said").exists():
    pass
{_LISTENS}"""
STOPPED = f"""
import os, pathlib, signal, sys, time
run = pathlib.Path(sys.argv[1])
os.kill(os.getpid(), signal.SIGSTOP)
{_LISTENS}"""


def child(code: str, folder: Path) -> Child:
    command = [sys.executable, "-S", "-c", code, str(folder)]
    return Child("learner", lambda _: command, folder / "learner.log")


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "IDLE_LIMIT_S", 0.3)
    monkeypatch.setattr(starting, "SAY_EVERY_S", 0.5)


@pytest.mark.usefixtures("_impatient")
def test_a_learner_that_works_is_waited_for_and_talked_about(tmp_path: Path) -> None:
    learner, said = child(BUSY, tmp_path), list[str]()

    def say(line: str) -> None:
        said.append(line)
        (tmp_path / "said").touch()  # longer than the limit after its start

    learner.start()
    try:
        assert wait_for_port(RunFolder(tmp_path), learner, say) == 4242
    finally:
        learner.signal(signal.SIGKILL)
        learner.wait(5)
    assert re.fullmatch(
        r"the learner does not listen yet after \d+ s: it works, or waits for a processor or a "
        r"disk; it has used \d+\.\d s of processor time",
        said[0],
    )


@pytest.mark.usefixtures("_impatient")
def test_a_stopped_learner_is_waited_for_until_it_continues(tmp_path: Path) -> None:
    learner, said = child(STOPPED, tmp_path), list[str]()

    def say(line: str) -> None:
        said.append(line)
        if "stopped (SIGSTOP)" in line:
            learner.signal(signal.SIGCONT)

    learner.start()
    try:
        assert wait_for_port(RunFolder(tmp_path), learner, say) == 4242
    finally:
        learner.signal(signal.SIGKILL)
        learner.wait(5)
    assert "stopped (SIGSTOP)" in said[-1]


@pytest.mark.usefixtures("_impatient")
def test_a_learner_that_does_nothing_is_given_up(tmp_path: Path) -> None:
    learner = child("import time; time.sleep(60)", tmp_path)
    learner.start()
    try:
        with pytest.raises(ResourceError, match=r"the learner did not listen, and has done nothin"):
            wait_for_port(RunFolder(tmp_path), learner, lambda line: None)
    finally:
        learner.signal(signal.SIGKILL)
        learner.wait(5)


@pytest.mark.usefixtures("_impatient")
def test_learners_that_work_are_children_of_one_that_waits(tmp_path: Path) -> None:
    run = f"subprocess.run([sys.executable, '-S', '-c', {BUSY!r}, sys.argv[1]])"
    launcher = f"import subprocess, sys\n{run}"
    learner = child(launcher, tmp_path)
    learner.start()

    def say(line: str) -> None:
        assert "it works" in line
        (tmp_path / "said").touch()

    try:
        assert wait_for_port(RunFolder(tmp_path), learner, say, several=True) == 4242
    finally:
        learner.wait(0)  # kills what it started, too
