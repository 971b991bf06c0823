"""One frozen model holds every default; YAML, environment variables and --set change it.

    configs/<name>.yaml  <  MURMUR__LEARNER__PORT=6000  <  --set learner.port=6000

`environment` or `source`, `algorithm` and `network` name a plug-in and carry its options inline;
the plug-in's own `Config` model checks them, in the service that has it. An unknown key is an error
that says what was probably meant.
"""

import os
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from murmur.shared.config.episode_options import NO_ENVIRONMENT, EnvironmentConfig
from murmur.shared.config.learner import LearnerConfig
from murmur.shared.config.section import (
    NO_PLUGIN,
    Auto,
    Count,
    MetricsHosts,
    PluginConfig,
    Port,
    Section,
    known_names,
    merged,
)
from murmur.shared.config.text import short, without_secrets
from murmur.shared.process.errors import ConfigError

ENV_METRICS_PORT = 9102
_MAX_NAME_BYTES = 200  # of a run: file systems allow 255, of which the time takes 16


class RunConfig(Section):
    """Name, folder, seed and limits of a run."""

    name: str = Field("", description="name of the run; empty: the configuration file's name")
    directory: str = Field("runs", description="folder that holds the run folders")
    seed: NonNegativeInt = Field(1, description="every random number of the run derives from it")
    max_updates: NonNegativeInt = Field(0, description="stop after this many updates; 0: no limit")
    max_env_steps: NonNegativeInt = Field(
        0,
        description="stop after this many environment steps (all agents act in one), or, with a "
        "source, samples trained, or, offline, rows learned from; 0: no limit",
    )
    max_minutes: NonNegativeFloat = Field(
        0, description="stop after this many minutes; 0: no limit"
    )
    max_episodes: NonNegativeInt = Field(
        0, description="stop after this many finished training episodes; 0: no limit"
    )
    offline: bool = Field(
        False,
        description="learn from a recorded dataset alone, imitation.dataset in all updates or the "
        "algorithm's replay.dataset one update after another; no environment trains, and "
        "evaluations need one as ever",
    )
    start_from: str = Field(
        "",
        description="fine-tuning: the checkpoint, or the run's folder (its best one), that a new "
        "run takes its weights from; empty: random weights",
    )
    plugin_folders: tuple[str, ...] = Field(
        (),
        description="folders with the files of plug-ins named module:Name; empty: where anything "
        "is named so, the configuration file's folder and the working directory",
    )

    @field_validator("name")
    @classmethod
    def _names_a_folder(cls, name: str) -> str:
        if not name.isprintable() or "/" in name or name in (".", ".."):
            raise ValueError(
                f"{name!r} cannot name a folder: it must have neither '/' nor control characters; "
                "set run.directory to put the run elsewhere"
            )
        if len(name.encode()) > _MAX_NAME_BYTES:
            raise ValueError(f"{short(name)} is longer than {_MAX_NAME_BYTES} bytes")
        return name


class SecurityConfig(Section):
    """Access to the ports. Needed if learner or environment server reach beyond loopback."""

    folder: str = Field(
        "",
        description="ca.pem, certificate.pem, key.pem and tokens of this side, as `murmur certs` "
        "makes them; read again when they change; empty: plain text, on loopback addresses only",
    )
    insecure: bool = Field(
        False, description="plain text, without tokens, on any address; logged as a warning"
    )

    @model_validator(mode="after")
    def _one_of_both(self) -> "SecurityConfig":
        if self.folder and self.insecure:
            raise ValueError(f"folder '{self.folder}' and insecure=true contradict each other")
        return self


_URI = "MURMUR_MLFLOW_URI"  # for child processes: the URI with its user and password

LOGGERS = ("tensorboard", "wandb", "mlflow")
TRACKERS = "murmur.trackers"  # entry points of installed packages with a tracker


