"""The table of the learner's metrics, as docs/reference/metrics.md lists them."""

from dataclasses import dataclass

_LATENCY_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1, 5)
_ACTING_S = (
    *(0.00025, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1),
    *(0.25, 1, 5),
)
_SIZES = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
_UPDATE_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_LAGS = (0, 1, 2, 3, 4, 8, 16)


@dataclass(frozen=True)
class Metric:
    """One row of docs/reference/metrics.md.

    Attributes:
        name: metric's name without the prefix `murmur_learner_` and Prometheus' suffix.
        kind: counter, gauge or histogram.
        meaning: quantity that it counts.
        remedy: advice for when it looks wrong.
        labels: its labels.
        buckets: upper bounds of a histogram's buckets.
        observed: read when scraped, not kept.
    """

    name: str
    kind: str
    meaning: str
    remedy: str = ""
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    observed: bool = False


METRICS = (
    Metric(
        "info",
        "gauge",
        "always 1: which run this is, and on which device it learns",
        labels=("run", "environment", "algorithm", "device"),
    ),
    Metric(
        "sessions",
        "gauge",
        "connected sessions",
        "fewer than expected: see the environment servers' logs",
        ("mode",),
    ),
    Metric(
        "ranks_without_sessions",
        "gauge",
        "several learners, told by rank 0: ranks that no training session is connected to",
        "above 0: no rank makes an update; fewer sessions than learners, or servers that do not "
        "name all learners: see the log of rank 0",
    ),
    Metric(
        "environments",
        "gauge",
        "environments of the connected training sessions",
        "fewer than expected: see the environment servers' logs",
    ),
    Metric(
        "environments_limit",
        "gauge",
        "environments that may act at once without rows getting older than learner.max_policy_lag "
        "updates; 0: any number",
        "below murmur_learner_environments: some wait their turn; raise learner.max_policy_lag, "
        "or let an update take more rows: the learner's log names the option",
    ),
    Metric(
        "sessions_refused",
        "counter",
        "sessions refused",
        "see the learner's log for each reason",
        ("reason",),
    ),
    Metric(
        "notices",
        "counter",
        "different things that the run changes, ignores or guesses of what environments, sources "
        "and configuration give, by kind",
        "any: read notices.jsonl in the run's folder, or the report",
        ("kind",),
    ),
    Metric("requests", "counter", "observation messages received", labels=("mode",)),
    Metric(
        "audit_lines_suppressed",
        "counter",
        "ends of streams that the log counts in one line",
        "many streams end for one reason: the log names it",
        ("reason",),
    ),
    Metric(
        "in_flight_bytes",
        "gauge",
        "memory set aside for the messages of the sessions connected, bytes",
        "at learner.max_in_flight_mib or max_evaluation_in_flight_mib further sessions are refused",
        ("mode",),
    ),
    Metric("received_bytes", "counter", "bytes of observation messages received"),
    Metric(
        "rejected",
        "counter",
        "sessions ended because a message broke the contract, or none came in time (idle)",
        "fix the environment that the log names; idle: see learner.session_timeout_s",
        ("reason",),
    ),
    Metric(
        "queue_depth",
        "gauge",
        "requests pending in the batcher",
        "always high: inference is the bottleneck",
    ),
    Metric(
        "queue_wait_seconds",
        "histogram",
        "time from a request's arrival to its batch",
        "high: inference or the update is in the way; see pipeline and precision",
        buckets=_LATENCY_S,
    ),
    Metric(
        "batch_envs",
        "histogram",
        "training environments that were acted on and answered together; evaluations, blocked and "
        "ended sessions do not count",
        "small: raise envs_per_worker, or set preferred_batch_envs",
        buckets=_SIZES,
    ),
    Metric(
        "inference_seconds",
        "histogram",
        "time to store, act on and answer a batch",
        "high: a smaller network, a faster device or lower precision",
        buckets=_LATENCY_S,
    ),
    Metric(
        "acting_seconds",
        "histogram",
        "time from a request's arrival to its actions: queue and inference; phase: while an update "
        "runs, or idle; sessions that wait for the learner do not count",
        "high during updates alone: they hold processors, interpreter or device",
        ("phase",),
        buckets=_ACTING_S,
    ),
    Metric(
        "acts_waited",
        "counter",
        "acts that took 10 ms and five times the usual or more: they waited for kernels, captures "
        "or the driver, on a CPU for processors; phase: while an update runs, or idle",
        "on CUDA, grows with each update: acting waits for updates, see `murmur doctor`",
        ("phase",),
    ),
    Metric(
        "acts_waited_seconds",
        "counter",
        "time of acts_waited beyond the usual",
        labels=("phase",),
    ),
    Metric(
        "environment_seconds",
        "histogram",
        "time from an answer to the next request of that session: environment, packing and wire",
        "high: faster environments, or more environment servers",
        buckets=_LATENCY_S,
    ),
    Metric(
        "parked_sessions",
        "gauge",
        "blocked sessions: they wait for the learner before they may begin another unroll",
        "always all: the update is the bottleneck",
    ),
    Metric(
        "update_seconds",
        "histogram",
        "time of one update",
        "high: lower precision, a faster device; `murmur doctor` probes the algorithm's options",
        buckets=_UPDATE_S,
    ),
    Metric("updates", "counter", "updates made"),
    Metric(
        "updates_skipped",
        "counter",
        "updates undone because a loss or a weight was not finite",
        "the log names the loss and a file with the batch: lower the learning rates, "
        "learner.precision=fp32; more than learner.max_skipped_updates in a row end the run",
    ),
    Metric(
        "outliers_clipped",
        "counter",
        "observations, rewards and returns that lay far beyond all others: clipped before they "
        "entered the statistics that normalize",
        "the log shows the first of each observation: a sensor's or simulator's fault",
        ("of",),
    ),
    Metric("policy_version", "gauge", "version of the acting policy"),
    Metric(
        "policy_lag",
        "histogram",
        "updates between acting on a row and learning from it",
        "above max_policy_lag rows are dropped",
        buckets=_LAGS,
    ),
    Metric("env_steps", "counter", "environment steps received (all agents act in one)"),
    Metric("agent_steps", "counter", "agent steps received"),
    Metric(
        "rows_received",
        "counter",
        "environment rows received: trained, inserted, dropped or held",
    ),
    Metric(
        "rows_trained",
        "counter",
        "environment rows taken by updates: each once, or from a replay many times",
    ),
    Metric("rows_inserted", "counter", "environment rows put into the replay, each once"),
    Metric(
        "rows_dropped",
        "counter",
        "environment rows that are not learned from. session: the last row of a session, which "
        "nothing was done on; lag: too old; restart: what a learner that was killed had not saved; "
        "skipped: those of updates_skipped",
        "lag: environment steps longer than max_policy_lag updates; session: "
        "environment servers die; restart: lower checkpoint_every_updates",
        ("reason",),
    ),
    Metric(
        "rows_undone",
        "counter",
        "environment rows that were trained or inserted after the checkpoint that a killed "
        "learner was started from again: what was learned from them is lost",
        "lower checkpoint_every_updates",
    ),
    Metric(
        "rows_stored",
        "gauge",
        "environment rows waiting for an update, or in the replay",
    ),
    Metric("episodes", "counter", "episodes finished", labels=("mode",)),
    Metric(
        "episodes_dropped",
        "counter",
        "episodes that never ended: their session was lost, or their environment failed",
        "environment: see murmur_env_episodes_dropped_total for why; session: rows_dropped",
        ("reason",),
    ),
    Metric(
        "episode_return",
        "gauge",
        "mean return of recent episodes, summed over agents",
        labels=("mode",),
    ),
    Metric(
        "episode_metric",
        "gauge",
        "mean of the environment's own results over recent episodes",
        labels=("name", "mode"),
    ),
    Metric("league_opponents", "gauge", "policies from the past that the run plays against"),
    Metric(
        "loss",
        "gauge",
        "losses and other scalars of the last update",
        "see docs/algorithms.md",
        ("name",),
    ),
    Metric("checkpoints", "counter", "checkpoints written"),
    Metric(
        "checkpoint_failures",
        "counter",
        "checkpoints, best and league policies that could not be written; training continued",
        "free some space: see the learner's log for the reason",
    ),
    Metric("checkpoint_seconds", "histogram", "time to write a checkpoint", buckets=_UPDATE_S),
    Metric("checkpoint_age_seconds", "gauge", "time since the last checkpoint"),
    Metric(
        "state_seconds",
        "counter",
        "where the time of each thread went: every second is in one state, see docs/idle-gpu.md",
        "`murmur doctor` reads it",
        ("thread", "state"),
        observed=True,
    ),
    Metric(
        "device_busy_seconds",
        "counter",
        "time in which the device worked for murmur; on CUDA between events, kernels' own waits "
        "for the host included",
        "grows much slower than time: see state_seconds for what it waits for",
        observed=True,
    ),
    Metric(
        "device_work_seconds",
        "counter",
        "the same by kind: act, update, evaluate; kinds may overlap",
        labels=("kind",),
        observed=True,
    ),
    Metric(
        "device_beside_seconds",
        "counter",
        "time in which the device worked on two kinds at once, as on acting beside an update",
        "on CUDA in the async pipeline, 0: acting and learning take turns",
        observed=True,
    ),
    Metric(
        "device_busy_ratio",
        "gauge",
        "device_busy_seconds per second, of the last seconds",
        "low: see state_seconds",
    ),
    Metric(
        "loss_scale",
        "gauge",
        "fp16: what the loss is multiplied by, so that small gradients do not vanish",
        "falls towards 1: gradients overflow; lower learning rates, or learner.precision=bf16",
    ),
    Metric(
        "scaler_skipped_steps",
        "counter",
        "fp16: steps of optimisers skipped because a gradient overflowed at the loss's scale",
        "more than 1 in 1000 updates: learner.grad_scaler=conservative, or bf16",
    ),
    Metric(
        "graph_replays",
        "counter",
        "calls that ran as one CUDA graph: act; of a replay draw, take (copy what was drawn), "
        "update, priorities; of a rollout the steps on minibatches (critic, actor, step) and "
        "passes through networks (forward, values); 0 on the CPU",
        labels=("graph",),
        observed=True,
    ),
    Metric(
        "graph_captures",
        "counter",
        "CUDA graphs captured, one for each shape of inputs",
        "grows after the first minute: shapes of inputs change; report it",
        ("graph",),
        observed=True,
    ),
    Metric(
        "graph_capture_seconds",
        "counter",
        "time of the host in captures of CUDA graphs, failed ones included",
        "grows after the first minute: see graph_captures and graph_fallbacks",
        ("graph",),
        observed=True,
    ),
    Metric(
        "graph_signatures",
        "counter",
        "shapes of inputs that functions to be captured were called with",
        "grows after the first minute: shapes change, and updates run without a graph; report it",
        ("graph",),
        observed=True,
    ),
    Metric(
        "eager_calls",
        "counter",
        "calls of captured functions that ran without a graph: the first few of each input shape, "
        "acts on larger batches than were captured beforehand, and those between a failed capture "
        "and the next; with learner.cuda_graph=false all",
        "on CUDA, grows as fast as graph_replays: see graph_fallbacks",
        ("graph",),
        observed=True,
    ),
    Metric(
        "eager_seconds",
        "counter",
        "time of the host in eager_calls, in which it launches their kernels one by one",
        "on CUDA, a large part of update_seconds: `murmur doctor` names the cause",
        ("graph",),
        observed=True,
    ),
    Metric(
        "graph_fallbacks",
        "counter",
        "captures of CUDA graphs that failed; after some eager calls the next is tried, three in "
        "all. memory: the device is out of memory; capture: any other error, which the log gives",
        "memory: smaller batches; capture: report the log's line, or set learner.cuda_graph=false",
        ("graph", "reason"),
        observed=True,
    ),
    Metric(
        "graph_retry_calls",
        "gauge",
        "after a failed capture: eager calls until the next is tried; 0: it was captured since, "
        "-1: it is not tried again",
        "-1: see graph_fallbacks; restarting the learner tries again",
        ("graph",),
        observed=True,
    ),
    Metric(
        "samples_received",
        "counter",
        "samples received, of both splits; with a cache each is received once, else once an epoch",
    ),
    Metric(
        "samples_broken",
        "counter",
        "samples that cannot be read; each leaves all epochs",
        "the log names the first ones and their files",
        ("reason",),
    ),
    Metric(
        "samples_reassigned",
        "counter",
        "samples asked of another session, as the one that had been asked ended",
        "rising: servers die or are too slow; see their logs",
    ),
    Metric("epoch", "gauge", "epochs trained"),
    Metric("epoch_samples_trained", "gauge", "samples trained in the epoch under way"),
    Metric("epoch_samples_remaining", "gauge", "samples of the epoch under way still to train"),
    Metric(
        "sample_cache",
        "gauge",
        "always 1: where samples are kept between epochs: device, or stream if they are sent again "
        "in each",
        "stream, and the learner waits: see supply.cache, or add servers",
        ("cache",),
    ),
    Metric(
        "tracker_failures",
        "counter",
        "attempts to send the run's record to a tracker that failed; each is repeated later",
        "grows: the learner's log has the tracker's own message",
        ("tracker",),
        observed=True,
    ),
    Metric(
        "tracker_unsent_bytes",
        "gauge",
        "bytes of progress.jsonl that the tracker does not have yet",
        "grows: see tracker_failures; after the run, `murmur track` sends the rest",
        ("tracker",),
        observed=True,
    ),
    Metric(
        "tracker_lines_dropped",
        "counter",
        "lines of progress.jsonl that the tracker never gets. disk: the learner could not write "
        "them; torn: a learner that was killed wrote them in part",
        "disk: free some space",
        ("tracker", "reason"),
        observed=True,
    ),
    Metric(
        "machine_busy_ratio",
        "gauge",
        "share of this machine's processors in use, by any program, over the last seconds",
        "near 1: environments and learner take each other's processors; more machines",
    ),
    Metric("device_memory_bytes", "gauge", "memory in use: torch's on CUDA, resident on CPU"),
    Metric(
        "device_info",
        "gauge",
        "always 1: the device by name, its driver, the CUDA version of torch, and the precision",
        labels=("name", "driver", "cuda", "precision"),
    ),
    Metric(
        "device_copied_bytes",
        "counter",
        "bytes that acting and evaluations copied between host and device: observations to_device, "
        "actions to_host; on the CPU, what a GPU would need copied",
        "near the bus's limit, 25 GB/s for PCIe 4: observe in uint8 or float16",
        ("direction",),
        observed=True,
    ),
    Metric(
        "gpu_utilization_ratio",
        "gauge",
        "NVML (DCGM_FI_DEV_GPU_UTIL): share of time in which any kernel ran; this and all other "
        "gpu_ metrics are absent on the CPU, and where the driver does not support them",
        "far below device_busy_ratio: kernels are small; larger batches, compile",
        observed=True,
    ),
    Metric(
        "gpu_memory_utilization_ratio",
        "gauge",
        "NVML (DCGM_FI_DEV_MEM_COPY_UTIL): share of time in which the GPU's memory was read or "
        "written",
        observed=True,
    ),
    Metric(
        "gpu_memory_used_bytes",
        "gauge",
        "NVML (DCGM_FI_DEV_FB_USED): memory in use by all processes",
        "near gpu_memory_total_bytes: smaller batches or a smaller replay",
        observed=True,
    ),
    Metric("gpu_memory_total_bytes", "gauge", "NVML: memory of the GPU", observed=True),
    Metric(
        "gpu_temperature_celsius",
        "gauge",
        "NVML (DCGM_FI_DEV_GPU_TEMP): temperature of the GPU",
        "above 80: it slows itself down; cooling",
        observed=True,
    ),
    Metric(
        "gpu_power_watts",
        "gauge",
        "NVML (DCGM_FI_DEV_POWER_USAGE): power drawn",
        observed=True,
    ),
    Metric(
        "gpu_power_limit_watts",
        "gauge",
        "NVML (DCGM_FI_DEV_ENFORCED_POWER_LIMIT): power that the GPU may draw",
        observed=True,
    ),
    Metric(
        "gpu_clock_hertz",
        "gauge",
        "NVML (DCGM_FI_DEV_SM_CLOCK, DCGM_FI_DEV_MEM_CLOCK): clock of the multiprocessors (sm) "
        "and of the memory",
        "sm far below gpu_clock_max_hertz under load: see gpu_throttled",
        ("clock",),
        observed=True,
    ),
    Metric(
        "gpu_clock_max_hertz",
        "gauge",
        "NVML: the highest clock of each",
        labels=("clock",),
        observed=True,
    ),
    Metric(
        "gpu_throttled",
        "gauge",
        "NVML (DCGM_FI_DEV_CLOCKS_EVENT_REASONS): 1 while this limit keeps the clocks down, else 0",
        "power_cap: normal under full load; software_thermal, hardware_thermal: cooling; "
        "hardware_slowdown, power_brake: the power supply or cooling of the machine",
        ("reason",),
        observed=True,
    ),
    Metric(
        "gpu_pcie_bytes_per_second",
        "gauge",
        "NVML (DCGM_FI_PROF_PCIE_RX_BYTES, _TX_BYTES): all traffic over PCIe in the 20 ms before",
        labels=("direction",),
        observed=True,
    ),
)
