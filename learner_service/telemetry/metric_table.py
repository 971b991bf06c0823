"""The table of the learner's metrics, from which docs/reference/metrics.md is written."""

from murmur.shared.process.metric import counter, gauge, histogram

_LATENCY_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1, 5)
_ACTING_S = (
    *(0.00025, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1),
    *(0.25, 1, 5),
)
_SIZES = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
_UPDATE_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_LAGS = (0, 1, 2, 3, 4, 8, 16)

KEPT = (
    gauge(
        "info",
        "always 1: which run this is, and on which device it learns",
        labels=("run", "environment", "algorithm", "device"),
    ),
    gauge(
        "sessions",
        "connected sessions",
        "fewer than expected: see the environment servers' logs",
        ("mode",),
    ),
    gauge(
        "ranks_without_sessions",
        "several learners, told by rank 0: ranks that no training session is connected to",
        "above 0: no rank makes an update; fewer sessions than learners, or servers that do not "
        "name all learners: see the log of rank 0",
    ),
    gauge(
        "environments",
        "environments of the connected training sessions",
        "fewer than expected: see the environment servers' logs",
    ),
    gauge(
        "environments_limit",
        "environments that may act at once without rows getting older than learner.max_policy_lag "
        "updates; 0: any number",
        "below murmur_learner_environments: some wait their turn; raise learner.max_policy_lag, "
        "or let an update take more rows: the learner's log names the option",
    ),
    counter(
        "sessions_refused", "sessions refused", "see the learner's log for each reason", ("reason",)
    ),
    counter(
        "notices",
        "different things that the run changes, ignores or guesses of what environments, sources "
        "and configuration give, by kind",
        "any: read notices.jsonl in the run's folder, or the report",
        ("kind",),
    ),
    counter("requests", "observation messages received", labels=("mode",)),
    counter(
        "audit_lines_suppressed",
        "ends of streams that the log counts in one line",
        "many streams end for one reason: the log names it",
        ("reason",),
    ),
    gauge(
        "in_flight_bytes",
        "memory set aside for the messages of the sessions connected, bytes",
        "at learner.max_in_flight_mib or max_evaluation_in_flight_mib further sessions are refused",
        ("mode",),
    ),
    counter("received_bytes", "bytes of observation messages received"),
    counter(
        "rejected",
        "sessions ended because a message broke the contract, or none came in time (idle)",
        "fix the environment that the log names; idle: see learner.session_timeout_s",
        ("reason",),
    ),
    gauge(
        "queue_depth", "requests pending in the batcher", "always high: inference is the bottleneck"
    ),
    histogram(
        "queue_wait_seconds",
        "time from a request's arrival to its batch",
        "high: inference or the update is in the way; see pipeline and precision",
        buckets=_LATENCY_S,
    ),
    histogram(
        "batch_envs",
        "training environments that were acted on and answered together; evaluations, blocked and "
        "ended sessions do not count",
        "small: raise envs_per_worker, or set preferred_batch_envs",
        buckets=_SIZES,
    ),
    histogram(
        "inference_seconds",
        "time to store, act on and answer a batch",
        "high: a smaller network, a faster device or lower precision",
        buckets=_LATENCY_S,
    ),
    histogram(
        "acting_seconds",
        "time from a request's arrival to its actions: queue and inference; phase: while an update "
        "runs, or idle; sessions that wait for the learner do not count",
        "high during updates alone: they hold processors, interpreter or device",
        ("phase",),
        buckets=_ACTING_S,
    ),
    counter(
        "acts_waited",
        "acts that took 10 ms and five times the usual or more: they waited for kernels, captures "
        "or the driver, on a CPU for processors; phase: while an update runs, or idle",
        "on CUDA, grows with each update: acting waits for updates, see `murmur doctor`",
        ("phase",),
    ),
    counter("acts_waited_seconds", "time of acts_waited beyond the usual", labels=("phase",)),
    histogram(
        "environment_seconds",
        "time from an answer to the next request of that session: environment, packing and wire",
        "high: faster environments, or more environment servers",
        buckets=_LATENCY_S,
    ),
    gauge(
        "parked_sessions",
        "blocked sessions: they wait for the learner before they may begin another unroll",
        "always all: the update is the bottleneck",
    ),
    histogram(
        "update_seconds",
        "time of one update",
        "high: lower precision, a faster device; `murmur doctor` probes the algorithm's options",
        buckets=_UPDATE_S,
    ),
    counter("updates", "updates made"),
    counter(
        "updates_skipped",
        "updates undone because a loss or a weight was not finite",
        "the log names the loss and a file with the batch: lower the learning rates, "
        "learner.precision=fp32; more than learner.max_skipped_updates in a row end the run",
    ),
    counter(
        "outliers_clipped",
        "observations, rewards and returns that lay far beyond all others: clipped before they "
        "entered the statistics that normalize",
        "the log shows the first of each observation: a sensor's or simulator's fault",
        ("of",),
    ),
    gauge("policy_version", "version of the acting policy"),
    histogram(
        "policy_lag",
        "updates between choosing an unroll's first action and learning from it, of each unroll",
        "at most max_policy_lag; for less of it fewer environments for each update",
        buckets=_LAGS,
    ),
    counter("env_steps", "environment steps received (all agents act in one)"),
    counter("agent_steps", "agent steps received"),
    counter("rows_received", "environment rows received: trained, inserted, dropped or held"),
    counter(
        "rows_trained", "environment rows taken by updates: each once, or from a replay many times"
    ),
    counter("rows_inserted", "environment rows put into the replay, each once"),
    counter(
        "rows_dropped",
        "environment rows that are not learned from. session: the last row of a session, which "
        "nothing was done on; lag: too old; restart: what a learner that was killed had not saved; "
        "skipped: those of updates_skipped",
        "lag: environment steps longer than max_policy_lag updates; session: "
        "environment servers die; restart: lower checkpoint_every_updates",
        ("reason",),
    ),
    counter(
        "rows_undone",
        "environment rows that were trained or inserted after the checkpoint that a killed "
        "learner was started from again: what was learned from them is lost",
        "lower checkpoint_every_updates",
    ),
    gauge("rows_stored", "environment rows waiting for an update, or in the replay"),
    counter("episodes", "episodes finished", labels=("mode",)),
    counter(
        "episodes_dropped",
        "episodes that never ended: their session was lost, or their environment failed",
        "environment: see murmur_env_episodes_dropped_total for why; session: rows_dropped",
        ("reason",),
    ),
    gauge("episode_return", "mean return of recent episodes, summed over agents", labels=("mode",)),
    gauge(
        "episode_metric",
        "mean of the environment's own results over recent episodes",
        labels=("name", "mode"),
    ),
    gauge(
        "curriculum_value",
        "environment.curriculum: value of the option in episodes that begin; of words the level",
        labels=("name",),
    ),
    gauge(
        "curriculum_level",
        "environment.curriculum: level of the option, from 0",
        "stays: episodes do not meet its `when`; progress.jsonl has their mean",
        ("name",),
    ),
    gauge("league_opponents", "policies from the past that the run plays against"),
    gauge(
        "loss", "losses and other scalars of the last update", "see docs/algorithms.md", ("name",)
    ),
    counter("checkpoints", "checkpoints written"),
    counter(
        "checkpoint_failures",
        "checkpoints, best and league policies that could not be written; training continued",
        "free some space: see the learner's log for the reason",
    ),
    histogram("checkpoint_seconds", "time to write a checkpoint", buckets=_UPDATE_S),
    gauge("checkpoint_age_seconds", "time since the last checkpoint"),
    gauge(
        "device_busy_ratio",
        "device_busy_seconds per second, of the last seconds",
        "low: see state_seconds",
    ),
    gauge(
        "loss_scale",
        "fp16: what the loss is multiplied by, so that small gradients do not vanish",
        "falls towards 1: gradients overflow; lower learning rates, or learner.precision=bf16",
    ),
    counter(
        "scaler_skipped_steps",
        "fp16: steps of optimisers skipped because a gradient overflowed at the loss's scale",
        "more than 1 in 1000 updates: learner.grad_scaler=conservative, or bf16",
    ),
    counter(
        "samples_received",
        "samples received, of both splits; with a cache each is received once, else once an epoch",
    ),
    counter(
        "samples_broken",
        "samples that cannot be read; each leaves all epochs",
        "the log names the first ones and their files",
        ("reason",),
    ),
    counter(
        "samples_reassigned",
        "samples asked of another session, as the one that had been asked ended",
        "rising: servers die or are too slow; see their logs",
    ),
    gauge("epoch", "epochs trained"),
    gauge("epoch_samples_trained", "samples trained in the epoch under way"),
    gauge("epoch_samples_remaining", "samples of the epoch under way still to train"),
    gauge(
        "sample_cache",
        "always 1: where samples are kept between epochs: device, or stream if they are sent again "
        "in each",
        "stream, and the learner waits: see supply.cache, or add servers",
        ("cache",),
    ),
    gauge(
        "machine_busy_ratio",
        "share of this machine's processors in use, by any program, over the last seconds",
        "near 1: environments and learner take each other's processors; more machines",
    ),
    gauge("device_memory_bytes", "memory in use: torch's on CUDA, resident on CPU"),
    gauge(
        "device_info",
        "always 1: the device by name, its driver, the CUDA version of torch, and the precision",
        labels=("name", "driver", "cuda", "precision"),
    ),
)

