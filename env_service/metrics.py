"""The metrics of an environment server, and the counts of its workers.

A worker adds to plain numbers and reports them to Prometheus a few times a second: an increment of
a multi-process counter takes as long as several environment steps.
"""

import threading
import time
from collections.abc import Iterator

import psutil
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from murmur.shared.process.host_cpu import tree_cpu_seconds
from murmur.shared.process.ledger import cpu_wait_seconds
from murmur.shared.process.metric import Metric, counter, gauge

PREFIX = "murmur_env_"  # of the metrics' names
METRICS: tuple[Metric, ...] = (
    gauge(
        "info",
        "always 1: which run this server works for",
        labels=("run", "environment", "mode"),
    ),
    counter(
        "steps",
        "rows sent to the learner; all agents of one environment act in one",
        "too few: see murmur_env_seconds_total for where the time goes",
        ("mode",),
    ),
    counter(
        "rows_unanswered",
        "rows sent whose answer never came, because the stream ended: at most those of one message "
        "each time; whether the learner has got them is for its rows_received to say",
        "rising: see murmur_env_reconnects_total",
    ),
    counter(
        "episodes",
        "episodes that ended",
        "none: episodes are longer than expected, or the learner does not answer",
        ("mode",),
    ),
    counter(
        "episodes_dropped",
        "episodes that never ended because their environment raised, returned what its spec "
        "forbids (contents), took too long for a step (hung), took its worker with it (died), or "
        "let it grow too large (memory)",
        "rising: each is a line in the log that names the environment, the episode's seed and the "
        "step, with which it can be played again",
        ("reason",),
    ),
    counter(
        "messages",
        "messages sent and received",
        "many and small: raise envs_per_worker, a message costs the same whatever its size",
        ("direction",),
    ),
    counter(
        "bytes",
        "bytes of those messages",
        "near the network's limit: observe in uint8 or float16",
        ("direction",),
    ),
    counter(
        "seconds",
        "seconds of all workers, each always in one state: step (environment), pack and unpack "
        "(messages), wait (gRPC and the learner's answer)",
        "mostly wait: the learner is the bottleneck, workers may be too many; mostly step: the "
        "environment is, add workers",
        ("state",),
    ),
    counter(
        "cpu_seconds",
        "CPU seconds of all workers; less step, pack and unpack it is the cost of gRPC",
        "high while mostly waiting: messages are many and small",
    ),
    counter(
        "cpu_wait_seconds",
        "seconds that workers were ready to run and had no processor; Linux counts them",
        "grows: other programs, or too many workers, take the processors",
    ),
    counter(
        "tree_cpu_seconds",
        "CPU seconds of the server, its workers and all processes that environments started",
        "beyond murmur_env_cpu_seconds_total: processes of the environments, such as simulators",
    ),
    counter(
        "reconnects",
        "streams that broke or were refused, and attempts that found no learner",
        "rising: look for the reason in the worker's log and in the learner's",
    ),
    gauge(
        "sessions",
        "sessions that the learner has welcomed",
        "below num_workers * sessions_per_worker: the learner is away or full (max_sessions)",
    ),
    counter(
        "sessions_moved",
        "sessions that went to another of several learners: to even out their environments "
        "(balance), or because theirs was not there for move_after_s (lost) or had no room (full)",
        "lost or full rising: look at that learner; balance rising all the time: sessions differ "
        "much in size, or servers come and go",
        ("reason",),
    ),
    counter(
        "worker_restarts",
        "workers that died and were started again",
        "rising: the traceback is in the log; memory exhausted shows as signal 9",
    ),
)


def _find(name: str) -> Metric:
    return next(metric for metric in METRICS if metric.name == name)


def register_counter(name: str, registry: CollectorRegistry) -> Counter:
    """Register a counter of the table."""
    metric = _find(name)
    return Counter(PREFIX + name, metric.meaning, metric.labels, registry=registry)


def _register_gauge(name: str, registry: CollectorRegistry) -> Gauge:
    """Register a gauge of the table; the server reports the sum over its running workers."""
    row, name = _find(name), PREFIX + name
    return Gauge(name, row.meaning, row.labels, registry=registry, multiprocess_mode="livesum")


def set_info(registry: CollectorRegistry, run: str, environment: str, mode: str) -> None:
    """Set `murmur_env_info` to this server's run. Called by the parent process."""
    _register_gauge("info", registry).labels(run, environment, mode).set(1)


class TreeCpu(Collector):
    """CPU seconds of the server's process and all below it, read when scraped."""

    def __init__(self) -> None:
        """Watch this process."""
        self._process, self._most = psutil.Process(), 0.0

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Yield the counter, which never falls: a process that is gone may leave no trace."""
        metric = _find("tree_cpu_seconds")
        self._most = max(self._most, tree_cpu_seconds(self._process))
        yield CounterMetricFamily(PREFIX + metric.name, metric.meaning, value=self._most)


REASONS = ("raised", "contents", "hung", "died", "memory")  # of murmur_env_episodes_dropped_total
MOVES = ("balance", "lost", "full")  # of murmur_env_sessions_moved_total
_WAYS = ("sent", "received")


class WorkerMetrics:
    """Counts of one worker process. Used by the worker's one thread.

    Attributes:
        counts: counts that `flush` will report, by "counter" or "counter/label"; add to them.
        sessions: number of sessions that a learner has welcomed.
    """

    STATES = ("step", "pack", "unpack", "wait")

    def __init__(self, mode: str, registry: CollectorRegistry) -> None:
        """Start counting, in state "wait".

        Args:
            mode: label of the sessions: "train", "evaluate" or "supply".
            registry: registry of the metrics.
        """
        self._totals = {
            name: register_counter(name, registry)
            for name in ("rows_unanswered", "reconnects", "cpu_seconds", "cpu_wait_seconds")
        }
        self._totals["episodes"] = register_counter("episodes", registry).labels(mode)
        for name, labels in (
            ("messages", _WAYS),
            ("bytes", _WAYS),
            ("seconds", self.STATES),
            ("episodes_dropped", REASONS),
            ("sessions_moved", MOVES),
        ):
            total = register_counter(name, registry)
            self._totals |= {f"{name}/{label}": total.labels(label) for label in labels}
        self.counts = dict.fromkeys(self._totals, 0.0)
        self._steps = register_counter("steps", registry).labels(mode)
        self.sessions, self._sessions = 0, _register_gauge("sessions", registry)
        self._seconds = dict.fromkeys(self.STATES, 0.0)  # a quicker look-up than in `counts`
        self._state, self._since = "wait", time.monotonic()
        self._cpu = self._cpu_wait = 0.0  # seconds counted so far

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
        self.counts[f"episodes_dropped/{reason}"] += episodes

    def flush(self) -> None:
        """Report everything counted since the last flush."""
        self.enter(self._state)
        for state, seconds in self._seconds.items():
            self.counts[f"seconds/{state}"] = seconds
            self._seconds[state] = 0.0
        cpu = time.process_time()
        waited = max(cpu_wait_seconds(threading.get_native_id()), self._cpu_wait)
        self.counts["cpu_seconds"] += cpu - self._cpu
        self.counts["cpu_wait_seconds"] += waited - self._cpu_wait
        self._cpu, self._cpu_wait = cpu, waited
        for key, total in self._totals.items():
            total.inc(self.counts[key])
            self.counts[key] = 0.0
        self._sessions.set(self.sessions)
