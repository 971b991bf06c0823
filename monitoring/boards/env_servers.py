"""The dashboard Environment servers: Each server's rate, time and trouble."""

from dataclasses import replace

from monitoring.boards.overview import SERVER_TIME
from monitoring.panel import (
    RATE_INTERVAL,
    SERVER,
    SERVER_NAME,
    Board,
    Panel,
    per_second,
    rate,
    server_gauge,
)

_NAME = f"server {SERVER_NAME}"
_WORK = [
    Panel(
        "Environment steps a second",
        "One server far below the others: its machine is busy or its network slow.",
        [(f"sum by (instance) ({rate('murmur_env_steps_total', SERVER)})", _NAME)],
        per_second("steps"),
    ),
    replace(SERVER_TIME, width=12),
    Panel(
        "Time stepping, by server",
        "Near 100 %: this server's cores are the limit.",
        [(f'murmur:env_state:ratio{{{SERVER}, state="step"}}', _NAME)],
        "percentunit",
    ),
    Panel(
        "Cores used",
        "CPU seconds a second. Near the container's limit: raise it. High while "
        "mostly waiting: messages are many and small.",
        [(rate("murmur_env_cpu_seconds_total", SERVER), _NAME)],
    ),
]
_WIRE = [
    Panel(
        "Messages a second",
        "Many and small: raise envs_per_worker.",
        [(f"sum by (direction) ({rate('murmur_env_messages_total', SERVER)})", "{{direction}}")],
        per_second("messages"),
    ),
    Panel(
        "Bytes a second",
        "Near the network's limit: observe in uint8 or float16.",
        [(f"sum by (direction) ({rate('murmur_env_bytes_total', SERVER)})", "{{direction}}")],
        "Bps",
    ),
]
_TROUBLE = [
    Panel(
        "Sessions",
        "Below num_workers * sessions_per_worker: the learner is away or full.",
        [server_gauge("murmur_env_sessions")],
    ),
    Panel(
        "Reconnects",
        "Streams that broke or were refused; the worker's log and the learner's say why.",
        [(f"increase(murmur_env_reconnects_total{{{SERVER}}}{RATE_INTERVAL})", _NAME)],
        warn=1,
    ),
    Panel(
        "Worker restarts",
        "The traceback is in the server's log; memory exhausted shows as signal 9.",
        [
            (
                f"increase(murmur_env_worker_restarts_total{{{SERVER}}}{RATE_INTERVAL})",
                _NAME,
            )
        ],
        warn=1,
    ),
    Panel(
        "Episodes a second",
        "One server without any: its environments hang.",
        [(f"sum by (instance) ({rate('murmur_env_episodes_total', SERVER)})", _NAME)],
        per_second("episodes"),
    ),
]
BOARD = Board(
    "murmur-env-servers",
    "Environment servers",
    "Each server's rate, time and trouble.",
    [("Work", _WORK), ("Wire", _WIRE), ("Trouble", _TROUBLE)],
)
