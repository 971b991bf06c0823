"""What a learner has done and what it took."""

import threading
import time

from murmur.learner_service.telemetry.metrics import LearnerMetrics
from murmur.shared.process.ledger import Ledger


def test_work_is_counted_by_hand() -> None:
    metrics = LearnerMetrics()
    ledger = Ledger("learner")
    metrics.keep(ledger)
    for wait in (0.5, 0.25):
        metrics.histogram("queue_wait_seconds").observe(wait)
    metrics.histogram("batch_envs").observe(8)
    metrics.counter("received_bytes").inc(300)

    def work() -> None:
        ledger.adopt()
        until = time.thread_time() + 0.01
        while time.thread_time() < until:
            pass
        done.update(metrics.work_done())

    done: dict[str, float] = {}
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    cpu, of_thread = done.pop("cpu_s"), done.pop("cpu_s/learner")
    assert cpu >= of_thread >= 0.01
    assert done.pop("cpu_wait_s/learner") >= 0.0
    assert done == {"requests": 2, "batches": 1, "received_bytes": 300}
