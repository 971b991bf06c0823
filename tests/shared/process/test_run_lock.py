"""The lock of a run folder."""

import errno
import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from murmur.shared.process.errors import ResourceError
from murmur.shared.process.run_lock import LOCK_FILE, LOCK_VARIABLE, RunLock

HOLD = """
import sys
from pathlib import Path
from murmur.shared.process.run_lock import RunLock
lock = RunLock.acquire(Path(sys.argv[1]))
print(lock.fd, flush=True)
input()
"""


def test_a_lock_names_its_holder_and_dies_with_it(tmp_path: Path) -> None:
    run = tmp_path / "a [run]"
    command = [sys.executable, "-c", HOLD, str(run)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with pytest.raises(ResourceError, match=f"in use by process {holder.pid};"):
            RunLock.acquire(run)
        RunLock.acquire(shutil.copytree(run, tmp_path / "copy")).release()
        holder.kill()
    assert (run / LOCK_FILE).read_text().startswith(f"{holder.pid} ")
    with RunLock.acquire(run):  # whatever process has that number now
        assert (run / LOCK_FILE).read_text().startswith(f"{os.getpid()} ")


def test_a_child_keeps_the_lock_that_it_was_handed(tmp_path: Path) -> None:
    lock = RunLock.acquire(tmp_path)
    fds, variables = lock.handed_down()
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | variables,
        pass_fds=fds,
    ) as child:
        assert child.stdout is not None
        assert int(child.stdout.readline()) == fds[0]
        lock.release()
        with pytest.raises(ResourceError, match="in use by process"):
            RunLock.acquire(tmp_path)
        child.kill()
    RunLock.acquire(tmp_path).release()


@pytest.mark.parametrize("value", ["", "x", "0", "9999"])
def test_a_descriptor_of_another_file_is_no_lock(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RunLock.acquire(tmp_path):
        monkeypatch.setenv(LOCK_VARIABLE, value)
        with pytest.raises(ResourceError, match="in use by"):
            RunLock.acquire(tmp_path)


def test_a_file_system_without_locks_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_locks(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with RunLock.acquire(tmp_path) as lock:
        assert lock.handed_down() == ((), {})
    assert "No locks available; make sure that no other process trains" in caplog.text


def test_a_folder_that_cannot_be_made_is_said_with_a_message(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    for name, why in (
        ("file", "it is a file"),
        ("link", "it is a link to nothing"),
        ("file/run", "Not a directory"),
        ("a\0b", "null"),
    ):
        with pytest.raises(ResourceError, match=rf"cannot make run folder.*{why}"):
            RunLock.acquire(tmp_path / name)
    run = tmp_path / "locked"
    (run / LOCK_FILE).mkdir(parents=True)
    with pytest.raises(ResourceError, match=r"cannot write to run folder .*: Is a directory"):
        RunLock.acquire(run)


def test_children_use_the_lock_that_their_parent_keeps(tmp_path: Path) -> None:
    with RunLock.acquire(tmp_path) as lock:
        done = subprocess.run(
            [sys.executable, "-c", HOLD, str(tmp_path)],
            input=b"\n",
            env=os.environ | lock.kept_by_parent(),
            check=True,
            capture_output=True,
            timeout=60,
        )
        assert done.stdout == b"None\n"
        with pytest.raises(ResourceError, match="in use by process"):
            RunLock.acquire(tmp_path)


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    script = f"""
import os, time
from pathlib import Path
from murmur.shared.process.run_lock import RunLock
lock = RunLock.acquire(Path({str(tmp_path)!r}))
child = os.fork()
if not child:
    time.sleep(60)
print(child, flush=True)
"""
    done = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert done.stdout is not None
    child = int(done.stdout.readline())
    try:
        done.wait(60)
        RunLock.acquire(tmp_path).release()
    finally:
        os.kill(child, 9)
        done.stdout.close()


def test_a_moved_folder_is_found(tmp_path: Path) -> None:
    run, moved = tmp_path / "run", tmp_path / "moved"
    with RunLock.acquire(run) as lock:
        assert lock.moved_to() is None
        run.rename(moved)
        if sys.platform == "linux":
            assert lock.moved_to() == moved
        (moved / LOCK_FILE).unlink()
        assert lock.moved_to() is None


def test_a_deleted_lock_is_retaken_unless_another_has_it(tmp_path: Path) -> None:
    with RunLock.acquire(tmp_path) as lock:
        (tmp_path / LOCK_FILE).unlink()
        lock.retake()
        with pytest.raises(ResourceError, match="in use by process"):
            RunLock.acquire(tmp_path)
        (tmp_path / LOCK_FILE).unlink()
        with RunLock.acquire(tmp_path):
            words = "run.lock was deleted while the run trains: run folder .* in use by process"
            with pytest.raises(ResourceError, match=words):
                lock.retake()
