"""All figures of the GPU path in one table, with goal, prediction and former value.

Needs CUDA; a call takes at most six minutes, and the next one continues. Each topic runs in a
process of its own, set up as a learner's, with a time limit; one that fails or is cut short is in
the result with its error and what it has measured. Results are kept under runs/bench-gpu.
`--smoke` runs the same code in miniature on the CPU, `--dry-run` prints the plan.

    python -m murmur.benchmarks.gpu --session 1 --out FOLDER

measures the first half of the topics, `--session 2` the rest, and writes what there is into FOLDER
after each topic; see benchmarks/gpu_session.sh.
"""

import argparse
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from murmur.benchmarks.effort import Effort
from murmur.benchmarks.gpu_topics import figures
from murmur.benchmarks.gpu_topics.catalogue import SESSIONS, TOPICS
from murmur.benchmarks.gpu_topics.runner import Outcome, Store, run_all, topic_command
from murmur.benchmarks.gpu_topics.topics import Context, is_error
from murmur.doctor.machine import commit
from murmur.learner_service.device.device import why_no_cuda
from murmur.learner_service.telemetry.device_info import describe_device
from murmur.learner_service.telemetry.gpu import Gpu
from murmur.results import provenance, run_command, save_result
from murmur.shared.config.section import known_names
from murmur.shared.process.errors import ConfigError

DESCRIPTION = (
    "every figure of the GPU path in one table: whole runs of three presets, updates, acting, "
    "augmentation, precisions (needs CUDA, two calls of six minutes; each continues the one before)"
)

_BUDGET_S = 345.0  # of a call
_IN_PROCESS = ("costs", "masac", "augment", "updates", "acting", "equality", "launches")


def run(effort: Effort = Effort.FULL, chosen: Sequence[str] = ()) -> dict[str, Any]:
    """Measure the topics; return the table, the topics and the device.

    Args:
        effort: extent of the measurement.
        chosen: topics to measure, in this order; none: all, the most valuable first.

    Raises:
        ConfigError: without CUDA, but for Effort.SMOKE; for an unknown topic.
    """
    require_known(chosen)
    if effort is Effort.SMOKE:
        return _smoke()
    return measure(effort, chosen or tuple(TOPICS), _BUDGET_S)


def require_known(chosen: Sequence[str]) -> None:
    """Refuse unknown topics.

    Raises:
        ConfigError: naming those that there are.
    """
    for name in chosen:
        if name not in TOPICS:
            raise ConfigError(f"--topics: no topic '{name}'; {known_names(name, TOPICS)}")


