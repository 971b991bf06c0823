"""The largest batch that fits: `batch_size: 0` in an algorithm's options.

Whole updates are tried on made-up rows, forward, backward and optimiser step: a forward pass alone
says little, since what is kept for the backward pass takes most of the memory.
"""

import ctypes
import gc
import hashlib
import json
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch

from learner_service.algorithm import algorithm_options
from learner_service.device import select_device
from learner_service.probe import seconds_per_row
from shared.config import ExperimentConfig, PluginConfig
from shared.errors import ConfigError
from shared.process import logger
from shared.spec import EnvSpec

_FIRST, _MOST = 256, 1 << 20
_CUDA_SHARE = 0.8  # of the free memory: the margin is for acting and for fragmentation
_SAMPLE_S = 0.001


def fit_batch_size(config: ExperimentConfig, spec: EnvSpec, run_dir: Path) -> ExperimentConfig:
    """Replace a batch size of 0 by the largest that fits the device; found once for each run.

    Raises:
        ConfigError: if not even one row fits.
    """
    options = algorithm_options(config.algorithm)
    place = _place(options)
    if place is None:
        return config
    cache = run_dir / "batch-size.json"
    key = hashlib.sha256((config.model_dump_json() + repr(spec)).encode()).hexdigest()
    saved = _read(cache)
    if saved.get("key") == key:
        return _with_size(config, place, saved["batch_size"], {})
    device = select_device(config.learner)
    logger.info("looking for the largest batch that fits %s ...", device)
    allowed = _allowed(config, device)

    def attempt(size: int) -> None:
        seconds_per_row(_with_size(config, place, size, {"data_passes": 1}), spec, repeats=1)

    attempt(1)  # what the libraries take once is no batch's fault
    meter = _Meter(device)

    def fits(size: int) -> bool:
        try:
            with meter:
                attempt(size)
        except torch.cuda.OutOfMemoryError:
            return False
        return meter.peak <= allowed

    size = largest(fits, _FIRST, _MOST)
    if size == 0:
        raise ConfigError(
            f"not even a batch of one row fits the {allowed / 2**30:.2f} GiB that an update may "
            "take; raise learner.memory_budget_gib or use a smaller network"
        )
    logger.info("batch_size %d: the largest that fits %.2f GiB", size, allowed / 2**30)
    cache.write_text(json.dumps({"key": key, "batch_size": size}))
    return _with_size(config, place, size, {})


def largest(fits: Callable[[int], bool], first: int, most: int) -> int:
    """The largest size that fits, to a sixteenth, by doubling and bisection; 0 if none does."""
    good, bad = 0, most + 1
    size = first
    while size <= most and fits(size):
        good, size = size, size * 2
    if size <= most:
        bad = size
    while good == 0 and bad > 1:
        size = bad // 2
        good, bad = (size, bad) if fits(size) else (0, size)
    while bad <= most and bad - good > max(1, good // 16):
        size = (good + bad) // 2
        good, bad = (size, bad) if fits(size) else (good, size)
    return good


def _place(options: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Where among an algorithm's options a batch size of 0 stands."""
    if options.get("batch_size") == 0:
        return ("batch_size",)
    replay = options.get("replay")
    if isinstance(replay, Mapping) and replay.get("batch_size") == 0:
        return ("replay", "batch_size")
    return None


def _with_size(
    config: ExperimentConfig, place: tuple[str, ...], size: int, also: Mapping[str, Any]
) -> ExperimentConfig:
    options = algorithm_options(config.algorithm)
    inner = options
    for part in place[:-1]:
        inner = inner[part]
    inner[place[-1]] = size
    if place[0] == "replay":
        inner["start_rows"] = max(inner["start_rows"], size)
    options |= {k: v for k, v in also.items() if k in options}
    algorithm = PluginConfig(name=config.algorithm.name, **options)
    return config.model_copy(update={"algorithm": algorithm})


def _allowed(config: ExperimentConfig, device: torch.device) -> float:
    """Bytes that an update may take."""
    if device.type == "cuda":
        return _CUDA_SHARE * torch.cuda.mem_get_info(device)[0]
    return config.learner.memory_budget_gib * 2**30


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


class _Meter:
    """Peak memory of what runs inside `with`, beyond what was in use when the meter was made.

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
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
            return
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while True:
            self._highest = max(self._highest, self._now())
            if self._stop.wait(_SAMPLE_S):
                return

    def __exit__(self, *error: object) -> None:
        if self._cuda:
            self._highest = torch.cuda.max_memory_allocated()
        else:
            self._stop.set()
            self._thread.join()
        self.peak = self._highest - self._base
        self._release()

    def _release(self) -> None:
        """Give unused memory back, or the next trial would seem to need less."""
        gc.collect()
        if self._cuda:
            torch.cuda.empty_cache()
        elif sys.platform == "linux":
            ctypes.CDLL(None).malloc_trim(0)
