"""Weights & Biases."""

import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from learner_service.telemetry.tracking.sink import Point
from shared.config.experiment import TrackingConfig


class WandbSink:
    """One run in Weights & Biases, as the protocol Sink.

    Curves have env_steps as their x-axis, since a resumed run may go back.

    Offline every opening writes a new folder. `wandb sync` of a second folder of one run replaces
    the state of the first, so each is sent the whole run.
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
        folder = run_dir / "tracking"
        self._run: Any = wandb.init(
            project=config.project,
            entity=config.entity or None,
            name=config.name or run_dir.resolve().name,
            tags=config.tags,
            dir=str(folder),
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

    def finish(self, summary: Mapping[str, float], *, complete: bool) -> None:
        """Write the final figures and close the run, with exit code 1 if not `complete`."""
        self._run.summary.update(dict(summary))
        self._run.finish(exit_code=0 if complete else 1)
