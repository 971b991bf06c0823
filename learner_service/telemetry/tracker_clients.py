"""One run in Weights & Biases, or in MLflow, through the tracker's own client."""

import logging
import os
import re
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from murmur.shared.config.experiment import TrackingConfig
from murmur.shared.config.text import without_secrets

# The most that MLflow takes in one request, and characters of a parameter.
_METRICS_AT_ONCE, _PARAMETERS_AT_ONCE = 1000, 100
_LONGEST_VALUE = 6000
_FORBIDDEN = re.compile(r"[^\w\-. :/]")  # in MLflow's names


class Point(NamedTuple):
    """Figures at one moment of a run.

    Attributes:
        time_s: time in seconds since 1970.
        env_steps: environment steps learned from, the x-axis of all curves.
        values: figures by name.
    """

    time_s: float
    env_steps: int
    values: Mapping[str, float]


class TrackerClient(Protocol):
    """One run in a tracker. An entry point of the group murmur.trackers names such a class.

    Any method may raise anything: murmur tries again later. See WandbClient for the attributes.
    """

    id_is_ours: bool
    run_id: str
    where: str

    def __init__(self, run_dir: Path, config: TrackingConfig, run_id: str) -> None:
        """Open the run, or that with `run_id` again."""

    @staticmethod
    def store(run_dir: Path, config: TrackingConfig) -> str:
        """Name the store that holds the points; "" if an opened run holds no earlier ones."""

    def configure(self, parameters: Mapping[str, Any]) -> None:
        """Set hyper-parameters by dotted name."""

    def log(self, points: Sequence[Point]) -> None:
        """Add points to the curves, over env_steps."""

    def send_file(self, file: Path, env_steps: int) -> None:
        """Add a picture."""

    def finish(self, *, complete: bool) -> None:
        """Close the run."""


class WandbClient:
    """One run in Weights & Biases. Any method may raise what W&B raises.

    Curves have env_steps as their x-axis, since a resumed run may go back.

    Offline every opening writes a new folder. `wandb sync` of a second folder of one run replaces
    the state of the first, so each is sent the whole run.

    Attributes:
        run_id: the run's id.
        where: an address, or a folder, at which people find the run.
        id_is_ours: whether the run has its id in every store; if not, the store gives it.
    """

    id_is_ours = True

    def __init__(self, run_dir: Path, config: TrackingConfig, run_id: str) -> None:
        """Open the run, or that with `run_id` again.

        Raises:
            wandb.Error: if no user is logged in, or the server does not answer.
        """
        import wandb

        self._wandb = wandb
        self.run_id = run_id or uuid.uuid4().hex[:12]
        self._run: Any = wandb.init(
            project=config.project,
            entity=config.entity or None,
            name=config.name or run_dir.resolve().name,
            tags=config.tags,
            dir=str(run_dir / "tracking"),
            id=self.run_id,
            resume=None if config.offline else "allow",
            mode="offline" if config.offline else "online",
            settings=wandb.Settings(console="off", silent=True),
        )
        self._run.define_metric("env_steps", hidden=True)
        self._run.define_metric("*", step_metric="env_steps")
        self.where = str(Path(self._run.dir).parent if config.offline else self._run.url)

    @staticmethod
    def store(run_dir: Path, config: TrackingConfig) -> str:
        """Return "online"; "" if offline, when an opened run holds no earlier points."""
        return "" if config.offline else "online"

    def configure(self, parameters: Mapping[str, Any]) -> None:
        """Set hyper-parameters by dotted name; later values replace earlier ones."""
        self._run.config.update(dict(parameters), allow_val_change=True)

    def log(self, points: Sequence[Point]) -> None:
        """Add points to the curves, over env_steps."""
        for point in points:
            self._run.log({**point.values, "env_steps": point.env_steps})

    def send_file(self, file: Path, env_steps: int) -> None:
        """Add a picture: .png as an image, other files as a video."""
        kind = self._wandb.Image if file.suffix == ".png" else self._wandb.Video
        self._run.log({f"media/{file.stem}": kind(str(file)), "env_steps": env_steps})

    def finish(self, *, complete: bool) -> None:
        """Close the run, with exit code 1 if not `complete`."""
        self._run.finish(exit_code=0 if complete else 1)


