"""Wait until a new process is ready, as long as it makes progress.

A start takes seconds, or minutes on a machine whose processors others use. So what counts is not
the time but whether the process gets on: it uses a processor, waits for one, or waits for a disk.
"""

import time
from collections.abc import Callable

import psutil

from shared.process.errors import ResourceError

IDLE_LIMIT_S = 120.0  # a process that does nothing for this time will not be ready
SAY_EVERY_S = 30.0
_LONGEST_LOOK_S = 1.0  # more between two looks is a pause of this process itself
_WORDS = {
    "busy": "it works, or waits for a processor or a disk",
    "stopped": "it is stopped (SIGSTOP) and waits for SIGCONT",
    "idle": "it does nothing",
}


class Startup:
    """Wait for the start of one child process. Used by one thread."""

    def __init__(
        self, name: str, log: object, say: Callable[[str], None], *, several: bool = False
    ) -> None:
        """Begin to wait.

        Args:
            name: name of the process, for the user.
            log: log of the process.
            say: function called now and then with a line about the activity of the process.
            several: True if its children do the work.
        """
        self._several = several
        self._name = name
        self._log = log
        self._say = say
        now = time.monotonic()
        self._began = now
        self._looked = now
        self._said = now
        self._pid = 0
        self._cpu_s = 0.0
        self._idle_s = 0.0

    def look(self, pid: int) -> None:
        """Look at the process, which runs and is not ready.

        Raises:
            ResourceError: if it has done nothing for too long.
        """
        now = time.monotonic()
        since, self._looked = min(now - self._looked, _LONGEST_LOOK_S), now
        doing = self._doing(pid)
        self._idle_s = self._idle_s + since if doing == "idle" else 0.0
        if self._idle_s > IDLE_LIMIT_S:
            raise ResourceError(
                f"the {self._name} did not listen, and has done nothing for {IDLE_LIMIT_S:.0f} s; "
                f"see {self._log}"
            )
        if now - self._said >= SAY_EVERY_S:
            self._said = now
            self._say(
                f"the {self._name} does not listen yet after {now - self._began:.0f} s: "
                f"{_WORDS[doing]}; it has used {self._cpu_s:.1f} s of processor time"
            )

    def _doing(self, pid: int) -> str:
        """Return the activity of a process since the last look: a key of _WORDS."""
        try:
            process = psutil.Process(pid)
            # Several learners are children of the one that starts them.
            family = [process, *(process.children() if self._several else ())]
            used = sum(sum(one.cpu_times()[:2]) for one in family)
            states = {one.status() for one in family}
        except psutil.Error:  # it, or one of them, has just ended
            return "busy"
        went_on = pid != self._pid or used > self._cpu_s
        self._pid, self._cpu_s = pid, used
        if states & {psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP}:
            return "stopped"
        return "busy" if went_on or states != {psutil.STATUS_SLEEPING} else "idle"
