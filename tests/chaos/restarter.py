"""Starts a murmur process again until it ends in order (0) or only the user can help (2).

    python -m tests.chaos.restarter COMMAND...

As systemd or a container's restart policy does, without their pauses.
"""

import os
import signal
import subprocess
import sys
from types import FrameType

from murmur.runs.child import PARENT_VARIABLE, join_supervisor


def main(command: list[str]) -> int:
    """Run a command until it need not be started again; returns its exit code."""
    join_supervisor()
    os.environ[PARENT_VARIABLE] = str(os.getpid())
    told: list[int] = []
    child: list[subprocess.Popen[bytes]] = []

    def stop(number: int, _frame: FrameType | None) -> None:
        told.append(number)
        for process in child[-1:]:
            process.send_signal(number)

    signal.signal(signal.SIGTERM, stop)
    while True:
        child.append(subprocess.Popen(command))
        code = child[-1].wait()
        if code in (0, 2) or told:
            return code


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
