"""One frozen model holds every default; YAML, environment variables and --set change it.

    configs/<name>.yaml  <  MURMUR__LEARNER__PORT=6000  <  --set learner.port=6000

`environment` or `source`, `algorithm` and `network` name a plug-in and carry its options inline;
the plug-in's own `Config` model checks them, in the service that has it. An unknown key is an error
that says what was probably meant.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from shared.augmentation import AugmentConfig
from shared.checking import validate as validate
from shared.config_files import CONFIG_DIRS as CONFIG_DIRS
from shared.config_files import (
    Change,
    changes_of,
    merged,
    path_of,
    read_config,
    replace_plugin,
    set_value,
    value_of,
)
from shared.config_files import Overrides as Overrides
from shared.config_files import config_names as config_names
from shared.config_files import find_config as find_config
from shared.errors import ConfigError
from shared.learner_config import BatcherConfig as BatcherConfig
from shared.learner_config import LearnerConfig as LearnerConfig
from shared.plugin_folders import look_in, named_code
from shared.run_config import RunConfig as RunConfig
from shared.section import NO_PLUGIN as NO_PLUGIN
from shared.section import Auto as Auto
from shared.section import Open as Open
from shared.section import PluginConfig as PluginConfig
from shared.section import Section as Section
from shared.security_config import SecurityConfig as SecurityConfig
from shared.tracking_config import TrackingConfig as TrackingConfig
from shared.yaml_text import PLUGINS, short

ENV_PREFIX = "MURMUR__"


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
    move_after_s: float = Field(
        30.0,
        gt=0,
        description="several learners: sessions go to another one when theirs has not been there "
        "for this time, s",
    )
    balance_every_s: float = Field(
        10.0,
        ge=0,
        description="several learners: how often a session looks whether another one has fewer "
        "environments, to move there, s; 0: never",
    )
    num_workers: Auto = Field(
        0,
        ge=0,
        description="worker processes of one environment server; 0 or auto: one for each of its "
        "machine's processors that the learner leaves; 1 in the sync pipeline",
    )
    envs_per_worker: int = Field(32, ge=1, description="environments in each worker process")
    sessions_per_worker: int = Field(
        2, ge=1, description="sessions that share a worker's environments; 2 = double buffering"
    )
    step_timeout_s: float = Field(
        20.0,
        ge=0,
        description="a worker whose environment takes longer for a step is replaced, s, as is one "
        "whose baseline takes longer for advice (imitation); 0: never",
    )
    start_timeout_s: float = Field(
        300.0,
        ge=0,
        description="a worker that takes longer to start, with importing and making its "
        "environments, or to recreate one of them, is replaced, s; 0: never",
    )
    worker_memory_mib: int = Field(
        0, ge=0, description="a worker that takes more memory is replaced, MiB; 0: no limit"
    )
    max_faults_per_minute: int = Field(
        10,
        ge=0,
        description="environments that fail start a new episode; if a worker's fail more often, "
        "the environment server ends",
    )
    metrics_host: str = Field(
        "127.0.0.1",
        description="addresses of the metrics and health port, with commas between them; a "
        "network, 10.0.1.0/24, stands for this machine's own address in it",
    )
    metrics_port: int = Field(9102, ge=0, le=65535, description="0: any free port")
    reconnect_min_s: float = Field(0.2, gt=0, description="first pause before reconnecting, s")
    reconnect_max_s: float = Field(5.0, gt=0, description="longest pause before reconnecting, s")
    give_up_after_s: float = Field(
        300.0, gt=0, description="exit when the learner has not been there for this time, s"
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

    every_updates: int = Field(0, ge=0, description="0: never")
    episodes: int = Field(
        50,
        ge=1,
        description="episodes of one evaluation; an evaluator makes at most "
        "env_server.envs_per_worker environments and plays them in turns",
    )
    first_seed: int = Field(
        1001,
        ge=0,
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

    @field_validator("environment")
    @classmethod
    def _is_the_same_environment(cls, value: dict[str, Any]) -> dict[str, Any]:
        if "name" in value:
            raise ValueError(
                f"name={short(value['name'])}: evaluations are in the run's environment; give "
                "only options that differ"
            )
        return value


class ImitationConfig(Section):
    """Imitation before reinforcement learning, from the advice of a baseline.

    DAgger (Ross, Gordon, Bagnell 2011, arXiv:1011.0686): the policy acts, and learns the actions
    that the baseline advises in the same states. The critic learns from rewards.
    """

    baseline: str = Field(
        "",
        description="a baseline of the environment, or package.module:Name; empty: no imitation",
    )
    updates: int = Field(
        100, ge=1, description="first updates of the run, in which the baseline is asked"
    )


class LeagueConfig(Section):
    """Opponents in games of two teams: the first half of the agents learns against them."""

    size: int = Field(
        0, ge=0, description="past policies of this run that are kept as opponents, the latest ones"
    )
    every_updates: int = Field(50, ge=1, description="updates between two policies that are kept")
    checkpoints: tuple[str, ...] = Field(
        (), description="files of policies that are opponents too, from the start and for good"
    )
    latest: float = Field(
        0.5,
        ge=0,
        le=1,
        description="share of episodes against the policy as it is now",
    )

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
        ge=0,
        description="samples that the learner asks of one session ahead of their arrival; 0 or "
        "auto: chosen by their size, 4 to 32",
    )


class ExperimentConfig(Section):
    """The whole configuration of a run."""

    run: RunConfig = RunConfig()
    environment: PluginConfig = NO_PLUGIN
    source: PluginConfig = NO_PLUGIN
    supply: SupplyConfig = SupplyConfig()
    env_server: EnvServerConfig = EnvServerConfig()
    algorithm: PluginConfig = PluginConfig(name="coma")
    network: PluginConfig = PluginConfig(name="auto")
    augment: AugmentConfig = AugmentConfig()
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
        if self.source.name and self.imitation.baseline:
            raise ValueError("imitation: a run with a source has no baseline; leave it out")
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
        options = merged(self.environment.options, self.evaluation.environment)
        environment = PluginConfig(**options | {"name": self.environment.name})
        return self.model_copy(update={"environment": environment})


def load(
    name: str | Mapping[str, Any],
    overrides: Overrides = (),
    environ: Mapping[str, str] | None = None,
) -> ExperimentConfig:
    """Load the configuration of an experiment.

    From then on the process looks for modules that it names in its run.plugin_folders.

    Args:
        name: a path, the name of a configuration that comes with murmur, or the sections of one.
        overrides: "a.b=value" items with values in YAML syntax, or a mapping of dotted keys.
        environ: environment variables with MURMUR__A__B=value items; None: the process's own.

    Raises:
        ConfigError: for an invalid configuration, naming the key, the value and the fix.
    """
    data, own_name, file = read_config(name)
    changes: list[Change] = []
    for key, text in sorted((os.environ if environ is None else environ).items()):
        if key.startswith("MURMUR_") and "__" in key[len(ENV_PREFIX) :] and key[7] != "_":
            raise ConfigError(f"environment variable {key}: write {ENV_PREFIX}{key[7:]}")
        if key.startswith(ENV_PREFIX):
            path = _path_of_variable(key)
            changes.append((path, value_of(text, key, path), key))
    changes += changes_of(overrides)
    for section in PLUGINS:
        names = [value for at, value, _ in changes if at == [section, "name"]]
        if names:
            replace_plugin(data, section, names[-1])
    for at, value, source in changes:
        set_value(data, at, value, source)
    try:
        config = validate(ExperimentConfig, data)
    except ConfigError as error:
        for at, _, source in changes:
            if source.startswith(ENV_PREFIX) and f"'{at[0]}" in str(error):
                raise ConfigError(f"{error} (environment variable {source})") from None
        raise
    run = config.run
    named = code_of(config)
    if named:
        run = run.model_copy(update={"plugin_folders": _plugin_folders(run, file)})
        look_in(run.plugin_folders, named)
    if not run.name:
        run = run.model_copy(update={"name": own_name})
    return config.model_copy(update={"run": run, "tracking": config.tracking.without_password()})


def code_of(config: ExperimentConfig) -> list[str]:
    """Return all code that a configuration names, as package.module:Name."""
    plugins = [getattr(config, section).model_dump() for section in PLUGINS]
    return named_code([plugins, config.evaluation.environment, config.imitation.baseline])


def _path_of_variable(key: str) -> list[Any]:
    """Return the keys that MURMUR__A__B names: in lower case, factory parameters as written.

    MURMUR__ENVIRONMENT__ARGUMENTS__TOLL is `toll`, and ...__maxSteps is `maxSteps`.
    """
    parts = key.removeprefix(ENV_PREFIX).split("__")
    low = [part.lower() for part in parts]
    options = low[1:] if low[0] == "evaluation" else low
    mixed = len(low) if options[1:2] != ["arguments"] else len(low) - len(options) + 2
    kept = [part.lower() if part.isupper() else part for part in parts[mixed:]]
    return path_of(".".join([*low[:mixed], *kept]), key)


def _plugin_folders(run: RunConfig, file: Path | None) -> tuple[str, ...]:
    """Return the absolute folders to search for named code, also when the run is resumed."""
    if run.plugin_folders:
        return tuple(os.path.abspath(folder) for folder in run.plugin_folders)
    beside = [] if file is None or file.parent in CONFIG_DIRS else [str(file.resolve().parent)]
    return tuple(dict.fromkeys([*beside, os.getcwd()]))
