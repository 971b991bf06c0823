"""The process that sends a run to one tracker until its learner ends.

    python -m learner_service.telemetry.tracking TRACKER RUN TRACKING_CONFIG_AS_JSON

The end of standard input is the end of the learner; the line "end" before it says: in order.
"""

import os
import select
import signal
import sys
import time
from pathlib import Path

from learner_service.telemetry.tracking.forwarder import Forwarder
from shared.config.experiment import TrackingConfig
from shared.process.errors import MurmurError
from shared.process.process import Backoff, configure_logging, logger

_POLL_S = 2.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 15.0, 600.0  # between attempts while the tracker fails
_OTHER_S = 60.0  # of a learner that died: its tracker may still be sending


def main() -> int:
    """Run; returns the exit code."""
    tracker, run_dir, settings = sys.argv[1:]
    configure_logging(f"tracker {tracker}")
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the learner too, which then says so
        signal.signal(number, signal.SIG_IGN)
    os.nice(10)  # training comes first
    forwarder = Forwarder(Path(run_dir), tracker, TrackingConfig.model_validate_json(settings))
    try:
        with forwarder.holding(_OTHER_S):
            follow(forwarder)
    except MurmurError as error:
        logger.warning("%s", error)
        return 1
    return 0


def follow(forwarder: Forwarder) -> None:
    """Send what is new, every two seconds, until standard input ends."""
    backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S, lambda: 1.0)
    said, due = b"", 0.0
    while True:
        over = False
        if select.select([sys.stdin], [], [], _POLL_S)[0]:
            data = os.read(sys.stdin.fileno(), 64)
            said, over = said + data, not data
        if not over and time.monotonic() < due:
            continue
        try:
            if over:
                forwarder.finish(complete=b"end" in said)
            else:
                forwarder.send()
            backoff.reset()
        except Exception as error:  # a tracker may raise anything: it must not end training
            forwarder.note(error)
            due = time.monotonic() + backoff.pause_s()
        if over:
            return


if __name__ == "__main__":
    raise SystemExit(main())