class TrackingConfig(Section):
    """Destinations of curves, hyper-parameters and pictures besides the run's folder."""

    loggers: tuple[str, ...] = Field(
        ("tensorboard",),
        description="any of tensorboard, wandb (extra wandb), mlflow (extra mlflow), and trackers "
        "of installed packages",
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
    histograms_every_updates: NonNegativeInt = Field(
        0,
        description="TensorBoard: histograms of weights, gradients and actions after every this "
        "many updates; 0: never",
    )
    figures_every_evaluations: NonNegativeInt = Field(
        5,
        description="draw every this many evaluations, from the first: TensorBoard gets histograms "
        "of the episodes' results; runs of segmentation write figures/masks.png (images, their "
        "masks, the predicted masks) and figures/confusion.png, which all loggers get; 0: never",
    )
    every_s: NonNegativeFloat = Field(
        10.0, description="W&B, MLflow: pause between points of training curves, s"
    )
    media: bool = Field(
        True, description="W&B, MLflow: also send the run's pictures: .gif, .mp4 and .png"
    )
    finish_s: PositiveFloat = Field(
        20.0,
        description="W&B, MLflow: longest wait at the run's end for what is not sent yet, s; "
        "`murmur track` sends the rest",
    )

    @field_validator("loggers")
    @classmethod
    def _are_known_and_different(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if name not in LOGGERS and not entry_points(group=TRACKERS, name=name):
                known = [*LOGGERS, *(entry.name for entry in entry_points(group=TRACKERS))]
                raise ValueError(f"no tracker '{name}'; {known_names(name, known)}")
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


Preset = Literal["none", "minimal", "standard", "strong"]
Probability = Annotated[float, Field(ge=0, le=1)]


class AugmentConfig(Section):
    """Augmentation of training batches, on the learner's device; never of evaluations."""

    preset: Literal[Preset, "progressive", "random-shift", "symmetry"] = Field(
        "none",
        description="samples with masks: none, minimal (flips), standard (flips, rotations of 15°, "
        "scales and shifts, colours), strong (more of each, blur), progressive (first, then "
        "another); RL: none, random-shift (images, by `pad` pixels), symmetry (the environment's)",
    )
    first: Preset = Field(
        "minimal", description="progressive: the preset that training begins with"
    )
    then: Preset = Field("strong", description="progressive: the preset from `at` on")
    at: NonNegativeInt = Field(
        50, description="progressive: the epoch or update that changes the preset"
    )
    per: Literal["epoch", "update"] = Field("epoch", description="progressive: what `at` counts")
    mixup: Probability = Field(
        0.0, description="share of the samples that are blended with another one; 0.3 is usual"
    )
    mixup_beta: PositiveFloat = Field(
        0.2, description="MixUp: weights of blends are drawn from Beta(this, this)"
    )
    cutmix: Probability = Field(
        0.0, description="share of the samples that get a rectangle of another one; 0.3 is usual"
    )
    cutmix_beta: PositiveFloat = Field(
        1.0, description="CutMix: areas that stay are drawn from Beta(this, this)"
    )
    outside: Literal["ignore", "background"] = Field(
        "ignore",
        description="masks where a warp shows what is outside the image: ignore (the ignore index: "
        "counts nowhere) or background (class 0)",
    )
    flip_probability: Probability | None = Field(
        None, description="share of the samples that are mirrored left to right; null: the preset's"
    )
    rotation_degrees: float | None = Field(
        None, ge=0, le=180, description="largest rotation either way; null: the preset's"
    )
    rotation_probability: Probability | None = Field(
        None, description="share that is rotated; null: the preset's, or 0.5 if it rotates none"
    )
    scale: float | None = Field(
        None, ge=0, lt=1, description="largest change of the size, 0.1: ±10 %; null: the preset's"
    )
    shift: float | None = Field(
        None,
        ge=0,
        le=1,
        description="largest shift, as a share of width and height; null: the preset's",
    )
    affine_probability: Probability | None = Field(
        None,
        description="share that is scaled and shifted; null: the preset's, or 0.5 if it does none",
    )
    brightness: float | None = Field(
        None, ge=0, le=1, description="largest change of the factor, 0.2: ±20 %; null: the preset's"
    )
    contrast: float | None = Field(None, ge=0, le=1, description="as brightness")
    saturation: float | None = Field(None, ge=0, le=1, description="as brightness")
    color_probability: Probability | None = Field(
        None,
        description="share whose brightness, contrast and saturation change; null: the preset's, "
        "or 0.5 if it changes none",
    )
    blur_sigma: tuple[float, float] | None = Field(
        None, description="least and largest sigma of the blur, pixels; null: the preset's"
    )
    blur_probability: Probability | None = Field(
        None, description="share that is blurred; null: the preset's, or 0.5 if it blurs none"
    )
    own: PluginConfig = Field(
        NO_PLUGIN,
        description="{name: package.module:Class, its options}: an augmentation of your own, "
        "applied after the preset",
    )
    pad: int = Field(4, ge=1, le=64, description="random-shift: largest shift, pixels")
    color: bool = Field(
        False, description="random-shift: vary brightness, contrast and saturation too"
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.mixup + self.cutmix > 1:
            raise ValueError(
                f"mixup={self.mixup:g} and cutmix={self.cutmix:g} add up to more than 1; a sample "
                "is mixed in one way at most: lower one of them"
            )
        if self.preset in ("random-shift", "symmetry") and (self.mixup or self.cutmix):
            raise ValueError(
                f"mixup and cutmix need samples with masks; preset={self.preset} is for RL: set "
                "both to 0"
            )
        if self.blur_sigma is not None and not 0 < self.blur_sigma[0] <= self.blur_sigma[1]:
            raise ValueError(
                f"blur_sigma={list(self.blur_sigma)}: write the least sigma, above 0, then the "
                "largest"
            )
        if self.preset in ("random-shift", "symmetry") and (bounds := self.bounds()):
            raise ValueError(
                f"{next(iter(bounds))} needs samples with masks; preset={self.preset} is for RL: "
                "remove it"
            )
        if self.own.name and ":" not in self.own.name:
            raise ValueError(f"own.name={self.own.name}: write it as package.module:Class")
        if self.color and self.preset != "random-shift":
            raise ValueError(
                f"color=true has no effect with preset={self.preset}; it is an option of "
                "random-shift: remove it"
            )
        return self

    @property
    def text(self) -> str:
        """Return the options that differ from their defaults, for the log; "" without any."""
        used = self.model_dump(exclude_defaults=True)
        return ", ".join(f"{name}={value}" for name, value in used.items())

    def bounds(self) -> dict[str, Any]:
        """Return the options given that change a preset for samples with masks."""
        open_ = [name for name, of in type(self).model_fields.items() if of.default is None]
        return {name: value for name in open_ if (value := getattr(self, name)) is not None}


NO_AUGMENT = AugmentConfig()
_SESSION_TIMEOUT_S = 60.0  # of a session, unless its worker's turns take longer


class EnvServerConfig(Section):
    """The environment servers."""

    learner: str = Field(
        "127.0.0.1:50051",
        description="host:port of the learner to connect to; of several: with commas between "
        "them, as host:first-last with a port each, or as one name that has several addresses. "
        "Sessions are spread over them by environments; sync: worker i stays with learner i "
        "modulo their number",
    )
    move_after_s: PositiveFloat = Field(
        30.0,
        description="several learners: sessions go to another one when theirs has not been there "
        "for this time, s",
    )
    balance_every_s: NonNegativeFloat = Field(
        10.0,
        description="several learners: how often a session looks whether another one has fewer "
        "environments, to move there, s; 0: never",
    )
    num_workers: Auto = Field(
        0,
        description="worker processes of one environment server; 0 or auto: one for each of its "
        "machine's processors that the learner leaves; 1 in the sync pipeline",
    )
    envs_per_worker: Count = Field(32, description="environments in each worker process")
    sessions_per_worker: Count = Field(
        2, description="sessions that share a worker's environments; 2 = double buffering"
    )
    step_timeout_s: NonNegativeFloat = Field(
        20.0,
        description="a worker whose environment takes longer for a step is replaced, s, as is one "
        "whose baseline takes longer for advice (imitation); 0: never",
    )
    start_timeout_s: NonNegativeFloat = Field(
        300.0,
        description="a worker that takes longer to start, with importing and making its "
        "environments, or to recreate one of them, is replaced, s; 0: never",
    )
    worker_memory_mib: NonNegativeInt = Field(
        0, description="a worker that takes more memory is replaced, MiB; 0: no limit"
    )
    max_faults_per_minute: NonNegativeInt = Field(
        10,
        description="environments that fail start a new episode; if a worker's fail more often, "
        "the environment server ends",
    )
    metrics_host: MetricsHosts = "127.0.0.1"
    metrics_port: Port = Field(
        None,
        description=f"auto: {ENV_METRICS_PORT}, or any free port if that is in use; 0: any free "
        "port",
    )
    reconnect_min_s: PositiveFloat = Field(0.2, description="first pause before reconnecting, s")
    reconnect_max_s: PositiveFloat = Field(5.0, description="longest pause before reconnecting, s")
    give_up_after_s: PositiveFloat = Field(
        300.0, description="exit when the learner has not been there for this time, s"
    )

    @model_validator(mode="after")
    def _sessions_fit(self) -> "EnvServerConfig":
        if self.envs_per_worker % self.sessions_per_worker:
            raise ValueError(
                f"envs_per_worker {self.envs_per_worker} is no multiple of "
                f"sessions_per_worker {self.sessions_per_worker}"
            )
        return self


class EvaluationConfig(Section):
    """Greedy evaluation during training, by a separate session."""

    every_updates: NonNegativeInt = Field(
        0, description="updates between two evaluations; one of the three at most; all 0: never"
    )
    every_env_steps: NonNegativeInt = Field(
        0, description="environment steps (all agents act in one) between two evaluations"
    )
    every_minutes: NonNegativeFloat = Field(0, description="minutes between two evaluations")
    episodes: Count = Field(
        50,
        description="episodes of one evaluation; an evaluator makes at most "
        "env_server.envs_per_worker environments and plays them in turns",
    )
    first_seed: NonNegativeInt = Field(
        1001,
        description="episode seeds first_seed, first_seed+1, ...; these episodes choose the best "
        "checkpoint, so results are measured on others: those of `murmur evaluate` begin at 1",
    )
    environment: dict[str, Any] = Field(
        {},
        description="options of the environment that differ in evaluations, merged key by key "
        "into the training's",
    )
    sample: bool = Field(
        False, description="draw actions from the policy, as in training, not its likeliest ones"
    )
    best_metric: str = Field(
        "return", description="picks the best checkpoint; with a leading -, less is better"
    )
    episode_file: str = Field(
        "",
        description="evaluator: keep what pictures of its newest first episode need in this .npz, "
        "for the live page; `murmur train` names it; empty: no file",
    )

    @property
    def on(self) -> bool:
        """Return whether there are evaluations during training."""
        return bool(self.every_updates or self.every_env_steps or self.every_minutes)

    @model_validator(mode="after")
    def _has_one_clock(self) -> Self:
        clocks = self.model_dump(include={"every_updates", "every_env_steps", "every_minutes"})
        given = [f"{key}={value:g}" for key, value in clocks.items() if value]
        if len(given) > 1:
            raise ValueError(
                f"{' and '.join(given)}: evaluations follow one of them; set the others to 0"
            )
        return self

    @field_validator("environment")
    @classmethod
    def _is_the_same_environment(cls, value: dict[str, Any]) -> dict[str, Any]:
        if "name" in value:
            raise ValueError(
                f"name={short(value['name'])}: evaluations are in the run's environment; give "
                "only options that differ"
            )
        if "curriculum" in value:
            raise ValueError("curriculum: evaluations use each course's last value; leave it out")
        return value


class ImitationConfig(Section):
    """Imitation before reinforcement learning, of a baseline's advice or of a dataset.

    DAgger (Ross, Gordon, Bagnell 2011, arXiv:1011.0686): the policy acts, and learns the actions
    that the baseline advises in the same states. Cloning: it learns the actions of a dataset, and
    environments wait. The critic learns from rewards.
    """

    baseline: str = Field(
        "",
        description="a baseline of the environment, or package.module:Name; empty: none is asked",
    )
    dataset: str = Field(
        "", description="folder of `murmur record` whose actions are cloned; empty: none are"
    )
    updates: Count = Field(100, description="first updates of the run, which imitate")

    @model_validator(mode="after")
    def _has_one_expert(self) -> Self:
        if self.baseline and self.dataset:
            raise ValueError(
                f"baseline={self.baseline} and dataset={self.dataset}: a run imitates one of them; "
                "leave the other out"
            )
        return self


class LeagueConfig(Section):
    """Opponents in games of two teams, one of which learns."""

    agents: tuple[int | str, ...] = Field(
        (),
        description="agents that learn, by number or name, or all agents of a name but for the "
        "number at its end; opponents play the others; empty: the first half, of two equal teams",
    )

    size: NonNegativeInt = Field(
        0, description="past policies of this run that are kept as opponents, the latest ones"
    )
    every_updates: Count = Field(50, description="updates between two policies that are kept")
    checkpoints: tuple[str, ...] = Field(
        (), description="files of policies that are opponents too, from the start and for good"
    )
    latest: float = Field(
        0.5,
        ge=0,
        le=1,
        description="share of episodes against the policy as it is now; if `agents` is given, 0 "
        "unless it says otherwise",
    )

    @model_validator(mode="after")
    def _has_opponents(self) -> Self:
        if self.agents and not self.on:
            raise ValueError(
                f"agents={list(self.agents)}: the other agents need opponents; set checkpoints, or "
                "leave agents out"
            )
        if self.agents and "latest" not in self.model_fields_set:  # so that config.yaml says it
            object.__setattr__(self, "latest", 0.0)
        return self

    @property
    def on(self) -> bool:
        """Return whether there is a league; if not, all agents of an environment learn."""
        return self.size > 0 or bool(self.checkpoints)


class SupplyConfig(Section):
    """Transport of a `source`'s samples to the learner."""

    cache: Literal["auto", "device", "stream"] = Field(
        "auto",
        description="device: every sample is sent once and kept on the learner's device; stream: "
        "samples are sent again in every epoch; auto: device if both splits take at most half of "
        "the device's free memory, else stream",
    )
    window: Auto = Field(
        0,
        description="samples that the learner asks of one session ahead of their arrival; 0 or "
        "auto: chosen by their size, 4 to 32",
    )


class ExperimentConfig(Section):
    """The whole configuration of a run."""

    run: RunConfig = RunConfig()
    environment: EnvironmentConfig = NO_ENVIRONMENT
    source: PluginConfig = NO_PLUGIN
    supply: SupplyConfig = SupplyConfig()
    env_server: EnvServerConfig = EnvServerConfig()
    algorithm: PluginConfig = PluginConfig(name="coma")
    network: PluginConfig = PluginConfig(name="auto")
    augment: AugmentConfig = NO_AUGMENT
    learner: LearnerConfig = LearnerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    imitation: ImitationConfig = ImitationConfig()
    league: LeagueConfig = LeagueConfig()
    tracking: TrackingConfig = TrackingConfig()
    security: SecurityConfig = SecurityConfig()

    @model_validator(mode="after")
    def _one_of_environment_and_source(self) -> "ExperimentConfig":
        if self.environment.name and self.source.name:
            raise ValueError(
                f"environment '{self.environment.name}' and source '{self.source.name}' are both "
                "configured: keep environment to train agents, or source to learn from images"
            )
        if not self.environment.name and not self.source.name:
            raise ValueError(
                "key 'environment' is missing: name an environment to train agents in, or a "
                "source of images to learn from"
            )
        if self.source.name and self.league.on:
            raise ValueError("league: a run with a source has no opponents; leave it out")
        if self.source.name and self.run.max_episodes:
            raise ValueError(
                f"run.max_episodes={self.run.max_episodes}: a run with a source has no episodes; "
                "set its epochs"
            )
        if self.source.name and (self.imitation.baseline or self.imitation.dataset):
            raise ValueError("imitation: a run with a source has no actions; leave it out")
        return self

    @model_validator(mode="after")
    def _offline_needs_no_environment(self) -> "ExperimentConfig":
        if not self.run.offline:
            return self
        if not self.dataset:
            raise ValueError(
                "run.offline=true: there is nothing to learn from; set imitation.dataset or, if "
                "the algorithm has a replay, its replay.dataset to a folder of `murmur record`"
            )
        if self.run.max_episodes:
            raise ValueError(
                f"run.max_episodes={self.run.max_episodes} and run.offline=true: no episode is "
                "played; set it to 0, and run.max_updates, run.max_env_steps or run.max_minutes"
            )
        if self.league.on:
            raise ValueError("league: an offline run plays no games; leave it out")
        if self.imitation.baseline:
            raise ValueError(
                f"imitation.baseline={self.imitation.baseline} and run.offline=true: a baseline "
                "advises in environments; leave it out, or record its episodes: murmur record"
            )
        return self

    @property
    def dataset(self) -> str:
        """Return the folder of the dataset that the run begins with; empty: there is none."""
        replay = self.algorithm.options.get("replay")
        of_replay = replay.get("dataset", "") if isinstance(replay, Mapping) else ""
        return self.imitation.dataset or str(of_replay)

    @model_validator(mode="after")
    def _evaluation_fits(self) -> "ExperimentConfig":
        differs = self.environment.curriculum or self.environment.randomize
        if differs or "randomize" in self.evaluation.environment:
            try:
                self.for_evaluation()
            except ValidationError as error:
                reason = error.errors()[0]["msg"].removeprefix("Value error, ")
                raise ValueError(f"evaluation.environment: {reason}") from None
        return self

    @model_serializer(mode="wrap")
    def _leave_out_what_is_not_used(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out `source` and `supply`, or `environment`, whichever the run does not use."""
        data: dict[str, Any] = handler(self)
        for key in ("environment",) if self.supervised else ("source", "supply"):
            data.pop(key, None)
        return data

    @property
    def supervised(self) -> bool:
        """Return whether the run learns from a source of samples, not from an environment."""
        return bool(self.source.name)

    @model_validator(mode="after")
    def _patience_fits(self) -> "ExperimentConfig":
        server, patience = self.env_server, self.learner.session_timeout_s
        turn, more = server.step_timeout_s * server.sessions_per_worker, ""
        if self.imitation.baseline:
            turn, more = 2 * turn, " times 2 (imitation.baseline)"
        if patience is None:  # chosen here, so that the run's config.yaml says it
            patience = max(_SESSION_TIMEOUT_S, 1.5 * turn) if turn else 0.0
            learner = self.learner.model_copy(update={"session_timeout_s": patience})
            object.__setattr__(self, "learner", learner)
        if patience and (patience <= turn or not turn):
            raise ValueError(
                f"learner.session_timeout_s={patience:g} must be more than "
                f"env_server.step_timeout_s={server.step_timeout_s:g} times sessions_per_worker="
                f"{server.sessions_per_worker}{more}: a worker's sessions take turns (0: no limit)"
            )
        return self

    @property
    def total_envs(self) -> int:
        """Return the training environments of one environment server; 0 if not chosen yet."""
        return self.env_server.num_workers * self.env_server.envs_per_worker

    def for_evaluation(self) -> "ExperimentConfig":
        """Return a copy with the environment's options for evaluation."""
        environment = self.environment
        base = {**environment.options, "randomize": environment.randomize}
        options = merged(base, self.evaluation.environment)
        return self.model_copy(update={"environment": environment.with_options(options)})
