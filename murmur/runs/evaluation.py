"""Evaluation of a trained policy over the real wire, and of scripted baselines."""

import json
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from murmur.env_service.adapters.frames import FRAME, with_frames
from murmur.env_service.environment import VectorEnvironment, make_environment
from murmur.env_service.pictures import Snapshot
from murmur.env_service.sessions.evaluate import OnRow, run_policy
from murmur.env_service.sessions.evaluation_result import EvaluationResult
from murmur.env_service.sessions.record_transitions import TransitionRecorder
from murmur.runs.child import Child, murmur_command
from murmur.runs.run_folder import RunFolder
from murmur.runs.supervisor import wait_for_port
from murmur.shared.config.experiment import ExperimentConfig, SecurityConfig
from murmur.shared.config.files import Overrides, save
from murmur.shared.process.errors import ConfigError
from murmur.shared.wire.timestep import StepType, TimeStep
from murmur.text import number, plain, screen_table

Say = Callable[[str], None]
MOST_ROWS = 240  # of an episode that are drawn; of a longer one every second, third ...


def evaluate_run(
    run: RunFolder,
    checkpoint: Path,
    episodes: int,
    first_seed: int,
    *,
    say: Say,
    on_row: OnRow | None = None,
    overrides: Overrides = (),
    drawn: bool = False,
    recorder: TransitionRecorder | None = None,
) -> EvaluationResult:
    """Evaluate a run's policy: a learner process serves it, the episodes are played here.

    Args:
        run: run with the configuration and weights.
        checkpoint: file of the weights.
        episodes: number of episodes.
        first_seed: seed of the first episode.
        say: function called with a line while the evaluation waits.
        on_row: function called with every row of the first episode.
        overrides: changes of the run's configuration for this evaluation.
        drawn: True if environments of other libraries draw themselves.
        recorder: recorder of all episodes; None: they are not recorded.

    Raises:
        MurmurError: if the checkpoint cannot be used or the learner cannot be reached.
    """
    config = run.config(overrides).model_copy(update={"security": SecurityConfig()})
    trained, played = (c.for_evaluation().environment for c in (run.config(), config))
    with tempfile.TemporaryDirectory(prefix="murmur-resized-") as folder:
        if played != trained:
            checkpoint = _for_environment(config, checkpoint, Path(folder))
        config = with_frames(config) if drawn else config
        with _serving_learner(run, config, checkpoint, say) as address:
            return run_policy(config, address, episodes, first_seed, on_row, recorder)


def _for_environment(config: ExperimentConfig, checkpoint: Path, folder: Path) -> Path:
    """Return a checkpoint of the same policy, for the number of agents of an environment.

    Args:
        config: configuration with the environment.
        checkpoint: file of the weights.
        folder: folder for another checkpoint.

    Raises:
        MurmurError: if the policy depends on the number of agents, which differs.
    """
    from murmur.learner_service.checkpoint import files
    from murmur.learner_service.checkpoint.contents import saved_spec
    from murmur.learner_service.checkpoint.folder import CheckpointFolder
    from murmur.learner_service.checkpoint.resize import resize_checkpoint

    plugin = config.for_evaluation().environment
    with closing(make_environment(plugin, 1, config.algorithm.name)) as environment:
        spec = environment.spec
    state = CheckpointFolder(checkpoint.parent, 1).load(checkpoint)
    if config.league.on or saved_spec(state).num_agents == spec.num_agents:
        return checkpoint
    resized = folder / checkpoint.name
    files.write(resize_checkpoint(state, checkpoint.name, spec), resized)
    return resized


@contextmanager
def _serving_learner(
    run: RunFolder, settings: ExperimentConfig, checkpoint: Path, say: Say
) -> Iterator[str]:
    """Serve a run's policy by a learner process that only acts; it ends with the block.

    It has a folder of its own, so it disturbs no training in `run`.

    Yields:
        address of the learner, host:port.
    """
    with tempfile.TemporaryDirectory(prefix="murmur-serve-") as name:
        folder = RunFolder(Path(name))
        config = save(settings, folder.path / "config.yaml")
        command = murmur_command(
            "learner",
            str(config),
            "--serve",
            *("--run", str(folder.path)),
            *("--checkpoint", str(checkpoint.resolve())),
            *("--set", "learner.host=127.0.0.1"),
            *("--set", "learner.port=0"),
            *("--set", "learner.metrics_port=0"),
            # The run may come from another machine, whose networks this one has not.
            *("--set", "learner.metrics_host=127.0.0.1"),
        )
        learner = Child("serving learner", lambda _: command, _serve_log(run, folder.path))
        learner.start()
        try:
            yield f"127.0.0.1:{wait_for_port(folder, learner, say, 'serve.json')}"
        finally:
            learner.signal(signal.SIGTERM)
            learner.wait(15.0)


def _serve_log(run: RunFolder, elsewhere: Path) -> Path:
    """Return the serving learner's log: in the run, or `elsewhere` if that cannot be written."""
    log = run.logs / "serve.log"
    try:
        run.logs.mkdir(exist_ok=True)
        log.open("ab").close()
    except OSError:
        return elsewhere / "serve.log"
    return log


