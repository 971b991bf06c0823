"""The learner's metrics about what trackers such as W&B and MLflow did not get."""

from learner_service.telemetry.metric import Metric

TRACKING_METRICS = (
    Metric(
        "tracker_failures",
        "counter",
        "attempts to send the run's record to a tracker that failed; each is repeated later",
        "grows: the learner's log has the tracker's own message",
        ("tracker",),
        observed=True,
    ),
    Metric(
        "tracker_unsent_bytes",
        "gauge",
        "bytes of progress.jsonl that the tracker does not have yet",
        "grows: see tracker_failures; after the run, `murmur track` sends the rest",
        ("tracker",),
        observed=True,
    ),
    Metric(
        "tracker_lines_dropped",
        "counter",
        "lines of progress.jsonl that the tracker never gets. disk: the learner could not write "
        "them; torn: a learner that was killed wrote them in part",
        "disk: free some space",
        ("tracker", "reason"),
        observed=True,
    ),
)
