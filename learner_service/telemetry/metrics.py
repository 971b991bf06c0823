"""The learner's Prometheus metrics, as they are counted and read, and its notices."""

import json
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client import Metric as Family
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from murmur.learner_service.telemetry.device_clock import DeviceClock
from murmur.learner_service.telemetry.gpu import Gpu
from murmur.learner_service.telemetry.metric_table import KEPT, OBSERVED
from murmur.learner_service.telemetry.persistent_counters import PersistentCounters
from murmur.shared.config.cores import available_cores
from murmur.shared.process.host_cpu import machine_busy_seconds
from murmur.shared.process.ledger import Ledger, ThreadClock
from murmur.shared.process.process import logger
from murmur.shared.wire.notices import FILE, Notice, Notices, notice_line, read_notices

_MOST_KINDS = 32  # of notices that the metric tells apart
_OTHER = "other"


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


class WeightedHistogram(Histogram):
    """A histogram that takes many equal values at once."""

    def observe_many(self, counts: Mapping[int, int]) -> None:
        """Observe values, value -> how often it was seen: a few of thousands of unrolls."""
        for value, times in counts.items():
            self._sum.inc(value * times)
            self._buckets[bisect_left(self._upper_bounds, value)].inc(times)


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


class NoticeLog(Notices):
    """Collect the notices that sessions and the learner give. Any thread may call it."""

    most = 256  # of a run

    def __init__(self, count: Callable[[str], None]) -> None:
        """Keep nothing on disk until `keep_in`.

        Args:
            count: adds 1 to the metric `notices` of a kind.
        """
        super().__init__()
        self._count = count
        self._file: Path | None = None
        self._kinds: set[str] = set()
        self._lock = threading.Lock()

    def keep_in(self, run_dir: Path) -> None:
        """Write further notices to the run's file; those in it count as said."""
        with self._lock:
            self._file = run_dir / FILE
            self._said |= {(known.kind, known.subject): known for known in read_notices(self._file)}

    def said(self, kind: str, subject: str) -> bool:
        """Return whether the run was given this notice, by this process or one before it."""
        with self._lock:
            return super().said(kind, subject)

    def add(self, notices: Iterable[Notice]) -> None:
        """Log, count and keep those whose kind and subject are new."""
        with self._lock:
            for notice in notices:
                self.say(notice.kind, notice.subject, notice.text)
            for notice in self.take():
                if len(self._kinds) < _MOST_KINDS:
                    self._kinds.add(notice.kind)
                self._count(notice.kind if notice.kind in self._kinds else _OTHER)
                self._keep(notice)

    def _keep(self, notice: Notice) -> None:
        if self._file is None:
            return
        try:
            with self._file.open("a") as file:
                file.write(notice_line(notice))
        except OSError as error:
            logger.error("cannot write %s: %s; training continues", self._file, error.strerror)


