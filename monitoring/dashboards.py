"""The Grafana dashboards, written by `python -m monitoring.dashboards` into grafana/dashboards.

A test compares the files with this module, another one asks every query of a Prometheus that has
scraped a training. Grafana's own library builds the JSON.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import dashboard as dashboards
from grafana_foundation_sdk.builders import prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common, dashboard

FOLDER = Path(__file__).parent / "grafana" / "dashboards"
_SOURCE = dashboard.DataSourceRef(type_val="prometheus", uid="prometheus")
# Every query of a learner's metrics carries LEARNER, every one of a server's SERVER.
LEARNER = 'instance=~"$learner"'
SERVER = 'instance=~"$server"'
_RATE = "[$__rate_interval]"


@dataclass(frozen=True)
class Panel:
    """One panel.

    Attributes:
        title: what it shows.
        description: what it means, and what to do when it looks wrong.
        queries: (PromQL, legend) of each line.
        unit: Grafana's name of the unit.
        kind: "lines", "stack" (areas that add up) or "stat" (the latest value).
        width: columns of 24.
        warn: from this value on it is yellow.
        bad: from this value on it is red; below it if `bad` < `warn`.
        top: upper end of the axis.
    """

    title: str
    description: str
    queries: Sequence[tuple[str, str]]
    unit: str = "short"
    kind: Literal["lines", "stack", "stat"] = "lines"
    width: int = 12
    warn: float | None = None
    bad: float | None = None
    top: float | None = None


@dataclass(frozen=True)
class Board:
    """One dashboard: rows of panels."""

    uid: str
    title: str
    description: str
    rows: Sequence[tuple[str, Sequence[Panel]]]


def _rate(metric: str, where: str = LEARNER) -> str:
    return f"rate({metric}{{{where}}}{_RATE})"


def _quantiles(metric: str, where: str = "") -> list[tuple[str, str]]:
    """Median and 99th percentile of a learner's histogram, over all selected learners."""
    buckets = f"sum by (le) ({_rate(metric + '_bucket', LEARNER + where)})"
    return [
        (f"histogram_quantile({q}, {buckets})", name) for q, name in ((0.5, "p50"), (0.99, "p99"))
    ]


def _mean(metric: str) -> str:
    return f"sum({_rate(metric + '_sum')}) / sum({_rate(metric + '_count')})"


def _ledger(thread: str, title: str, description: str) -> Panel:
    """Where the time of a learner's thread goes; the states add up to all of it."""
    where = f'{LEARNER}, thread="{thread}"'
    rate = _rate("murmur_learner_state_seconds_total", where)
    mean = f"sum by (state) ({rate}) / scalar(sum({rate}))"
    return Panel(title, description, [(mean, "{{state}}")], "percentunit", "stack", 8, top=1)


LEARNER_TIME = _ledger(
    "learner",
    "What the learner thread does",
    "Mostly wait_rows: more environment servers. Mostly forward, backward, optimize or "
    "synchronize: the update is the bottleneck, which is where it should be; a faster device, "
    "lower precision or fewer data_passes make it faster. Empty with pipeline=sync.",
)
INFERENCE_TIME = _ledger(
    "inference",
    "What the inference thread does",
    "Mostly wait_environments: the environments are the bottleneck. Mostly wait_learning: acting "
    "is as far ahead of learning as it may be, so the update is. Mostly act or transfer: a "
    "smaller network, a faster device, larger batches.",
)
SERVER_TIME = Panel(
    "What the environment servers do",
    "Mostly step: the environments are the bottleneck, add workers while cores are free. Mostly "
    "wait: the learner is; more servers gain nothing. Much pack and unpack: messages are many and "
    "small, raise envs_per_worker.",
    [(f"avg by (state) (murmur:env_state:ratio{{{SERVER}}})", "{{state}}")],
    "percentunit",
    "stack",
    8,
    top=1,
)
RETURN = Panel(
    "Return",
    "Mean of recent episodes, summed over agents. Training explores, evaluation is greedy. Falls "
    "after it rose: lower learning rates or a smaller max_policy_lag.",
    [(f"murmur_learner_episode_return{{{LEARNER}}}", "{{mode}} {{instance}}")],
)
RATE = Panel(
    "Agent steps a second",
    "Decisions of single agents that reach the learner. Flat although servers were added: look at "
    "what the learner thread does.",
    [(f"murmur:agent_steps:rate1m{{{LEARNER}}}", "{{instance}}")],
    "ops",
)
SESSIONS = Panel(
    "Sessions",
    "Streams of environment servers: servers * workers * sessions_per_worker. Fewer than "
    "expected: see the servers' logs. Always all blocked: the update is the bottleneck.",
    [
        (f"sum by (mode) (murmur_learner_sessions{{{LEARNER}}})", "{{mode}}"),
        (f"sum(murmur_learner_parked_sessions{{{LEARNER}}})", "blocked"),
    ],
)

