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
    model_serializer,
    model_validator,
)

from shared.augmentation import AugmentConfig
from shared.checking import validate as validate
from shared.config_files import CONFIG_DIRS as CONFIG_DIRS
from shared.config_files import (
    PLUGINS,
    Change,
    changes_of,
    read_config,
    replace_plugin,
    set_value,
    value_of,
)
from shared.config_files import Overrides as Overrides
from shared.config_files import config_names as config_names
from shared.config_files import find_config as find_config
from shared.errors import ConfigError
from shared.plugin_folders import look_in, named_code
from shared.run_config import RunConfig as RunConfig
from shared.section import NO_PLUGIN as NO_PLUGIN
from shared.section import Auto as Auto
from shared.section import Open as Open
from shared.section import PluginConfig as PluginConfig
from shared.section import Section as Section
from shared.security_config import SecurityConfig as SecurityConfig
from shared.tracking_config import TrackingConfig as TrackingConfig

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
        description="a worker whose environment takes longer for a step is replaced, s; 0: never",
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


class BatcherConfig(Section):
    """Dynamic batching of inference requests; the terms are those of Triton's batcher."""

    max_batch_envs: int = Field(4096, ge=1, description="most environments in one batch")
    preferred_batch_envs: int = Field(
        0,
        ge=0,
        description="wait up to max_wait_ms to gather this number of environments; 0: never wait",
    )
    max_wait_ms: float = Field(0.0, ge=0, description="longest wait of the oldest request, ms")
    latency_target_ms: float = Field(
        0.0,
        ge=0,
        description="async: tune size and wait above while running, so that 99 of 100 requests "
        "get their actions within this time of their arrival, ms; 0: off",
    )

    @model_validator(mode="after")
    def _one_chooses(self) -> "BatcherConfig":
        if self.latency_target_ms and (self.preferred_batch_envs or self.max_wait_ms):
            raise ValueError(
                f"latency_target_ms={self.latency_target_ms:g} chooses preferred_batch_envs and "
                f"max_wait_ms, which are {self.preferred_batch_envs} and {self.max_wait_ms:g}: "
                "set both to 0, or latency_target_ms"
            )
        return self


