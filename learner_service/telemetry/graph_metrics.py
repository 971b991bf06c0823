"""The learner's metrics about how updates run: the loss scaler, CUDA graphs and eager calls."""

from learner_service.telemetry.metric import Metric

GRAPH_METRICS = (
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
)
