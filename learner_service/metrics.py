"""The learner's Prometheus metrics: every one with its meaning, in one table."""

from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

_LATENCY_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1, 5)
_UPDATE_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_SIZES = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
_LAGS = (0, 1, 2, 3, 4, 8, 16)


@dataclass(frozen=True)
class Metric:
    """One row of docs/metrics.md.

    Attributes:
        name: without the prefix `murmur_learner_`, and without the suffix that Prometheus adds.
        kind: counter, gauge or histogram.
        meaning: what it counts.
        remedy: what to do when it looks wrong.
        labels: its labels.
        buckets: upper bounds of a histogram's buckets.
    """

    name: str
    kind: str
    meaning: str
    remedy: str = ""
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


METRICS = (
    Metric(
        "sessions",
        "gauge",
        "connected sessions",
        "fewer than expected: see the environment servers' logs",
        ("mode",),
    ),
    Metric(
        "sessions_refused",
        "counter",
        "sessions refused",
        "see the learner's log for each reason",
        ("reason",),
    ),
    Metric("requests", "counter", "observation messages received", labels=("mode",)),
    Metric("received_bytes", "counter", "bytes of observation messages received"),
    Metric(
        "rejected",
        "counter",
        "observation messages that broke the contract; each ends its session",
        "mend the environment that the log names",
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
        "environments in an inference batch",
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
        "transfer_seconds", "counter", "time spent gathering rows and sending them to the device"
    ),
    Metric(
        "parked_sessions",
        "gauge",
        "sessions that wait for the learner before they may begin another unroll",
        "always all: the update is the bottleneck",
    ),
    Metric(
        "update_seconds",
        "histogram",
        "time of one update",
        "high: fewer data_passes, lower precision, a faster device",
        buckets=_UPDATE_S,
    ),
    Metric(
        "learner_wait_seconds",
        "counter",
        "time the learner waited for rows",
        "grows nearly as fast as time: more environment servers",
    ),
    Metric("updates", "counter", "updates made"),
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
        "environment rows thrown away",
        "lag: match batch_size * "
        "batch_number to the number of environments; session: environment servers die",
        ("reason",),
    ),
    Metric(
        "rows_stored",
        "gauge",
        "environment rows waiting for an update, or in the replay",
    ),
    Metric("episodes", "counter", "episodes finished", labels=("mode",)),
    Metric("episodes_dropped", "counter", "episodes cut short by the loss of their session"),
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
    Metric(
        "loss",
        "gauge",
        "losses and other scalars of the last update",
        "see docs/algorithms.md",
        ("name",),
    ),
    Metric("checkpoints", "counter", "checkpoints written"),
    Metric("checkpoint_seconds", "histogram", "time to write a checkpoint", buckets=_UPDATE_S),
    Metric("checkpoint_age_seconds", "gauge", "time since the last checkpoint"),
    Metric(
        "device_busy_ratio",
        "gauge",
        "share of the last seconds in which the device worked: "
        "inference and updates, as the host sees them",
        "low: see learner_wait_seconds",
    ),
    Metric("device_memory_bytes", "gauge", "memory in use: torch's on CUDA, resident on CPU"),
    Metric(
        "gpu_utilization_ratio",
        "gauge",
        "NVML: share of time in which any kernel ran; absent without a GPU",
    ),
)


class LearnerMetrics:
    """All of METRICS, by attribute, in a registry of their own."""

    def __init__(self) -> None:
        """Register them."""
        self.registry = CollectorRegistry()
        self._by_name: dict[str, Counter | Gauge | Histogram] = {}
        self._labelled: dict[tuple[object, ...], Counter | Gauge | Histogram] = {}
        for m in METRICS:
            if m.name == "gpu_utilization_ratio":
                self.registry.register(_GpuUtilization())
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

    def counter(self, metric: str, /, **labels: str) -> Counter:
        """A counter, with its labels set."""
        return self._get(metric, labels)  # type: ignore[return-value]

    def gauge(self, metric: str, /, **labels: str) -> Gauge:
        """A gauge, with its labels set."""
        return self._get(metric, labels)  # type: ignore[return-value]

    def histogram(self, metric: str, /, **labels: str) -> Histogram:
        """A histogram, with its labels set."""
        return self._get(metric, labels)  # type: ignore[return-value]

    def _get(self, name: str, labels: dict[str, str]) -> Counter | Gauge | Histogram:
        if not labels:
            return self._by_name[name]
        key = (name, *labels.items())
        metric = self._labelled.get(key)
        if metric is None:  # prometheus_client's own lookup takes 2 us, too much for every message
            metric = self._labelled[key] = self._by_name[name].labels(**labels)
        return metric


class _GpuUtilization(Collector):
    """NVML's utilisation, read when scraped; nothing where there is no NVIDIA driver."""

    def __init__(self) -> None:
        self._handle = None
        try:
            import pynvml
        except ImportError:
            return
        try:
            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        except pynvml.NVMLError:
            return
        self._read = pynvml.nvmlDeviceGetUtilizationRates

    def collect(self) -> list[GaugeMetricFamily]:
        """The gauge, or nothing."""
        if self._handle is None:
            return []
        try:
            value = self._read(self._handle).gpu / 100
        except Exception:  # NVML fails when the driver is restarted; a scrape must not
            return []
        family = GaugeMetricFamily("murmur_learner_gpu_utilization_ratio", "NVML utilisation")
        family.add_metric([], value)
        return [family]
