"""Several learners begin and end a run together, however late each one's environments come."""

import threading
import time
import zlib

from learner_service.group.group import Group
from shared.errors import ConfigError, SpecError

_EVERY_S = 0.1


class Gathering:
    """Holds back a rank that knows its environment until all ranks do.

    The main thread agrees with the other ranks; the thread that opens the run waits for it. From
    then on the thread that learns agrees.
    """

    def __init__(self, group: Group) -> None:
        """Wait for the ranks of `group`."""
        self._group = group
        self._code = 0  # of what this rank's run is about; 0: not known yet
        self._over = threading.Event()
        self._cancelled = False

    def join(self, text: str) -> None:
        """Wait for all ranks. Called by the thread that opens the run.

        Args:
            text: what the run is about; must be the same on all ranks.

        Raises:
            SpecError: if the process ends before they are there.
        """
        if self._group.size == 1:
            return
        self._code = 1 + zlib.crc32(text.encode())
        self._over.wait()
        if self._cancelled:
            raise SpecError("the learner is told to stop")

    def await_all(self, stop: threading.Event) -> bool:
        """Wait until all ranks are there; returns False if one is told to stop before.

        Raises:
            ConfigError: if they are about different environments.
        """
        while not self._over.is_set():
            own = {"here": float(self._code > 0), "stop": float(stop.is_set())}
            together = self._group.agree(own, "sum")
            if together["stop"]:
                return False
            if together["here"] == self._group.size:
                self._require_one_run()
                self._over.set()
                return True
            stop.wait(_EVERY_S)
        return not self._cancelled

    def _require_one_run(self) -> None:
        extremes = self._group.agree({"least": -self._code, "most": self._code}, "max")
        if -extremes["least"] != extremes["most"]:
            raise ConfigError(
                "the learners' environments differ, so they cannot learn together: start all "
                "environment servers with one configuration, one release of murmur, and the "
                "agents in one order (possible_agents = sorted(...))"
            )

    def cancel(self) -> None:
        """Let go of the thread that waits: the process ends."""
        self._cancelled |= not self._over.is_set()
        self._over.set()

    def await_end(self, busy: bool, stop: threading.Event) -> bool:
        """Whether a rank is still busy at the end of a complete run, and none was told to stop."""
        own = {"busy": float(busy), "stop": float(stop.is_set())}
        together = self._group.agree(own, "sum")
        time.sleep(_EVERY_S)
        return together["busy"] > 0 and not together["stop"]
