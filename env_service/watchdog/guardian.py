"""Script that ends processes left behind by a killed environment server's workers.

It runs in a separate process: it waits for the end of its standard input, then kills every process
with an environment variable that begins with its argument. See descendants.Guardian.
"""

import contextlib
import os
import signal
import sys

_ROUNDS = 20  # a process may fork while it is being found


def _marked(mark: bytes) -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
                if any(variable.startswith(mark) for variable in file.read().split(b"\0")):
                    found.append(int(name))
    return found


def main() -> None:
    """Wait for the end of standard input, then kill all marked processes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdin.buffer.read()
    for _ in range(_ROUNDS):
        marked = _marked(os.fsencode(sys.argv[1]))
        if not marked:
            return
        for process in marked:
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)


if __name__ == "__main__":
    main()
