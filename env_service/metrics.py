"""The metrics of an environment server, and the counts of its workers.

A worker adds to plain numbers and reports them to Prometheus a few times a second: an increment of
a multi-process counter takes as long as several environment steps.
"""

import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

import psutil
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from murmur.shared.process.host_cpu import tree_cpu_seconds
from murmur.shared.process.ledger import cpu_wait_seconds


class Metric(NamedTuple):
    """One metric: its name, its meaning, the remedy for unusual values, and its labels."""

    name: str
    meaning: str
    remedy: str = ""
    labels: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """Return its kind, "counter" or "gauge"."""
        return "counter" if self.name.endswith("_total") else "gauge"


METRICS: list[Metric] = [
    Metric(
        "murmur_env_info",
        "always 1: which run this server works for",
        labels=("run", "environment", "mode"),
    ),
    Metric(
        "murmur_env_steps_total",
        "rows sent to the learner; all agents of one environment act in one",
        "too few: see murmur_env_seconds_total for where the time goes",
        ("mode",),
    ),
    Metric(
        "murmur_env_rows_unanswered_total",
        "rows sent whose answer never came, because the stream ended: at most those of one message "
        "each time; whether the learner has got them is for its rows_received to say",
        "rising: see murmur_env_reconnects_total",
    ),
    Metric(
        "murmur_env_episodes_total",
        "episodes that ended",
        "none: episodes are longer than expected, or the learner does not answer",
        ("mode",),
    ),
    Metric(
        "murmur_env_episodes_dropped_total",
        "episodes that never ended because their environment raised, returned what its spec "
        "forbids (contents), took too long for a step (hung), took its worker with it (died), or "
        "let it grow too large (memory)",
        "rising: each is a line in the log that names the environment, the episode's seed and the "
        "step, with which it can be played again",
        ("reason",),
    ),
    Metric(
        "murmur_env_messages_total",
        "messages sent and received",
        "many and small: raise envs_per_worker, a message costs the same whatever its size",
        ("direction",),
    ),
    Metric(
        "murmur_env_bytes_total",
        "bytes of those messages",
        "near the network's limit: observe in uint8 or float16",
        ("direction",),
    ),
    Metric(
        "murmur_env_seconds_total",
        "seconds of all workers, each always in one state: step (environment), pack and unpack "
        "(messages), wait (gRPC and the learner's answer)",
        "mostly wait: the learner is the bottleneck, workers may be too many; mostly step: the "
        "environment is, add workers",
        ("state",),
    ),
    Metric(
        "murmur_env_cpu_seconds_total",
        "CPU seconds of all workers; less step, pack and unpack it is the cost of gRPC",
        "high while mostly waiting: messages are many and small",
    ),
    Metric(
        "murmur_env_cpu_wait_seconds_total",
        "seconds that workers were ready to run and had no processor; Linux counts them",
        "grows: other programs, or too many workers, take the processors",
    ),
    Metric(
        "murmur_env_tree_cpu_seconds_total",
        "CPU seconds of the server, its workers and all processes that environments started",
        "beyond murmur_env_cpu_seconds_total: processes of the environments, such as simulators",
    ),
    Metric(
        "murmur_env_reconnects_total",
        "streams that broke or were refused, and attempts that found no learner",
        "rising: look for the reason in the worker's log and in the learner's",
    ),
    Metric(
        "murmur_env_sessions",
        "sessions that the learner has welcomed",
        "below num_workers * sessions_per_worker: the learner is away or full (max_sessions)",
    ),
    Metric(
        "murmur_env_sessions_moved_total",
        "sessions that went to another of several learners: to even out their environments "
        "(balance), or because theirs was not there for move_after_s (lost) or had no room (full)",
        "lost or full rising: look at that learner; balance rising all the time: sessions differ "
        "much in size, or servers come and go",
        ("reason",),
    ),
    Metric(
        "murmur_env_worker_restarts_total",
        "workers that died and were started again",
        "rising: the traceback is in the log; memory exhausted shows as signal 9",
    ),
]


def _find(name: str) -> Metric:
    return next(metric for metric in METRICS if metric.name == name)


def counter(name: str, registry: CollectorRegistry) -> Counter:
    """Register a counter of the table."""
    metric = _find(name)
    return Counter(name, metric.meaning, metric.labels, registry=registry)


def _gauge(name: str, registry: CollectorRegistry) -> Gauge:
    """Register a gauge of the table; the server reports the sum over its running workers."""
    metric = _find(name)
    return Gauge(
        name, metric.meaning, metric.labels, registry=registry, multiprocess_mode="livesum"
    )


