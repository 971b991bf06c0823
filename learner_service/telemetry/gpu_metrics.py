"""The learner's metrics about the device: what it is, what NVML reports, what is copied."""

from learner_service.telemetry.metric import Metric

GPU_METRICS = (
    Metric(
        "device_info",
        "gauge",
        "always 1: the device by name, its driver, the CUDA version of torch, and the precision",
        labels=("name", "driver", "cuda", "precision"),
    ),
    Metric(
        "device_copied_bytes",
        "counter",
        "bytes that acting and evaluations copied between host and device: observations to_device, "
        "actions to_host; on the CPU, what a GPU would need copied",
        "near the bus's limit, 25 GB/s for PCIe 4: observe in uint8 or float16",
        ("direction",),
        observed=True,
    ),
    Metric(
        "gpu_utilization_ratio",
        "gauge",
        "NVML (DCGM_FI_DEV_GPU_UTIL): share of time in which any kernel ran; this and all other "
        "gpu_ metrics are absent on the CPU, and where the driver does not support them",
        "far below device_busy_ratio: kernels are small; larger batches, compile",
        observed=True,
    ),
    Metric(
        "gpu_memory_utilization_ratio",
        "gauge",
        "NVML (DCGM_FI_DEV_MEM_COPY_UTIL): share of time in which the GPU's memory was read or "
        "written",
        observed=True,
    ),
    Metric(
        "gpu_memory_used_bytes",
        "gauge",
        "NVML (DCGM_FI_DEV_FB_USED): memory in use by all processes",
        "near gpu_memory_total_bytes: smaller batches or a smaller replay",
        observed=True,
    ),
    Metric("gpu_memory_total_bytes", "gauge", "NVML: memory of the GPU", observed=True),
    Metric(
        "gpu_temperature_celsius",
        "gauge",
        "NVML (DCGM_FI_DEV_GPU_TEMP): temperature of the GPU",
        "above 80: it slows itself down; cooling",
        observed=True,
    ),
    Metric(
        "gpu_power_watts",
        "gauge",
        "NVML (DCGM_FI_DEV_POWER_USAGE): power drawn",
        observed=True,
    ),
    Metric(
        "gpu_power_limit_watts",
        "gauge",
        "NVML (DCGM_FI_DEV_ENFORCED_POWER_LIMIT): power that the GPU may draw",
        observed=True,
    ),
    Metric(
        "gpu_clock_hertz",
        "gauge",
        "NVML (DCGM_FI_DEV_SM_CLOCK, DCGM_FI_DEV_MEM_CLOCK): clock of the multiprocessors (sm) "
        "and of the memory",
        "sm far below gpu_clock_max_hertz under load: see gpu_throttled",
        ("clock",),
        observed=True,
    ),
    Metric(
        "gpu_clock_max_hertz",
        "gauge",
        "NVML: the highest clock of each",
        labels=("clock",),
        observed=True,
    ),
    Metric(
        "gpu_throttled",
        "gauge",
        "NVML (DCGM_FI_DEV_CLOCKS_EVENT_REASONS): 1 while this limit keeps the clocks down, else 0",
        "power_cap: normal under full load; software_thermal, hardware_thermal: cooling; "
        "hardware_slowdown, power_brake: the power supply or cooling of the machine",
        ("reason",),
        observed=True,
    ),
    Metric(
        "gpu_pcie_bytes_per_second",
        "gauge",
        "NVML (DCGM_FI_PROF_PCIE_RX_BYTES, _TX_BYTES): all traffic over PCIe in the 20 ms before",
        labels=("direction",),
        observed=True,
    ),
)