_GRAPHS = {
    "graph_replays": "replayed",
    "eager_calls": "eager",
    "graph_fallbacks": "not captured",
}
_WORK = 'thread="learner", state=~"sample|forward|backward|optimize|synchronize|publish"'
RANKS = (
    Panel(
        "Environments by learner",
        "Of learners that share a run: they should differ by less than those of one session. "
        "Uneven for long: let the number of sessions be a multiple of the learners'.",
        [(f"murmur_learner_environments{{{LEARNER}}}", "{{instance}} {{rank}}")],
        width=8,
    ),
    Panel(
        "Waiting, by learner",
        "wait_rows: for environments; add servers. wait_ranks: exchange with the other learners of "
        "the run, and waiting for them. Who waits least for the others is who they wait for.",
        [
            (
                "sum by (instance, rank, state) ("
                + _rate(
                    "murmur_learner_state_seconds_total",
                    f'{LEARNER}, state=~"wait_rows|wait_ranks"',
                )
                + ")",
                "{{instance}} {{rank}} {{state}}",
            )
        ],
        "percentunit",
        width=8,
        top=1,
    ),
    Panel(
        "Work of an update, by learner",
        "Seconds of work in an update, without waiting. One learner far above the others: its "
        "device is slower, hotter or shared. Empty with pipeline=sync.",
        [
            (
                "sum by (instance, rank) ("
                + _rate("murmur_learner_state_seconds_total", f"{LEARNER}, {_WORK}")
                + ") / sum by (instance, rank) ("
                + _rate("murmur_learner_updates_total")
                + ")",
                "{{instance}} {{rank}}",
            )
        ],
        "s",
        width=8,
    ),
)
GPU_PANELS = (
    Panel(
        "CUDA graphs",
        "Calls a second that ran as one graph, and eagerly, kernel by kernel. Much eager on a "
        "GPU: a graph could not be captured, the learner's log says why. All eager on a CPU.",
        [
            (
                f"sum by (graph) ({_rate(f'murmur_learner_{name}_total')}) or vector(0)",
                f"{{{{graph}}}} {word}",
            )
            for name, word in _GRAPHS.items()
        ],
        "ops",
    ),
    Panel(
        "GPU: busy and used",
        "Busy: between the first and the last kernel of each piece of work, by CUDA events. "
        "Kernels: NVML's share of time in which any kernel ran. Kernels far below busy: the GPU "
        "waits for launches; CUDA graphs, larger batches. Memory: share of time in which its "
        "memory was read or written.",
        [
            (f"murmur_learner_device_busy_ratio{{{LEARNER}}}", "busy {{instance}}"),
            (f"murmur_learner_gpu_utilization_ratio{{{LEARNER}}}", "kernels {{instance}}"),
            (f"murmur_learner_gpu_memory_utilization_ratio{{{LEARNER}}}", "memory {{instance}}"),
        ],
        "percentunit",
        top=1,
    ),
    Panel(
        "GPU clocks",
        "Clocks of multiprocessors (sm) and memory, of their highest. sm low under load: see what "
        "throttles it. Empty without a GPU.",
        [
            (
                f"murmur_learner_gpu_clock_hertz{{{LEARNER}}} "
                f"/ murmur_learner_gpu_clock_max_hertz{{{LEARNER}}}",
                "{{clock}} {{instance}}",
            )
        ],
        "percentunit",
        top=1,
    ),
    Panel(
        "GPU throttled",
        "Share of the last 5 minutes in which a limit kept the clocks down. power_cap is normal "
        "under full load; thermal: cooling; hardware_slowdown, power_brake: the machine's power "
        "supply or cooling. Empty without a GPU.",
        [
            (
                f"avg_over_time(murmur_learner_gpu_throttled{{{LEARNER}}}[5m])",
                "{{reason}} {{instance}}",
            )
        ],
        "percentunit",
        warn=0.5,
        top=1,
    ),
    Panel(
        "GPU power",
        "Drawn, and the limit. Far below the limit: the GPU does little. Empty without a GPU.",
        [
            (f"murmur_learner_gpu_power_watts{{{LEARNER}}}", "drawn {{instance}}"),
            (f"murmur_learner_gpu_power_limit_watts{{{LEARNER}}}", "limit {{instance}}"),
        ],
        "watt",
    ),
    Panel(
        "GPU memory in use",
        "By all processes. Above 95 %: the next larger batch may not fit. Empty without a GPU.",
        [(f"murmur:gpu_memory:ratio{{{LEARNER}}}", "{{instance}}")],
        "percentunit",
        warn=0.85,
        bad=0.95,
        top=1,
    ),
    Panel(
        "GPU temperature",
        "Above 80 °C it slows itself down: cooling. Empty without a GPU.",
        [(f"murmur_learner_gpu_temperature_celsius{{{LEARNER}}}", "{{instance}}")],
        "celsius",
        warn=80,
    ),
    Panel(
        "PCIe",
        "NVML: all traffic of the GPU over PCIe, in the 20 ms before each look. Empty without a "
        "GPU, and where it is not supported.",
        [(f"murmur_learner_gpu_pcie_bytes_per_second{{{LEARNER}}}", "{{direction}} {{instance}}")],
        "Bps",
    ),
    Panel(
        "Devices",
        "What each learner runs on: name, driver, CUDA version of torch, precision.",
        [
            (
                "count by (name, driver, cuda, precision) "
                f"(murmur_learner_device_info{{{LEARNER}}})",
                "{{name}}, driver {{driver}}, CUDA {{cuda}}, {{precision}}",
            )
        ],
        kind="stat",
    ),
)

