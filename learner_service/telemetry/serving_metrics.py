"""Metrics of the sessions that the learner serves, and of how it answers them."""

from learner_service.telemetry.metric import Metric

_LATENCY_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1, 5)
_ACTING_S = (
    *(0.00025, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1),
    *(0.25, 1, 5),
)
_SIZES = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)

SERVING_METRICS = (
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
        "above learner.batcher.latency_target_ms: `murmur doctor` says which part is too slow",
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
        "batch_wait_seconds",
        "gauge",
        "longest wait for a larger batch, as tuned to learner.batcher.latency_target_ms",
        labels=("phase",),
    ),
    Metric(
        "batch_preferred_envs",
        "gauge",
        "environments that a batch waits for, as tuned to learner.batcher.latency_target_ms",
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
)
