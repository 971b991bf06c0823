"""The largest batch that fits: `batch_size: 0` in an algorithm's options.

Whole updates are tried on synthetic rows, forward, backward and optimizer step: a forward pass
alone says little, since what is kept for the backward pass takes most of the memory.
"""

import ctypes
import gc
import math
import re
import sys
import threading
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import psutil
import torch

from murmur.learner_service.device.cuda_graph import CALLS_TO_CAPTURE
from murmur.learner_service.device.device import select_device
from murmur.learner_service.device.precision import Precision
from murmur.learner_service.learning.base import algorithm_config, with_options
from murmur.learner_service.storage.replay import ReplayStorage
from murmur.learner_service.tuning.probe import Probe, depends_on, kept_choice
from murmur.shared.config import PluginConfig
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.process.errors import ConfigError, SpecError
from murmur.shared.process.files import read_json
from murmur.shared.process.process import logger
from murmur.shared.wire.spec import EnvSpec

_FIRST, _MOST = 256, 1 << 20
_CUDA_SHARE = 0.8  # of the free memory: the margin is for acting and for fragmentation
_SAMPLE_S = 0.001
_CACHE = "batch-size.json"
_CLEAR_REFS = Path("/proc/self/clear_refs")


def size_is_measured(config: ExperimentConfig, key: str, run_dir: Path) -> ConfigError:
    """Return the error of a sync run without batch size: what fits differs between machines.

    Args:
        config: the experiment.
        key: option of the algorithm that is 0.
        run_dir: run's folder; the message names the size that was found for the run, else the
            algorithm's default.
    """
    value: Any = read_json(run_dir / _CACHE).get("batch_size")
    if value is None:
        value = attrgetter(key)(algorithm_config(PluginConfig(name=config.algorithm.name)))
    example = f"={value}" if value else " to a number"
    return ConfigError(
        f"algorithm.{key}=0 takes what fits this machine, and the sync pipeline uses nothing "
        f"measured: set algorithm.{key}{example}, or learner.pipeline=async"
    )


def largest_batch(config: ExperimentConfig, spec: EnvSpec, run_dir: Path) -> int:
    """Return the size of the largest batch that fits the device: found before, or now.

    Found once for each run, also if it is resumed; again only where something has changed that the
    size depends on: the algorithm, the network, the precision, the environment, or the memory.

    Args:
        config: a rank's share of the experiment, with a batch size of 0.
        spec: spec of the environment.
        run_dir: folder where the choice is kept.

    Raises:
        ConfigError: if not even one row fits.
        MurmurError: if the settings do not fit each other.
    """
    device = select_device(config.learner)
    memory: dict[str, Any] = {"device": device.type, "gib": config.learner.memory_budget_gib}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        memory = {"device": properties.name, "bytes": properties.total_memory}
    precision = Precision.of(config.learner, device).name
    found_for = depends_on(config, spec, precision=precision, **memory)
    cache = run_dir / _CACHE
    return kept_choice(cache, "batch_size", found_for, lambda: _find(config, spec, device))


def _find(config: ExperimentConfig, spec: EnvSpec, device: torch.device) -> int:
    """Return the largest size whose updates fit the device and the replay.

    Raises:
        ConfigError: if not even one row fits.
    """
    logger.info("looking for the largest batch that fits %s ...", device)
    options, size = algorithm_config(config.algorithm), 0
    about = options.about
    allowed = config.learner.memory_budget_gib * 2**30
    if device.type == "cuda":
        allowed = _CUDA_SHARE * torch.cuda.mem_get_info(device)[0]

    def room_after(size: int) -> int:
        trial = options.changed({**about.trial, about.open_batch_size: size})
        return _room_after(with_options(config, trial), spec, device)

    if most := room_after(1):  # what the libraries take once is no batch's fault
        before = peak_bytes(lambda: 1, device)

        def fits(size: int) -> bool:
            try:
                return peak_bytes(lambda: room_after(size), device) - before <= allowed
            except SpecError:  # a row did: this is more than learner.memory_limit_gib
                return False

        size = largest(fits, _FIRST, most)
        _release(device)
    if size == 0:
        on_cpu = device.type == "cpu"
        fix = "raise learner.memory_budget_gib" if on_cpu else about.batch_size_advice
        raise ConfigError(
            f"algorithm.{about.open_batch_size}=0: not even a batch of one row fits the "
            f"{allowed / 2**30:.2f} GiB that an update may take on {device}; {fix} or use a "
            "smaller network"
        )
    logger.info("batch_size %d: the largest that fits %.2f GiB", size, allowed / 2**30)
    return size


def _room_after(config: ExperimentConfig, spec: EnvSpec, device: torch.device) -> int:
    """Make the updates that take most memory.

    Returns:
        rows that a batch may have for what the storage holds; 0 if CUDA ran out of memory.
    """
    try:
        probe = Probe(config, spec)
        # The second has beside it what the optimizers keep; on CUDA the fourth may be captured.
        for _ in range(CALLS_TO_CAPTURE if device.type == "cuda" else 2):
            probe.fill()
            probe.update()
        probe.wait()
    except torch.OutOfMemoryError:  # caught here, so that its frames' tensors go
        return 0
    storage = probe.storage
    return min(_MOST, storage.capacity) if isinstance(storage, ReplayStorage) else _MOST


def largest(fits: Callable[[int], bool], first: int, most: int) -> int:
    """Return the largest size up to `most` that fits, to a sixteenth, by doubling and bisection.

    Args:
        fits: function from a size to whether it fits.
        first: size to try first.
        most: largest size to try.

    Returns:
        the size; 0 if not even 1 fits.
    """
    good, bad = 0, most + 1
    size = min(first, most)
    while bad - good > max(1, good // 16):
        if fits(size):
            good = size
        else:
            bad = size
        size = min(2 * good, most) if bad > most else (good + bad) // 2
    return good


def peak_bytes(make: Callable[[], int], device: torch.device) -> float:
    """Return the most memory in use at a time while something is made, after a clean-up.

    On the CPU it is the kernel's own mark of the largest resident size, if that can be set back: on
    Linux, but where /proc/self/clear_refs is not to be written, as in some containers. Else a
    thread samples the resident size, and misses a peak that is over before it gets its turn.

    Args:
        make: function that returns 0 if memory ran out.
        device: device of the memory.

    Returns:
        bytes of the device, or of the process; infinity if memory ran out.
    """
    _release(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        made, peak = make(), torch.cuda.max_memory_allocated()
    elif _reset_high_water():
        made, peak = make(), _high_water()
    else:
        made, peak = _sampled(make)
    return peak if made else math.inf


def _release(device: torch.device) -> None:
    """Give unused memory back, or the next trial would seem to need less."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


def _reset_high_water() -> bool:
    """Set the kernel's mark of the largest resident size back; returns whether it can be had."""
    try:
        _CLEAR_REFS.write_text("5")
        return _high_water() > 0
    except OSError:
        return False


def _high_water() -> int:
    """Return the largest resident size since the mark was reset, in bytes; 0 if unknown."""
    status = Path("/proc/self/status").read_text()
    found = re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def _sampled(make: Callable[[], int]) -> tuple[int, int]:
    """Return what is made, and the largest resident size that a thread saw meanwhile, in bytes."""
    process, ended, most = psutil.Process(), threading.Event(), 0

    def sample() -> None:
        nonlocal most
        most = max(most, process.memory_info().rss)

    def watch() -> None:
        while not ended.wait(_SAMPLE_S):
            sample()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        made = make()
    finally:
        ended.set()
        thread.join()
    sample()
    return made, most
