"""Every figure of the GPU path in one table, with its goal and what counts predict for an H200.

Needs CUDA; at most ten minutes. Each topic runs in a process of its own with a time limit; one that
fails is in the result with its error. Results are kept under runs/bench-gpu, so that another call
continues with what is missing. `--smoke` runs the same code in miniature on the CPU, `--dry-run`
prints the plan.
"""

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from learner_service.runtime.device import why_no_cuda
from learner_service.telemetry.device_info import describe_device
from learner_service.telemetry.gpu import Gpu
from murmur.benchmarks.effort import Effort
from murmur.benchmarks.gpu_topics import figures
from murmur.benchmarks.gpu_topics.catalogue import TOPICS
from murmur.benchmarks.gpu_topics.runner import Outcome, Store, run_all, topic_command
from murmur.benchmarks.gpu_topics.topics import Context, is_error
from murmur.machine import commit
from shared.checking import known_names
from shared.errors import ConfigError

DESCRIPTION = (
    "every figure of the GPU path in one table: updates eager and captured, acting, precisions, "
    "streams, NVML while training (needs CUDA, ten minutes; continues where it was cut short)"
)

_BUDGET_S = 590.0
_IN_PROCESS = ("masac", "acting", "updates", "equality", "launches")  # what smoke runs


def run(effort: Effort = Effort.FULL, chosen: Sequence[str] = ()) -> dict[str, Any]:
    """The table, the topics and the device.

    Args:
        effort: how carefully.
        chosen: topics to measure, in this order; none: all.

    Raises:
        ConfigError: without CUDA, but for Effort.SMOKE; for an unknown topic.
    """
    for name in chosen:
        if name not in TOPICS:
            raise ConfigError(f"--topics: no topic '{name}'; {known_names(name, TOPICS)}")
    if effort is Effort.SMOKE:
        return _smoke()
    if not torch.cuda.is_available():
        raise ConfigError(
            f"no GPU to measure: {why_no_cuda()}; --dry-run prints what would be measured, --smoke "
            "runs it in miniature on the CPU"
        )
    context = Context("cuda", effort)
    store = Store(Path("runs") / "bench-gpu" / _label(effort))
    limits = {name: TOPICS[name].limit_s for name in chosen or TOPICS}
    outcomes = run_all(
        store,
        limits,
        lambda name: topic_command(name, effort, "cuda"),
        _BUDGET_S,
        lambda line: print(line, flush=True),
    )
    return _result(context, outcomes)


def dry_run() -> dict[str, Any]:
    """What would be measured, and what the counts predict."""
    context = Context("cuda", Effort.FULL)
    planned = [figure for topic in TOPICS.values() for figure in topic.plan(context)]
    return {
        "figures": figures.rows(planned, {}),
        "topics": {
            name: {"limit, s": topic.limit_s, "figures": len(topic.plan(context))}
            for name, topic in TOPICS.items()
        },
        "prediction": f"{figures.EAGER_US} µs a launch, {figures.CAPTURED_US} µs a kernel in a "
        f"graph, {figures.TFLOPS} TFLOP/s in fp32, {figures.TB_PER_S} TB/s",
    }


def _smoke() -> dict[str, Any]:
    """The topics' code on the CPU, in this process.

    Raises:
        RuntimeError: if any of it fails.
    """
    context = Context("cpu", Effort.SMOKE)
    outcomes = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name in _IN_PROCESS:
            started = time.monotonic()
            measured = TOPICS[name].measure(context)
            outcomes[name] = Outcome(measured, time.monotonic() - started)
    finally:
        torch.set_num_threads(threads)
    result = _result(context, outcomes)
    failed = {
        n: row["measured"] for n, row in result["figures"].items() if is_error(row["measured"])
    }
    if failed:
        raise RuntimeError(f"parts of the benchmark fail: {failed}")
    return result


def _result(context: Context, outcomes: dict[str, Outcome]) -> dict[str, Any]:
    """One table of all figures, in the order of the topics."""
    planned = [f for name in outcomes if name in TOPICS for f in TOPICS[name].plan(context)]
    values = {name: value for o in outcomes.values() for name, value in o.figures.items()}
    device = torch.device(context.device)
    gpu = None
    if context.device == "cuda":
        gpu = Gpu(str(torch.cuda.get_device_properties(device).uuid))
    return {
        "figures": figures.rows(planned, values),
        "topics": {
            name: {"seconds": outcome.seconds, "error": outcome.error}
            for name, outcome in outcomes.items()
        },
        "device": describe_device(device, "fp32 unless named", gpu),
        "goals not met": sum(row["met"] == "NO" for row in figures.rows(planned, values).values()),
    }


def _label(effort: Effort) -> str:
    """Names what results belong together: source, device, torch, effort."""
    parts = (commit(), torch.cuda.get_device_name(), torch.__version__, effort.value)
    return re.sub(r"[^A-Za-z0-9.+]+", "-", "-".join(parts))
