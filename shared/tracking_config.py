"""The section `tracking` of the configuration."""

import os
from typing import Literal

from pydantic import Field, field_validator, model_validator

from shared.config_text import without_secrets
from shared.errors import ConfigError
from shared.section import Section

_URI = "MURMUR_MLFLOW_URI"  # for child processes: the URI with its user and password

Logger = Literal["tensorboard", "wandb", "mlflow"]


class TrackingConfig(Section):
    """Destinations of curves, hyper-parameters and pictures besides the run's folder."""

    loggers: tuple[Logger, ...] = Field(
        ("tensorboard",),
        description="any of tensorboard, wandb (extra wandb) and mlflow (extra mlflow)",
    )
    project: str = Field(
        "murmur", min_length=1, description="W&B project, or MLflow experiment, of the run"
    )
    name: str = Field("", description="name of the tracked run; empty: that of the run's folder")
    tags: tuple[str, ...] = Field(
        (), description="tags of the tracked run; MLflow: KEY=VALUE, or KEY alone for KEY=true"
    )
    entity: str = Field("", description="W&B: team or user; empty: that of the login")
    mlflow_uri: str = Field(
        "",
        description="MLflow: tracking server or store; empty: MLFLOW_TRACKING_URI, without it "
        "mlflow.db beside the run's folder",
    )
    offline: bool = Field(
        False,
        description="no network: W&B writes into the run's folder, for `wandb sync`; MLflow "
        "writes mlflow.db beside it",
    )
    histograms_every_updates: int = Field(
        0,
        ge=0,
        description="TensorBoard: histograms of weights and actions, and each network's gradient "
        "norm, after every this many updates; 0: never",
    )
    figures_every_evaluations: int = Field(
        5,
        ge=0,
        description="draw every this many evaluations, from the first: TensorBoard gets histograms "
        "of the episodes' results; runs of segmentation write figures/masks.png (images, their "
        "masks, the predicted masks) and figures/confusion.png, which all loggers get; 0: never",
    )
    every_s: float = Field(
        10.0, ge=0, description="W&B, MLflow: pause between points of training curves, s"
    )
    media: bool = Field(
        True, description="W&B, MLflow: also send the run's pictures: .gif, .mp4 and .png"
    )
    finish_s: float = Field(
        20.0,
        gt=0,
        description="W&B, MLflow: longest wait at the run's end for what is not sent yet, s; "
        "`murmur track` sends the rest",
    )

    @field_validator("loggers")
    @classmethod
    def _are_different(cls, value: tuple[Logger, ...]) -> tuple[Logger, ...]:
        for name in value:
            if value.count(name) > 1:
                raise ValueError(f"'{name}' is listed {value.count(name)} times; list it once")
        return value

    @model_validator(mode="after")
    def _histograms_have_a_place(self) -> "TrackingConfig":
        if self.histograms_every_updates and "tensorboard" not in self.loggers:
            raise ValueError(
                f"histograms_every_updates={self.histograms_every_updates} is for TensorBoard, "
                f"which loggers={list(self.loggers)} lacks: add tensorboard, or set it to 0"
            )
        return self

    def without_password(self) -> "TrackingConfig":
        """Return a copy with `***` for user and password in mlflow_uri.

        Files, pages and trackers show configurations. This process and its children find the whole
        URI in an environment variable.
        """
        shown: str = without_secrets(self.mlflow_uri)
        if shown == self.mlflow_uri:
            return self
        os.environ[_URI] = self.mlflow_uri
        return self.model_copy(update={"mlflow_uri": shown})

    def whole_mlflow_uri(self) -> str:
        """Return the URI with user and password; MLFLOW_TRACKING_URI if none is configured.

        Raises:
            ConfigError: if user and password are not known here, such as in a resumed run.
        """
        known = [os.environ.get(name, "") for name in (_URI, "MLFLOW_TRACKING_URI")]
        if not self.mlflow_uri:
            return known[1]
        if "://***@" not in self.mlflow_uri:
            return self.mlflow_uri
        for uri in known:
            if without_secrets(uri) == self.mlflow_uri:
                return uri
        raise ConfigError(
            f"tracking.mlflow_uri={self.mlflow_uri} is kept without its user and password; set the "
            "environment variable MLFLOW_TRACKING_URI to the whole URI"
        )

    @property
    def services(self) -> tuple[str, ...]:
        """Return the loggers that have a process of their own."""
        return tuple(name for name in self.loggers if name != "tensorboard")