BOARDS = (
    Board(
        "murmur-overview",
        "Overview",
        "Is it learning, how fast, and what is it waiting for?",
        [
            (
                "Now",
                [
                    Panel(
                        "Waits for rows",
                        "Share of the learner's time. High: more environment servers.",
                        [(f"avg(murmur:learner_starved:ratio{{{LEARNER}}})", "")],
                        "percentunit",
                        "stat",
                        4,
                        warn=0.3,
                        bad=0.5,
                    ),
                    Panel(
                        "Rows it could use",
                        "How many times as many rows as it gets the learner could learn from: "
                        "multiply the environment servers by this to keep it busy.",
                        [(f"avg(murmur:row_demand:ratio{{{LEARNER}}})", "")],
                        "suffix:×",
                        "stat",
                        4,
                        warn=1.5,
                        bad=2,
                    ),
                    Panel(
                        "Device busy",
                        "Share of the last seconds in which it acted or learned. Low: see what the "
                        "learner thread waits for.",
                        [(f"avg(murmur_learner_device_busy_ratio{{{LEARNER}}})", "")],
                        "percentunit",
                        "stat",
                        4,
                        warn=0.7,
                        bad=0.4,
                    ),
                    Panel(
                        "Agent steps a second",
                        "Over all selected learners.",
                        [(f"sum(murmur:agent_steps:rate1m{{{LEARNER}}})", "")],
                        "ops",
                        "stat",
                        4,
                    ),
                    Panel(
                        "Training sessions",
                        "None: environment servers cannot reach the learner or it refuses them.",
                        [(f'sum(murmur_learner_sessions{{{LEARNER}, mode="train"}})', "")],
                        "short",
                        "stat",
                        4,
                        warn=1,
                        bad=0.5,
                    ),
                    Panel(
                        "Alerts firing",
                        "Listed in Prometheus under Alerts; remedies: docs/reference/alerts.md.",
                        [
                            (
                                'count(ALERTS{alertstate="firing", alertname=~"Murmur.*"}) '
                                "or vector(0)",
                                "",
                            )
                        ],
                        "short",
                        "stat",
                        4,
                        warn=1,
                        bad=2,
                    ),
                ],
            ),
            ("Where the time goes", [LEARNER_TIME, INFERENCE_TIME, SERVER_TIME]),
            ("Progress", [RATE, RETURN]),
        ],
    ),
    Board(
        "murmur-queues",
        "Queues and batching",
        "From a request's arrival to its answer.",
        [
            (
                "Latency",
                [
                    Panel(
                        "Wait in the batcher",
                        "From a request's arrival to its batch. High: inference or the update is "
                        "in the way; see pipeline and precision.",
                        _quantiles("murmur_learner_queue_wait_seconds"),
                        "s",
                    ),
                    Panel(
                        "Inference",
                        "Store, act and answer, per batch. High: a smaller network, a faster "
                        "device or lower precision.",
                        _quantiles("murmur_learner_inference_seconds"),
                        "s",
                        warn=0.1,
                    ),
                    Panel(
                        "From a request to its actions, during updates",
                        "Queue and inference. Above learner.batcher.latency_target_ms while the "
                        "panel beside it is not: updates hold processors or interpreter.",
                        _quantiles("murmur_learner_acting_seconds", ', phase="update"'),
                        "s",
                    ),
                    Panel(
                        "From a request to its actions, between updates",
                        "Above learner.batcher.latency_target_ms: acting is slow, or requests "
                        "queue.",
                        _quantiles("murmur_learner_acting_seconds", ', phase="idle"'),
                        "s",
                    ),
                    Panel(
                        "Longest wait for a larger batch",
                        "As tuned to learner.batcher.latency_target_ms; empty without one. 0: "
                        "there is no room to wait, or acting is idle enough.",
                        [
                            (
                                f"murmur_learner_batch_wait_seconds{{{LEARNER}}}",
                                "{{phase}} {{instance}}",
                            )
                        ],
                        "s",
                    ),
                    Panel(
                        "Environments a batch waits for",
                        "As tuned to learner.batcher.latency_target_ms; empty without one.",
                        [
                            (
                                f"murmur_learner_batch_preferred_envs{{{LEARNER}}}",
                                "{{phase}} {{instance}}",
                            )
                        ],
                    ),
                ],
            ),
            (
                "Batches",
                [
                    Panel(
                        "Environments in a batch",
                        "Small: raise envs_per_worker, or set preferred_batch_envs.",
                        [
                            (_mean("murmur_learner_batch_envs"), "mean"),
                            *_quantiles("murmur_learner_batch_envs"),
                        ],
                    ),
                    Panel(
                        "Batches a second",
                        "One forward pass each.",
                        [(f"sum({_rate('murmur_learner_batch_envs_count')})", "batches")],
                        "ops",
                    ),
                    Panel(
                        "Pending requests",
                        "Always high: inference is the bottleneck.",
                        [(f"murmur_learner_queue_depth{{{LEARNER}}}", "{{instance}}")],
                    ),
                    SESSIONS,
                ],
            ),
            ("Learners of one run", RANKS),
            (
                "Wire",
                [
                    Panel(
                        "Observation messages a second",
                        "A message costs about the same whatever its size.",
                        [(f"sum by (mode) ({_rate('murmur_learner_requests_total')})", "{{mode}}")],
                        "ops",
                    ),
                    Panel(
                        "Bytes received",
                        "Near the network's limit: observe in uint8 or float16.",
                        [(f"sum({_rate('murmur_learner_received_bytes_total')})", "received")],
                        "Bps",
                    ),
                    Panel(
                        "From an answer to the next request",
                        "Environment, packing and wire, as the learner sees them. High: faster "
                        "environments, or more environment servers.",
                        _quantiles("murmur_learner_environment_seconds"),
                        "s",
                    ),
                    Panel(
                        "Refused and rejected",
                        "Sessions refused and observations that broke the contract; the "
                        "learner's log names each.",
                        [
                            (
                                "sum by (reason) (increase("
                                f"murmur_learner_sessions_refused_total{{{LEARNER}}}{_RATE})) "
                                "or vector(0)",
                                "refused {{reason}}",
                            ),
                            (
                                "sum by (reason) (increase("
                                f"murmur_learner_rejected_total{{{LEARNER}}}{_RATE})) "
                                "or vector(0)",
                                "rejected {{reason}}",
                            ),
                        ],
                        warn=1,
                    ),
                ],
            ),
        ],
    ),
    Board(
        "murmur-learning",
        "Learning",
        "Returns, losses, lag, and the environment's own results.",
        [
            (
                "Results",
                [
                    RETURN,
                    Panel(
                        "The environment's results",
                        "Means over recent episodes; docs/terrain.md, formation.md and snakes.md "
                        "say what each means.",
                        [
                            (
                                f'murmur_learner_episode_metric{{{LEARNER}, name=~"$metric"}}',
                                "{{name}} {{mode}}",
                            )
                        ],
                    ),
                ],
            ),
            (
                "Updates",
                [
                    Panel(
                        "Losses",
                        "Of the last update. What each is: docs/algorithms.md.",
                        [
                            (
                                f'murmur_learner_loss{{{LEARNER}, name=~".*loss.*"}}',
                                "{{name}} {{instance}}",
                            )
                        ],
                    ),
                    Panel(
                        "Other scalars of the update",
                        "Gradient norms of 0 under fp16: steps are skipped. Explained variance "
                        "near 0: the critic knows nothing yet.",
                        [
                            (
                                f'murmur_learner_loss{{{LEARNER}, name!~".*loss.*"}}',
                                "{{name}} {{instance}}",
                            )
                        ],
                    ),
                    Panel(
                        "Updates a second",
                        "Improvements of the policy.",
                        [(_rate("murmur_learner_updates_total"), "{{instance}}")],
                        "ops",
                    ),
                    Panel(
                        "Time of an update",
                        "High: fewer data_passes, lower precision, a faster device.",
                        _quantiles("murmur_learner_update_seconds"),
                        "s",
                    ),
                ],
            ),
            (
                "Rows",
                [
                    Panel(
                        "Policy lag",
                        "Updates between acting on a row and learning from it, mean. Above "
                        "max_policy_lag rows are dropped.",
                        [(f"murmur:policy_lag:mean{{{LEARNER}}}", "{{instance}}")],
                        warn=2,
                    ),
                    Panel(
                        "Rows received, trained, dropped",
                        "Dropped for lag: match batch_size * batch_number to the number of "
                        "environments. For session: environment servers die.",
                        [
                            (f"sum({_rate('murmur_learner_rows_received_total')})", "received"),
                            (f"sum({_rate('murmur_learner_rows_trained_total')})", "trained"),
                            (
                                "sum by (reason) ("
                                f"{_rate('murmur_learner_rows_dropped_total')}) or vector(0)",
                                "dropped {{reason}}",
                            ),
                        ],
                        "ops",
                    ),
                    Panel(
                        "Rows that wait for an update",
                        "In full unrolls.",
                        [(f"murmur_learner_rows_stored{{{LEARNER}}}", "{{instance}}")],
                    ),
                    Panel(
                        "Episodes a second",
                        "None: episodes are long, or no session plays.",
                        [(f"sum by (mode) ({_rate('murmur_learner_episodes_total')})", "{{mode}}")],
                        "ops",
                    ),
                ],
            ),
        ],
    ),
    Board(
        "murmur-env-servers",
        "Environment servers",
        "Each server's rate, time and trouble.",
        [
            (
                "Work",
                [
                    Panel(
                        "Environment steps a second",
                        "One server far below the others: its machine is busy or its network slow.",
                        [
                            (
                                f"sum by (instance) ({_rate('murmur_env_steps_total', SERVER)})",
                                "{{instance}}",
                            )
                        ],
                        "ops",
                    ),
                    replace(SERVER_TIME, width=12),
                    Panel(
                        "Time stepping, by server",
                        "Near 100 %: this server's cores are the limit.",
                        [
                            (
                                f'murmur:env_state:ratio{{{SERVER}, state="step"}}',
                                "{{instance}}",
                            )
                        ],
                        "percentunit",
                        top=1,
                    ),
                    Panel(
                        "Cores used",
                        "CPU seconds a second. Near the container's limit: raise it. High while "
                        "mostly waiting: messages are many and small.",
                        [(_rate("murmur_env_cpu_seconds_total", SERVER), "{{instance}}")],
                    ),
                ],
            ),
            (
                "Wire",
                [
                    Panel(
                        "Messages a second",
                        "Many and small: raise envs_per_worker.",
                        [
                            (
                                "sum by (direction) ("
                                f"{_rate('murmur_env_messages_total', SERVER)})",
                                "{{direction}}",
                            )
                        ],
                        "ops",
                    ),
                    Panel(
                        "Bytes a second",
                        "Near the network's limit: observe in uint8 or float16.",
                        [
                            (
                                f"sum by (direction) ({_rate('murmur_env_bytes_total', SERVER)})",
                                "{{direction}}",
                            )
                        ],
                        "Bps",
                    ),
                ],
            ),
            (
                "Trouble",
                [
                    Panel(
                        "Sessions",
                        "Below num_workers * sessions_per_worker: the learner is away or full.",
                        [(f"murmur_env_sessions{{{SERVER}}}", "{{instance}}")],
                    ),
                    Panel(
                        "Reconnects",
                        "Streams that broke or were refused; the worker's log and the learner's "
                        "say why.",
                        [
                            (
                                f"increase(murmur_env_reconnects_total{{{SERVER}}}{_RATE})",
                                "{{instance}}",
                            )
                        ],
                        warn=1,
                    ),
                    Panel(
                        "Worker restarts",
                        "The traceback is in the server's log; memory exhausted shows as signal 9.",
                        [
                            (
                                f"increase(murmur_env_worker_restarts_total{{{SERVER}}}{_RATE})",
                                "{{instance}}",
                            )
                        ],
                        warn=1,
                    ),
                    Panel(
                        "Episodes a second",
                        "One server without any: its environments hang.",
                        [
                            (
                                f"sum by (instance) ({_rate('murmur_env_episodes_total', SERVER)})",
                                "{{instance}}",
                            )
                        ],
                        "ops",
                    ),
                ],
            ),
        ],
    ),
    Board(
        "murmur-resources",
        "Resources",
        "Device, memory, processes, checkpoints.",
        [
            (
                "Device",
                [
                    Panel(
                        "Busy",
                        "Share of time in which the device worked for murmur: any, and by kind; "
                        "kinds may overlap. Low: see the ledger on the overview.",
                        [
                            (_rate("murmur_learner_device_busy_seconds_total"), "any {{instance}}"),
                            (
                                _rate("murmur_learner_device_work_seconds_total"),
                                "{{kind}} {{instance}}",
                            ),
                        ],
                        "percentunit",
                        top=1,
                    ),
                    Panel(
                        "Memory of the learner",
                        "On the device: torch's on CUDA, the process's on a CPU. Near the limit: "
                        "fewer environments or smaller batches.",
                        [
                            (
                                f"murmur_learner_device_memory_bytes{{{LEARNER}}}",
                                "device {{instance}}",
                            ),
                            (
                                f"process_resident_memory_bytes{{{LEARNER}}}",
                                "process {{instance}}",
                            ),
                        ],
                        "bytes",
                    ),
                    Panel(
                        "Copied between host and device",
                        "By acting and evaluations: observations in, actions out. Near the bus's "
                        "limit: observe in uint8 or float16.",
                        [
                            (
                                "sum by (direction) ("
                                f"{_rate('murmur_learner_device_copied_bytes_total')})",
                                "{{direction}}",
                            )
                        ],
                        "Bps",
                    ),
                ],
            ),
            ("GPU", GPU_PANELS),
            (
                "Processes",
                [
                    Panel(
                        "Cores used by the learner",
                        "CPU seconds a second: the wire, inference and, without a GPU, learning.",
                        [(_rate("process_cpu_seconds_total"), "{{instance}}")],
                    ),
                    Panel(
                        "Cores used by environment servers",
                        "Near what they may use: raise the limit or add servers elsewhere.",
                        [(f"sum({_rate('murmur_env_cpu_seconds_total', SERVER)})", "all servers")],
                    ),
                    Panel(
                        "Age of the last checkpoint",
                        "What a crash would lose. High: lower checkpoint_every_updates.",
                        [(f"murmur_learner_checkpoint_age_seconds{{{LEARNER}}}", "{{instance}}")],
                        "s",
                        warn=1800,
                    ),
                    Panel(
                        "Scrapes that succeed",
                        "1: up. 0: the service does not answer Prometheus.",
                        [('up{job=~".*(learner|env)"}', "{{job}} {{instance}}")],
                        top=1,
                    ),
                ],
            ),
        ],
    ),
)