class MlflowClient:
    """One run in MLflow, with the methods and attributes of WandbClient."""

    id_is_ours = False

    def __init__(self, run_dir: Path, config: TrackingConfig, run_id: str) -> None:
        """Open the run, or that with `run_id` again.

        Raises:
            MlflowException: if the server or store cannot be used.
        """
        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.WARNING)
        from mlflow import MlflowClient

        uri = ("" if config.offline else config.whole_mlflow_uri()) or _local(run_dir)
        self._client = MlflowClient(tracking_uri=uri)
        if run_id:
            self._client.update_run(run_id, "RUNNING")
        else:
            local = (run_dir.resolve().parent / "mlflow-artifacts").as_uri()
            run_id = self._create(config, run_dir, local if uri == _local(run_dir) else None)
        self.run_id, self.where = run_id, f"{without_secrets(uri)} run {run_id}"
        self._known: dict[str, str] = dict(self._client.get_run(run_id).data.params)

    @staticmethod
    def store(run_dir: Path, config: TrackingConfig) -> str:
        """Name the server or the local database that holds the run's points."""
        uri = config.mlflow_uri or os.environ.get("MLFLOW_TRACKING_URI", "")
        shown: str = without_secrets(uri)
        return _local(run_dir) if config.offline or not uri else shown

    def _create(self, config: TrackingConfig, run_dir: Path, artifacts: str | None) -> str:
        """A new run in the experiment, which is made if it does not exist."""
        found = self._client.get_experiment_by_name(config.project)
        experiment = (
            found.experiment_id
            if found
            else self._client.create_experiment(config.project, artifact_location=artifacts)
        )
        pairs = (tag.partition("=") for tag in config.tags)
        tags = {key: value if equals else "true" for key, equals, value in pairs}
        name = config.name or run_dir.resolve().name
        run_id: str = self._client.create_run(experiment, tags=tags, run_name=name).info.run_id
        return run_id

    def configure(self, parameters: Mapping[str, Any]) -> None:
        """Set parameters. MLflow's cannot change: later values become tags `changed.NAME`."""
        from mlflow.entities import Param, RunTag

        texts = {_name(k): str(v)[:_LONGEST_VALUE] for k, v in parameters.items()}
        new = [Param(k, v) for k, v in texts.items() if k not in self._known]
        changed = [
            RunTag(f"changed.{k}", v) for k, v in texts.items() if self._known.get(k, v) != v
        ]
        for i in range(0, max(len(new), len(changed)), _PARAMETERS_AT_ONCE):
            part = slice(i, i + _PARAMETERS_AT_ONCE)
            self._client.log_batch(self.run_id, params=new[part], tags=changed[part])
        self._known |= texts

    def log(self, points: Sequence[Point]) -> None:
        """Add points to the curves, in batches of the most that MLflow takes in one request."""
        from mlflow.entities import Metric

        metrics = [
            Metric(_name(name), value, int(1e3 * point.time_s), point.env_steps)
            for point in points
            for name, value in point.values.items()
        ]
        for i in range(0, len(metrics), _METRICS_AT_ONCE):
            self._client.log_batch(self.run_id, metrics=metrics[i : i + _METRICS_AT_ONCE])

    def send_file(self, file: Path, env_steps: int) -> None:
        """Add a picture as an artifact in the folder `media`."""
        self._client.log_artifact(self.run_id, str(file), "media")

    def finish(self, *, complete: bool) -> None:
        """Mark the run FINISHED, or FAILED if not `complete`."""
        self._client.set_terminated(self.run_id, "FINISHED" if complete else "FAILED")


def _local(run_dir: Path) -> str:
    """The store beside the run's folder, where runs share it."""
    return f"sqlite:///{run_dir.resolve().parent / 'mlflow.db'}"


def _name(name: str) -> str:
    """A name that MLflow takes."""
    return _FORBIDDEN.sub("_", name)
