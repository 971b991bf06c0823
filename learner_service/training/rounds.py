"""What the learners of a group decide together: when to update, to log, to save and to stop."""

import threading
from typing import Any

from learner_service.group.group import Group
from learner_service.telemetry.progress import OWN_COUNTERS, Progress

_SUMMED = (*OWN_COUNTERS, "updates_skipped")
_REASONS = ("lag", "session", "restart", "skipped")  # why rows are dropped


class Rounds:
    """Agreements of all ranks, each one small exchange. Used by the thread that learns.

    A learner that is alone decides by itself and exchanges nothing.

    Attributes:
        log_due: whether a rank asked for a line of the log in the latest round.
        time_up: whether a rank had reached run.max_minutes in the latest round.
    """

    def __init__(self, group: Group, progress: Progress, stop: threading.Event) -> None:
        """Decide with the ranks of `group`.

        Args:
            group: the learners of the run.
            progress: of this rank; includes the others' environment steps.
            stop: set from outside to end the run.
        """
        self._group = group
        self._progress = progress
        self._stop = stop
        self._stopping, self._env_steps = False, 0
        self.log_due = self.time_up = False

    @property
    def alone(self) -> bool:
        """Whether there is one learner."""
        return self._group.size == 1

    @property
    def stopping(self) -> bool:
        """Whether the run was told to stop: this learner, or a rank in the latest round."""
        return self._stop.is_set() if self.alone else self._stopping

    @property
    def env_steps(self) -> int:
        """Environment steps of all ranks, the same number on each: what limits count."""
        return self._progress.all_env_steps if self.alone else self._env_steps

    def count(self, own: int, of_all: int) -> None:
        """Count the environment steps of an update: this rank's, and those of all ranks."""
        self._progress.env_steps += own
        self._progress.others_env_steps += of_all - own
        self._env_steps += of_all

    def meet(self, *, ready: bool, log_due: bool, time_up: bool) -> bool:
        """A round, before an update; returns whether every rank has the rows of one.

        Args:
            ready: whether this rank has.
            log_due: whether its log is due.
            time_up: whether it has reached run.max_minutes.
        """
        own: dict[str, float] = {
            "ready": ready,
            "log_due": log_due,
            "time_up": time_up,
            "stop": self._stop.is_set(),
            "env_steps": self._progress.env_steps,
        }
        all_ranks = self._group.agree(own, "sum")
        self.log_due, self.time_up = all_ranks["log_due"] > 0, all_ranks["time_up"] > 0
        self._stopping = all_ranks["stop"] > 0
        self._env_steps = round(all_ranks["env_steps"])
        self._progress.others_env_steps = self._env_steps - round(own["env_steps"])
        return all_ranks["ready"] == self._group.size

    def everywhere(self, condition: bool) -> bool:
        """Whether a condition holds on every rank."""
        return self._group.all_ranks(condition)

    def totals(self, rows_waiting: int) -> dict[str, Any]:
        """Counters in sum over the ranks, and figures of each, for the log; empty if alone.

        Args:
            rows_waiting: rows of this rank that wait to be learned from.
        """
        if self.alone:
            return {}
        p, group = self._progress, self._group
        own: dict[str, float] = {name: getattr(p, name) for name in _SUMMED}
        own["updates_skipped"] /= group.size  # updates are skipped by all
        own |= {f"dropped {reason}": p.rows_dropped.get(reason, 0) for reason in _REASONS}
        own["rows_waiting"] = rows_waiting
        for rank in range(group.size):
            here = rank == group.rank
            own[f"received {rank}"] = p.rows_received if here else 0
            own[f"waited {rank}"] = group.waited_s if here else 0
        total = group.agree(own, "sum")
        dropped = {reason: round(total[f"dropped {reason}"]) for reason in _REASONS}
        return {
            **{name: round(total[name]) for name in (*_SUMMED, "rows_waiting")},
            "rows_dropped": {reason: rows for reason, rows in dropped.items() if rows},
            "ranks": [
                {
                    "rank": rank,
                    "rows_received": round(total[f"received {rank}"]),
                    "wait_ranks_s": total[f"waited {rank}"],
                }
                for rank in range(group.size)
            ],
        }
