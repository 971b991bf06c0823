"""Lines of `murmur doctor` about the device: its figures between two snapshots."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from murmur.doctor.gpu_waits import failed_captures, grown, on_gpu
from murmur.runs.snapshots import Snapshot
from murmur.text import percent

_APART = 0.6  # NVML's share below this part of the busy share: the device waits for launches
_CAPTURE_S = "graph_capture_seconds"
_BUSY = 0.3  # below it there is too little work to tell


def device_lines(before: Snapshot, after: Snapshot, busy: float) -> list[str]:
    """Return lines on the device, NVML's figures, bytes copied and graphs, as far as known.

    Args:
        before: earlier snapshot.
        after: later snapshot.
        busy: share of time in which the device worked, by the learner's own clock.
    """
    lines = [about_text(after.about)] if after.about else []
    figures, span = after.device, after.time - before.time
    if gpu := _gpu(figures):
        lines.append(gpu)
    if evidence := small_kernels(busy, figures.get("utilization_ratio")):
        lines.append(
            f"the device waits for launches: {evidence}; CUDA graphs (learner.cuda_graph), larger "
            "batches"
        )
    limits = [k.removeprefix("throttled_") for k, v in figures.items() if "throttled_" in k and v]
    if limits:
        lines.append(f"clocks are kept down by {', '.join(sorted(limits))}")
    failed = failed_captures(after)
    if not failed and (count := figures.get("graph_fallbacks")):
        failed = [
            f"{count:.0f} CUDA graphs could not be captured, their calls run eagerly; the log of "
            "the learner says why"
        ]
    lines += failed
    if span > 0:
        lines += _rates(before.device, figures, span)
        lines += _graphs(before, after)
    return lines


def small_kernels(busy: float, used: float | None) -> str:
    """Return evidence that the device waits for launches of kernels; "" if there is none.

    Args:
        busy: share of time with work under way, by CUDA events.
        used: share of time with kernels running, by NVML; None: unknown.
    """
    if used is None or busy <= _BUSY or used >= _APART * busy:
        return ""
    return (
        f"kernels run {percent(used)} of the time by NVML, while work is under way "
        f"{percent(busy)} by CUDA events"
    )


def busy_text(busy: float, used: float | None) -> str:
    """Return text about the share of time in which the device works, by each known clock.

    Args:
        busy: share by the learner's own clock: CUDA events, or the host's on a CPU.
        used: share in which kernels ran, by NVML; None: unknown.
    """
    if used is None:
        return f"works {percent(busy)} of the time"
    return f"works {percent(busy)} of the time by CUDA events, {percent(used)} by NVML"


def gpu_figures(device: Mapping[str, float], busy: float | None = None) -> dict[str, str]:
    """Return the GPU's utilization and memory by name, as text; empty without a GPU.

    Args:
        device: figures of the device, as progress.jsonl has them.
        busy: share of time in which work was under way, by CUDA events; None: unknown.
    """
    used, memory = device.get("utilization_ratio"), device.get("memory_used_bytes")
    if used is None and memory is None and "memory_peak_bytes" not in device:
        return {}
    figures = {} if used is None else {"GPU (NVML)": percent(used)}
    if busy is not None:
        figures["GPU (CUDA events)"] = percent(busy)
    if memory is not None and device.get("memory_total_bytes"):
        total = device["memory_total_bytes"]
        figures["GPU memory"] = f"{memory / 2**30:.1f} of {total / 2**30:.1f} GiB"
    elif "memory_bytes" in device:  # NVML cannot be asked: torch's own
        figures["GPU memory"] = f"{device['memory_bytes'] / 2**30:.1f} GiB"
    return figures


def busy_share(records: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the device's busy share of time over records of progress; None: unknown.

    Clocks of processes begin at 0; the time between two processes does not count.
    """
    worked = span = 0.0
    for before, after in pairwise(r for r in records if "device_busy_s" in r):
        took, busy = (
            after["time"] - before["time"],
            after["device_busy_s"] - before["device_busy_s"],
        )
        if took > 0 and 0 <= busy <= 1.1 * took:
            worked, span = worked + busy, span + took
    return min(1.0, worked / span) if span else None


def run_busy_text(records: Sequence[Mapping[str, Any]]) -> str:
    """Return a run's GPU-busy shares by each clock over its progress records; "" without a GPU."""
    devices = [r.get("device", {}) for r in records]
    used = [of["utilization_ratio"] for of in devices if "utilization_ratio" in of]
    busy = busy_share(records)
    if not used or busy is None:
        return ""
    return busy_text(busy, sum(used) / len(used))


def about_text(about: Mapping[str, str]) -> str:
    """Return a device of command.json or of the metrics, as text."""
    parts = [about.get("name", "")]
    for key, word in (("driver", "driver "), ("cuda", "CUDA "), ("memory", ""), ("precision", "")):
        if about.get(key):
            parts.append(f"{word}{about[key]}")
    return ", ".join(filter(None, parts))


def _gpu(f: Mapping[str, float]) -> str:
    """Return NVML's figures in one line; empty without a GPU."""
    parts = []
    if "utilization_ratio" in f:
        parts.append(f"NVML: kernels run {percent(f['utilization_ratio'])} of the time")
    for name in ("sm", "memory"):
        if f"clock_hertz_{name}" in f:
            most = f.get(f"clock_max_hertz_{name}")
            of = f" of {most / 1e6:.0f}" if most else ""
            parts.append(f"{name} clock {f[f'clock_hertz_{name}'] / 1e6:.0f}{of} MHz")
    if "power_watts" in f:
        limit = f.get("power_limit_watts")
        parts.append(f"{f['power_watts']:.0f}{f' of {limit:.0f}' if limit else ''} W")
    if "memory_total_bytes" in f:
        used, total = f["memory_used_bytes"] / 2**30, f["memory_total_bytes"] / 2**30
        parts.append(f"{used:.1f} of {total:.1f} GiB")
    if "temperature_celsius" in f:
        parts.append(f"{f['temperature_celsius']:.0f} °C")
    return ", ".join(parts)


def _rates(before: Mapping[str, float], after: Mapping[str, float], span: float) -> list[str]:
    """Return lines on bytes copied, graph replays and eager calls per second."""

    def rate(name: str) -> float | None:
        if name not in after:
            return None
        return max(after[name] - before.get(name, 0.0), 0.0) / span

    lines = []
    to, back = rate("copied_to_device_bytes"), rate("copied_to_host_bytes")
    if to is not None and back is not None:
        lines.append(f"copied {to / 1e6:.3g} MB/s to the device, {back / 1e6:.3g} MB/s to the host")
    replays, eager = rate("graph_replays"), rate("eager_calls")
    if replays:
        lines.append(
            f"{replays:.3g} replays of CUDA graphs and {eager or 0:.3g} eager calls a second"
        )
    return lines


def _graphs(before: Snapshot, after: Snapshot) -> list[str]:
    """Return lines on eager calls and captures by function; on the CPU all calls are eager."""
    captures, seconds = grown(before, after, "graph_captures"), grown(before, after, _CAPTURE_S)
    eager = grown(before, after, "eager_calls") if on_gpu(after) else {}
    lines = []
    if any(eager.values()):
        counts = ", ".join(f"{name} {n:.0f}" for name, n in eager.items() if n)
        lines.append(f"eager calls meanwhile: {counts}")
    if any(captures.values()):
        counts = ", ".join(
            f"{name} {n:.0f}" + (f" ({seconds[name]:.3g} s)" if name in seconds else "")
            for name, n in captures.items()
            if n
        )
        lines.append(f"graphs captured meanwhile: {counts}")
    return lines
