"""A run in the Python API: its training, its metrics, its checkpoints."""

import atexit
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console

from murmur.env_service.sessions.evaluation_result import EvaluationResult
from murmur.runs.interrupts import end_before_signals
from murmur.runs.run_folder import RunFolder
from murmur.runs.training import Prepared, train
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.config.extras import advising
from murmur.shared.config.files import Overrides
from murmur.shared.process.errors import ConfigError
from murmur.shared.process.process import logger
from murmur.text import print_plain

if TYPE_CHECKING:
    import pandas as pd

Record = dict[str, Any]  # a line of progress.jsonl
Callback = Callable[["Run", Record], None]


class Run:
    """The folder of a run, and its training if this process started it.

    `murmur.train` returns one; `murmur.Run(folder)` opens an existing one. At the end of a `with`
    block it stops a training in the background and waits for the last checkpoint.

    Methods may be called from any thread.

    Attributes:
        path: the run's folder.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        """Open the folder of a run.

        Raises:
            ConfigError: if there is no run in it.
        """
        self._folder = RunFolder.open(Path(path))
        self.path = self._folder.path
        self._stop = threading.Event()
        self._ended = threading.Event()  # Thread.join would not do: Ctrl-C breaks it before 3.13
        self._ended.set()
        self._thread: threading.Thread | None = None  # that trains
        self._error: BaseException | None = None
        self._process = os.getpid()

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}{', training' if self.running else ''})"

    def __fspath__(self) -> str:
        """Return the folder: a run can be given wherever a path can."""
        return str(self.path)

    def __enter__(self) -> Self:
        """Return the run; the end of the block stops its training."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Stop the training that this process started and wait for its end."""
        self._end()
        if error is None:
            self._raise_error()

    @property
    def config(self) -> ExperimentConfig:
        """The run's whole configuration."""
        return self._folder.config()

    @property
    def running(self) -> bool:
        """Return whether this or another process of this machine trains the run."""
        return not self._ended.is_set() or self._folder.process("learner.json") is not None

    def stop(self) -> None:
        """Ask the training to save a checkpoint and end; return at once, see `wait`.

        Raises:
            ConfigError: if another process trains the run.
        """
        self._require_own("stopped")
        self._stop.set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the training has ended.

        Args:
            timeout_s: longest wait [s]; None: no limit.

        Returns:
            whether it has ended.

        Raises:
            KeyboardInterrupt: on Ctrl-C, after an orderly stop with a checkpoint.
            MurmurError: for an error the user can fix, which ended the training.
            Exception: what a callback raised, after an orderly stop with a checkpoint.
        """
        self._require_own("waited for")
        try:
            self._join(timeout_s)
        except KeyboardInterrupt:
            self._end()
            raise
        if not self._ended.is_set():
            return False
        self._raise_error()
        return True

    def metrics(self) -> "pd.DataFrame":
        """Return the training's progress, a row every learner.log_every_s seconds.

        Returns:
            a DataFrame with the columns seconds, updates, env_steps, agent_steps, episodes,
            agent_steps_per_s, policy_lag, return (mean of recent training episodes), metrics.NAME
            of the environment and losses.NAME of the algorithm. A very long run is thinned out
            evenly.

        Raises:
            ConfigError: if pandas is not installed.
        """
        rows = [_progress_row(record) for record in self._folder.records("progress")]
        return _frame(rows, _progress_row({}))

    def evaluations(self) -> "pd.DataFrame":
        """Return the evaluations during the training, a row each.

        Returns:
            a DataFrame with the columns seconds, updates, env_steps, episodes, and for `return` and
            each metrics.NAME the mean, NAME.std (standard deviation), NAME.low and NAME.high (95 %
            interval).

        Raises:
            ConfigError: if pandas is not installed.
        """
        rows = [_evaluation_row(record) for record in self._folder.records("evaluation")]
        nothing = {"metrics": {"return": {"mean": None}}}
        return _frame(rows, _evaluation_row(nothing))

    def best(self) -> Path:
        """Return the checkpoint with the best evaluation; the latest if there was no evaluation.

        Raises:
            CheckpointError: if there is no checkpoint.
        """
        return self._folder.checkpoint("best")

    def latest(self) -> Path:
        """Return the latest checkpoint.

        Raises:
            CheckpointError: if there is no checkpoint.
        """
        return self._folder.checkpoint("latest")

    @advising()
    def evaluate(
        self,
        episodes: int = 50,
        *,
        first_seed: int = 1,
        checkpoint: str | PathLike[str] = "best",
        overrides: Overrides = (),
    ) -> EvaluationResult:
        """Play episodes with a trained policy, like `murmur evaluate`: a learner process serves it.

        Args:
            episodes: number of episodes.
            first_seed: seed of the first episode; the following ones count up.
            checkpoint: "best", "latest" or a file.
            overrides: changes of the configuration for this evaluation, see murmur.config.

        Returns:
            the return and every metric of each episode: `result.metrics` has arrays by name,
            `result.summary()` means and 95 % intervals.

        Raises:
            MurmurError: if there is no such checkpoint, or the evaluation fails.
        """
        from murmur.runs.evaluation import evaluate_run

        if episodes < 1:
            raise ConfigError(f"episodes={episodes}: give 1 or more")
        if self.config.supervised:
            raise ConfigError(
                f"run '{self.path}' learned from a source; `murmur evaluate {self.path}` measures "
                "its network on the validation split"
            )
        weights = self._folder.checkpoint(str(checkpoint))
        say = partial(print_plain, Console())
        return evaluate_run(
            self._folder, weights, episodes, first_seed, say=say, overrides=overrides
        )

    def _train(
        self, prepared: Prepared, callbacks: Sequence[Callback], console: Console, *, wait: bool
    ) -> None:
        """Train in this thread or, without `wait`, in a thread of its own. Called once."""
        self._ended.clear()
        # Python does not wait for a daemon thread, and its end would kill the children.
        atexit.register(self._end)
        if wait:
            self._thread = threading.current_thread()
            self._work(prepared, callbacks, console)
            self._raise_error()
            return

        def work() -> None:
            self._work(prepared, callbacks, console)
            if (error := self._error) is not None:  # `wait`, which raises it, may never be called
                logger.error("run %s: %s: %s", self.path, type(error).__name__, error)

        self._thread = threading.Thread(target=work, name="murmur-train", daemon=True)
        end_before_signals(self._end)
        self._thread.start()

    def _work(self, prepared: Prepared, callbacks: Sequence[Callback], console: Console) -> None:
        """Supervise the run's processes until they have ended."""

        def tell(record: dict[str, Any]) -> None:
            for callback in callbacks:
                if self._error is not None:
                    return
                try:
                    _require_none(callback, callback(self, record))
                except Exception as error:  # of the caller's code; raised after the orderly stop
                    self._error = error
                    self._stop.set()

        try:
            train(prepared, console, stop=self._stop, on_record=tell)
        except BaseException as error:
            self._error = self._error or error
        finally:
            self._ended.set()

    def _end(self) -> None:
        """Stop and wait for the end; a forked child leaves the training to its parent."""
        if os.getpid() == self._process:
            self._stop.set()
            self._join(None)

    def _join(self, timeout_s: float | None) -> None:
        """Wait for the end of the training, unless it is this thread that trains."""
        if self._thread is not threading.current_thread():
            self._ended.wait(timeout_s)

    def _raise_error(self) -> None:
        """Raise the error that ended the training, once."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _require_own(self, done: str) -> None:
        """Check that no other process trains the run.

        Raises:
            ConfigError: if another process trains the run.
        """
        forked = os.getpid() != self._process and not self._ended.is_set()
        pid = self._folder.process("learner.json")
        if (self._ended.is_set() or forked) and pid:
            raise ConfigError(
                f"run '{self.path}' is trained by another process and cannot be {done} from here; "
                f"its learner is process {pid}"
            )


def _require_none(callback: Callback, answer: object) -> None:
    """Refuse False, which ends the training in other libraries.

    Raises:
        ConfigError: naming the callback.
    """
    if answer is False:
        name = getattr(callback, "__name__", type(callback).__name__)
        raise ConfigError(f"callback '{name}' returned False; call run.stop() to end the run")


def _progress_row(record: Record) -> dict[str, float | None]:
    """Convert a record of progress to a row of figures."""
    names = ("seconds", "updates", "env_steps", "agent_steps", "episodes", "agent_steps_per_s")
    row = {name: record.get(name) for name in (*names, "policy_lag", "return")}
    for section in ("metrics", "losses"):
        row |= {f"{section}.{name}": value for name, value in record.get(section, {}).items()}
    return row


def _evaluation_row(record: Record) -> dict[str, float | None]:
    """Convert a record of an evaluation to a row of figures."""
    row = {name: record.get(name) for name in ("seconds", "updates", "env_steps")}
    for name, summary in record["metrics"].items():
        key = name if name == "return" else f"metrics.{name}"
        row["episodes"] = summary.get("episodes")
        low, high = summary.get("ci95", (None, None))
        row |= {key: summary["mean"], f"{key}.std": summary.get("std")}
        row |= {f"{key}.low": low, f"{key}.high": high}
    return row


@advising()
def _frame(rows: list[dict[str, float | None]], columns: Iterable[str]) -> "pd.DataFrame":
    """Return rows as a DataFrame, which has `columns` even without rows.

    Raises:
        ConfigError: if pandas is not installed.
    """
    import pandas as pd

    return pd.DataFrame(rows) if rows else pd.DataFrame(columns=list(columns))
