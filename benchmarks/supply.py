"""Supply servers: two beside one, and the device once the cache is full."""

from dataclasses import replace
from typing import Any

from murmur.benchmarks._processes import Processes, Snapshot
from murmur.benchmarks.effort import Effort
from murmur.doctor.diagnosis import diagnose
from murmur.runs.snapshots import from_metrics

DESCRIPTION = "samples a second of one and two supply servers; the device once the cache is full"
_DELAY_MS = 30.0  # of each sample
_FORECAST = 2  # times as many servers


def run(effort: Effort) -> dict[str, Any]:
    """Measure two trainings: one that waits for samples, one that has all of them."""
    seconds = effort.choose(0.8, 6.0, 20.0)
    return {**_streaming(seconds), **_cached(effort.choose(1.0, 8.0, 20.0))}


def _experiment(
    train: int, size: int, delay_ms: float, cache: str, batch_size: int
) -> dict[str, Any]:
    source = {"name": "benchmarks.slow_source:SlowSource", "train": train, "size": size}
    return {
        "source": {**source, "delay_ms": delay_ms},
        "supply": {"cache": cache, "window": 4},
        "env_server": {"num_workers": 1},
        "algorithm": {"name": "segmentation", "epochs": 100_000, "batch_size": batch_size},
        "network": {"name": "unet", "channels": [8, 8], "groups": 4},
        "learner": {"device": "cpu", "num_threads": 1, "checkpoint_every_updates": 1000},
    }


def _streaming(seconds: float) -> dict[str, Any]:
    """Measure samples per second of one server and of two, and the doctor's forecast of two."""
    with Processes(_experiment(400, 16, _DELAY_MS, "stream", batch_size=8)) as processes:
        processes.wait_for_updates(2)
        before = processes.snapshot()
        ((first, last),) = from_metrics(processes.metrics_url, seconds)
        one = _rate(before, processes.snapshot(), "samples_received_total")
        # The servers only wait: whatever else keeps this machine busy does not limit them.
        seen = diagnose(first, replace(last, machine_busy=None))
        forecast = next(r.rate for r in seen.remedies if r.what.startswith(f"{_FORECAST} times"))
        processes.add_server()
        processes.wait_for("sessions:supply", 2)
        before, after = processes.window(seconds)
    two = _rate(before, after, "samples_received_total")
    return {
        "delay of a sample, ms": _DELAY_MS,
        "samples a second": {"one server": round(one, 1), "two servers": round(two, 1)},
        "two servers over one": round(two / one, 3),
        "the doctor": {
            "waits for": seen.bottleneck,
            "forecast for two servers": round(forecast, 1),
            "forecast over measured": round(forecast / two, 3),
        },
    }


def _rate(before: Snapshot, after: Snapshot, counter: str) -> float:
    """Return a counter's increase per second."""
    grown = after.metrics[counter] - before.metrics[counter]
    return grown / (after.wall_s - before.wall_s)


def _cached(seconds: float) -> dict[str, Any]:
    """Measure the busy share of the device once its cache holds every sample."""
    with Processes(_experiment(64, 32, 0.0, "device", batch_size=32)) as processes:
        processes.wait_for("samples_received_total", 64)
        processes.wait_for_updates(8)
        before, after = processes.window(seconds)
    return {
        "with a full cache": {
            "device busy": round(_rate(before, after, "device_busy_seconds_total"), 3),
            "samples trained a second": round(_rate(before, after, "rows_trained_total")),
            "samples received a second": _rate(before, after, "samples_received_total"),
        }
    }
