"""What a learner has done and what it took, for `murmur plan`: counts and processor seconds."""

import time

from learner_service.telemetry.metrics import LearnerMetrics


def work_done(metrics: LearnerMetrics) -> dict[str, float]:
    """Totals of this process.

    Returns:
        requests: observation messages served; batches, batch_envs: that were acted on, and their
        environments; away_s, aways: from answers to the sessions' next requests; update_s, updates;
        received_bytes; cpu_s: of the process; cpu_s/<thread>: of each thread with a ledger.
    """
    done: dict[str, float] = {"cpu_s": time.process_time()}
    _, done["requests"] = metrics.sum_of("queue_wait_seconds")
    done["batch_envs"], done["batches"] = metrics.sum_of("batch_envs")
    done["away_s"], done["aways"] = metrics.sum_of("environment_seconds")
    done["update_s"], done["updates"] = metrics.sum_of("update_seconds")
    done["received_bytes"] = metrics.sum_of("received_bytes")[0]
    for thread, seconds in metrics.cpu_seconds().items():
        done[f"cpu_s/{thread}"] = seconds
    return done
