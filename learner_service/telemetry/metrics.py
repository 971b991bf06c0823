"""The learner's Prometheus metrics: every one with its meaning, in one table."""

import json
import threading
from collections.abc import Mapping
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from learner_service.telemetry.copied import Copied
from learner_service.telemetry.device_clock import DeviceClock
from learner_service.telemetry.gpu import Gpu
from learner_service.telemetry.gpu_metrics import GPU_METRICS
from learner_service.telemetry.graph_metrics import GRAPH_METRICS
from learner_service.telemetry.metric import Metric, RankRegistry
from learner_service.telemetry.notices import NoticeLog
from learner_service.telemetry.persistent_counters import PersistentCounters
from learner_service.telemetry.sample_metrics import SAMPLE_METRICS
from learner_service.telemetry.serving_metrics import SERVING_METRICS
from learner_service.telemetry.tracking_metrics import TRACKING_METRICS
from shared.ledger import Ledger, ThreadClock

_UPDATE_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_LAGS = (0, 1, 2, 3, 4, 8, 16)


METRICS = (
    Metric(
        "info",
        "gauge",
        "always 1: which run this is, and on which device it learns",
        labels=("run", "environment", "algorithm", "device"),
    ),
    *SERVING_METRICS,
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
    *GRAPH_METRICS,
    *SAMPLE_METRICS,
    *TRACKING_METRICS,
    Metric(
        "machine_busy_ratio",
        "gauge",
        "share of this machine's processors in use, by any program, over the last seconds",
        "near 1: environments and learner take each other's processors; more machines",
    ),
    Metric("device_memory_bytes", "gauge", "memory in use: torch's on CUDA, resident on CPU"),
    *GPU_METRICS,
)


class Counted(Protocol):
    """What is counted elsewhere: CUDA graphs (runtime.cuda_graph), trackers (ProgressLog)."""

    def counts(self) -> Mapping[str, Mapping[tuple[str, ...], float]]:
        """Metric -> labels -> count; may be called by any thread."""


class KeptCounter:
    """A counter that continues where the process before left it. Any thread may increment it."""

    def __init__(self, counter: Counter, kept: PersistentCounters, name: str) -> None:
        """Start from the persistent count, and keep the count there from now on."""
        self._counter = counter
        self._kept = kept
        self._slot = kept.slot(name)
        self._lock = threading.Lock()
        counter.inc(kept[self._slot])

    def inc(self, amount: float = 1) -> None:
        """Count."""
        with self._lock:
            self._kept[self._slot] += amount
        self._counter.inc(amount)