def set_info(registry: CollectorRegistry, run: str, environment: str, mode: str) -> None:
    """Set `murmur_env_info` to this server's run. Called by the parent process."""
    _gauge("murmur_env_info", registry).labels(run, environment, mode).set(1)


class TreeCpu(Collector):
    """CPU seconds of the server's process and all below it, read when scraped."""

    def __init__(self) -> None:
        """Watch this process."""
        self._process, self._most = psutil.Process(), 0.0

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Yield the counter, which never falls: a process that is gone may leave no trace."""
        metric = _find("murmur_env_tree_cpu_seconds_total")
        self._most = max(self._most, tree_cpu_seconds(self._process))
        yield CounterMetricFamily(metric.name, metric.meaning, value=self._most)


REASONS = ("raised", "contents", "hung", "died", "memory")  # of murmur_env_episodes_dropped_total
MOVES = ("balance", "lost", "full")  # of murmur_env_sessions_moved_total


class WorkerMetrics:
    """Counts of one worker process. Used by the worker's one thread.

    Attributes:
        episodes, rows_unanswered, messages_sent, messages_received, bytes_sent, bytes_received,
        reconnects, sessions: plain counts; add to them, `flush` reports them.
        moved: plain counts of moved sessions by reason, one of MOVES.
    """

    STATES = ("step", "pack", "unpack", "wait")

    def __init__(self, mode: str, registry: CollectorRegistry) -> None:
        """Start counting, in state "wait".

        Args:
            mode: label of the sessions: "train", "evaluate" or "supply".
            registry: registry of the metrics.
        """
        self.episodes = self.rows_unanswered = 0
        self.messages_sent = self.messages_received = 0
        self.bytes_sent = self.bytes_received = 0
        self.reconnects = self.sessions = 0
        self._dropped = dict.fromkeys(REASONS, 0.0)
        self.moved = dict.fromkeys(MOVES, 0.0)
        self._seconds = dict.fromkeys(self.STATES, 0.0)
        self._state, self._since = "wait", time.monotonic()

        messages = counter("murmur_env_messages_total", registry)
        volume = counter("murmur_env_bytes_total", registry)
        self._steps = counter("murmur_env_steps_total", registry).labels(mode)
        self._counters = {
            "episodes": counter("murmur_env_episodes_total", registry).labels(mode),
            "rows_unanswered": counter("murmur_env_rows_unanswered_total", registry),
            "messages_sent": messages.labels("sent"),
            "messages_received": messages.labels("received"),
            "bytes_sent": volume.labels("sent"),
            "bytes_received": volume.labels("received"),
            "reconnects": counter("murmur_env_reconnects_total", registry),
        }
        self._by_label = [
            (self._seconds, counter("murmur_env_seconds_total", registry)),
            (self._dropped, counter("murmur_env_episodes_dropped_total", registry)),
            (self.moved, counter("murmur_env_sessions_moved_total", registry)),
        ]
        self._cpu = counter("murmur_env_cpu_seconds_total", registry)
        self._cpu_wait = counter("murmur_env_cpu_wait_seconds_total", registry)
        self._cpu_reported = self._cpu_wait_reported = 0.0
        self._sessions = _gauge("murmur_env_sessions", registry)

    def enter(self, state: str) -> None:
        """Count the worker's time as `state` from now on."""
        now = time.monotonic()
        self._seconds[self._state] += now - self._since
        self._state, self._since = state, now

    def count_rows(self, rows: int) -> None:
        """Count rows that are about to be sent, at once: also exact if the worker is killed.

        Takes 3 us, once per message.
        """
        self._steps.inc(rows)

    def drop_episodes(self, reason: str, episodes: int) -> None:
        """Count episodes that never ended; `reason` is one of REASONS."""
        self._dropped[reason] += episodes

    def flush(self) -> None:
        """Report everything counted since the last flush."""
        self.enter(self._state)
        for name, total in self._counters.items():
            total.inc(getattr(self, name))
            setattr(self, name, 0)
        for counts, total in self._by_label:
            for label, count in counts.items():
                total.labels(label).inc(count)
                counts[label] = 0.0
        cpu = time.process_time()
        self._cpu.inc(cpu - self._cpu_reported)
        self._cpu_reported = cpu
        waited = max(cpu_wait_seconds(threading.get_native_id()), self._cpu_wait_reported)
        self._cpu_wait.inc(waited - self._cpu_wait_reported)
        self._cpu_wait_reported = waited
        self._sessions.set(self.sessions)