def _thresholds(panel: Panel) -> dashboards.ThresholdsConfig:
    """Green, yellow, red in the order of the values."""
    steps = [(None, "green"), (panel.warn, "yellow"), (panel.bad, "red")]
    if panel.warn is not None and panel.bad is not None and panel.bad < panel.warn:
        steps = [(None, "red"), (panel.bad, "yellow"), (panel.warn, "green")]
    return (
        dashboards.ThresholdsConfig()
        .mode(dashboard.ThresholdsMode.ABSOLUTE)
        .steps(
            [
                dashboard.Threshold(value=value, color=color)
                for i, (value, color) in enumerate(steps)
                if i == 0 or value is not None
            ]
        )
    )


def _panel(panel: Panel) -> stat.Panel | timeseries.Panel:
    built: stat.Panel | timeseries.Panel
    if panel.kind == "stat":
        built = stat.Panel().height(4)
    else:
        built = (
            timeseries.Panel()
            .height(8)
            .legend(
                common_builders.VizLegendOptions()
                .display_mode(common.LegendDisplayMode.LIST)
                .placement(common.LegendPlacement.BOTTOM)
                .show_legend(True)
            )
            .tooltip(
                common_builders.VizTooltipOptions()
                .mode(common.TooltipDisplayMode.MULTI)
                .sort(common.SortOrder.DESCENDING)
            )
        )
        if panel.warn is not None:
            built.thresholds_style(
                common_builders.GraphThresholdsStyleConfig().mode(
                    common.GraphThresholdsStyleMode.DASHED
                )
            )
        if panel.kind == "stack":
            built.fill_opacity(60).line_width(0).stacking(
                common_builders.StackingConfig().mode(common.StackingMode.NORMAL).group("A")
            )
    built.title(panel.title).description(panel.description).unit(panel.unit)
    built.datasource(_SOURCE).span(panel.width).thresholds(_thresholds(panel))
    if panel.unit != "short" or panel.kind != "lines":
        built.min(0)
    if panel.top is not None:
        built.max(panel.top)
    for letter, (expression, legend) in zip("ABCDEF", panel.queries, strict=False):
        built.with_target(
            prometheus.Dataquery()
            .datasource(_SOURCE)
            .expr(expression)
            .legend_format(legend or "__auto")
            .ref_id(letter)
        )
    return built