# Read when scraped, not kept.
OBSERVED = (
    counter(
        "state_seconds",
        "where the time of each thread went: every second is in one state, see docs/idle-gpu.md",
        "`murmur doctor` reads it",
        ("thread", "state"),
    ),
    counter(
        "thread_cpu_seconds", "CPU seconds of each thread that has a ledger", labels=("thread",)
    ),
    counter(
        "thread_cpu_wait_seconds",
        "time that each thread was ready to run and had no processor; Linux counts it",
        "grows: other programs, or the run's own processes, take the processors",
        ("thread",),
    ),
    counter(
        "machine_busy_seconds",
        "CPU seconds of any program on the processors that the learner may use",
        "less those of the run, others' load: see `murmur doctor`",
    ),
    gauge("machine_cores", "processors that the learner may use, by affinity and quota"),
    counter(
        "device_busy_seconds",
        "time in which the device worked for murmur; on CUDA between events, kernels' own waits "
        "for the host included",
        "grows much slower than time: see state_seconds for what it waits for",
    ),
    counter(
        "device_work_seconds",
        "the same by kind: act, update, evaluate; kinds may overlap",
        labels=("kind",),
    ),
    counter(
        "device_beside_seconds",
        "time in which the device worked on two kinds at once, as on acting beside an update",
        "on CUDA in the async pipeline, 0: acting and learning take turns",
    ),
    counter(
        "graph_replays",
        "calls that ran as one CUDA graph: act; of a replay draw, take (copy what was drawn), "
        "update, priorities; of a rollout the steps on minibatches (critic, actor, step) and "
        "passes through networks (forward, values); 0 on the CPU",
        labels=("graph",),
    ),
    counter(
        "graph_captures",
        "CUDA graphs captured, one for each shape of inputs",
        "grows after the first minute: shapes of inputs change; report it",
        ("graph",),
    ),
    counter(
        "graph_capture_seconds",
        "time of the host in captures of CUDA graphs, failed ones included",
        "grows after the first minute: see graph_captures and graph_fallbacks",
        ("graph",),
    ),
    counter(
        "graph_signatures",
        "shapes of inputs that functions to be captured were called with",
        "grows after the first minute: shapes change, and updates run without a graph; report it",
        ("graph",),
    ),
    counter(
        "eager_calls",
        "calls of captured functions that ran without a graph: the first few of each input shape, "
        "acts on larger batches than were captured beforehand, and those between a failed capture "
        "and the next; with learner.cuda_graph=false all",
        "on CUDA, grows as fast as graph_replays: see graph_fallbacks",
        ("graph",),
    ),
    counter(
        "eager_seconds",
        "time of the host in eager_calls, in which it launches their kernels one by one",
        "on CUDA, a large part of update_seconds: `murmur doctor` names the cause",
        ("graph",),
    ),
    counter(
        "graph_fallbacks",
        "captures of CUDA graphs that failed; after some eager calls the next is tried, three in "
        "all. memory: the device is out of memory; capture: any other error, which the log gives",
        "memory: smaller batches; capture: report the log's line, or set learner.cuda_graph=false",
        ("graph", "reason"),
    ),
    gauge(
        "graph_retry_calls",
        "after a failed capture: eager calls until the next is tried; 0: it was captured since, "
        "-1: it is not tried again",
        "-1: see graph_fallbacks; restarting the learner tries again",
        ("graph",),
    ),
    counter(
        "tracker_failures",
        "attempts to send the run's record to a tracker that failed; each is repeated later",
        "grows: the learner's log has the tracker's own message",
        ("tracker",),
    ),
    gauge(
        "tracker_unsent_bytes",
        "bytes of progress.jsonl that the tracker does not have yet",
        "grows: see tracker_failures; after the run, `murmur track` sends the rest",
        ("tracker",),
    ),
    counter(
        "tracker_lines_dropped",
        "lines of progress.jsonl that the tracker never gets. disk: the learner could not write "
        "them; torn: a learner that was killed wrote them in part",
        "disk: free some space",
        ("tracker", "reason"),
    ),
    counter(
        "device_copied_bytes",
        "bytes that acting and evaluations copied between host and device: observations to_device, "
        "actions to_host; on the CPU, what a GPU would need copied",
        "near the bus's limit, 25 GB/s for PCIe 4: observe in uint8 or float16",
        ("direction",),
    ),
    gauge(
        "gpu_utilization_ratio",
        "NVML (DCGM_FI_DEV_GPU_UTIL): share of time in which any kernel ran; this and all other "
        "gpu_ metrics are absent on the CPU, and where the driver does not support them",
        "far below device_busy_ratio: kernels are small; larger batches, compile",
    ),
    gauge(
        "gpu_memory_utilization_ratio",
        "NVML (DCGM_FI_DEV_MEM_COPY_UTIL): share of time in which the GPU's memory was read or "
        "written",
    ),
    gauge(
        "gpu_memory_used_bytes",
        "NVML (DCGM_FI_DEV_FB_USED): memory in use by all processes",
        "near gpu_memory_total_bytes: smaller batches or a smaller replay",
    ),
    gauge("gpu_memory_total_bytes", "NVML: memory of the GPU"),
    gauge(
        "gpu_temperature_celsius",
        "NVML (DCGM_FI_DEV_GPU_TEMP): temperature of the GPU",
        "above 80: it slows itself down; cooling",
    ),
    gauge("gpu_power_watts", "NVML (DCGM_FI_DEV_POWER_USAGE): power drawn"),
    gauge(
        "gpu_power_limit_watts",
        "NVML (DCGM_FI_DEV_ENFORCED_POWER_LIMIT): power that the GPU may draw",
    ),
    gauge(
        "gpu_clock_hertz",
        "NVML (DCGM_FI_DEV_SM_CLOCK, DCGM_FI_DEV_MEM_CLOCK): clock of the multiprocessors (sm) "
        "and of the memory",
        "sm far below gpu_clock_max_hertz under load: see gpu_throttled",
        ("clock",),
    ),
    gauge("gpu_clock_max_hertz", "NVML: the highest clock of each", labels=("clock",)),
    gauge(
        "gpu_throttled",
        "NVML (DCGM_FI_DEV_CLOCKS_EVENT_REASONS): 1 while this limit keeps the clocks down, else 0",
        "power_cap: normal under full load; software_thermal, hardware_thermal: cooling; "
        "hardware_slowdown, power_brake: the power supply or cooling of the machine",
        ("reason",),
    ),
    gauge(
        "gpu_pcie_bytes_per_second",
        "NVML (DCGM_FI_PROF_PCIE_RX_BYTES, _TX_BYTES): all traffic over PCIe in the 20 ms before",
        labels=("direction",),
    ),
)

METRICS = KEPT + OBSERVED
