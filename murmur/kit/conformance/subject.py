"""The environment server under examination, where the kit itself starts it."""

import asyncio
import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from shared.process.errors import ConfigError

_LOOK_EVERY_S = 0.05
_LAST_WORDS = 400  # characters of its output that are shown
_KILL_AFTER_S = 15.0


class Subject:
    """A child process with all that it starts; ended with the block, if not before."""

    def __init__(self, command: Sequence[str]) -> None:
        """Prepare to start a command."""
        self._command = command
        self._log = tempfile.NamedTemporaryFile(prefix="murmur-conformance-")  # noqa: SIM115
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        """Start it.

        Raises:
            ConfigError: if there is no such program.
        """
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            self._log.close()
            raise ConfigError(f"cannot start '{self._command[0]}': {error.strerror}") from None
        return self

    def __exit__(self, *_: object) -> None:
        """End the process and all its descendants."""
        assert self._process is not None
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_KILL_AFTER_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()

    @property
    def ended(self) -> bool:
        """Return whether the process has ended."""
        assert self._process is not None
        return self._process.poll() is not None

    def terminate(self) -> None:
        """Send the process SIGTERM."""
        assert self._process is not None
        self._process.terminate()

    async def code(self, timeout_s: float) -> int | None:
        """Return the process's exit code; None if it does not end in time."""
        assert self._process is not None
        deadline = asyncio.get_running_loop().time() + timeout_s
        while (code := self._process.poll()) is None:
            if asyncio.get_running_loop().time() > deadline:
                return None
            await asyncio.sleep(_LOOK_EVERY_S)
        return code

    def last_message(self) -> str:
        """Return the end of the process's output."""
        text = Path(self._log.name).read_text(errors="replace")
        return " ".join(text[-_LAST_WORDS:].split())