def caveat_of_best(run: RunFolder, checkpoint: str, episodes: int, first_seed: int) -> str:
    """Return a warning about a best checkpoint, else "".

    It is untrained if no later evaluation has ended; its figures are optimistic on the seeds that
    chose it.

    Args:
        run: run whose evaluations during training chose the checkpoint.
        checkpoint: name of the file that was played.
        episodes: number of episodes played.
        first_seed: seed of the first episode.
    """
    newest = next(run.newest_records("evaluation"), None)
    if checkpoint == "best.pt" and newest is not None and newest["updates"] == 0:
        return (
            "best.pt is the policy before training: no later evaluation came to its end. Take the "
            "latest with --checkpoint latest."
        )
    e = run.config().evaluation
    overlap = first_seed < e.first_seed + e.episodes and e.first_seed < first_seed + episodes
    if checkpoint != "best.pt" or not overlap:
        return ""
    return (
        f"These figures of best.pt are optimistic: episodes of seeds {e.first_seed} to "
        f"{e.first_seed + e.episodes - 1} chose it. Take others with --first-seed."
    )


def run_title(run: RunFolder, checkpoint: Path, overrides: Overrides = ()) -> str:
    """Return the title of an evaluation, which says if actions are sampled."""
    sampled = ", actions sampled" if run.config(overrides).evaluation.sample else ""
    return f"{run.path.name}, {checkpoint.name}{sampled}"


def result_table(title: str, result: EvaluationResult) -> Table:
    """Return a table of mean, spread and confidence of every metric."""
    episodes = len(result.metrics["return"])
    table = screen_table(
        *("metric", "mean", "std", "95 % interval", "min", "max"),
        title=f"{title}: {episodes} episodes of {result.environment}, "
        f"seeds {result.first_seed} to {result.first_seed + episodes - 1}",
    )
    for name, s in result.summary().items():
        interval = f"{number(s.low)} … {number(s.high)}"
        table.add_row(
            plain(name), number(s.mean), number(s.std), interval, number(s.min), number(s.max)
        )
    return table


def to_record(title: str, result: EvaluationResult) -> dict[str, Any]:
    """Return a result as JSON values, with mean curves over all episodes and their 95 % half-width.

    An episode that has ended counts with its final value, so that the mean does not jump when
    episodes end. A mean of no episode, and a half-width of fewer than two, is None.
    """
    record: dict[str, Any] = json.loads(result.to_json())
    record |= {"title": title, "mean_curves": {}, "curves_ci95": {}}
    for name, values in result.curves.items():
        curves = np.ma.masked_invalid(carried_forward(values))  # what is masked becomes None
        half_width = 1.96 * curves.std(axis=0, ddof=1) / np.sqrt(curves.count(axis=0))
        record["mean_curves"][name] = curves.mean(axis=0).tolist()
        record["curves_ci95"][name] = half_width.tolist()
    return record


def carried_forward(curves: NDArray[np.float64]) -> NDArray[np.float64]:
    """Fill curves [E, T] after each episode's end with its final value."""
    steps = np.arange(curves.shape[1])
    last = np.where(np.isnan(curves), 0, steps).max(axis=1)  # [E]
    return np.take_along_axis(curves, np.minimum(steps, last[:, None]), axis=1)


class Recorder:
    """Recorder of the values that pictures of an episode need; pass its `take` as on_row.

    Of the frames of an episode of more than 2 MOST_ROWS rows every second, fourth ... is kept, so
    its length does not matter for memory. Other states are small, and paths are drawn through all.

    Attributes:
        snapshots: rows of the episode; empty if the environment cannot be drawn.
        every: number of rows of the episode for each that is kept.
        frames_per_second: pictures of an episode's second; 0 if the environment does not say.
    """

    def __init__(self, required_by: str = "") -> None:
        """Start with an empty record.

        Args:
            required_by: name of the environment if it has to draw itself, for the message; "": one
                without pictures is not recorded.
        """
        self._required_by = required_by
        self.snapshots: list[Snapshot] = []

    def take(self, environment: VectorEnvironment, timestep: TimeStep) -> None:
        """Note a row of copy 0.

        Raises:
            ConfigError: if the environment draws nothing, and has to.
        """
        if timestep.step_type[0] == StepType.FIRST:  # an evaluation that broke is played again
            self.snapshots = []
            self.every, self._rows = 1, 0
            self.frames_per_second = getattr(environment, "frames_per_second", 0)
        try:
            state = dict(environment.render_state(0))
        except NotImplementedError as error:
            if self._required_by:
                raise ConfigError(
                    f"environment '{self._required_by}' has no pictures: {error}. Its factory must "
                    f"take render_mode='{FRAME}' and its render() return an array"
                ) from error
            return
        last = timestep.step_type[0] == StepType.LAST
        if self._rows % self.every == 0 or last:
            metrics = {name: float(values[0]) for name, values in timestep.metrics.items()}
            self.snapshots.append(Snapshot(state, metrics))
        self._rows += 1
        if FRAME in state and len(self.snapshots) > 2 * MOST_ROWS and not last:
            self.snapshots, self.every = self.snapshots[::2], 2 * self.every
