"""What a learner reports every learner.log_every_s: a line of the log, and gauges."""

import time
from collections.abc import Mapping
from typing import Any

import psutil
import torch

from learner_service.storage.storage import Storage
from learner_service.telemetry.device_clock import DeviceClock
from learner_service.telemetry.metrics import LearnerMetrics
from learner_service.telemetry.progress import Progress, ProgressLog
from learner_service.telemetry.work import work_done
from learner_service.training.duties import Duties
from learner_service.training.rounds import Rounds

_NVML_EVERY_S = 5.0  # asking takes milliseconds


class Report:
    """See the module. Used by the thread that learns."""

    def __init__(
        self,
        log: ProgressLog | None,
        progress: Progress,
        metrics: LearnerMetrics,
        storage: Storage[Any],
        clock: DeviceClock,
        duties: Duties,
        rounds: Rounds,
    ) -> None:
        """Begin to measure; the arguments are those of Learner."""
        self._log = log
        self._progress = progress
        self._metrics = metrics
        self._storage, self._clock = storage, clock
        self._duties, self._rounds = duties, rounds
        self._process = psutil.Process()
        psutil.cpu_percent()
        self._busy_before = (time.monotonic(), 0.0)
        self._update_times = (0, 0.0)  # updates since the last line of the log, their seconds

    def note_update(self, took: float) -> None:
        """Count an update and its seconds."""
        count, seconds = self._update_times
        self._update_times = (count + 1, seconds + took)

    def write(self) -> None:
        """Write a line of the log, with what all ranks have; every rank calls it."""
        machine_busy = psutil.cpu_percent() / 100  # since the last time it was asked
        self._metrics.gauge("machine_busy_ratio").set(machine_busy)
        rows_waiting = self._storage.waiting_rows
        totals = self._rounds.totals(rows_waiting)
        if self._log is None:
            return
        figures = {
            "rows_waiting": rows_waiting,
            "ledger": self._metrics.ledger_seconds(),
            "device_busy_s": self._clock.seconds()[0],
            "machine_busy": machine_busy,
            "environments_limit": self._storage.environments_limit,
            "latency": self._metrics.latencies(),
            "rollout": self._storage.chosen,
            "device": self._device_figures(),
            "graphs": {
                metric: {"/".join(labels): count for labels, count in counts.items()}
                for metric, counts in self._metrics.graph_calls().items()
                if counts
            },
            "work": work_done(self._metrics),
            **self._duties.figures(),
        }
        self._log.write(figures, totals)

    def _device_figures(self) -> dict[str, float]:
        """Mean update time since the last line, memory, bytes copied, and NVML's figures."""
        m, (count, seconds) = self._metrics, self._update_times
        self._update_times = (0, 0.0)
        figures = {
            "memory_bytes": float(self._memory()),
            "copied_to_device_bytes": float(m.copied.to_device),
            "copied_to_host_bytes": float(m.copied.to_host),
            **{
                name: float(sum(of.values()))
                for name, of in m.graph_calls().items()
                if name != "graph_retry_calls"
            },
            **{name: m.sum_of(name)[0] for name in ("acts_waited", "acts_waited_seconds")},
        }
        if count:
            figures["update_ms"] = 1e3 * seconds / count
        if m.gpu is not None:
            figures["memory_peak_bytes"] = float(torch.cuda.max_memory_allocated())
        return figures | (m.gpu.recent(_NVML_EVERY_S) if m.gpu else {})

    def _memory(self) -> int:
        """Memory in use: torch's on CUDA, the process's on the CPU."""
        if self._metrics.gpu is not None:
            return torch.cuda.memory_allocated()
        resident: int = self._process.memory_info().rss
        return resident

    def set_results(self, mode: str, means: Mapping[str, float]) -> None:
        """Set the gauges of the environment's results: mean of each by its name."""
        for name, mean in means.items():
            if name == "return":
                self._metrics.gauge("episode_return", mode=mode).set(mean)
            else:
                self._metrics.gauge("episode_metric", name=name, mode=mode).set(mean)

    def set_gauges(self, now: float, saved: float) -> None:
        """Set the gauges that are too slow to set per message.

        Args:
            now: time.monotonic().
            saved: the same when the last checkpoint was written.
        """
        m = self._metrics
        self.set_results("train", self._progress.means())
        m.gauge("rows_stored").set(self._storage.ready_rows)
        self._duties.set_gauges(m)
        m.gauge("checkpoint_age_seconds").set(now - saved)
        busy, _ = self._clock.seconds()
        before = self._busy_before
        m.gauge("device_busy_ratio").set((busy - before[1]) / max(now - before[0], 1e-9))
        self._busy_before = (now, busy)
        m.gauge("device_memory_bytes").set(self._memory())
