"""Record a learner's work and its cost, for `murmur plan`: counts and processor seconds."""

import time

from murmur.learner_service.telemetry.metrics import LearnerMetrics


def work_done(metrics: LearnerMetrics) -> dict[str, float]:
    """Totals of this process.

    Returns:
        requests: observation messages served; batches: that were acted on; received_bytes; cpu_s:
        of the process; cpu_s/<thread>, cpu_wait_s/<thread>: of each thread with a ledger.
    """
    done: dict[str, float] = {"cpu_s": time.process_time()}
    _, done["requests"] = metrics.sum_of("queue_wait_seconds")
    _, done["batches"] = metrics.sum_of("batch_envs")
    done["received_bytes"], _ = metrics.sum_of("received_bytes")
    for thread, seconds in metrics.cpu_seconds().items():
        done[f"cpu_s/{thread}"] = seconds
    for thread, seconds in metrics.cpu_wait_seconds().items():
        done[f"cpu_wait_s/{thread}"] = seconds
    return done
