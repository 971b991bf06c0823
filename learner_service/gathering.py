"""Decisions that the learners of a group take together: begin, every step of the loop, end."""

import threading
import time
import zlib
from dataclasses import dataclass
from typing import Any

from murmur.learner_service.ranks.group import Group
from murmur.learner_service.telemetry.progress import OWN_COUNTERS, Progress, reached_limit
from murmur.shared.config.experiment import RunConfig
from murmur.shared.process.errors import ConfigError, SpecError

_EVERY_S = 0.1
_SUMMED = (*OWN_COUNTERS, "updates_skipped")
_REASONS = ("lag", "session", "restart", "skipped")  # why rows are dropped


class StartBarrier:
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
            text: description of the run; must be the same on all ranks.

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
        """Wait a little if a rank is busy at the end of a complete run; return whether one was.

        A rank that is told to stop ends the wait of all.
        """
        own = {"busy": float(busy), "stop": float(stop.is_set())}
        together = self._group.agree(own, "sum")
        waits = together["busy"] > 0 and not together["stop"]
        if waits:
            time.sleep(_EVERY_S)
        return waits


@dataclass(eq=False)
class RankSync:
    """Agrees with all ranks in one small exchange before each update; a learner alone at once.

    Used by the thread that learns.

    Attributes:
        group: learners of the run.
        progress: counters of this rank; include the others' environment steps.
        stop: event that is set from outside to end the run.
        limits: updates, environment steps, minutes and episodes at which the run is complete.
        log_due: whether a rank asked for a line of the log in the latest round.
        env_steps: environment steps of all ranks, the same number on each: what limits count.
    """

    group: Group
    progress: Progress
    stop: threading.Event
    limits: RunConfig
    log_due: bool = False
    _stopping: bool = False
    _time_up: bool = False
    _episodes: int = 0  # of all ranks, in the latest round

    def __post_init__(self) -> None:
        """Count on from where the progress is."""
        self.env_steps = self.progress.all_env_steps

    def meet(self, *, ready: bool, log_due: bool) -> bool:
        """Hold a round before an update; return whether every rank has the rows of one.

        Args:
            ready: whether this rank has rows.
            log_due: whether this rank's log is due.
        """
        p, minutes = self.progress, self.limits.max_minutes
        own: dict[str, float] = {
            "ready": ready,
            "log_due": log_due,
            "time_up": bool(minutes) and p.seconds >= 60 * minutes,
            "stop": self.stop.is_set(),
            "env_steps": p.env_steps,
            "episodes": p.episodes,
        }
        all_ranks = self.group.agree(own, "sum")
        self.log_due = all_ranks["log_due"] > 0
        self._time_up = all_ranks["time_up"] > 0
        self._stopping = all_ranks["stop"] > 0
        self.env_steps = round(all_ranks["env_steps"])
        self._episodes = round(all_ranks["episodes"])
        p.others_env_steps = self.env_steps - round(own["env_steps"])
        return all_ranks["ready"] == self.group.size

    def count(self, own: int, of_all: int) -> None:
        """Count the environment steps of an update: this rank's, and those of all ranks."""
        self.progress.env_steps += own
        self.progress.others_env_steps += of_all - own
        self.env_steps += of_all

    @property
    def over(self) -> bool:
        """Whether the run has reached a limit; time and episodes are those of the latest round."""
        done = self.progress.updates
        limit = reached_limit(self.limits, done, self.env_steps, 0.0, self._episodes)
        return self._time_up or bool(limit)

    @property
    def stopping(self) -> bool:
        """Whether a rank was told to stop in the latest round; a learner alone needs no round."""
        return self._stopping or (self.group.size == 1 and self.stop.is_set())

    def totals(self, rows_waiting: int) -> dict[str, Any]:
        """Sum counters over the ranks and list figures of each, for the log; empty if alone.

        Args:
            rows_waiting: rows of this rank that wait to be learned from.
        """
        p, group = self.progress, self.group
        if group.size == 1:
            return {}
        own: dict[str, float] = {name: getattr(p, name) for name in _SUMMED}
        own["updates_skipped"] /= group.size  # all ranks skip an update together
        own |= {f"dropped {reason}": p.rows_dropped.get(reason, 0) for reason in _REASONS}
        own["rows_waiting"] = rows_waiting
        waited_s = group.waited_s  # before this line's own exchanges
        total = group.agree(own, "sum")
        received, waited = group.gather(own["rows_received"]), group.gather(waited_s)
        dropped = {reason: round(total[f"dropped {reason}"]) for reason in _REASONS}
        return {
            **{name: round(total[name]) for name in (*_SUMMED, "rows_waiting")},
            "rows_dropped": {reason: rows for reason, rows in dropped.items() if rows},
            "ranks": [
                {"rank": rank, "rows_received": round(rows), "wait_ranks_s": seconds}
                for rank, (rows, seconds) in enumerate(zip(received, waited, strict=True))
            ],
        }
