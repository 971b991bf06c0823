"""Figures of the GPU that the learner uses, as its driver gives them through NVML."""

import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

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


# By the metric's name in metrics.METRICS and the values of its labels: number in its unit.
Figures = dict[tuple[str, ...], float]
Key = TypeVar("Key")
Answer = TypeVar("Answer")


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

    def read(self) -> Figures:
        """The figures that this GPU and driver support; takes about a millisecond."""
        if self.trouble:
            return {}
        n, gpu = self._nvml, self._handle
        clock, highest = n.nvmlDeviceGetClockInfo, n.nvmlDeviceGetMaxClockInfo
        # NVML counts percent, milliwatts and MHz.
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
        return self._answers(asked) | self._limits()

    def recent(self, max_age_s: float) -> dict[str, float]:
        """`read` by name (see `by_name`), not asked again for a while; for one thread."""
        now = time.monotonic()
        if now - self._asked_at >= max_age_s:
            self._asked_at, self._recent = now, by_name(self.read())
        return self._recent

    def read_pcie(self) -> Figures:
        """Bytes a second over PCIe, averaged over 20 ms; takes these 20 ms for each direction."""
        if self.trouble:
            return {}
        n, gpu = self._nvml, self._handle

        def bytes_per_second(counter: int) -> float:  # NVML counts KiB a second
            return float(n.nvmlDeviceGetPcieThroughput(gpu, counter)) * 1024

        metric = "gpu_pcie_bytes_per_second"
        asked: dict[tuple[str, ...], Callable[[], float]] = {
            (metric, "to_device"): lambda: bytes_per_second(n.NVML_PCIE_UTIL_RX_BYTES),
            (metric, "to_host"): lambda: bytes_per_second(n.NVML_PCIE_UTIL_TX_BYTES),
        }
        return self._answers(asked)

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
        return self._answers(asked)

    def _reasons(self) -> int:
        """Bits of the reasons for the present clocks."""
        n = self._nvml
        try:
            return int(n.nvmlDeviceGetCurrentClocksEventReasons(self._handle))
        except (AttributeError, n.NVMLError):  # the name before driver 535 and nvidia-ml-py 12.535
            return int(n.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle))

    def _limits(self) -> Figures:
        """Whether each limit keeps the clocks down."""
        try:
            reasons = self._reasons()
        except self._nvml.NVMLError:
            return {}
        return {
            ("gpu_throttled", label): float(bool(reasons & getattr(self._nvml, constant)))
            for label, constant in _LIMITS.items()
        }

    def _answers(self, asked: Mapping[Key, Callable[[], Answer]]) -> dict[Key, Answer]:
        """Ask; leave out what is unsupported, or unknown while the driver is being restarted."""
        found = {}
        for name, ask in asked.items():
            with suppress(self._nvml.NVMLError):
                found[name] = ask()
        return found


def by_name(figures: Figures) -> dict[str, float]:
    """Figures by one name each, labels joined to it, without the prefix `gpu_`."""
    return {"_".join(name).removeprefix("gpu_"): float(x) for name, x in figures.items()}
