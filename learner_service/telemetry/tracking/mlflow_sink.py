"""MLflow."""

import logging
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from learner_service.telemetry.tracking.sink import Point
from shared.config.experiment import TrackingConfig
from shared.config.text import without_secrets

_METRICS_AT_ONCE = 1000  # the most that MLflow takes in one request
_PARAMETERS_AT_ONCE = 100
_LONGEST_VALUE = 6000  # characters of a parameter
_FORBIDDEN = re.compile(r"[^\w\-. :/]")  # in names


class MlflowSink:
    """One run in MLflow, as the protocol Sink."""

    id_is_ours = False

    def __init__(self, run_dir: Path, config: TrackingConfig, run_id: str) -> None:
        """Open the run, or that with `run_id` again.

        Raises:
            MlflowException: if the server or store cannot be used.
        """
        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.WARNING)
        from mlflow import MlflowClient

        whole = "" if config.offline else config.whole_mlflow_uri()
        uri = whole or _local(run_dir)
        self._client = MlflowClient(tracking_uri=uri)
        if run_id:
            self._client.update_run(run_id, "RUNNING")
        else:
            local = (run_dir.resolve().parent / "mlflow-artifacts").as_uri()
            run_id = self._create(config, run_dir, local if uri == _local(run_dir) else None)
        self.run_id, self.where = run_id, f"{without_secrets(uri)} run {run_id}"
        self._known: dict[str, str] = dict(self._client.get_run(run_id).data.params)
        self._steps = 0

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
        self._known |= {param.key: param.value for param in new}

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
        self._steps = points[-1].env_steps

    def send_file(self, file: Path, env_steps: int) -> None:
        """Add a picture as an artifact in the folder `media`."""
        self._client.log_artifact(self.run_id, str(file), "media")

    def finish(self, summary: Mapping[str, float], *, complete: bool) -> None:
        """Write the final figures and mark the run FINISHED, or FAILED if not `complete`."""
        for name, value in summary.items():
            self._client.log_metric(self.run_id, _name(name), value, step=self._steps)
        self._client.set_terminated(self.run_id, "FINISHED" if complete else "FAILED")


def _local(run_dir: Path) -> str:
    """The store beside the run's folder, where runs share it."""
    return f"sqlite:///{run_dir.resolve().parent / 'mlflow.db'}"


def _name(name: str) -> str:
    """A name that MLflow takes."""
    return _FORBIDDEN.sub("_", name)
