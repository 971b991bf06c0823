"""Progress of a run: counters that survive a restart, recent results, and their log files."""

import contextlib
import json
import os
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from murmur.learner_service.telemetry.figures import Figures, png
from murmur.learner_service.telemetry.statistics import FEWEST, Statistics
from murmur.learner_service.telemetry.tracking import TrackerProcess, flattened, scalars_of
from murmur.shared.config.experiment import RunConfig
from murmur.shared.config.text import parse_yaml, without_secrets
from murmur.shared.process.errors import ResourceError
from murmur.shared.process.files import make_folder, write_whole
from murmur.shared.process.process import logger

# Of Progress: what each rank of a group counts for itself, and all that it counts.
OWN_COUNTERS = ("env_steps_received", "episodes", "rows_received", "rows_trained", "rows_inserted")
_COUNTERS = ("updates", "updates_skipped", *OWN_COUNTERS)
# Of Progress: what later results are compared with; older checkpoints lack it.
_OF_THE_START = (
    *("untrained", "trained_episodes", "first_losses", "first_evaluation", "rewards_at_odds"),
)
_RECENT_EPISODES = 100
_UNTRAINED_EPISODES = 1000  # that are kept
_FIRST_EPISODES = 10  # that count as untrained in any case: of few environments fewer begin so
_RATE_OVER_S = 0.5  # a rate over less is noise
_RATE_SPAN_S = 10.0  # that a rate is taken over: environments that wait for updates give bursts
_FLUSH_S = 10  # how late TensorBoard shows a point


