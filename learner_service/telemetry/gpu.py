"""What the driver says of the GPU that the learner uses, through NVML."""

from collections.abc import Callable
from typing import Any


class Gpu:
    """One GPU as NVML sees it. `read` may be called by any thread.

    Attributes:
        trouble: why it cannot be asked at all; empty if it can.
    """

    def __init__(self, uuid: str) -> None:
        """Find the GPU; never raises, since learning goes on without its figures.

        Args:
            uuid: as CUDA gives it, without a prefix; of all GPUs only those in
                CUDA_VISIBLE_DEVICES are CUDA's, so that its numbers are not NVML's.
        """
        self.trouble = ""
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

    def read(self) -> dict[str, float]:
        """Figures by the names of metrics.METRICS, those that this GPU and driver have."""
        if self.trouble:
            return {}
        n, gpu = self._nvml, self._handle
        asked: dict[str, Callable[[], float]] = {
            "gpu_utilization_ratio": lambda: n.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
            "gpu_memory_used_bytes": lambda: n.nvmlDeviceGetMemoryInfo(gpu).used,
            "gpu_memory_total_bytes": lambda: n.nvmlDeviceGetMemoryInfo(gpu).total,
            "gpu_temperature_celsius": lambda: n.nvmlDeviceGetTemperature(
                gpu, n.NVML_TEMPERATURE_GPU
            ),
            "gpu_power_watts": lambda: n.nvmlDeviceGetPowerUsage(gpu) / 1e3,
        }
        values = {}
        for name, ask in asked.items():
            try:
                values[name] = ask()
            except n.NVMLError:  # not supported, or the driver is being restarted
                continue
        return values
