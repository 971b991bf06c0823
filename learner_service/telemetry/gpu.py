"""Figures of the GPU that the learner uses, as its driver gives them through NVML."""

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from shared.process.nvml import cuda_version

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
        return [
            *self._ask(lambda: _utilization(n.nvmlDeviceGetUtilizationRates(gpu))),
            *self._ask(lambda: _memory(n.nvmlDeviceGetMemoryInfo(gpu))),
            *self._ask_one(
                "gpu_temperature_celsius",
                lambda: n.nvmlDeviceGetTemperature(gpu, n.NVML_TEMPERATURE_GPU),
            ),
            *self._ask_one("gpu_power_watts", lambda: n.nvmlDeviceGetPowerUsage(gpu) / 1e3),
            *self._ask_one(
                "gpu_power_limit_watts", lambda: n.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1e3
            ),
            *self._clock("sm", n.NVML_CLOCK_SM),
            *self._clock("memory", n.NVML_CLOCK_MEM),
            *self._ask(lambda: self._limits(self._reasons())),
        ]

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
        n = self._nvml
        return [
            *self._pcie("to_device", n.NVML_PCIE_UTIL_RX_BYTES),
            *self._pcie("to_host", n.NVML_PCIE_UTIL_TX_BYTES),
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

    def _limits(self, reasons: int) -> list[Figure]:
        return [
            Figure("gpu_throttled", float(bool(reasons & getattr(self._nvml, constant))), (label,))
            for label, constant in _LIMITS.items()
        ]

    def _clock(self, label: str, clock: int) -> list[Figure]:
        """A clock and its highest; NVML counts MHz."""
        n, gpu = self._nvml, self._handle
        return [
            *self._ask_one(
                "gpu_clock_hertz", lambda: n.nvmlDeviceGetClockInfo(gpu, clock) * 1e6, label
            ),
            *self._ask_one(
                "gpu_clock_max_hertz", lambda: n.nvmlDeviceGetMaxClockInfo(gpu, clock) * 1e6, label
            ),
        ]

    def _pcie(self, label: str, counter: int) -> list[Figure]:
        """Traffic in one direction; NVML counts KiB a second."""
        n, gpu = self._nvml, self._handle
        return self._ask_one(
            "gpu_pcie_bytes_per_second",
            lambda: n.nvmlDeviceGetPcieThroughput(gpu, counter) * 1024,
            label,
        )

    def _ask_one(self, metric: str, ask: Callable[[], float], *labels: str) -> list[Figure]:
        return self._ask(lambda: [Figure(metric, float(ask()), labels)])

    def _ask(self, ask: Callable[[], list[Figure]]) -> list[Figure]:
        """Return figures of `ask`; none if unsupported, or while the driver is being restarted."""
        try:
            return ask()
        except self._nvml.NVMLError:
            return []


def by_name(figures: list[Figure]) -> dict[str, float]:
    """Figures by one name each, labels joined to it, without the prefix `gpu_`."""
    return {"_".join((f.metric, *f.labels)).removeprefix("gpu_"): f.value for f in figures}


def _utilization(rates: Any) -> list[Figure]:  # noqa: ANN401 - a structure of NVML
    return [
        Figure("gpu_utilization_ratio", rates.gpu / 100),
        Figure("gpu_memory_utilization_ratio", rates.memory / 100),
    ]


def _memory(memory: Any) -> list[Figure]:  # noqa: ANN401 - a structure of NVML
    return [
        Figure("gpu_memory_used_bytes", memory.used),
        Figure("gpu_memory_total_bytes", memory.total),
    ]
