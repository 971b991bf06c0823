"""A child process that is kept alive, with its command, environment and log.

A child that dies is started again with growing pauses. Children die with the process that started
them.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from murmur.doctor.machine import ROOT
from murmur.runs.log_errors import last_error
from murmur.shared.config.files import ENV_PREFIX
from murmur.shared.process.errors import MurmurError, ResourceError
from murmur.shared.process.host_memory import MemoryKills
from murmur.shared.process.process import FOREIGN_VARIABLES, Backoff, die_with_parent
from murmur.shared.process.run_lock import RunLock

PARENT_VARIABLE = "MURMUR_PARENT"
HEALTHY_AFTER_S = 60.0  # a child that lived so long starts again with short pauses
MAX_DEATHS_IN_A_ROW = 5
LOST = 75  # EX_TEMPFAIL: exit code of several learners of which one was killed


class ChildError(MurmurError):
    """Error of a child process that the user can fix; the message is the child's."""


def join_supervisor() -> bool:
    """End this child when the supervisor is gone, for whatever reason.

    Returns:
        True if there is a supervisor.
    """
    parent = os.environ.pop(PARENT_VARIABLE, "")
    if parent:
        die_with_parent(int(parent))
    return bool(parent)


def murmur_command(*arguments: str) -> list[str]:
    """Return the command line of a murmur process with this interpreter."""
    return [sys.executable, "-P", "-m", "murmur", *arguments]


def child_environment() -> dict[str, str]:
    """Return a child's environment; its configuration comes from the run's folder alone."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(ENV_PREFIX)}
    for name in FOREIGN_VARIABLES:
        env.pop(name, None)
    paths = [str(ROOT), *filter(None, [env.get("PYTHONPATH")])]
    return env | {
        "OMP_WAIT_POLICY": "passive",  # idle OpenMP threads sleep: the cores are shared
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join(paths),
        PARENT_VARIABLE: str(os.getpid()),
    }


@dataclass
class Child:
    """A process that is kept alive, in a session that the terminal's Ctrl-C does not reach.

    Attributes:
        name: user's name of the process; its log is <name>.log.
        command: function that returns its command line, since a restarted learner resumes.
        log: file of its output.
        lock: lock of the run's folder, handed down to the process.
        variables: environment variables added to `child_environment`.
        deaths: number of ends without a request.
        settled: True if the run made progress since the process was started.
    """

    name: str
    command: Callable[["Child"], list[str]]
    log: Path
    lock: RunLock = field(default_factory=lambda: RunLock(None))
    variables: Mapping[str, str] = field(default_factory=dict)
    deaths: int = 0
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    retry_at: float = 0.0
    deaths_in_a_row: int = 0
    settled: bool = False
    _restarts: bool = False
    _log_start: int = 0
    _failure: str = ""
    _memory_kills: MemoryKills = field(default_factory=MemoryKills)
    backoff: Backoff = field(default_factory=lambda: Backoff(1.0, 30.0, lambda: 1.0))

    def start(self) -> None:
        """Start it.

        Raises:
            ResourceError: if the system cannot start it.
        """
        descriptors, variables = self.lock.handed_down()
        command = self.command(self)
        self.settled, self._restarts = False, False
        self._memory_kills = MemoryKills()
        with self.log.open("ab") as log:
            self._log_start = log.tell()
            try:
                self.process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**child_environment(), **self.variables, **variables},
                    pass_fds=descriptors,
                    start_new_session=True,
                )
            except OSError as error:
                raise ResourceError(
                    f"cannot start {self.name}: {command[0]}: {error.strerror}"
                ) from None
        self.started = time.monotonic()

    def tend(self, say: Callable[[str], None]) -> int | None:
        """Start it again if it died and its pause is over.

        Returns:
            exit code if it ended since the last look, else None.

        Raises:
            ChildError: if it exited with 2, or failed twice with the same message before the run
                made progress.
            ResourceError: if it keeps dying.
        """
        now = time.monotonic()
        if self.process is None:
            if now >= self.retry_at:
                self.start()
            return None
        code = self.process.poll()
        if code is None:
            return None
        self.process = None
        message = last_error(self.log, self._log_start)
        if code == 2:
            raise ChildError(message or f"{self.name} failed; see {self.log}")
        if self._restarts:
            self.start()
            return code
        # A signal comes from outside: try again.
        own = code > 0 and code != LOST and not self.settled
        failure = re.sub(r"0x[0-9a-f]+|\d+", "#", message) if own else ""
        if failure and failure == self._failure:
            raise ChildError(f"{self.name} failed twice at its start: {message}; see {self.log}")
        self._failure = failure
        if now - self.started > HEALTHY_AFTER_S:
            self.deaths_in_a_row = 0
            self.backoff.reset()
        pause = self.backoff.pause_s()
        self.retry_at = now + pause
        if code != 0 or self.name != "learner":
            self.deaths += 1
            self.deaths_in_a_row += 1
            how = exit_message(code, self._memory_kills)
            if self.deaths_in_a_row >= MAX_DEATHS_IN_A_ROW:
                raise ResourceError(
                    f"{self.name} died {self.deaths_in_a_row} times in a row "
                    f"({how}); see {self.log}"
                )
            say(f"{self.name} ended ({how}); starting it again in {pause:.0f} s")
        return code

    @property
    def running(self) -> bool:
        """Return whether the process was started and has not ended."""
        return self.process is not None and self.process.poll() is None

    def restart(self) -> None:
        """Tell it to end, if it is running; `tend` starts it again at once: this is no death."""
        self._restarts = True
        self.signal(signal.SIGTERM)

    def signal(self, number: int) -> None:
        """Send a signal if it is running."""
        if self.process is not None:  # one that has ended gets none
            self.process.send_signal(number)

    def wait(self, timeout_s: float) -> str:
        """Wait for its end; kill it and what it started if it takes too long.

        Returns:
            error of the process by its log or exit code; "" if it ended in order.
        """
        if self.process is None:
            return ""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            self.process = None
            return f"{self.name} did not end within {timeout_s:.0f} s and was killed"
        self.process = None
        message = "" if code == 0 else last_error(self.log, self._log_start)
        how = f"{exit_message(code, self._memory_kills)}; see {self.log}" if code else ""
        return message or how

    def kill(self) -> None:
        """Kill the process and the processes it started."""
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def exit_message(code: int, memory_kills: MemoryKills | None = None) -> str:
    """Return text about an exit code.

    Args:
        code: exit code of the process; negative: the signal that ended it.
        memory_kills: counts of memory kills from before the process started, to explain a SIGKILL.
    """
    why = ""
    if memory_kills is not None and code in (-signal.SIGKILL, LOST):
        why = memory_kills.explanation()
    if code == LOST:
        return f"a rank was killed{why and ', '}{why}"
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}{why and ', '}{why}"
    except ValueError:
        return f"killed by signal {-code}"
