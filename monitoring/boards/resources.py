"""The dashboard Resources: Device, memory, processes, checkpoints."""

from monitoring.panel import (
    LEARNER,
    LEARNER_NAME,
    SERVER,
    Board,
    Panel,
    learner_gauge,
    per_second,
    rate,
    server_gauge,
)

# Only of learners on a GPU: on a CPU every call is eager, and the device is the processor.
_ON_GPU = f'and on (instance) murmur_learner_device_info{{{LEARNER}, cuda!=""}}'
_GRAPHS = {"graph_replays": "replayed", "eager_calls": "eager", "graph_fallbacks": "not captured"}
GPU_PANELS = (
    Panel(
        "CUDA graphs",
        "Calls a second that ran as one graph, and eagerly, kernel by kernel. Much eager on a "
        "GPU: a graph could not be captured, the learner's log says why.",
        [
            (
                f"sum by (graph) ({rate(f'murmur_learner_{name}_total')} {_ON_GPU})",
                f"{{{{graph}}}} {word}",
            )
            for name, word in _GRAPHS.items()
        ],
        per_second("calls"),
    ),
    Panel(
        "GPU: busy and used",
        "Busy: between the first and the last kernel of each piece of work, by CUDA events. "
        "Kernels: NVML's share of time in which any kernel ran. Kernels far below busy: the GPU "
        "waits for launches; CUDA graphs, larger batches. Memory: share of time in which its "
        "memory was read or written.",
        [
            (
                f"murmur_learner_device_busy_ratio{{{LEARNER}}} {_ON_GPU}",
                f"busy (CUDA events) {LEARNER_NAME}",
            ),
            learner_gauge("murmur_learner_gpu_utilization_ratio", f"kernels (NVML) {LEARNER_NAME}"),
            learner_gauge("murmur_learner_gpu_memory_utilization_ratio", f"memory {LEARNER_NAME}"),
        ],
        "percentunit",
    ),
    Panel(
        "Waits for launches and captures",
        "Share of a thread's time. Eager: the learner's or the inference thread's calls launch "
        "kernels one by one. Captures: graphs are recorded. Acts: acting waits for updates, "
        "captures or processors. Any of it for long: see `murmur doctor`.",
        [
            (
                f"{rate('murmur_learner_eager_seconds_total')} {_ON_GPU}",
                f"eager {{{{graph}}}} {LEARNER_NAME}",
            ),
            (
                f"{rate('murmur_learner_graph_capture_seconds_total')} {_ON_GPU}",
                f"captures {{{{graph}}}} {LEARNER_NAME}",
            ),
            (
                f"{rate('murmur_learner_acts_waited_seconds_total')} {_ON_GPU}",
                f"acts, {{{{phase}}}} {LEARNER_NAME}",
            ),
        ],
        "percentunit",
    ),
    Panel(
        "GPU clocks",
        "Clocks of multiprocessors (sm) and memory, of their highest. sm low under load: see what "
        "throttles it.",
        [
            (
                f"murmur_learner_gpu_clock_hertz{{{LEARNER}}} "
                f"/ murmur_learner_gpu_clock_max_hertz{{{LEARNER}}}",
                f"{{{{clock}}}} {LEARNER_NAME}",
            )
        ],
        "percentunit",
    ),
    Panel(
        "GPU throttled",
        "Share of the last 5 minutes in which a limit kept the clocks down. power_cap is normal "
        "under full load; thermal: cooling; hardware_slowdown, power_brake: the machine's power "
        "supply or cooling.",
        [
            (
                f"avg_over_time(murmur_learner_gpu_throttled{{{LEARNER}}}[5m])",
                f"{{{{reason}}}} {LEARNER_NAME}",
            )
        ],
        "percentunit",
        warn=0.5,
    ),
    Panel(
        "GPU power",
        "Drawn, and the limit. Far below the limit: the GPU does little.",
        [
            learner_gauge("murmur_learner_gpu_power_watts", f"drawn {LEARNER_NAME}"),
            learner_gauge("murmur_learner_gpu_power_limit_watts", f"limit {LEARNER_NAME}"),
        ],
        "watt",
    ),
    Panel(
        "GPU memory in use",
        "By all processes. Above 95 %: the next larger batch may not fit.",
        [learner_gauge("murmur:gpu_memory:ratio")],
        "percentunit",
        warn=0.85,
        bad=0.95,
    ),
    Panel(
        "GPU temperature",
        "Above 80 °C it slows itself down: cooling.",
        [learner_gauge("murmur_learner_gpu_temperature_celsius")],
        "celsius",
        warn=80,
    ),
    Panel(
        "PCIe",
        "NVML: all traffic of the GPU over PCIe, in the 20 ms before each look. Empty where it is "
        "not supported.",
        [
            learner_gauge(
                "murmur_learner_gpu_pcie_bytes_per_second", f"{{{{direction}}}} {LEARNER_NAME}"
            )
        ],
        "Bps",
    ),
)
_DEVICE = [
    Panel(
        "Busy",
        "Share of time in which the device worked for murmur: any, and by kind; "
        "kinds may overlap. Low: see the ledger on the overview.",
        [
            (rate("murmur_learner_device_busy_seconds_total"), f"any {LEARNER_NAME}"),
            (rate("murmur_learner_device_work_seconds_total"), f"{{{{kind}}}} {LEARNER_NAME}"),
        ],
        "percentunit",
    ),
    Panel(
        "Memory of the learner",
        "On the device: torch's on CUDA, the process's on a CPU. Near the limit: "
        "fewer environments or smaller batches.",
        [
            learner_gauge("murmur_learner_device_memory_bytes", f"device {LEARNER_NAME}"),
            learner_gauge("process_resident_memory_bytes", f"process {LEARNER_NAME}"),
        ],
        "bytes",
    ),
    Panel(
        "Copied between host and device",
        "By acting and evaluations: observations in, actions out. Near the bus's "
        "limit: observe in uint8 or float16.",
        [
            (
                f"sum by (direction) ({rate('murmur_learner_device_copied_bytes_total')})",
                "{{direction}}",
            )
        ],
        "Bps",
        width=8,
    ),
    Panel(
        "Devices",
        "What each learner runs on: name, driver, CUDA version of torch, precision.",
        [
            (
                "count by (name, driver, cuda, precision) "
                f"(murmur_learner_device_info{{{LEARNER}}})",
                "{{name}}, driver {{driver}}, CUDA {{cuda}}, {{precision}}",
            )
        ],
        kind="stat",
        width=16,
    ),
]
_PROCESSES = [
    Panel(
        "Cores used by the learner",
        "CPU seconds a second: the wire, inference and, without a GPU, learning.",
        [(rate("process_cpu_seconds_total"), f"learner {LEARNER_NAME}")],
    ),
    Panel(
        "Cores used by environment servers",
        "Near what they may use: raise the limit or add servers elsewhere.",
        [(f"sum({rate('murmur_env_cpu_seconds_total', SERVER)})", "all servers")],
    ),
    Panel(
        "Age of the last checkpoint",
        "What a crash would lose. High: lower checkpoint_every_updates.",
        [learner_gauge("murmur_learner_checkpoint_age_seconds")],
        "s",
        warn=1800,
    ),
    Panel(
        "Scrapes that succeed",
        "1: up. 0: the service does not answer Prometheus.",
        [
            learner_gauge("up"),
            server_gauge("up"),
        ],
        top=1,
    ),
]
_GPU = "GPU: open this row if a learner has one"
BOARD = Board(
    "murmur-resources",
    "Resources",
    "Device, memory, processes, checkpoints.",
    [("Device", _DEVICE), ("Processes", _PROCESSES), (_GPU, GPU_PANELS)],
    closed=[_GPU],
)