class LearnerMetrics(Collector):
    """All metrics of the table, by name, in a registry of their own, and those of the process.

    Names are strings: a test compares those in the code with the table.

    With persistent counters, counts never go back, however often the process is started again.

    Attributes:
        clock: tells how long the device worked.
        gpu: source of the GPU's figures; None: there is no GPU.
        copied: bytes that acting and evaluations copy between host and device: observations
            and rewards "to_device", actions "to_host"; counted by the inference thread.
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
        self._by_name: dict[str, Counter | Gauge | WeightedHistogram] = {}
        self._made: dict[tuple[object, ...], Counter | KeptCounter | Gauge | WeightedHistogram] = {}
        for m in KEPT:
            name = f"murmur_learner_{m.name}"
            if m.kind == "histogram":
                made: Counter | Gauge | WeightedHistogram = WeightedHistogram(
                    name, m.meaning, m.labels, registry=self.registry, buckets=m.buckets
                )
            else:
                kind = Counter if m.kind == "counter" else Gauge
                made = kind(name, m.meaning, m.labels, registry=self.registry)
            self._by_name[m.name] = made
        self.clock: DeviceClock | None = None
        self.gpu: Gpu | None = None
        self.copied = {"to_device": 0, "to_host": 0}
        self.log: Counted | None = None
        self.notices = NoticeLog(lambda kind: self.counter("notices", kind=kind).inc())
        self._ledgers: list[Ledger] = []
        self.registry.register(self)
        for name in kept.items() if kept else ():
            metric, labels = json.loads(name)
            if metric in self._by_name:
                self._get(metric, labels)

    def total(self, metric: str) -> float:
        """A kept counter's sum over its labels, over all processes of the run."""
        assert self._kept is not None
        return sum(v for k, v in self._kept.items().items() if json.loads(k)[0] == metric)

    def keep(self, ledger: Ledger) -> None:
        """Report a thread's ledger."""
        self._ledgers.append(ledger)

    def watch(self, graphs: Counted) -> None:
        """Report a thread's CUDA graphs."""
        self._graphs.append(graphs)

    def graph_calls(self) -> dict[str, dict[tuple[str, ...], float]]:
        """Sum the counts of CUDA graphs: metric -> labels -> sum over all threads."""
        sums: dict[str, dict[tuple[str, ...], float]] = {
            metric.name: {} for metric in OBSERVED if "graph" in metric.labels
        }
        for graphs in self._graphs:
            for metric, counts in graphs.counts().items():
                for labels, count in counts.items():
                    sums[metric][labels] = sums[metric].get(labels, 0) + count
        return sums

    def ledgers(self) -> list[Ledger]:
        """Those of the threads that name their states."""
        return [ledger for ledger in self._ledgers if not isinstance(ledger, ThreadClock)]

    def ledger_seconds(self) -> dict[str, dict[str, float]]:
        """Seconds by thread and state."""
        return {ledger.thread: ledger.seconds() for ledger in self._ledgers}

    def cpu_seconds(self) -> dict[str, float]:
        """Processor seconds by thread."""
        return {ledger.thread: ledger.cpu_seconds() for ledger in self._ledgers}

    def cpu_wait_seconds(self) -> dict[str, float]:
        """Seconds that each thread waited for a processor."""
        return {ledger.thread: ledger.cpu_wait_seconds() for ledger in self._ledgers}

    def counter(self, metric: str, /, **labels: str) -> Counter | KeptCounter:
        """A counter, with its labels set."""
        return self._get(metric, labels)  # type: ignore[return-value]

    def gauge(self, metric: str, /, **labels: str) -> Gauge:
        """A gauge, with its labels set."""
        return self._get(metric, labels)  # type: ignore[return-value]

    def histogram(self, metric: str, /, **labels: str) -> WeightedHistogram:
        """A histogram, with its labels set."""
        return self._get(metric, labels)  # type: ignore[return-value]

    def sum_of(self, metric: str) -> tuple[float, float]:
        """A histogram's sum and number of observations, or a counter's total, over its labels."""
        (family,) = self._by_name[metric].collect()
        total = sum(s.value for s in family.samples if s.name.endswith(("_sum", "_total")))
        return total, sum(s.value for s in family.samples if s.name.endswith("_count"))

    def work_done(self) -> dict[str, float]:
        """Return the work of this process and its cost, for `murmur plan`.

        Returns:
            requests, observation messages served; batches, those acted on; received_bytes; cpu_s,
            CPU seconds of the process; cpu_s/<thread> and cpu_wait_s/<thread>, seconds of each
            thread with a ledger.
        """
        return {
            "cpu_s": time.process_time(),
            "requests": self.sum_of("queue_wait_seconds")[1],
            "batches": self.sum_of("batch_envs")[1],
            "received_bytes": self.sum_of("received_bytes")[0],
            **{f"cpu_s/{thread}": s for thread, s in self.cpu_seconds().items()},
            **{f"cpu_wait_s/{thread}": s for thread, s in self.cpu_wait_seconds().items()},
        }

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

    def collect(self) -> Iterable[Family]:
        """Yield the observed metrics, as far as there is something to read."""
        found = self._observed()
        for m in OBSERVED:
            if m.name in found:
                kind = CounterMetricFamily if m.kind == "counter" else GaugeMetricFamily
                family = kind(f"murmur_learner_{m.name}", m.meaning, labels=m.labels)
                for labels, value in found[m.name].items():
                    family.add_metric(labels, value)
                yield family

    def _observed(self) -> Mapping[str, Mapping[tuple[str, ...], float]]:
        """Read ledgers, CUDA graphs, trackers, the device's clock and NVML.

        Returns:
            metric -> values of its labels -> value.
        """
        found: dict[str, Mapping[tuple[str, ...], float]] = {
            **self.graph_calls(),
            **(self.log.counts() if self.log else {}),
            "state_seconds": {
                (thread, state): seconds
                for thread, states in self.ledger_seconds().items()
                for state, seconds in states.items()
            },
            "thread_cpu_seconds": {(t,): s for t, s in self.cpu_seconds().items()},
            "thread_cpu_wait_seconds": {(t,): s for t, s in self.cpu_wait_seconds().items()},
            "machine_busy_seconds": {(): machine_busy_seconds()},
            "machine_cores": {(): available_cores()},
            "device_copied_bytes": {(way,): n for way, n in self.copied.items()},
        }
        if self.clock is not None:
            busy, kinds = self.clock.seconds()
            found["device_busy_seconds"] = {(): busy}
            found["device_work_seconds"] = {(kind,): seconds for kind, seconds in kinds.items()}
            found["device_beside_seconds"] = {(): self.clock.beside()}
        of_gpu: dict[str, dict[tuple[str, ...], float]] = {}
        if self.gpu is not None:
            for (metric, *labels), value in (self.gpu.read() | self.gpu.read_pcie()).items():
                of_gpu.setdefault(metric, {})[tuple(labels)] = value
        return found | of_gpu

    def _get(
        self, name: str, labels: dict[str, str]
    ) -> Counter | KeptCounter | Gauge | WeightedHistogram:
        key = (name, *labels.items())
        made = self._made.get(key)
        if made is None:  # prometheus_client's own lookup takes 2 us, too much for every message
            metric = self._by_name[name]
            made = metric.labels(**labels) if labels else metric
            if self._kept is not None and isinstance(made, Counter):
                made = KeptCounter(made, self._kept, json.dumps([name, labels]))
            self._made[key] = made
        return made