def measure(
    effort: Effort,
    chosen: Sequence[str],
    budget_s: float,
    out: Path | None = None,
    session: str = "",
    device: str = "cuda",
) -> dict[str, Any]:
    """Measure topics, each in a process of its own.

    Args:
        effort: extent of the measurement.
        chosen: topics, in this order.
        budget_s: time for all of them [s].
        out: folder of the result, which is written after each topic; None: not written.
        session: suffix of the result's name.
        device: "cuda", or "cpu" to try the command.

    Raises:
        ConfigError: without CUDA.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"no GPU to measure: {why_no_cuda()}; --dry-run prints what would be measured, --smoke "
            "runs it in miniature on the CPU"
        )
    context, origin = Context(device, effort), provenance("murmur.benchmarks.gpu")
    file = Path("runs") / "bench-gpu" / f"{_label(effort, device)}.json"
    store = Store(file, None if out is None else out / f"topics{session}.json")

    def keep() -> None:
        if out is not None:
            done = {name: found for name, found in store.load().items() if name in TOPICS}
            whole = _result(context, {name: done[name] for name in TOPICS if name in done})
            save_result(f"gpu{session}", whole, origin, quick=effort is not Effort.FULL, folder=out)

    outcomes = run_all(
        store,
        {name: TOPICS[name].limit_s for name in chosen},
        lambda name: topic_command(name, effort, device),
        budget_s,
        lambda line: print(line, flush=True),
        keep,
    )
    keep()
    return _result(context, outcomes)


def dry_run(chosen: Sequence[str] = ()) -> dict[str, Any]:
    """Return the planned figures, their likely duration and the predictions from the counts.

    Args:
        chosen: topics; none: all.

    Raises:
        ConfigError: for an unknown topic.
    """
    require_known(chosen)
    context = Context("cuda", Effort.FULL)
    topics = {name: TOPICS[name] for name in chosen or TOPICS}
    planned = [figure for topic in topics.values() for figure in topic.plan(context)]
    likely = {
        name: {
            "likely, s": topic.likely_s,
            "limit, s": topic.limit_s,
            "session": 1 + (name in SESSIONS[1]),
            "figures": len(topic.plan(context)),
        }
        for name, topic in topics.items()
    }
    table = {
        name: {column: x for column, x in row.items() if column not in ("measured", "met")}
        for name, row in figures.rows(planned, {}).items()
    }
    counts = {
        case.name: {
            "launches": count.launches,
            "replays among them": count.graphs,
            "nodes": count.nodes,
            "environment rows": count.rows,
            "launches and nodes, ms": count.ms,
            "with arithmetic, ms": case.captured_ms,
        }
        for case in figures.CASES
        if (count := case.counted(figures.OF_A_RUN)) is not None
    }
    return {
        "topics": likely,
        "seconds likely": sum(topic.likely_s for topic in topics.values()),
        "an update of a run": counts,
        "figures": table,
        "prediction": f"{figures.LAUNCH_US} µs a launch, {figures.NODE_US} µs a kernel in a "
        f"graph, or {figures.TFLOPS} TFLOP/s, {figures.TB_PER_S} TB/s if that takes longer",
    }


def _smoke() -> dict[str, Any]:
    """Run the topics' code on the CPU, in this process.

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
    """Return one table of all figures, in the order of the topics."""
    planned = [f for name in outcomes if name in TOPICS for f in TOPICS[name].plan(context)]
    values = {name: value for o in outcomes.values() for name, value in o.figures.items()}
    device = torch.device(context.device)
    gpu = None
    if context.device == "cuda":
        gpu = Gpu(str(torch.cuda.get_device_properties(device).uuid))
    return {
        "figures": figures.rows(planned, values),
        "topics": {
            name: {"seconds": outcome.seconds, "error": outcome.error, **outcome.settings}
            for name, outcome in outcomes.items()
        },
        "device": describe_device(device, "fp32 unless named", gpu),
        "goals not met": sum(row["met"] == "NO" for row in figures.rows(planned, values).values()),
    }


def _label(effort: Effort, device: str) -> str:
    """Name the results that belong together: source, device, torch, effort."""
    name = torch.cuda.get_device_name() if device == "cuda" else device
    parts = (commit(), name, torch.__version__, effort.value)
    return re.sub(r"[^A-Za-z0-9.]+", "-", "-".join(parts))


def main() -> None:
    """Run the chosen topics, and write their figures after each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--session", type=int, choices=(1, 2), help="half of the topics")
    parser.add_argument("--topics", default="", help="only these, by commas, in this order")
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--seconds", type=float, default=_BUDGET_S, help="of all topics")
    parser.add_argument("--smoke", action="store_true", help="in miniature, on the CPU")
    arguments = parser.parse_args()
    wanted = [part.strip() for part in arguments.topics.split(",") if part.strip()]
    require_known(wanted)
    halves = {1: SESSIONS[0], 2: SESSIONS[1], None: tuple(TOPICS)}
    chosen = wanted or halves[arguments.session]
    session = f"-session-{arguments.session}" if arguments.session else ""
    effort, device = (Effort.SMOKE, "cpu") if arguments.smoke else (Effort.FULL, "cuda")
    measure(effort, chosen, arguments.seconds, arguments.out, session, device)


if __name__ == "__main__":
    run_command(main)
