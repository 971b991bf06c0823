"""An environment that ends, hangs or multiplies its process when it is told to."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

DAEMON = """
import os, sys, time
if os.fork(): os._exit(0)
os.setsid()
if os.fork(): os._exit(0)
open(sys.argv[1], "a").write(f"{os.getpid()}\\n")
time.sleep(3600)
"""


def _exit(code: int) -> None:
    os._exit(code)


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _interrupt() -> None:
    raise KeyboardInterrupt


def _recurse() -> None:
    _recurse()


def _stay() -> None:
    threading.Thread(target=time.sleep, args=(3600,)).start()  # the interpreter waits for it


def _disturb() -> None:
    """What libraries do to a process that they take for their own."""
    os.chdir("/")
    os.umask(0o777)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    sys.stdout.close()
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - for the rest of the process


def _fork() -> None:
    for _ in range(50):
        if os.fork() == 0:
            time.sleep(3600)


FAULTS: dict[str, Any] = {
    "stay": _stay,
    "disturb": _disturb,
    "fork": _fork,
    "close-files": lambda: os.closerange(3, 4096),
    "exit-0": lambda: _exit(0),
    "exit-2": lambda: _exit(2),
    "sys-exit-0": lambda: sys.exit(0),
    "interrupt": _interrupt,
    "recurse": _recurse,
    "abort": os.abort,
    "stop": _stop,
    "hang": lambda: time.sleep(3600),
}


class Treacherous(gymnasium.Env[Any, Any]):
    """Walks for ever. A file in `control`, named `<where>-<fault>`, makes one copy fail once.

    Where: "make", "reset", "step" or "close". With `children`, a file, it starts a process, one in
    a session of its own and a daemon, and writes their ids there.
    """

    observation_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, control: str, children: str = "") -> None:
        self._control, self._age = Path(control), 0
        if children:
            sleep = [sys.executable, "-S", "-c", "import time; time.sleep(3600)"]
            started = [subprocess.Popen(sleep), subprocess.Popen(sleep, start_new_session=True)]
            subprocess.run([sys.executable, "-S", "-c", DAEMON, children], check=True)
            with open(children, "a") as file:
                file.writelines(f"{process.pid}\n" for process in started)
        self._obey("make")

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._age = 0
        self._obey("reset")
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self._age += 1
        time.sleep(0.002)
        self._obey("step")
        return np.zeros(1, np.float32), 0.0, False, self._age >= 20, {}

    def close(self) -> None:
        self._obey("close")

    def _obey(self, where: str) -> None:
        for name in os.listdir(self._control):
            if name.startswith(f"{where}-"):
                try:
                    (self._control / name).unlink()  # the process that succeeds has the fault
                except FileNotFoundError:
                    continue
                FAULTS[name.removeprefix(f"{where}-")]()
