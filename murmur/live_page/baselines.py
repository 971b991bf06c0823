"""Baselines of a run that `murmur report` evaluated, for a line in its curves."""

import math
from typing import Any

from murmur.runs.run_folder import RunFolder
from murmur.runs.scores import Metric
from shared.config.experiment import ExperimentConfig
from shared.config.text import comparable, plain_data

_POLICY = "baseline "  # of results of baselines, see env_service.sessions.evaluate


class Baselines:
    """Baselines evaluated on the run's evaluation environment. Reads only changed files."""

    def __init__(self, run: RunFolder, config: ExperimentConfig, metric: Metric) -> None:
        """Prepare to show a run's baselines; the best one is the best by `metric`."""
        self._run, self._metric = run, metric
        self._supervised = config.supervised
        self._environment = comparable(plain_data(config.for_evaluation().environment))
        self._seen: tuple[tuple[str, int], ...] = ()
        self._means: dict[str, dict[str, float]] = {}

    def best(self) -> dict[str, Any] | None:
        """Return name and mean of each metric of the best baseline; None if none is known."""
        self._read()
        metric = self._metric.name
        known = {name: m[metric] for name, m in self._means.items() if metric in m}
        best = self._metric.best_name(known)
        return None if best is None else {"name": best, "metrics": self._means[best]}

    def text(self) -> str:
        """Return the source of the line, or how to get one."""
        if self._supervised:
            return ""
        if not self._means:
            return f"No baseline is known: `murmur report {self._run.path}` evaluates them."
        return f"The line is the best of {len(self._means)} baselines by {self._metric}."

    def _read(self) -> None:
        files = sorted((self._run.path / "evaluations").glob("*.json"))
        seen = []
        for file in files:
            try:
                seen.append((file.name, file.stat().st_mtime_ns))
            except OSError:  # it was removed meanwhile
                continue
        if tuple(seen) == self._seen:
            return
        self._seen, self._means = tuple(seen), {}
        for file_name, _ in seen:
            record = self._run.read_json(f"evaluations/{file_name}")
            policy = str(record.get("policy", ""))
            environment = (record.get("key") or {}).get("environment")
            if policy.startswith(_POLICY) and environment == self._environment:
                self._means[policy.removeprefix(_POLICY)] = {
                    metric: summary["mean"]
                    for metric, summary in record["summary"].items()
                    if math.isfinite(summary["mean"])
                }
