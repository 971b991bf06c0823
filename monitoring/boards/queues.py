"""The dashboard Queues and batching: From a request's arrival to its answer."""

from monitoring.panel import (
    LEARNER,
    LEARNER_NAME,
    RATE_INTERVAL,
    Board,
    Panel,
    learner_gauge,
    mean,
    per_second,
    quantiles,
    rate,
)

_SESSIONS = Panel(
    "Sessions",
    "Streams of environment servers: servers * workers * sessions_per_worker. Fewer than "
    "expected: see the servers' logs. Blocked (parked_sessions): of those that train, the ones "
    "that wait for the learner. Always all blocked: the update is the bottleneck.",
    [
        (f"sum by (mode) (murmur_learner_sessions{{{LEARNER}}})", "{{mode}}"),
        (f"sum(murmur_learner_parked_sessions{{{LEARNER}}})", "blocked"),
    ],
)
_WORK = 'thread="learner", state=~"sample|forward|backward|optimize|synchronize|publish"'
_RANKS = (
    Panel(
        "Environments by learner",
        "Of learners that share a run: they should differ by less than those of one session. "
        "Uneven for long: let the number of sessions be a multiple of the learners'.",
        [learner_gauge("murmur_learner_environments", f"rank {{{{rank}}}} {LEARNER_NAME}")],
        width=8,
    ),
    Panel(
        "Waiting, by learner",
        "wait_rows: for environments; add servers. wait_ranks: exchange with the other learners of "
        "the run, and waiting for them. Who waits least for the others is who they wait for.",
        [
            (
                "sum by (instance, rank, state) ("
                + rate(
                    "murmur_learner_state_seconds_total",
                    f'{LEARNER}, state=~"wait_rows|wait_ranks"',
                )
                + ")",
                f"rank {{{{rank}}}} {LEARNER_NAME} {{{{state}}}}",
            )
        ],
        "percentunit",
        width=8,
    ),
    Panel(
        "Work of an update, by learner",
        "Seconds of work in an update, without waiting. One learner far above the others: its "
        "device is slower, hotter or shared. Empty with pipeline=sync, where the inference thread "
        "learns.",
        [
            (
                "sum by (instance, rank) ("
                + rate("murmur_learner_state_seconds_total", f"{LEARNER}, {_WORK}")
                + ") / sum by (instance, rank) ("
                + rate("murmur_learner_updates_total")
                + ")",
                f"rank {{{{rank}}}} {LEARNER_NAME}",
            )
        ],
        "s",
        width=8,
    ),
)
_LATENCY = [
    Panel(
        "Wait in the batcher",
        "From a request's arrival to its batch. High: inference or the update is "
        "in the way; see pipeline and precision.",
        quantiles("murmur_learner_queue_wait_seconds"),
        "s",
    ),
    Panel(
        "Inference",
        "Store, act and answer, per batch. High: a smaller network, a faster "
        "device or lower precision.",
        quantiles("murmur_learner_inference_seconds"),
        "s",
        warn=0.1,
    ),
    Panel(
        "From a request to its actions, during updates",
        "Queue and inference. High while the panel beside it is not: updates hold "
        "processors or interpreter.",
        quantiles("murmur_learner_acting_seconds", ', phase="update"'),
        "s",
    ),
    Panel(
        "From a request to its actions, between updates",
        "High: acting is slow, or requests queue.",
        quantiles("murmur_learner_acting_seconds", ', phase="idle"'),
        "s",
    ),
]
_BATCHES = [
    Panel(
        "Environments in a batch",
        "Training environments acted on together, without evaluations and blocked sessions. Small: "
        "raise envs_per_worker, or set preferred_batch_envs.",
        [(mean("murmur_learner_batch_envs"), "mean"), *quantiles("murmur_learner_batch_envs")],
    ),
    Panel(
        "Batches a second",
        "Acts for training: one forward pass of the policy each, and more for opponents. "
        "Evaluations do not count.",
        [(f"sum({rate('murmur_learner_batch_envs_count')})", "batches")],
        per_second("batches"),
    ),
    Panel(
        "Pending requests",
        "Always high: inference is the bottleneck.",
        [learner_gauge("murmur_learner_queue_depth")],
    ),
    _SESSIONS,
]
_WIRE = [
    Panel(
        "Observation messages a second",
        "A message costs about the same whatever its size.",
        [(f"sum by (mode) ({rate('murmur_learner_requests_total')})", "{{mode}}")],
        per_second("messages"),
    ),
    Panel(
        "Bytes received",
        "Near the network's limit: observe in uint8 or float16.",
        [(f"sum({rate('murmur_learner_received_bytes_total')})", "received")],
        "Bps",
    ),
    Panel(
        "From an answer to the next request",
        "Environment, packing and wire, as the learner sees them. High: faster "
        "environments, or more environment servers.",
        quantiles("murmur_learner_environment_seconds"),
        "s",
    ),
    Panel(
        "Refused and rejected",
        "Sessions refused and observations that broke the contract; the learner's log names each.",
        [
            (
                "sum by (reason) (increase("
                f"murmur_learner_sessions_refused_total{{{LEARNER}}}{RATE_INTERVAL})) "
                "or vector(0)",
                "refused {{reason}}",
            ),
            (
                "sum by (reason) (increase("
                f"murmur_learner_rejected_total{{{LEARNER}}}{RATE_INTERVAL})) "
                "or vector(0)",
                "rejected {{reason}}",
            ),
        ],
        warn=1,
    ),
]
BOARD = Board(
    "murmur-queues",
    "Queues and batching",
    "From a request's arrival to its answer.",
    [
        ("Latency", _LATENCY),
        ("Batches", _BATCHES),
        ("Learners of one run", _RANKS),
        ("Wire", _WIRE),
    ],
)
