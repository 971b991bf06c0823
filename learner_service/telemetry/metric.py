"""One metric of the learner, as docs/reference/metrics.md lists it."""

from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client import Metric as Family


@dataclass(frozen=True)
class Metric:
    """One row of docs/reference/metrics.md.

    Attributes:
        name: without the prefix `murmur_learner_`, and without the suffix that Prometheus adds.
        kind: counter, gauge or histogram.
        meaning: what it counts.
        remedy: what to do when it looks wrong.
        labels: its labels.
        buckets: upper bounds of a histogram's buckets.
        observed: read when scraped, not kept.
    """

    name: str
    kind: str
    meaning: str
    remedy: str = ""
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    observed: bool = False


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
