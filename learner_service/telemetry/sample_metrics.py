"""Metrics of runs that learn from a source of samples."""

from learner_service.telemetry.metric import Metric

SAMPLE_METRICS = (
    Metric(
        "samples_received",
        "counter",
        "samples received, of both splits; with a cache each is received once, else once an epoch",
    ),
    Metric(
        "samples_broken",
        "counter",
        "samples that cannot be read; each leaves all epochs",
        "the log names the first ones and their files",
        ("reason",),
    ),
    Metric(
        "samples_reassigned",
        "counter",
        "samples asked of another session, as the one that had been asked ended",
        "rising: servers die or are too slow; see their logs",
    ),
    Metric("epoch", "gauge", "epochs trained"),
    Metric("epoch_samples_trained", "gauge", "samples trained in the epoch under way"),
    Metric("epoch_samples_remaining", "gauge", "samples of the epoch under way still to train"),
    Metric(
        "sample_cache",
        "gauge",
        "always 1: where samples are kept between epochs: device, or stream if they are sent again "
        "in each",
        "stream, and the learner waits: see supply.cache, or add servers",
        ("cache",),
    ),
)
