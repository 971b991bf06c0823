"""Wait for a starting learner: minutes on a busy machine, with a line now and then."""

import re
import signal
import sys
from pathlib import Path

import pytest

from murmur.runs import supervisor
from murmur.runs.child import Child
from murmur.runs.run_folder import RunFolder
from murmur.runs.supervisor import wait_for_port
from murmur.shared.process.errors import ResourceError

STOPPED = """
import os, pathlib, signal, sys, time
run = pathlib.Path(sys.argv[1])
os.kill(os.getpid(), signal.SIGSTOP)
(run / "learner.json").write_text('{"port": 4242}')
time.sleep(60)
"""


def child(code: str, folder: Path) -> Child:
    command = [sys.executable, "-S", "-c", code, str(folder)]
    return Child("learner", lambda _: command, folder / "learner.log")


def test_a_learner_that_starts_slowly_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "SAY_EVERY_S", 0.3)
    learner, said = child(STOPPED, tmp_path), list[str]()

    def say(line: str) -> None:
        said.append(line)
        learner.signal(signal.SIGCONT)

    learner.start()
    try:
        assert wait_for_port(RunFolder(tmp_path), learner, say) == 4242
    finally:
        learner.signal(signal.SIGKILL)
        learner.wait(5)
    assert re.fullmatch(r"the learner does not listen yet after \d+ s; Ctrl-C stops", said[0])


def test_a_learner_that_never_listens_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "START_LIMIT_S", 0.3)
    learner = child("import time; time.sleep(60)", tmp_path)
    learner.start()
    try:
        with pytest.raises(ResourceError, match=r"the learner did not listen within 0 s; see .*"):
            wait_for_port(RunFolder(tmp_path), learner, lambda line: None)
    finally:
        learner.signal(signal.SIGKILL)
        learner.wait(5)