def _variable(name: str, label: str, query: str) -> dashboards.QueryVariable:
    """A variable whose values Prometheus knows; several or all can be chosen."""
    return (
        dashboards.QueryVariable(name)
        .label(label)
        .datasource(_SOURCE)
        .query(query)
        .refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(dashboard.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .current(dashboard.VariableOption(selected=True, text="All", value="$__all"))
    )


def build(board: Board) -> str:
    """The JSON of a dashboard."""
    built = (
        dashboards.Dashboard(f"murmur: {board.title}")
        .uid(board.uid)
        .description(board.description)
        .tags(["murmur"])
        .refresh("5s")
        .time("now-15m", "now")
        .timezone("browser")
        .tooltip(dashboard.DashboardCursorSync.CROSSHAIR)
        .editable()
        .link(
            dashboards.DashboardLink("murmur")
            .type(dashboard.DashboardLinkType.DASHBOARDS)
            .tags(["murmur"])
            .include_vars(True)
            .keep_time(True)
        )
        .with_variable(_variable("run", "run", "label_values(murmur_learner_info, run)"))
        .with_variable(
            _variable(
                "learner", "learner", 'label_values(murmur_learner_info{run=~"$run"}, instance)'
            )
        )
        .with_variable(
            _variable(
                "server",
                "environment server",
                'label_values(murmur_env_info{run=~"$run"}, instance)',
            )
        )
    )
    if board.uid == "murmur-learning":
        built.with_variable(
            _variable(
                "metric",
                "result",
                f"label_values(murmur_learner_episode_metric{{{LEARNER}}}, name)",
            )
        )
    number = 0
    for title, panels in board.rows:
        number += 1
        built.with_row(dashboards.Row(title).id(number))
        for panel in panels:
            number += 1
            built.with_panel(_panel(panel).id(number))
    return JSONEncoder(sort_keys=True, indent=1).encode(built.build()) + "\n"


def files() -> dict[Path, str]:
    """Every file and its contents."""
    return {FOLDER / f"{b.uid.removeprefix('murmur-')}.json": build(b) for b in BOARDS}


def panels(text: str) -> list[dict[str, Any]]:
    """The panels of a dashboard's JSON, without its rows' headings."""
    found: list[dict[str, Any]] = []
    for panel in json.loads(text)["panels"]:
        found += [panel] if panel["type"] != "row" else panel.get("panels", [])
    return found


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text)
        print(f"written: {path.relative_to(FOLDER.parents[2])}")
