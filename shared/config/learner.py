"""The section `learner` of the configuration: ports, device, pipeline, limits, batching."""

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat

from murmur.shared.config.section import Auto, Count, MetricsHosts, Open, Port, Section

PORT = 50051
METRICS_PORT = 9101


class BatcherConfig(Section):
    """Dynamic batching of inference requests; the terms are those of Triton's batcher."""

    max_batch_envs: Count = Field(4096, description="most environments in one batch")
    preferred_batch_envs: NonNegativeInt = Field(
        0, description="wait up to max_wait_ms to gather this number of environments; 0: never wait"
    )
    max_wait_ms: NonNegativeFloat = Field(0.0, description="longest wait of the oldest request, ms")


class LearnerConfig(Section):
    """The learner."""

    host: str = Field(
        "127.0.0.1",
        description="address to listen on; IPv6 as ::1 or [::1]; 0.0.0.0 in a container",
    )
    port: Port = Field(
        None,
        description=f"gRPC port; auto: {PORT}, or with `murmur train` any free port if that is in "
        "use; 0: any free port",
    )
    metrics_host: MetricsHosts = "127.0.0.1"
    metrics_port: Port = Field(
        None,
        description=f"auto: {METRICS_PORT}, or any free port if that is in use; 0: any free port",
    )
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
    memory_limit_gib: NonNegativeFloat = Field(
        0.0,
        description="memory that networks, and that unrolls, may take, GiB; an environment whose "
        "observations would take more is refused at its handshake; 0: what is free",
    )
    memory_budget_gib: PositiveFloat = Field(
        2.0, description="CPU: what an update may take where batch_size is 0"
    )
    pipeline: Literal["async", "sync"] = Field(
        "async",
        description="async: act while learning, rows at most max_policy_lag updates old; "
        "sync: act, then learn; the same seed gives the same run bit for bit",
    )
    max_policy_lag: Open = Field(
        None,
        description="async pipeline: the learner drops and counts rows whose actions were chosen "
        "more than this number of updates ago; with a replay: number of unrolls of every "
        "environment by which acting may be ahead of the updates due; null or auto: 1, or 2 if the "
        "first updates show that environments and learner are about as fast",
    )
    max_sessions: Count = Field(64, description="training sessions; further ones are refused")
    max_evaluation_sessions: Count = Field(
        16,
        description="evaluation sessions; they have places of their own, so none of them, however "
        "many wait, keeps a training session out",
    )
    max_in_flight_mib: PositiveFloat = Field(
        1024.0,
        description="memory for the messages of all training sessions together, MiB: an "
        "observation and an action of each. A session for which there is no room is refused",
    )
    max_evaluation_in_flight_mib: PositiveFloat = Field(
        256.0, description="the same for evaluation sessions, MiB"
    )
    max_sessions_per_identity: NonNegativeInt = Field(
        0, description="sessions of one certificate's name; 0: only max_sessions counts"
    )
    max_audit_lines: Count = Field(
        20,
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
    max_abs_reward: PositiveFloat = Field(
        1e6,
        description="a reward beyond ± this is a fault of its environment, whose episode is "
        "dropped; the learner refuses it. The default keeps squared returns within float32",
    )
    max_skipped_updates: NonNegativeInt = Field(
        10,
        description="updates in a row that may be undone because a loss or a weight was not "
        "finite; one more ends the run",
    )
    stalled_after_s: NonNegativeFloat = Field(
        1800.0,
        description="/healthz fails, and says why, if a thread that acts or learns stays in one "
        "state of the time ledger for this time, s: a device or file system that does not answer; "
        "waiting for environments does not count; ten times that while torch compiles; 0: never",
    )
    group_timeout_s: PositiveFloat = Field(
        300.0,
        description="several learners: longest wait for one that runs but does not arrive, s; then "
        "the process ends, to be restarted. In the sync pipeline longer than an unroll takes. A "
        "paused or lost one is noticed after 20 s, or this if it is less",
    )
    group_check_every_updates: Count = Field(
        100, description="several learners: updates between comparisons of their weights"
    )
    batcher: BatcherConfig = BatcherConfig()
    checkpoint_every_updates: Count = Field(50, description="updates between checkpoints")
    keep_checkpoints: Count = Field(3, description="latest checkpoints kept beside the best")
    log_every_s: PositiveFloat = Field(1.0, description="pause between lines of progress.jsonl, s")

    @property
    def policy_lag(self) -> int:
        """Return `max_policy_lag`, or 1 until it is chosen."""
        return 1 if self.max_policy_lag is None else self.max_policy_lag
