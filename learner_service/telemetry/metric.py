"""One metric of the learner, as docs/metrics.md lists it."""

from dataclasses import dataclass


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
        observed: read when scraped, not kept.
    """

    name: str
    kind: str
    meaning: str
    remedy: str = ""
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    observed: bool = False
