"""The largest batch that fits: `batch_size: 0` in an algorithm's options.

Whole updates are tried on synthetic rows, forward, backward and optimiser step: a forward pass
alone says little, since what is kept for the backward pass takes most of the memory.
"""

import ctypes
import gc
import json
import sys
import threading
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import psutil
import torch

from learner_service.device.cuda_graph import CALLS_TO_CAPTURE
from learner_service.device.device import resolve_precision, select_device
from learner_service.learning.base import algorithm_config, with_options
from learner_service.storage.replay import ReplayStorage
from learner_service.tuning.probe import Probe, depends_on
from shared.config import PluginConfig
from shared.config.experiment import ExperimentConfig
from shared.process.errors import ConfigError, SpecError
from shared.process.files import read_json
from shared.process.process import logger
from shared.wire.spec import EnvSpec

_FIRST, _MOST = 256, 1 << 20
_CUDA_SHARE = 0.8  # of the free memory: the margin is for acting and for fragmentation
_SAMPLE_S = 0.001
_CACHE = "batch-size.json"
_CLEAR_REFS = Path("/proc/self/clear_refs")


def require_nothing_measured(config: ExperimentConfig, run_dir: Path) -> None:
    """Check that a sync run has a batch size: what fits differs from machine to machine.

    Raises:
        ConfigError: if it is to be found, naming the one that was found for the run, or the
            algorithm's default.
    """
    place = algorithm_config(config.algorithm).about.open_batch_size
    if not place or config.learner.pipeline != "sync":
        return
    value: Any = read_json(run_dir / _CACHE).get("batch_size")
    if value is None:
        value = attrgetter(place)(algorithm_config(PluginConfig(name=config.algorithm.name)))
    example = f"={value}" if value else " to a number"
    raise ConfigError(
        f"algorithm.{place}=0 takes what fits this machine, and the sync pipeline uses nothing "
        f"measured: set algorithm.{place}{example}, or learner.pipeline=async"
    )


def fit_batch_size(config: ExperimentConfig, spec: EnvSpec, run_dir: Path) -> ExperimentConfig:
    """Replace a batch size of 0 by the largest that fits the device and the replay.

    Found once for each run, also if it is resumed; again only where something has changed that the
    size depends on: the algorithm, the network, the precision, the environment, or the memory.

    Raises:
        ConfigError: if not even one row fits.
        MurmurError: if the settings do not fit each other.
    """
    options = algorithm_config(config.algorithm)
    about = options.about
    if not (place := about.open_batch_size):
        return config
    device = select_device(config.learner)
    found_for = _depends_on(config, spec, device)
    cache = run_dir / _CACHE
    saved = read_json(cache)
    if saved.get("found_for") == found_for:
        return with_options(config, options.changed({place: saved["batch_size"]}))
    logger.info("looking for the largest batch that fits %s ...", device)
    allowed = _allowed(config, device)

    def room_after(size: int) -> int:
        trial = options.changed({**about.trial, place: size})
        return _room_after(with_options(config, trial), spec, device)

    size = 0
    if most := room_after(1):  # what the libraries take once is no batch's fault
        meter = _Meter(device)

        def fits(size: int) -> bool:
            try:
                with meter:
                    made = room_after(size) > 0
            except SpecError:  # a row did: this is more than learner.memory_limit_gib
                return False
            return made and meter.peak <= allowed

        size = largest(fits, _FIRST, most)
    if size == 0:
        on_cpu = device.type == "cpu"
        fix = "raise learner.memory_budget_gib" if on_cpu else about.batch_size_advice
        raise ConfigError(
            f"algorithm.{place}=0: not even a batch of one row fits the "
            f"{allowed / 2**30:.2f} GiB that an update may take on {device}; {fix} or use a "
            "smaller network"
        )
    logger.info("batch_size %d: the largest that fits %.2f GiB", size, allowed / 2**30)
    cache.write_text(json.dumps({"batch_size": size, "found_for": found_for}))
    return with_options(config, options.changed({place: size}))


def _room_after(config: ExperimentConfig, spec: EnvSpec, device: torch.device) -> int:
    """Make the updates that take most memory.

    Returns:
        how many rows a batch may have for what the storage holds; 0 if CUDA ran out of memory.
    """
    try:
        probe = Probe(config, spec)
        # The second has beside it what the optimisers keep; on CUDA the fourth may be captured.
        for _ in range(CALLS_TO_CAPTURE if device.type == "cuda" else 2):
            probe.fill()
            probe.update()
        probe.wait()
    except torch.cuda.OutOfMemoryError:  # caught here, so that its frames' tensors go
        return 0
    storage = probe.storage
    return min(_MOST, storage.capacity) if isinstance(storage, ReplayStorage) else _MOST


def largest(fits: Callable[[int], bool], first: int, most: int) -> int:
    """The largest size up to `most` that fits, to a sixteenth, by doubling and bisection; or 0."""
    good, bad = 0, most + 1
    size = min(first, most)
    while bad - good > max(1, good // 16):
        if fits(size):
            good = size
        else:
            bad = size
        size = min(2 * good, most) if bad > most else (good + bad) // 2
    return good


def _depends_on(config: ExperimentConfig, spec: EnvSpec, device: torch.device) -> dict[str, Any]:
    """Return what the size depends on, as it is read back from JSON."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        memory: dict[str, Any] = {"device": properties.name, "bytes": properties.total_memory}
    else:
        memory = {"device": device.type, "gib": config.learner.memory_budget_gib}
    precision = resolve_precision(config.learner, device)
    return depends_on(config, spec, precision=precision, **memory)


def _allowed(config: ExperimentConfig, device: torch.device) -> float:
    """Bytes that an update may take."""
    if device.type == "cuda":
        return _CUDA_SHARE * torch.cuda.mem_get_info(device)[0]
    return config.learner.memory_budget_gib * 2**30


class _Meter:
    """Peak memory of what runs inside `with`, beyond what was in use when the meter was made.

    On the CPU it is the kernel's own mark of the largest resident size, if that can be set back: on
    Linux, but where /proc/self/clear_refs is not to be written, as in some containers. Else a
    thread samples the resident size, and misses a peak that is over before it gets its turn.

    Attributes:
        peak: bytes, after `with`.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda, self._process = device.type == "cuda", psutil.Process()
        self._release()
        self._base = self._now()
        self.peak = 0

    def _now(self) -> int:
        if self._cuda:
            return torch.cuda.memory_allocated()
        rss: int = self._process.memory_info().rss
        return rss

    def __enter__(self) -> None:
        self._highest = 0
        self._thread: threading.Thread | None = None
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
        elif not _reset_high_water():
            self._stop = threading.Event()
            self._thread = threading.Thread(target=self._watch, daemon=True)
            self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(_SAMPLE_S):
            self._highest = max(self._highest, self._now())

    def __exit__(self, *error: object) -> None:
        if self._cuda:
            self._highest = torch.cuda.max_memory_allocated()
        elif self._thread:
            self._stop.set()
            self._thread.join()
            self._highest = max(self._highest, self._now())
        else:
            self._highest = _high_water()
        self.peak = self._highest - self._base
        self._release()

    def _release(self) -> None:
        """Give unused memory back, or the next trial would seem to need less."""
        gc.collect()
        if self._cuda:
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
    """The largest resident size since the mark was reset, in bytes; 0 if unknown."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
