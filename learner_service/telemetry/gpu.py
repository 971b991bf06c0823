"""Figures of the GPU that the learner uses, as its driver gives them through NVML."""

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from murmur.shared.process.nvml import cuda_version

# Reasons for lower clocks that mean a limit was reached, by NVML's constants. Clocks are lower
# without such a limit on an idle GPU, and where an administrator set them.
_LIMITS = {
    "power_cap": "nvmlClocksThrottleReasonSwPowerCap",
    "hardware_slowdown": "nvmlClocksThrottleReasonHwSlowdown",
    "sync_boost": "nvmlClocksThrottleReasonSyncBoost",
    "software_thermal": "nvmlClocksThrottleReasonSwThermalSlowdown",
    "hardware_thermal": "nvmlClocksThrottleReasonHwThermalSlowdown",
    "power_brake": "nvmlClocksThrottleReasonHwPowerBrakeSlowdown",
}


class Figure(NamedTuple):
    """One figure of the GPU.

    Attributes:
        metric: its name in metrics.METRICS.
        value: number in the unit that the metric's name says.
        labels: values of the metric's labels.
    """

    metric: str
    value: float
    labels: tuple[str, ...] = ()


class Gpu:
    """One GPU as NVML sees it. Any thread may call its methods, but one alone `recent`.

    Attributes:
        trouble: reason why NVML cannot be asked at all; empty if it can.
    """

    def __init__(self, uuid: str) -> None:
        """Find the GPU; never raises, since learning continues without its figures.

        Args:
            uuid: GPU's UUID as CUDA gives it, without a prefix. CUDA_VISIBLE_DEVICES hides GPUs
                from CUDA but not from NVML, so their numbers differ.
        """
        self.trouble = ""
        self._asked_at, self._recent = -math.inf, dict[str, float]()
        try:
            import pynvml
        except ModuleNotFoundError:
            self.trouble = "nvidia-ml-py is not installed"
            return
        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
            self._handle = self._find(uuid)
        except pynvml.NVMLError as error:
            self.trouble = f"NVML: {error}"

    def _find(self, uuid: str) -> Any:  # noqa: ANN401 - NVML's handle
        try:
            return self._nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        except self._nvml.NVMLError_NotFound:  # a part of one
            return self._nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")

    def read(self) -> list[Figure]:
        """The figures that this GPU and driver support; takes about a millisecond."""
        if self.trouble:
            return []
        n, gpu = self._nvml, self._handle
        clock, highest = n.nvmlDeviceGetClockInfo, n.nvmlDeviceGetMaxClockInfo
        # By metric and labels; NVML counts percent, milliwatts and MHz.
        asked: dict[tuple[str, ...], Callable[[], float]] = {
            ("gpu_utilization_ratio",): lambda: n.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
            ("gpu_memory_utilization_ratio",): lambda: (
                n.nvmlDeviceGetUtilizationRates(gpu).memory / 100
            ),
            ("gpu_memory_used_bytes",): lambda: n.nvmlDeviceGetMemoryInfo(gpu).used,
            ("gpu_memory_total_bytes",): lambda: n.nvmlDeviceGetMemoryInfo(gpu).total,
            ("gpu_temperature_celsius",): lambda: n.nvmlDeviceGetTemperature(
                gpu, n.NVML_TEMPERATURE_GPU
            ),
            ("gpu_power_watts",): lambda: n.nvmlDeviceGetPowerUsage(gpu) / 1e3,
            ("gpu_power_limit_watts",): lambda: n.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1e3,
            ("gpu_clock_hertz", "sm"): lambda: clock(gpu, n.NVML_CLOCK_SM) * 1e6,
            ("gpu_clock_max_hertz", "sm"): lambda: highest(gpu, n.NVML_CLOCK_SM) * 1e6,
            ("gpu_clock_hertz", "memory"): lambda: clock(gpu, n.NVML_CLOCK_MEM) * 1e6,
            ("gpu_clock_max_hertz", "memory"): lambda: highest(gpu, n.NVML_CLOCK_MEM) * 1e6,
        }
        found = [f for (metric, *of), ask in asked.items() for f in self._ask(metric, ask, *of)]
        return [*found, *self._limits()]

    def recent(self, max_age_s: float) -> dict[str, float]:
        """`read` by name (see `by_name`), not asked again for a while; for one thread."""
        now = time.monotonic()
        if now - self._asked_at >= max_age_s:
            self._asked_at, self._recent = now, by_name(self.read())
        return self._recent

    def read_pcie(self) -> list[Figure]:
        """Bytes a second over PCIe, averaged over 20 ms; takes these 20 ms for each direction."""
        if self.trouble:
            return []
        n, gpu = self._nvml, self._handle

        def bytes_per_second(counter: int) -> float:  # NVML counts KiB a second
            return float(n.nvmlDeviceGetPcieThroughput(gpu, counter)) * 1024

        metric = "gpu_pcie_bytes_per_second"
        return [
            *self._ask(metric, lambda: bytes_per_second(n.NVML_PCIE_UTIL_RX_BYTES), "to_device"),
            *self._ask(metric, lambda: bytes_per_second(n.NVML_PCIE_UTIL_TX_BYTES), "to_host"),
        ]

    def describe(self) -> dict[str, str]:
        """Name, driver, CUDA version of the driver and memory, as far as NVML gives them."""
        if self.trouble:
            return {}
        n, gpu = self._nvml, self._handle
        asked: dict[str, Callable[[], str]] = {
            "name": lambda: str(n.nvmlDeviceGetName(gpu)),
            "driver": lambda: str(n.nvmlSystemGetDriverVersion()),
            "driver_cuda": lambda: cuda_version(n.nvmlSystemGetCudaDriverVersion_v2()),
            "memory": lambda: f"{n.nvmlDeviceGetMemoryInfo(gpu).total / 2**30:.1f} GiB",
        }
        known = {}
        for name, ask in asked.items():
            try:
                known[name] = ask()
            except n.NVMLError:
                continue
        return known

    def _reasons(self) -> int:
        """Bits of the reasons for the present clocks."""
        n = self._nvml
        try:
            return int(n.nvmlDeviceGetCurrentClocksEventReasons(self._handle))
        except (AttributeError, n.NVMLError):  # the name before driver 535 and nvidia-ml-py 12.535
            return int(n.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle))

    def _limits(self) -> list[Figure]:
        """Whether each limit keeps the clocks down."""
        try:
            reasons = self._reasons()
        except self._nvml.NVMLError:
            return []
        return [
            Figure("gpu_throttled", float(bool(reasons & getattr(self._nvml, constant))), (label,))
            for label, constant in _LIMITS.items()
        ]

    def _ask(self, metric: str, ask: Callable[[], float], *labels: str) -> list[Figure]:
        """Return a figure; none if unsupported, or while the driver is being restarted."""
        try:
            return [Figure(metric, float(ask()), labels)]
        except self._nvml.NVMLError:
            return []


def by_name(figures: list[Figure]) -> dict[str, float]:
    """Figures by one name each, labels joined to it, without the prefix `gpu_`."""
    return {"_".join((f.metric, *f.labels)).removeprefix("gpu_"): f.value for f in figures}