class LearnerConfig(Section):
    """The learner."""

    host: str = Field("127.0.0.1", description="address to listen on; 0.0.0.0 in a container")
    port: int = Field(50051, ge=0, le=65535, description="gRPC port; 0: any free port")
    metrics_host: str = Field(
        "127.0.0.1",
        description="addresses of the metrics and health port, with commas between them; a "
        "network, 10.0.1.0/24, stands for this machine's own address in it",
    )
    metrics_port: int = Field(9101, ge=0, le=65535, description="0: any free port")
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto",
        description="auto: CUDA if there is one; a sync run keeps what was chosen in config.yaml",
    )
    precision: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "auto",
        description="auto: fp32 on the CPU; on CUDA what a few timed updates show to be fastest, "
        "fp32 or the 16-bit type that the device has in hardware (bf16, before Ampere fp16), which "
        "config.yaml then holds; sync: that 16-bit type untimed. fp32 on CUDA multiplies in TF32",
    )
    grad_scaler: Literal["conservative", "aggressive"] = Field(
        "conservative",
        description="fp16: the loss's scale begins at 2^10 and doubles every 2000 steps without "
        "overflow, or (aggressive) at 2^16 and every 1000; an overflow halves it and skips a step",
    )
    num_threads: Auto = Field(
        0,
        ge=0,
        description="torch threads on the CPU, for each of acting and learning; 0 or auto: a "
        "quarter of the machine's processors, 1 to 8; 1 in the sync pipeline",
    )
    compile: bool = Field(
        False,
        description="torch.compile the networks that learn: fewer and larger kernels after a "
        "minute of compiling; needs a C++ compiler on the CPU, Triton on CUDA",
    )
    cuda_graph: bool = Field(
        True,
        description="CUDA: capture updates and acting as graphs, each replayed in one launch; what "
        "cannot be captured runs eagerly, see murmur_learner_graph_fallbacks_total; false: all "
        "runs eagerly. No effect on the CPU",
    )
    memory_limit_gib: float = Field(
        0.0,
        ge=0,
        description="memory that networks, and that unrolls, may take, GiB; an environment whose "
        "observations would take more is refused at its handshake; 0: what is free",
    )
    memory_budget_gib: float = Field(
        2.0,
        gt=0,
        description="CPU: what an update may take where batch_size is 0",
    )
    pipeline: Literal["async", "sync"] = Field(
        "async",
        description="async: act while learning, rows at most max_policy_lag updates old; "
        "sync: act, then learn; the same seed gives the same run bit for bit",
    )
    max_policy_lag: Open = Field(
        None,
        ge=0,
        description="async: rows older than this number of updates are dropped and counted; with a "
        "replay: unrolls of every environment that acting may be ahead of the updates due; null or "
        "auto: 1, and 2 if the first updates show that environments and learner are about as fast",
    )
    max_sessions: int = Field(64, ge=1, description="training sessions; further ones are refused")
    max_evaluation_sessions: int = Field(
        16,
        ge=1,
        description="evaluation sessions; they have places of their own, so none of them, however "
        "many wait, keeps a training session out",
    )
    max_in_flight_mib: float = Field(
        1024.0,
        gt=0,
        description="memory for the messages of all training sessions together, MiB: an "
        "observation and an action of each. A session for which there is no room is refused",
    )
    max_evaluation_in_flight_mib: float = Field(
        256.0, gt=0, description="the same for evaluation sessions, MiB"
    )
    max_sessions_per_identity: int = Field(
        0, ge=0, description="sessions of one certificate's name; 0: only max_sessions counts"
    )
    max_audit_lines: int = Field(
        20,
        ge=1,
        description="log: lines about streams that ended for the same reason, in 10 s; how many "
        "more there were is said in one line, and counted in murmur_learner_audit_lines_suppressed",
    )
    session_timeout_s: float | None = Field(
        None,
        ge=0,
        description="a session that sends nothing for this time after an answer is ended, s; its "
        "first rows may take ten times as long; 0: never; null: 60, or 1.5 times "
        "env_server.step_timeout_s x sessions_per_worker if that is longer",
    )
    max_abs_reward: float = Field(
        1e6,
        gt=0,
        description="a reward beyond ± this is a fault of its environment, whose episode is "
        "dropped; the learner refuses it. The default keeps squared returns within float32",
    )
    max_skipped_updates: int = Field(
        10,
        ge=0,
        description="updates in a row that may be undone because a loss or a weight was not "
        "finite; one more ends the run",
    )
    stalled_after_s: float = Field(
        1800.0,
        ge=0,
        description="/healthz fails, and says why, if a thread that acts or learns stays in one "
        "state of the time ledger for this time, s: a device or file system that does not answer; "
        "waiting for environments does not count; ten times that while torch compiles; 0: never",
    )
    group_timeout_s: float = Field(
        300.0,
        gt=0,
        description="several learners: longest wait for one that runs but does not arrive, s; then "
        "the process ends, to be restarted. In the sync pipeline longer than an unroll takes. A "
        "paused or lost one is noticed after 30 s, or this if it is less",
    )
    group_check_every_updates: int = Field(
        100, ge=1, description="several learners: updates between comparisons of their weights"
    )
    batcher: BatcherConfig = BatcherConfig()
    checkpoint_every_updates: int = Field(50, ge=1, description="updates between checkpoints")
    keep_checkpoints: int = Field(3, ge=1, description="latest checkpoints kept beside the best")
    log_every_s: float = Field(1.0, gt=0, description="pause between lines of progress.jsonl, s")

    @model_validator(mode="after")
    def _target_is_of_async(self) -> "LearnerConfig":
        if self.pipeline == "sync" and self.batcher.latency_target_ms:
            raise ValueError(
                f"batcher.latency_target_ms={self.batcher.latency_target_ms:g} with pipeline=sync: "
                "there acting waits for all environments and for updates; set pipeline=async, or "
                "latency_target_ms=0"
            )
        return self

    @property
    def policy_lag(self) -> int:
        """`max_policy_lag`, or what it is until it is chosen."""
        return 1 if self.max_policy_lag is None else self.max_policy_lag


