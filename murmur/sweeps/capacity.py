"""Capacity of a machine: the number of runs at once, and the resources of each."""

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from murmur.shared.config.cores import available_cores, choose
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.process.errors import ConfigError
from murmur.shared.process.host_memory import available_bytes

# Measured resident memory, GiB; what a run really takes is looked at while it works.
LEARNER_GIB = 0.75
PROCESS_GIB = 0.45  # a worker with the environments of a usual configuration, or an evaluator
_GPU_LEAST_GIB = 2.0  # of a run that says no limit: networks, rollouts and CUDA's own
_GPU_SHARE = 0.85  # of what is free; the rest is CUDA's own
_GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """A GPU that runs may use.

    Attributes:
        name: name of the device.
        visible: entry of the device in CUDA_VISIBLE_DEVICES.
        free_gib: memory that no process uses now.
    """

    name: str
    visible: str
    free_gib: float


@dataclass(frozen=True)
class Capacity:
    """Resources that a sweep may use at a time.

    Attributes:
        parallel: number of runs at once.
        reason: reason for the limit of their number, for the screen.
        cores: processors of one run.
        memory_gib: expected memory of one run.
        gpus: GPUs that the runs take in turns; empty: they use the CPU.
        gpu_limit_gib: value of learner.memory_limit_gib for a run that sets none; 0: no limit.
    """

    parallel: int
    reason: str
    cores: float
    memory_gib: float
    gpus: tuple[Gpu, ...] = ()
    gpu_limit_gib: float = 0.0

    def text(self) -> str:
        """Return the resources in use, in one sentence for the screen."""
        at_once = "1 run at a time" if self.parallel == 1 else f"{self.parallel} runs at once"
        cores = "1 core" if self.cores == 1 else f"{self.cores:.3g} cores"
        parts = [f"{at_once} ({self.reason}): {cores} each"]
        if self.gpus:
            names = ", ".join(gpu.name for gpu in self.gpus)
            limit = f", {self.gpu_limit_gib:.1f} GiB of its memory each" * bool(self.gpu_limit_gib)
            parts.append(f"on {names}{limit}")
        return " ".join(parts)


def measure_capacity(
    configs: Sequence[ExperimentConfig], parallel: int, gpus: Sequence[Gpu] | None = None
) -> Capacity:
    """Return the capacity of the machine for these runs.

    Args:
        configs: configurations of the runs; the most demanding one counts.
        parallel: number of runs that the user wants; 0: as many as cores, memory and GPUs hold.
        gpus: GPUs of this machine; None: search for them.

    Raises:
        ConfigError: if a run needs a device that is not there.
    """
    cores, free_gib = available_cores(), available_bytes() / _GIB
    memory_gib = max(memory_of(config) for config in configs)
    found = find_gpus() if gpus is None else gpus
    used = tuple(found) if any(c.learner.device != "cpu" for c in configs) else ()
    if not used and any(c.learner.device == "cuda" for c in configs):
        raise ConfigError(
            "learner.device=cuda, but no GPU can be used here; see `murmur check`, or set "
            "learner.device=cpu"
        )
    # Runs at once that each resource allows; the scarcest one limits them.
    most = {
        f"{cores:.3g} cores": math.floor(cores / max(cores_of(config) for config in configs)),
        f"{free_gib:.1f} GiB of memory free": math.floor(free_gib / memory_gib),
    }
    if used:
        least = max(c.learner.memory_limit_gib or _GPU_LEAST_GIB for c in configs)
        room = sum(math.floor(_GPU_SHARE * gpu.free_gib / least) for gpu in used)
        most[f"{sum(gpu.free_gib for gpu in used):.1f} GiB of GPU memory free"] = room
    limit = min(most, key=lambda name: most[name])
    count = parallel or max(1, most[limit])
    reason = "as set" if parallel else limit
    if count >= len(configs):
        count, reason = len(configs), reason if parallel else "all of them"
    return Capacity(
        count,
        reason,
        max(1.0, cores / count),
        memory_gib,
        used,
        _gpu_limit(used, count),
    )


def _gpu_limit(gpus: Sequence[Gpu], count: int) -> float:
    """Return the GPU memory of one of `count` runs [GiB], rounded down; 0: no limit."""
    if not gpus or count <= len(gpus):
        return 0.0
    each = math.ceil(count / len(gpus))
    return math.floor(10 * _GPU_SHARE * min(gpu.free_gib for gpu in gpus) / each) / 10


def cores_of(config: ExperimentConfig) -> float:
    """Return the number of processors that a run keeps busy.

    In the sync pipeline acting and learning take turns. A run that leaves its workers and threads
    to murmur works with one of each; an offline run has no workers.
    """
    workers, threads = _workers_of(config), config.learner.num_threads or 1
    return max(workers, threads) if config.learner.pipeline == "sync" else workers + threads


def memory_of(config: ExperimentConfig) -> float:
    """Return the expected memory of a run [GiB], without knowledge of its environment."""
    evaluator = config.evaluation.on and not config.supervised
    return LEARNER_GIB + PROCESS_GIB * (_workers_of(config) + evaluator)


def _workers_of(config: ExperimentConfig) -> int:
    return 0 if config.run.offline else config.env_server.num_workers or 1


def shares(config: ExperimentConfig, capacity: Capacity) -> list[str]:
    """Return --set items that give a run its share of the machine, without those it sets."""
    items = [f"{key}={number}" for key, number in choose(config, capacity.cores).items()]
    if capacity.gpu_limit_gib and not config.learner.memory_limit_gib:
        items.append(f"learner.memory_limit_gib={capacity.gpu_limit_gib}")
    return items


def find_gpus() -> list[Gpu]:
    """Return the NVIDIA GPUs that torch can use here, limited by CUDA_VISIBLE_DEVICES."""
    if find_spec("pynvml") is None or find_spec("torch") is None:
        return []
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        shown = os.environ.get("CUDA_VISIBLE_DEVICES")
        count = pynvml.nvmlDeviceGetCount()
        names: Iterable[int | str] = range(count)
        if shown is not None:
            names = map(str.strip, shown.split(","))
        found = [_gpu(name) for name in names if name not in ("", "-1")]
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()
    if not found:
        return []
    import torch

    return found if torch.version.cuda else []


def _gpu(name: int | str) -> Gpu:
    """Return a GPU by its number, or by its entry in CUDA_VISIBLE_DEVICES."""
    import pynvml

    if isinstance(name, int) or name.isdecimal():
        handle = pynvml.nvmlDeviceGetHandleByIndex(int(name))
    else:
        handle = pynvml.nvmlDeviceGetHandleByUUID(name)
    # CUDA and NVML may count in different orders.
    visible = str(pynvml.nvmlDeviceGetUUID(handle)) if isinstance(name, int) else name
    free = pynvml.nvmlDeviceGetMemoryInfo(handle).free / _GIB
    return Gpu(str(pynvml.nvmlDeviceGetName(handle)), visible, free)
