"""A row of a service's table of metrics, from which docs/reference/metrics.md is written."""

from dataclasses import dataclass
from functools import partial


@dataclass(frozen=True)
class Metric:
    """One row of docs/reference/metrics.md.

    Attributes:
        kind: counter, gauge or histogram.
        name: metric's name without the service's prefix and Prometheus' suffix.
        meaning: quantity that it counts.
        remedy: advice for when it looks wrong.
        labels: its labels.
        buckets: upper bounds of a histogram's buckets.
    """

    kind: str
    name: str
    meaning: str
    remedy: str = ""
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


counter = partial(Metric, "counter")
gauge = partial(Metric, "gauge")
histogram = partial(Metric, "histogram")
