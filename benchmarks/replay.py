"""A replay of a million rows: sampling, new priorities, new rows; one CPU core, and CUDA if there.

Rows are those of four agents that observe 18 numbers and act with 2; a sample is 1024 transitions
with all their arrays. Uniform sampling is prioritized with all priorities alike.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import psutil
import torch

from murmur.benchmarks.effort import Effort
from murmur.learner_service.storage.replay import ReplayBatch, ReplayConfig, ReplayStorage
from murmur.shared.wire.spec import ArraySpec, Continuous, EnvSpec

DESCRIPTION = "a sample of 1024 from a replay of 1 M rows (target ≤ 2 ms on a CPU core)"

_ROWS, _BATCH, _ENVS, _STEPS = 1_000_000, 1024, 64, 8
_SPEC = EnvSpec("toy", 4, (ArraySpec("observation", "float32", (18,)),), Continuous(2))


def run(effort: Effort = Effort.FULL) -> dict[str, Any]:
    """Measure median milliseconds for each device."""
    rows, repeats = effort.choose((10_000, 1), (100_000, 20), (_ROWS, 200))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        result = {"CPU, CPU-ms": _measure(torch.device("cpu"), rows, repeats)}
    finally:
        torch.set_num_threads(before)
    if torch.cuda.is_available():
        result["CUDA, ms"] = _measure(torch.device("cuda"), rows, repeats)
    return {"rows": rows, "sample": _BATCH, "load_average": psutil.getloadavg()[0], **result}


def _measure(device: torch.device, rows: int, repeats: int) -> dict[str, float]:
    table = {}
    error = torch.rand(_BATCH, device=device)

    def take() -> ReplayBatch:
        batch = storage.sample(0, 0.0)
        assert batch is not None
        batch.td_error = error
        return batch

    kinds: dict[str, dict[str, Any]] = {
        "uniform sample": {},
        "prioritized sample, 3 steps": {"prioritized": True, "n_step": 3},
        "prioritized sample": {"prioritized": True},
    }
    for name, options in kinds.items():
        config = ReplayConfig(
            capacity_rows=rows, batch_size=_BATCH, unroll_steps=_STEPS, prefetch=False, **options
        )
        storage = ReplayStorage(config, _SPEC, 0.99, None, device, {}, seed=0)
        for _ in range(-(-rows // (_ENVS * _STEPS))):
            _put(storage)
        for _ in range(50):  # priorities of many sizes
            storage.done(take())
        table[name] = _time(take, device, repeats)
    batch = take()
    table["new priorities"] = _time(lambda: storage.done(batch), device, repeats)
    table[f"{_ENVS * _STEPS} new rows"] = _time(lambda: _put(storage), device, repeats)
    return table


def _put(storage: ReplayStorage) -> None:
    """Add rows that are all in mid-episode."""
    unroll = storage.begin(_ENVS, 0, 0)
    unroll.arrays["step_type"].fill_(1)
    unroll.cursor = storage.length + 1
    storage.add(unroll)


def _time(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Measure median milliseconds: of CPU time on a CPU, else of elapsed time."""
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    spent = []
    for turn in range(repeats + 20):
        started = clock()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if turn >= 20:
            spent.append((clock() - started) * 1e3)
    return statistics.median(spent)
