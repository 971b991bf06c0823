"""How far a run has come: counters that survive a restart, recent results, and their log files."""

import json
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.tensorboard import SummaryWriter

_RECENT_EPISODES = 100
_RATE_OVER_S = 0.5  # a rate over less is noise


class Progress:
    """Counters and recent results. Each field has one writing thread.

    Attributes:
        updates: updates made, which is also the policy's version.
        env_steps: environment steps received.
        episodes: episodes finished.
        rows_received: environment rows that came; each is later trained, dropped, or still held.
        rows_trained: environment rows that updates took; from a replay, each as often as taken.
        rows_inserted: environment rows put into a replay; 0 without one.
        rows_dropped: environment rows thrown away, by reason.
        losses: scalars of the last update.
        policy_lag: mean lag of the last update's rows.
    """

    def __init__(self) -> None:
        self.updates = self.env_steps = self.episodes = 0
        self.rows_received = self.rows_trained = self.rows_inserted = 0
        self.rows_dropped: dict[str, int] = {}
        self.losses: dict[str, float] = {}
        self.policy_lag = 0.0
        self.recent: dict[str, deque[float]] = {}
        self._seconds_before = 0.0
        self._started = time.monotonic()

    @property
    def seconds(self) -> float:
        """Training time, over all restarts, in seconds."""
        return self._seconds_before + time.monotonic() - self._started

    def finish_episode(self, name: str, values: NDArray[np.floating[Any]]) -> None:
        """Note results of finished episodes."""
        recent = self.recent.get(name)
        if recent is None:
            recent = self.recent.setdefault(name, deque(maxlen=_RECENT_EPISODES))
        recent.extend(values.tolist())

    def drop(self, reason: str, rows: int) -> None:
        """Note rows thrown away."""
        self.rows_dropped[reason] = self.rows_dropped.get(reason, 0) + rows

    def means(self) -> dict[str, float]:
        """Mean of each recent result."""
        return {name: float(np.mean(list(v))) for name, v in list(self.recent.items()) if v}

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {
            "updates": self.updates,
            "env_steps": self.env_steps,
            "episodes": self.episodes,
            "rows_received": self.rows_received,
            "rows_trained": self.rows_trained,
            "rows_inserted": self.rows_inserted,
            "rows_dropped": dict(self.rows_dropped),
            "seconds": self.seconds,
            "recent": {k: list(v) for k, v in list(self.recent.items())},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue counting."""
        self.updates, self.env_steps = state["updates"], state["env_steps"]
        self.episodes, self.rows_trained = state["episodes"], state["rows_trained"]
        self.rows_received, self.rows_inserted = state["rows_received"], state["rows_inserted"]
        self.rows_dropped = dict(state["rows_dropped"])
        # What the checkpoint's process still held is gone with it.
        settled = self.rows_inserted or self.rows_trained
        held = self.rows_received - settled - sum(self.rows_dropped.values())
        if held:
            self.drop("restart", held)
        self.recent = {k: deque(v, _RECENT_EPISODES) for k, v in state["recent"].items()}
        self._seconds_before, self._started = state["seconds"], time.monotonic()


class ProgressLog:
    """progress.jsonl and TensorBoard. Used by one thread at a time."""

    def __init__(self, run_dir: Path, progress: Progress, num_agents: int) -> None:
        """Append to the run's logs."""
        self._file = (run_dir / "progress.jsonl").open("a", buffering=1)
        self._board = SummaryWriter(str(run_dir / "tensorboard"))
        self._progress, self._num_agents = progress, num_agents
        self._last = (time.monotonic(), progress.env_steps)
        self._rate = 0.0

    def write(
        self,
        ledger: Mapping[str, Mapping[str, float]],
        device_busy_s: float,
        machine_busy: float,
        environments_limit: int,
    ) -> None:
        """One line of progress.

        Args:
            ledger: seconds by thread and state.
            device_busy_s: seconds in which the device worked.
            machine_busy: share of this machine's processors in use, 0 to 1.
            environments_limit: environments that may act at once; 0: any number.
        """
        p = self._progress
        now = (time.monotonic(), p.env_steps)
        elapsed = now[0] - self._last[0]
        if elapsed >= _RATE_OVER_S:
            self._rate = (now[1] - self._last[1]) / elapsed * self._num_agents
            self._last = now
        means = p.means()
        line = {
            "kind": "progress",
            "time": time.time(),
            "seconds": p.seconds,
            "updates": p.updates,
            "env_steps": p.env_steps,
            "agent_steps": p.env_steps * self._num_agents,
            "episodes": p.episodes,
            "agent_steps_per_s": self._rate,
            "return": means.get("return"),
            "metrics": {k: v for k, v in means.items() if k != "return"},
            "losses": p.losses,
            "policy_lag": p.policy_lag,
            "rows_received": p.rows_received,
            "rows_trained": p.rows_trained,
            "rows_inserted": p.rows_inserted,
            "rows_dropped": p.rows_dropped,
            "ledger": ledger,
            "device_busy_s": device_busy_s,
            "machine_busy": machine_busy,
            "environments_limit": environments_limit,
        }
        self._file.write(json.dumps(line) + "\n")
        for name, value in means.items():
            self._scalar(f"episode/{name}", value)
        for name, value in p.losses.items():
            self._scalar(f"update/{name}", value)
        self._scalar("rate/agent_steps_per_s", self._rate)
        self._scalar("rate/policy_lag", p.policy_lag)

    def write_evaluation(
        self, updates: int, env_steps: int, summary: dict[str, dict[str, Any]]
    ) -> None:
        """One line for an evaluation."""
        line = {
            "kind": "evaluation",
            "time": time.time(),
            "seconds": self._progress.seconds,
            "updates": updates,
            "env_steps": env_steps,
            "metrics": summary,
        }
        self._file.write(json.dumps(line) + "\n")
        for name, values in summary.items():
            self._board.add_scalar(f"evaluation/{name}", values["mean"], env_steps)

    def close(self) -> None:
        """Flush."""
        self._file.close()
        self._board.close()

    def _scalar(self, tag: str, value: float) -> None:
        self._board.add_scalar(tag, value, self._progress.env_steps)