class Progress:
    """Counters and recent results. Each field has one writing thread.

    An environment row is a time step of one environment with all its agents.

    Attributes:
        updates: updates made, which is also the policy's version.
        updates_skipped: updates undone because a loss or a weight was not finite.
        env_steps: environment steps learned from or put into a replay, of this rank.
        others_env_steps: the same of the other ranks, as they were last agreed on.
        env_steps_received: all that came, also those that were dropped or still wait.
        episodes: episodes finished.
        rows_received: environment rows that came; each is later trained, dropped, or still held.
        rows_trained: environment rows that updates took; from a replay, each as often as taken.
        rows_inserted: environment rows put into a replay; 0 without one.
        rows_dropped: environment rows thrown away, by reason.
        losses: scalars of the last update.
        policy_lag: mean lag of the last update's unrolls.
        recent: results of the latest episodes, by name.
        untrained: returns of episodes that began before the first update.
        trained_episodes: other episodes finished.
        first_losses: scalars of the first update.
        first_evaluation: results by name of the evaluation before the first update.
        rewards_at_odds: rewarded rows of untrained episodes, and those that reward one agent and
            punish another.
    """

    def __init__(self) -> None:
        self.updates = 0
        self.env_steps = 0
        self.env_steps_received = 0
        self.episodes = 0
        self.others_env_steps = 0
        self.updates_skipped = self.epochs = 0
        self.rows_received = 0
        self.rows_trained = 0
        self.rows_inserted = 0
        self.rows_dropped: dict[str, int] = {}
        self.losses: dict[str, float] = {}
        self.policy_lag = 0.0
        self.recent = _no_results()
        self.untrained: list[float] = []
        self.trained_episodes = 0
        self.first_losses: dict[str, float] = {}
        self.first_evaluation: dict[str, list[float]] = {}
        self.rewards_at_odds = [0, 0]
        self._seconds_before = 0.0
        self._started = time.monotonic()

    @property
    def all_env_steps(self) -> int:
        """Environment steps of all ranks: what curves are drawn over, and what limits count."""
        return self.env_steps + self.others_env_steps

    @property
    def seconds(self) -> float:
        """Training time, over all restarts, in seconds."""
        return self._seconds_before + time.monotonic() - self._started

    def finish_return(self, value: float, untrained: bool) -> None:
        """Note the return of a finished episode, which is in `episodes` already.

        Args:
            value: return of the episode.
            untrained: whether the episode began before the first update.
        """
        self.recent["return"].append(value)
        if not untrained and self.episodes > _FIRST_EPISODES:
            self.trained_episodes += 1
        elif len(self.untrained) < _UNTRAINED_EPISODES:
            self.untrained.append(value)

    def latest(self, name: str) -> list[float]:
        """Return results of the latest trained episodes: of the later half, up to 100."""
        count = min(self.trained_episodes, max(FEWEST, self.trained_episodes // 2))
        return list(self.recent.get(name, ()))[-count:] if count else []

    def returns(self) -> dict[str, dict[str, float]]:
        """Summarise untrained and latest returns, where there are any."""
        found = {"untrained": self.untrained, "latest": self.latest("return")}
        return {name: Statistics.of(x)._asdict() for name, x in found.items() if x}

    def drop(self, reason: str, rows: int) -> None:
        """Note rows thrown away."""
        self.rows_dropped[reason] = self.rows_dropped.get(reason, 0) + rows

    def means(self) -> dict[str, float]:
        """Mean of each recent result."""
        return {name: float(np.mean(list(v))) for name, v in list(self.recent.items()) if v}

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        own = {"own_env_steps": self.env_steps} if self.others_env_steps else {}
        return {
            **{name: getattr(self, name) for name in _COUNTERS},
            "epochs": self.epochs,
            "env_steps": self.all_env_steps,
            **own,
            "rows_dropped": dict(self.rows_dropped),
            "seconds": self.seconds,
            "recent": {k: list(v) for k, v in list(self.recent.items())},
            **{name: getattr(self, name) for name in _OF_THE_START},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue counting; `settle` then counts the rows that were held."""
        total = state["env_steps"]
        self.env_steps = state.get("own_env_steps", total)
        self.others_env_steps = total - self.env_steps
        for name in (*_COUNTERS, "epochs"):
            setattr(self, name, state[name])
        self.rows_dropped = dict(state["rows_dropped"])
        self.recent = _no_results()
        for name, results in state["recent"].items():
            self.recent[name].extend(results)
        for name in _OF_THE_START:
            setattr(self, name, state.get(name, getattr(self, name)))
        self._seconds_before, self._started = state["seconds"], time.monotonic()

    @property
    def rows_settled(self) -> int:
        """Rows that were learned from or are in a replay."""
        return self.rows_inserted or self.rows_trained

    def settle(self, held: int) -> None:
        """Count as dropped what the checkpoint's process held and the checkpoint does not.

        Args:
            held: rows received that the checkpoint has, or that will come again.
        """
        lost = self.rows_received - self.rows_settled - sum(self.rows_dropped.values()) - held
        if lost:
            self.drop("restart", lost)


def _no_results() -> defaultdict[str, deque[float]]:
    """Return a mapping from names to the latest results, in which any name has a place."""
    return defaultdict(lambda: deque(maxlen=_RECENT_EPISODES))


def share_of_budget(limits: RunConfig, progress: Progress) -> tuple[float | None, str]:
    """Return the largest share that is spent of a run's limits, and that limit; None: no limit."""
    spent = _spent(
        limits, progress.updates, progress.all_env_steps, progress.seconds, progress.episodes
    )
    return max(
        ((done / limit, f"run.{name}={limit:,}") for name, done, limit in spent), default=(None, "")
    )


def reached_limit(
    limits: RunConfig, updates: int, env_steps: int, seconds: float, episodes: int
) -> str:
    """Return the limit of a run that is reached, as it is configured; "" if none is."""
    spent = _spent(limits, updates, env_steps, seconds, episodes)
    return next((f"run.{name}={limit}" for name, done, limit in spent if done >= limit), "")


def _spent(
    limits: RunConfig, updates: int, env_steps: int, seconds: float, episodes: int
) -> Iterator[tuple[str, float, float]]:
    """Yield name, amount so far and bound of each limit that a run has."""
    for name, done in (
        ("max_updates", updates),
        ("max_env_steps", env_steps),
        ("max_minutes", seconds / 60),
        ("max_episodes", episodes),
    ):
        if limit := getattr(limits, name):
            yield name, done, limit


class ProgressLog:
    """progress.jsonl and TensorBoard. Used by one thread at a time.

    A full disk costs lines of the log, not the run.
    """

    def __init__(
        self,
        run_dir: Path,
        progress: Progress,
        num_agents: int,
        trackers: Sequence[TrackerProcess] = (),
        *,
        tensorboard: bool = True,
        figures_every: int = 5,
    ) -> None:
        """Append to the run's logs.

        Args:
            run_dir: run's folder.
            progress: counters.
            num_agents: number of agents that act in each step.
            trackers: processes that send the logs to trackers.
            tensorboard: whether TensorBoard gets the figures.
            figures_every: evaluations from one whose figures are drawn to the next; 0: never.

        Raises:
            OSError: if progress.jsonl cannot be opened.
        """
        self._file = (run_dir / "progress.jsonl").open("ab", buffering=0)
        self._lost = 0  # lines in a row
        self._lines_lost = 0  # in all
        self._board: SummaryWriter | None = None
        if tensorboard:
            with self._board_may_fail():
                self._board = SummaryWriter(str(run_dir / "tensorboard"), flush_secs=_FLUSH_S)
        self._config_file: Path | None = run_dir / "config.yaml"  # None once it is on the board
        self._trackers = trackers
        self._figures, self._figures_every = run_dir / "figures", figures_every
        self._evaluations = 0  # in this process
        self._progress, self._num_agents = progress, num_agents
        self._seen = deque([(time.monotonic(), progress.env_steps_received)])
        self._grouped = False  # whether `_seen` counts all ranks
        self._rate = 0.0

    def _note_parameters(self, board: SummaryWriter, config_file: Path) -> None:
        """Give TensorBoard's tab HPARAMS the run's configuration, and the curves to judge it by."""
        config = parse_yaml(config_file.read_text(), str(config_file))
        best = config.get("evaluation", {}).get("best_metric", "return").removeprefix("-")
        metrics = dict.fromkeys((f"evaluation/{best}", "episode/return"), 0.0)
        parameters = flattened(without_secrets(config))
        parameters = {
            k: v for k, v in parameters.items() if isinstance(v, bool | str | int | float)
        }
        # add_hparams would write a point of each metric
        writer = board._get_file_writer()  # type: ignore[no-untyped-call]
        for summary in hparams(parameters, metrics)[:2]:  # type: ignore[no-untyped-call]
            writer.add_summary(summary)

    def write(
        self, figures: Mapping[str, Any], totals: Mapping[str, Any] = MappingProxyType({})
    ) -> None:
        """One line of progress.

        Args:
            figures: figures not counted by Progress, by name in the line. `ledger`: seconds by
                thread and state; `device_busy_s`: seconds in which the device worked;
                `machine_busy`: share of this machine's processors in use, 0 to 1;
                `machine_busy_s`: CPU seconds of any program on the `cores` this process may use;
                `environments_limit`: environments that may act at once, 0: any number;
                `rows_waiting`: environment rows that wait to be learned from for the first time;
                `rollout`: what the storage chose by the environments there are; `device`: memory,
                update time, copies, and NVML's figures; `latency`: LearnerMetrics.latencies;
                `work`: LearnerMetrics.work_done; `samples`: where the epoch stands, if the run has
                a source.
            totals: several learners' counters in sum, and figures of each.
        """
        received = totals.get("env_steps_received", self._progress.env_steps_received)
        if totals and not self._grouped:  # what the other ranks had before counts for no rate
            self._seen, self._grouped = deque([(time.monotonic(), received)]), True
        self._update_rate(received)
        means = self._progress.means()
        line = {
            "kind": "progress",
            "time": time.time(),
            **self._counted(means),
            **figures,
            **totals,
        }
        self._append(line)
        self._draw(line)
        for tracker in self._trackers:
            tracker.look()

    def _counted(self, means: Mapping[str, float]) -> dict[str, Any]:
        """Return the run's counts and averages so far."""
        p = self._progress
        return {
            "seconds": p.seconds,
            **{name: getattr(p, name) for name in _COUNTERS},
            "env_steps": p.all_env_steps,
            "agent_steps": p.all_env_steps * self._num_agents,
            "agent_steps_per_s": self._rate,
            "return": means.get("return"),
            "returns": p.returns(),
            "metrics": {k: v for k, v in means.items() if k != "return"},
            "losses": p.losses,
            "policy_lag": p.policy_lag,
            "rows_dropped": p.rows_dropped,
        }

    def write_evaluation(
        self,
        updates: int,
        env_steps: int,
        summary: dict[str, dict[str, Any]],
        figures: Callable[[], Figures] = Figures,
    ) -> None:
        """One line for an evaluation, and every tracking.figures_every_evaluations its figures.

        Args:
            updates: made when it began.
            env_steps: the same.
            summary: name -> "mean" and others of each result.
            figures: makes them; called only if they are due.
        """
        line = {
            "kind": "evaluation",
            "time": time.time(),
            "seconds": self._progress.seconds,
            "updates": updates,
            "env_steps": env_steps,
            "metrics": summary,
        }
        self._append(line)
        self._draw(line)
        if self._figures_every and self._evaluations % self._figures_every == 0:
            self._draw_figures(figures(), env_steps)
        self._evaluations += 1

    def _draw_figures(self, figures: Figures, env_steps: int) -> None:
        """Histograms and pictures in TensorBoard; each picture also in figures/, the latest one."""
        try:
            for name, picture in figures.pictures.items():
                make_folder(self._figures)
                write_whole(self._figures / f"{name}.png", png(picture))
        except ResourceError as error:
            logger.error("%s; training continues", error)
        if self._board is None:
            return
        with self._board_may_fail():
            for name, picture in figures.pictures.items():
                self._board.add_image(f"figures/{name}", picture, env_steps, dataformats="HWC")
        self.draw_histograms(figures.values, env_steps)

    def draw_histograms(self, found: Mapping[str, ArrayLike], env_steps: int) -> None:
        """Histograms in TensorBoard of the finite values under each name."""
        board = self._board
        if board is None:
            return
        with self._board_may_fail():
            for name, values in found.items():
                array = np.asarray(values)
                if (finite := array[np.isfinite(array)]).size:
                    board.add_histogram(name, finite, env_steps)

    def counts(self) -> Mapping[str, Mapping[tuple[str, ...], int]]:
        """Count data that trackers missed: metric -> labels -> count. Any thread may call it."""
        sent = {tracker.name: tracker.forwarder() for tracker in self._trackers}
        dropped: dict[tuple[str, ...], int] = {(name, "disk"): self._lines_lost for name in sent}
        dropped |= {(name, "torn"): of.state.torn for name, of in sent.items()}
        return {
            "tracker_failures": {(name,): of.state.failures for name, of in sent.items()},
            "tracker_unsent_bytes": {(name,): of.unsent_bytes for name, of in sent.items()},
            "tracker_lines_dropped": dropped,
        }

    def close(self) -> None:
        """Flush, and give trackers tracking.finish_s for what they have not sent."""
        self._file.close()
        with self._board_may_fail():
            if self._board is not None:
                self._board.close()
        for tracker in self._trackers:
            tracker.end()
        for tracker in self._trackers:
            tracker.wait()

    def _append(self, line: Mapping[str, Any]) -> None:
        """Write a line whole, or none of it."""
        text = (json.dumps(line) + "\n").encode()
        size = self._file.seek(0, os.SEEK_END)
        try:
            if self._file.write(text) == len(text):
                if self._lost:
                    logger.warning("progress.jsonl continues; %d lines of it are lost", self._lost)
                self._lost = 0
                return
            reason = "no space left for a whole line"
        except OSError as error:
            reason = error.strerror or str(error)
        with contextlib.suppress(OSError):
            self._file.truncate(size)
        if not self._lost:
            logger.error("cannot write %s: %s; training continues", self._file.name, reason)
        self._lost += 1
        self._lines_lost += 1

    def _update_rate(self, received: int) -> None:
        """Measure the rate of agent-steps over the last seconds."""
        now, seen = time.monotonic(), self._seen
        seen.append((now, received))
        while len(seen) > 2 and seen[1][0] <= now - _RATE_SPAN_S:
            seen.popleft()
        elapsed = now - seen[0][0]
        if elapsed >= _RATE_OVER_S:
            self._rate = (received - seen[0][1]) / elapsed * self._num_agents

    def _draw(self, line: Mapping[str, Any]) -> None:
        """Add a line's figures to TensorBoard."""
        board = self._board
        if board is None:
            return
        with self._board_may_fail():
            if self._config_file is not None and self._config_file.is_file():
                self._note_parameters(board, self._config_file)
                self._config_file = None
            for tag, value in scalars_of(line).items():
                board.add_scalar(tag, value, line["env_steps"])

    @contextlib.contextmanager
    def _board_may_fail(self) -> Iterator[None]:
        """TensorBoard's writer cannot continue once it has failed."""
        try:
            yield
        except OSError as error:
            logger.error(
                "cannot write TensorBoard's file: %s; its curves end here, progress.jsonl has all",
                error.strerror or error,
            )
            self._board = None