class LearnerMetrics:
    """All of METRICS, by name, in a registry of their own, and those of the process.

    Names are strings: a test compares those in the code with METRICS.

    With persistent counters, counts never go back, however often the process is started again.

    Attributes:
        clock: tells how long the device worked.
        gpu: where figures of the GPU come from; None: there is none.
        copied: bytes between host and device; counted by the inference thread.
        log: what trackers did not get; None: this process writes no log.
        notices: what sessions said that they change, ignore or guess.
    """

    def __init__(self, kept: PersistentCounters | None = None, rank: int | None = None) -> None:
        """Register them.

        Args:
            kept: where counts are kept.
            rank: of one of several learners: all its metrics are labelled with it.
        """
        self._kept = kept
        self._graphs: list[Counted] = []
        self.registry = CollectorRegistry() if rank is None else RankRegistry(rank)
        ProcessCollector(registry=self.registry)  # process_cpu_seconds_total and its like
        self._by_name: dict[str, Counter | Gauge | Histogram] = {}
        self._made: dict[tuple[object, ...], Counter | KeptCounter | Gauge | Histogram] = {}
        for m in METRICS:
            if m.observed:
                continue
            name = f"murmur_learner_{m.name}"
            if m.kind == "histogram":
                made: Counter | Gauge | Histogram = Histogram(
                    name, m.meaning, m.labels, registry=self.registry, buckets=m.buckets
                )
            else:
                kind = Counter if m.kind == "counter" else Gauge
                made = kind(name, m.meaning, m.labels, registry=self.registry)
            self._by_name[m.name] = made
        self.clock: DeviceClock | None = None
        self.gpu: Gpu | None = None
        self.copied = Copied()
        self.log: Counted | None = None
        self.notices = NoticeLog(lambda kind: self.counter("notices", kind=kind).inc())
        self._ledgers: list[Ledger | ThreadClock] = []
        self.registry.register(_Observed(self))
        for name in kept.items() if kept else ():
            metric, labels = json.loads(name)
            if metric in self._by_name:
                self._get(metric, labels)

    def total(self, metric: str) -> float:
        """A kept counter's sum over its labels, over all processes of the run."""
        assert self._kept is not None
        return sum(v for k, v in self._kept.items().items() if json.loads(k)[0] == metric)

    def keep(self, ledger: Ledger | ThreadClock) -> None:
        """Report a thread's ledger."""
        self._ledgers.append(ledger)

    def watch(self, graphs: Counted) -> None:
        """Report a thread's CUDA graphs."""
        self._graphs.append(graphs)

    def graph_calls(self) -> dict[str, dict[tuple[str, ...], float]]:
        """What is counted about CUDA graphs: metric -> labels -> sum over all threads."""
        sums: dict[str, dict[tuple[str, ...], float]] = {
            metric.name: {} for metric in GRAPH_METRICS if metric.observed
        }
        for graphs in self._graphs:
            for metric, counts in graphs.counts().items():
                for labels, count in counts.items():
                    sums[metric][labels] = sums[metric].get(labels, 0) + count
        return sums

    def ledgers(self) -> list[Ledger]:
        """Those of the threads that name their states."""
        return [ledger for ledger in self._ledgers if isinstance(ledger, Ledger)]

    def ledger_seconds(self) -> dict[str, dict[str, float]]:
        """Seconds by thread and state."""
        return {ledger.thread: ledger.seconds() for ledger in self._ledgers}

    def cpu_seconds(self) -> dict[str, float]:
        """Processor seconds by thread."""
        return {ledger.thread: ledger.cpu_seconds() for ledger in self._ledgers}

    def counter(self, metric: str, /, **labels: str) -> Counter | KeptCounter:
        """A counter, with its labels set."""
        return self._get(metric, labels)  # type: ignore[return-value]

    def gauge(self, metric: str, /, **labels: str) -> Gauge:
        """A gauge, with its labels set."""
        return self._get(metric, labels)  # type: ignore[return-value]

    def histogram(self, metric: str, /, **labels: str) -> Histogram:
        """A histogram, with its labels set."""
        return self._get(metric, labels)  # type: ignore[return-value]

    def sum_of(self, histogram: str) -> tuple[float, float]:
        """A histogram's sum and number of observations, or a counter's total, over its labels."""
        (family,) = self._by_name[histogram].collect()
        total = sum(s.value for s in family.samples if s.name.endswith(("_sum", "_total")))
        return total, sum(s.value for s in family.samples if s.name.endswith("_count"))

    def latencies(self) -> dict[str, dict[str, float]]:
        """Cumulative buckets: of "acting" by phase, "update" and "idle", and of "inference"."""
        found: dict[str, dict[str, float]] = {}
        for histogram in ("acting_seconds", "inference_seconds"):
            (family,) = self._by_name[histogram].collect()
            for s in family.samples:
                if s.name.endswith("_bucket"):
                    of = found.setdefault(s.labels.get("phase", "inference"), {})
                    of[s.labels["le"]] = s.value
        return found

    def _get(self, name: str, labels: dict[str, str]) -> Counter | KeptCounter | Gauge | Histogram:
        key = (name, *labels.items())
        made = self._made.get(key)
        if made is None:  # prometheus_client's own lookup takes 2 us, too much for every message
            metric = self._by_name[name]
            made = metric.labels(**labels) if labels else metric
            if self._kept is not None and isinstance(made, Counter):
                made = KeptCounter(made, self._kept, json.dumps([name, labels]))
            self._made[key] = made
        return made


class _Observed(Collector):
    """What is read only when scraped: ledgers, the device's clock, NVML."""

    def __init__(self, metrics: LearnerMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> list[Any]:
        """Counters and gauges, as far as there is something to read."""
        families: list[Any] = []
        spent = self._family("state_seconds")
        for thread, seconds in self._metrics.ledger_seconds().items():
            for state, value in seconds.items():
                spent.add_metric([thread, state], value)
        families.append(spent)
        log = self._metrics.log.counts() if self._metrics.log else {}
        for metric, counts in {**self._metrics.graph_calls(), **log}.items():
            calls = self._family(metric)
            for labels, count in counts.items():
                calls.add_metric(labels, count)
            families.append(calls)
        if self._metrics.clock is not None:
            busy, kinds = self._metrics.clock.seconds()
            total, work = self._family("device_busy_seconds"), self._family("device_work_seconds")
            total.add_metric([], busy)
            for kind, value in kinds.items():
                work.add_metric([kind], value)
            beside = self._family("device_beside_seconds")
            beside.add_metric([], self._metrics.clock.beside())
            families += [total, work, beside]
        copied = self._family("device_copied_bytes")
        copied.add_metric(["to_device"], self._metrics.copied.to_device)
        copied.add_metric(["to_host"], self._metrics.copied.to_host)
        return [*families, copied, *self._gpu_families()]

    def _gpu_families(self) -> list[Any]:
        """NVML's figures, a family for each metric."""
        gpu = self._metrics.gpu
        families: dict[str, Any] = {}
        for figure in [*gpu.read(), *gpu.read_pcie()] if gpu else ():
            family = families.get(figure.metric)
            if family is None:
                family = families[figure.metric] = self._family(figure.metric)
            family.add_metric(list(figure.labels), figure.value)
        return list(families.values())

    def _family(self, name: str) -> Any:  # noqa: ANN401 - a family of either kind
        m = next(m for m in METRICS if m.name == name)
        kind = CounterMetricFamily if m.kind == "counter" else GaugeMetricFamily
        return kind(f"murmur_learner_{name}", m.meaning, labels=m.labels)
