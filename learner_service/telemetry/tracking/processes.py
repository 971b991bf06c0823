"""The processes that send a run to its trackers, as its learner sees them."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from learner_service.telemetry.metric_table import METRICS
from learner_service.telemetry.tracking.forwarder import Forwarder
from shared.config.experiment import TrackingConfig
from shared.process.process import logger


class TrackerProcesses:
    """One process for each tracker. None of them can end, block or slow the learner.

    Used by the thread that writes the log.
    """

    def __init__(self, run_dir: Path, config: TrackingConfig) -> None:
        """Start them."""
        self._run_dir, self._config = run_dir, config
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        for name in config.services:
            command = (sys.executable, "-P", "-m", "learner_service.telemetry.tracking", name)
            try:
                self._processes[name] = subprocess.Popen(
                    [*command, str(run_dir), config.model_dump_json()], stdin=subprocess.PIPE
                )
            except OSError as error:
                logger.warning("%s: cannot start its process: %s", name, error)

    def look(self) -> None:
        """Say once if one of them has died."""
        for name, process in list(self._processes.items()):
            if process.poll() is not None:
                logger.warning(
                    "%s: its process ended with %d; training continues. %s",
                    name,
                    process.returncode,
                    self._rest(name),
                )
                self._close(name)

    def counts(self, lines_lost: int) -> Mapping[str, Mapping[tuple[str, ...], int]]:
        """Count data that the trackers missed: metric -> labels -> count. Any thread may call it.

        Args:
            lines_lost: number of lines of progress.jsonl that could not be written.
        """
        found: dict[str, dict[tuple[str, ...], int]] = {
            metric.name: {} for metric in METRICS if "tracker" in metric.labels
        }
        for name in self._config.services:
            forwarder = Forwarder(self._run_dir, name, self._config)
            found["tracker_failures"][name,] = forwarder.state.failures
            found["tracker_unsent_bytes"][name,] = forwarder.unsent_bytes
            found["tracker_lines_dropped"][name, "disk"] = lines_lost
            found["tracker_lines_dropped"][name, "torn"] = forwarder.state.torn
        return found

    def close(self) -> None:
        """Let them send the rest; wait at most tracking.finish_s."""
        for process in self._processes.values():
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.write(b"end\n")
                process.stdin.close()
        deadline = time.monotonic() + self._config.finish_s
        for name, process in list(self._processes.items()):
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if rest := self._rest(name):
                logger.warning("%s: %s", name, rest)
            self._close(name)

    def _close(self, name: str) -> None:
        process = self._processes.pop(name)
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()

    def _rest(self, name: str) -> str:
        """Name the lines that are not sent, and how to send them; "" if all are sent."""
        forwarder = Forwarder(self._run_dir, name, self._config)
        if not forwarder.unsent_lines:
            return ""
        return (
            f"{forwarder.unsent_lines} lines of progress.jsonl are not sent; "
            f"`murmur track {self._run_dir}` sends them"
        )