class EvaluationConfig(Section):
    """Greedy evaluation during training, by a session of its own."""

    every_updates: int = Field(0, ge=0, description="0: never")
    episodes: int = Field(50, ge=1, description="episodes of one evaluation")
    first_seed: int = Field(
        1001,
        ge=0,
        description="episode seeds first_seed, first_seed+1, ...; these episodes choose the best "
        "checkpoint, so results are measured on others: those of `murmur evaluate` begin at 1",
    )
    environment: dict[str, Any] = Field(
        {}, description="options of the environment that differ in evaluations"
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


class LeagueConfig(Section):
    """Opponents in games of two teams: the first half of the agents learns, they play the rest."""

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
        """Whether there is a league; if not, all agents of an environment learn."""
        return self.size > 0 or bool(self.checkpoints)


class SupplyConfig(Section):
    """How samples of a `source` get to the learner."""

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
        return self

    @model_serializer(mode="wrap")
    def _leave_out_what_is_not_used(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """`environment` or `source`, with `supply`, whichever the run has."""
        data: dict[str, Any] = handler(self)
        for key in ("environment",) if self.supervised else ("source", "supply"):
            data.pop(key, None)
        return data

    @property
    def supervised(self) -> bool:
        """Whether the run learns from a source of samples; if not, from an environment."""
        return bool(self.source.name)

    @model_validator(mode="after")
    def _patience_fits(self) -> "ExperimentConfig":
        server, patience = self.env_server, self.learner.session_timeout_s
        turn = server.step_timeout_s * server.sessions_per_worker
        if patience is None:  # chosen here, so that the run's config.yaml says it
            patience = max(_SESSION_TIMEOUT_S, 1.5 * turn) if turn else 0.0
            learner = self.learner.model_copy(update={"session_timeout_s": patience})
            object.__setattr__(self, "learner", learner)
        if patience and (patience <= turn or not turn):
            raise ValueError(
                f"learner.session_timeout_s={patience:g} must be more than "
                f"env_server.step_timeout_s={server.step_timeout_s:g} times sessions_per_worker="
                f"{server.sessions_per_worker}: a worker's sessions take turns (0: no limit)"
            )
        return self

    @property
    def total_envs(self) -> int:
        """Training environments of one environment server; 0 while their number is not chosen."""
        return self.env_server.num_workers * self.env_server.envs_per_worker

    def for_evaluation(self) -> "ExperimentConfig":
        """The same with the environment as evaluations have it."""
        options = {**self.environment.options, **self.evaluation.environment}
        environment = PluginConfig(name=self.environment.name, **options)
        return self.model_copy(update={"environment": environment})


def load(
    name: str | Mapping[str, Any],
    overrides: Overrides = (),
    environ: Mapping[str, str] | None = None,
) -> ExperimentConfig:
    """The configuration of an experiment.

    Modules that it names are looked for in its run.plugin_folders from now on.

    Args:
        name: a path, the name of a configuration that comes with murmur, or the sections of one.
        overrides: "a.b=value" items with values in YAML syntax, or a mapping of dotted keys.
        environ: where MURMUR__A__B=value items are looked up; None: the process's environment.

    Raises:
        ConfigError: for anything wrong, naming the key, the value and the fix.
    """
    data, own_name, file = read_config(name)
    changes: list[Change] = []
    for key, text in sorted((os.environ if environ is None else environ).items()):
        if key.startswith("MURMUR_") and "__" in key[len(ENV_PREFIX) :] and key[7] != "_":
            raise ConfigError(f"environment variable {key}: write {ENV_PREFIX}{key[7:]}")
        if key.startswith(ENV_PREFIX):
            changes.append((key[len(ENV_PREFIX) :].lower().split("__"), value_of(text, key), key))
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
    plugins = [getattr(config, section).model_dump() for section in PLUGINS]
    named = named_code([plugins, config.evaluation.environment])
    if named:
        run = run.model_copy(update={"plugin_folders": _plugin_folders(run, file)})
        look_in(run.plugin_folders, named)
    if not run.name:
        run = run.model_copy(update={"name": own_name})
    return config.model_copy(update={"run": run})


def _plugin_folders(run: RunConfig, file: Path | None) -> tuple[str, ...]:
    """Absolute paths where named code is looked for, also when the run is resumed."""
    if run.plugin_folders:
        return tuple(os.path.abspath(folder) for folder in run.plugin_folders)
    beside = [] if file is None or file.parent in CONFIG_DIRS else [str(file.resolve().parent)]
    return tuple(dict.fromkeys([*beside, os.getcwd()]))
