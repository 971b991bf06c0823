"""The environment server under examination, where the kit itself starts it."""

import asyncio
import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from murmur.shared.process.errors import ConfigError

_LAST_WORDS = 400  # characters of its output that are shown
_KILL_AFTER_S = 15.0


class Subject:
    """A child process."""

    def __init__(self, process: "subprocess.Popen[bytes]", log: Path) -> None:
        """Take over a process that writes its output to `log`."""
        self._process, self._log = process, log

    @property
    def ended(self) -> bool:
        """Return whether the process has ended."""
        return self._process.poll() is not None

    def terminate(self) -> None:
        """Send the process SIGTERM."""
        self._process.terminate()

    async def code(self, timeout_s: float) -> int | None:
        """Return the process's exit code; None if it does not end in time."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return await asyncio.to_thread(self._process.wait, timeout_s)
        return None

    def last_message(self) -> str:
        """Return the end of the process's output."""
        return " ".join(self._log.read_text(errors="replace")[-_LAST_WORDS:].split())


@contextlib.contextmanager
def started(command: Sequence[str]) -> Iterator[Subject]:
    """Start a command; end it with the block, if not before, with all that it starts.

    Raises:
        ConfigError: if there is no such program.
    """
    with tempfile.NamedTemporaryFile(prefix="murmur-conformance-") as log:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise ConfigError(f"cannot start '{command[0]}': {error.strerror}") from None
        try:
            yield Subject(process, Path(log.name))
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_KILL_AFTER_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
