"""The learner's Prometheus metrics, as they are counted and read."""

import json
import threading
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client import Metric as Family
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from learner_service.telemetry.copied import Copied
from learner_service.telemetry.device_clock import DeviceClock
from learner_service.telemetry.gpu import Gpu
from learner_service.telemetry.metric_table import METRICS
from learner_service.telemetry.notices import NoticeLog
from learner_service.telemetry.persistent_counters import PersistentCounters
from shared.process.ledger import Ledger, ThreadClock


class Counted(Protocol):
    """Counts kept elsewhere: CUDA graphs (device.cuda_graph), trackers (ProgressLog)."""

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


class RankRegistry(CollectorRegistry):
    """The metrics of one of several learners: each sample is labelled with its rank."""

    def __init__(self, rank: int) -> None:
        """Label with this rank."""
        super().__init__()
        self._label = {"rank": str(rank)}

    def collect(self) -> Iterable[Family]:
        """All metrics."""
        for family in super().collect():
            family.samples = [
                sample._replace(labels={**sample.labels, **self._label})
                for sample in family.samples
            ]
            yield family


class LearnerMetrics:
    """All of METRICS, by name, in a registry of their own, and those of the process.

    Names are strings: a test compares those in the code with METRICS.

    With persistent counters, counts never go back, however often the process is started again.

    Attributes:
        clock: tells how long the device worked.
        gpu: source of the GPU's figures; None: there is no GPU.
        copied: bytes between host and device; counted by the inference thread.
        log: counts of data that trackers did not get; None: this process writes no log.
        notices: settings that sessions said they change, ignore or guess.
    """

    def __init__(self, kept: PersistentCounters | None = None, rank: int | None = None) -> None:
        """Register them.

        Args:
            kept: persistent counters of the run.
            rank: rank of one of several learners; all its metrics are labelled with it.
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
        """Sum the counts of CUDA graphs: metric -> labels -> sum over all threads."""
        sums: dict[str, dict[tuple[str, ...], float]] = {
            metric.name: {} for metric in METRICS if metric.observed and "graph" in metric.labels
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
    """Collector of figures read only when scraped: ledgers, the device's clock, NVML."""

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
