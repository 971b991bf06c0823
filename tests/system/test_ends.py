"""How a run ends that is told to: by every signal, on a full disk, by a lost lock or folder."""

import fcntl
import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.waiting import wait_until

SMALL = {
    "env_server.num_workers": 1,
    "env_server.envs_per_worker": 8,
    "env_server.metrics_port": 0,
    "learner.port": 0,
    "learner.metrics_port": 0,
    "learner.checkpoint_every_updates": 100_000,
    "algorithm.unroll_steps": 16,
    "evaluation.every_updates": 0,
    "run.max_minutes": 5,
}


def command(run: Path, **settings: object) -> list[str]:
    items = {**SMALL, **{k.replace("__", "."): v for k, v in settings.items()}}
    sets = [part for key, value in items.items() for part in ("--set", f"{key}={value}")]
    train = [sys.executable, "-m", "murmur", "train", "spread", "--no-page"]
    return [*train, "--run", str(run), *sets]


def updates(run: Path) -> int:
    """Updates that progress.jsonl tells of."""
    try:
        last = (run / "progress.jsonl").read_text().splitlines()[-1]
        return int(json.loads(last).get("updates", 0))
    except (OSError, IndexError, ValueError):
        return 0


def checkpoints(run: Path) -> list[str]:
    return sorted(file.name for file in run.glob("checkpoints/update-*.pt"))


def fill(file: Path) -> None:
    """Write to a file until that raises."""
    with file.open("wb", buffering=0) as rest:
        while True:
            rest.write(bytes(1 << 14))


@contextmanager
def training(
    run: Path, *prefix: str, enough: int = 2, **settings: object
) -> Iterator[subprocess.Popen[str]]:
    """A `murmur train` that has made some updates; killed at the end if it still runs."""
    with subprocess.Popen(
        [*prefix, *command(run, **settings)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            wait_until(lambda: updates(run) >= enough or process.poll() is not None, "updates", 90)
            assert process.poll() is None, process.communicate()[0]
            yield process
        finally:
            process.kill()


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and output."""
    output = process.communicate(timeout=90)[0]
    return process.returncode, output


@pytest.mark.long
@pytest.mark.parametrize("name", ["SIGHUP", "SIGTERM", "SIGINT", "SIGQUIT", "SIGUSR1"])
def test_a_signal_ends_a_run_with_a_checkpoint(tmp_path: Path, name: str) -> None:
    run = tmp_path / "run"
    with training(run) as process:
        process.send_signal(getattr(signal, name))
        if name == "SIGHUP":  # the shell sends another one
            time.sleep(0.3)
            process.send_signal(signal.SIGHUP)
        code, output = ended(process)
    assert (code, len(checkpoints(run))) == (130, 1), output
    assert f"stopped; resume with:  murmur train --resume --run {run}" in output


@pytest.mark.long
def test_a_run_under_nohup_survives_its_terminal(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with training(run, "nohup") as process:
        process.send_signal(signal.SIGHUP)
        before = updates(run)
        wait_until(lambda: updates(run) > before + 1, "updates")
        process.send_signal(signal.SIGTERM)
        assert ended(process)[0] == 130


@pytest.mark.long
def test_a_closed_terminal_ends_a_run_with_a_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "run"
    terminal, own = pty.openpty()
    process = subprocess.Popen(
        command(run),
        stdin=own,
        stdout=own,
        stderr=own,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(own)
    try:

        def learned() -> bool:
            os.read(terminal, 1 << 16)
            return updates(run) >= 2

        wait_until(learned, "updates", 90)
        os.close(terminal)
        assert process.wait(90) == 130
    finally:
        process.kill()
    assert len(checkpoints(run)) == 1


@pytest.mark.long
@pytest.mark.skipif(os.getuid() != 0, reason="only root mounts a small disk")
def test_a_last_checkpoint_that_fails_is_said_last(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=6m", "none", str(disk)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("no disk can be mounted here")
    try:
        with training(disk / "run") as process:
            with pytest.raises(OSError, match="space"):
                fill(disk / "rest")
            process.send_signal(signal.SIGINT)
            code, output = ended(process)
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
    assert code == 2
    last = output.splitlines()[-1]
    assert re.match("error: the run stopped without a last checkpoint, all of it is lost: ", last)
    assert "No space left on device" in last
    assert "stopped; resume" not in output


@pytest.mark.long
def test_a_deleted_lock_is_made_again_or_ends_the_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with training(run, learner__checkpoint_every_updates=2) as process:
        (run / "run.lock").unlink()
        wait_until((run / "run.lock").exists, "another lock file")
        again = subprocess.run(command(run), capture_output=True, text=True, check=False)
        assert again.returncode == 2
        assert "is in use by process" in again.stderr
        (run / "run.lock").unlink()
        (run / "run.lock").touch()
        with (run / "run.lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            code, output = ended(process)
    assert code == 2
    assert "run.lock was deleted while the run trains: run folder" in output.splitlines()[-1]


@pytest.mark.long
def test_a_moved_run_stops_with_a_checkpoint_where_it_is(tmp_path: Path) -> None:
    run, moved = tmp_path / "run", tmp_path / "moved"
    with training(run) as process:
        run.rename(moved)
        code, output = ended(process)
    assert (code, len(checkpoints(moved)), run.exists()) == (2, 1, False), output
    last = output.splitlines()[-1]
    assert f"was moved to {moved} while the run trains" in last
    assert f"murmur train --resume --run {moved}" in last


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


@pytest.mark.long
@pytest.mark.parametrize("name", ENDS)
def test_a_training_in_the_background_ends_with_its_process(tmp_path: Path, name: str) -> None:
    end, code = ENDS[name]
    run = tmp_path / "run"
    script = API.format(settings=SMALL, folder=str(run), end=textwrap.dedent(end))
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=150, check=False
    )
    assert (done.returncode, len(checkpoints(run))) == (code, 1), done.stderr
