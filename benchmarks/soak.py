"""A long run, watched from outside: does it hold on to memory, descriptors or threads?

    python -m benchmarks.soak --minutes 60

A learner, an environment server and an evaluator are real processes that speak TLS over loopback:
they train, evaluate, write checkpoints and are asked for their metrics. Beside them visitors come
and go, each over a connection of its own: some leave in order, some vanish, some are refused for
what they send or are. As a worker does, they reconnect unless the status is final: where the
learner ends a stream that is just being written on, grpc's client sometimes reports INTERNAL in
place of the learner's status. The environments wait in every step without using the processor, so
an hour costs a few minutes of one core.

What counts is the median of the last fifth of the time after the warm-up against that of its first
fifth. The exit code is 1 if a process's own or resident memory grew by more than the limit, or its
descriptors or threads at all, or if a visitor met another end than it had to. Written are
benchmarks/results/soak.json with a table (.md) and curves (.svg).
"""

import argparse
import asyncio
import dataclasses
import itertools
import json
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
from prometheus_client import CollectorRegistry

from murmur.benchmarks._processes import Processes, cpu_s
from murmur.doctor.machine import RESULTS
from murmur.env_service.environment import make_environment
from murmur.env_service.metrics import WorkerMetrics
from murmur.env_service.sessions.connection import Connection
from murmur.env_service.sessions.reconnect import Disconnected
from murmur.env_service.sessions.worker import Stream, hello_of
from murmur.kit.certs import make_certificates
from murmur.results import origin_text, provenance, require_clean_source, run_command
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.config.section import validate
from murmur.shared.rpc import rollout_pb2 as pb
from murmur.shared.wire.channel import FINAL
from murmur.shared.wire.credentials import Role
from murmur.shared.wire.timestep import StepType

_SAMPLE_EVERY_S = 10.0
_SHORT_SESSION_EVERY_S = 3.0
_MAX_ROWS = 30  # of a visit
_MAX_CONNECTS = 3  # in a row
_MAX_DRIFT = 0.02
_DELAY_MS = 25.0
_FINAL = {status.name for status in FINAL} | {"OK"}
_COUNTED = ("updates", "rows_received", "rows_trained", "rows_dropped", "episodes", "checkpoints")


def experiment() -> dict[str, Any]:
    """Return the configuration: two sessions of slow environments, an update every few seconds."""
    return {
        "environment": {
            "name": "gymnasium",
            "factory": "benchmarks.slow_environment:make",
            "arguments": {"delay_ms": _DELAY_MS},
        },
        "env_server": {"num_workers": 1, "envs_per_worker": 4, "sessions_per_worker": 2},
        "algorithm": {"name": "mappo", "batch_size": 50, "batch_number": 2, "data_passes": 2},
        "network": {"name": "mlp", "hidden": [32]},
        "learner": {"device": "cpu", "checkpoint_every_updates": 10, "max_policy_lag": 4},
        "evaluation": {"every_updates": 20, "episodes": 4},
    }


@dataclass(frozen=True)
class Sample:
    """Measurements of all processes at one moment.

    Attributes:
        minute: minutes since the first sample.
        own_mb, resident_mb, descriptors, threads: figures by process.
        series: number of metrics that the learner exposes.
    """

    minute: float
    own_mb: dict[str, float]
    resident_mb: dict[str, float]
    descriptors: dict[str, int]
    threads: dict[str, int]
    series: int


def take_sample(processes: Processes, began: float) -> Sample:
    """Measure all processes now.

    Raises:
        psutil.NoSuchProcess: if one of them has ended.
    """
    own_mb, resident_mb, descriptors, threads = {}, {}, {}, {}
    for name, process in processes.all.items():
        memory = process.memory_full_info()
        own_mb[name], resident_mb[name] = memory.uss / 1e6, memory.rss / 1e6
        descriptors[name], threads[name] = process.num_fds(), process.num_threads()
    minute = (time.monotonic() - began) / 60
    series = processes.snapshot().series
    return Sample(minute, own_mb, resident_mb, descriptors, threads, series)


async def short_session(config: ExperimentConfig, role: Role, what: str, rows: int) -> str:
    """Play one session from Hello to its end; return how it ended.

    Args:
        config: configuration with the environment to play and the learner's address.
        role: role whose credentials the session shows.
        what: "leaves", "vanishes", "sends NaN" or "brings another environment".
        rows: number of messages before the end.
    """
    environment = make_environment(config.environment, 1)
    spec = environment.spec
    if what == "brings another environment":
        spec = dataclasses.replace(spec, name="another")
    seeds = np.zeros(1, np.uint64)
    async with aclosing(Connection(config, role)) as connection, connection.channel() as channel:
        stream = Stream(channel, spec, 1, WorkerMetrics("train", CollectorRegistry()))
        try:
            await stream.greet(hello_of(spec, 1, "visitor", pb.MODE_TRAIN))
            timestep = environment.reset(seeds)
            for _ in range(rows):
                action = await stream.exchange(timestep)
                timestep = environment.step(action, timestep.step_type == StepType.LAST, seeds)
            if what == "sends NaN":
                poison = np.full_like(timestep.reward, np.nan)
                await stream.exchange(dataclasses.replace(timestep, reward=poison))
            if what == "leaves":
                await stream.close()
                return grpc.StatusCode.OK.name
        except Disconnected as error:
            return error.code.name
        finally:
            stream.cancel()
            environment.close()
    return grpc.StatusCode.CANCELLED.name


VISITS: tuple[tuple[str, Role, str], ...] = (
    ("leaves", "environment", "OK"),
    ("vanishes", "environment", "CANCELLED"),
    ("sends NaN", "environment", "INVALID_ARGUMENT"),
    ("brings another environment", "environment", "FAILED_PRECONDITION"),
    ("leaves", "read-only", "PERMISSION_DENIED"),
)


async def open_short_sessions(address: str, credentials: Path, ends: Counter[str]) -> None:
    """Open one session after another; count each end against the required one."""
    chance = random.Random(0)  # noqa: S311 - no secret
    for what, role, wanted in itertools.cycle(VISITS):
        config = validate(
            ExperimentConfig,
            {
                "environment": experiment()["environment"],
                "env_server": {"learner": address},
                "security": {"folder": str(credentials / role)},
            },
        )
        for attempt in range(_MAX_CONNECTS):
            end = await short_session(config, role, what, chance.randrange(1, _MAX_ROWS))
            if end == wanted or end in _FINAL or attempt == _MAX_CONNECTS - 1:
                break
            ends[f"{end}, reconnected"] += 1
        ends[end if end == wanted else f"{end} instead of {wanted} ({what})"] += 1
        await asyncio.sleep(_SHORT_SESSION_EVERY_S)


async def soak(minutes: float, warm_up: float) -> dict[str, Any]:
    """Run everything for this time; return samples and findings."""
    ends: Counter[str] = Counter()
    pause_s = min(_SAMPLE_EVERY_S, 60 * minutes / 5)  # even a trial takes some
    with tempfile.TemporaryDirectory(prefix="murmur-certs-") as name:
        credentials = Path(name)
        make_certificates(credentials, ["127.0.0.1"], days=30)
        servers: tuple[Role, ...] = ("environment", "evaluator")
        with Processes(experiment(), credentials, servers=servers) as processes:
            processes.wait_for_updates(1)
            began = time.monotonic()
            cpu_began = sum(map(cpu_s, processes.all.values()))
            visitors = asyncio.create_task(
                open_short_sessions(processes.address, credentials, ends)
            )
            samples: list[Sample] = []
            try:
                while not samples or samples[-1].minute < minutes:
                    samples.append(await asyncio.to_thread(take_sample, processes, began))
                    done, _ = await asyncio.wait({visitors}, timeout=pause_s)
                    for task in done:
                        task.result()  # raises: a visitor never ends by itself
            finally:
                visitors.cancel()
            cpu = sum(map(cpu_s, processes.all.values())) - cpu_began
            learner = processes.snapshot().metrics
    after = [s for s in samples if s.minute >= warm_up]
    fifth = max(1, len(after) // 5)
    return {
        "minutes": samples[-1].minute,
        "warm_up_minutes": warm_up,
        "cores_used": cpu / (60 * samples[-1].minute),
        **{name: learner[f"{name}_total"] for name in _COUNTED},
        "visits": dict(ends),
        "metric_series": [after[0].series, after[-1].series],
        "processes": compare(after[:fifth], after[-fifth:]),
        "samples": [dataclasses.asdict(s) for s in thin(samples)],
    }


def compare(early: Sequence[Sample], late: Sequence[Sample]) -> dict[str, dict[str, Any]]:
    """Compare two stretches of time: medians by process, and the growth of its own memory."""
    found: dict[str, dict[str, Any]] = {}
    for name in early[0].own_mb:
        row: dict[str, Any] = {}
        for what in ("own_mb", "resident_mb", "descriptors", "threads"):
            row[what] = [
                statistics.median(getattr(s, what)[name] for s in part) for part in (early, late)
            ]
        row["drift"] = _growth(row["own_mb"])
        found[name] = row
    return found


def _growth(medians: Sequence[float]) -> float:
    return medians[1] / medians[0] - 1


def thin(samples: Sequence[Sample]) -> list[Sample]:
    """Thin samples to about a hundred, with rounded numbers."""
    return [
        dataclasses.replace(
            s,
            minute=round(s.minute, 2),
            own_mb={k: round(v, 2) for k, v in s.own_mb.items()},
            resident_mb={k: round(v, 2) for k, v in s.resident_mb.items()},
        )
        for s in samples[:: max(1, len(samples) // 100)]
    ]


def problems(result: dict[str, Any]) -> list[str]:
    """Return messages on figures that grew and on sessions that ended with a wrong status."""
    found = [f"{count} visits ended with {end}" for end, count in result["visits"].items()]
    found = [words for words in found if "instead" in words]
    for name, row in result["processes"].items():
        for what in ("own", "resident"):
            growth = _growth(row[f"{what}_mb"])
            if growth > _MAX_DRIFT:
                found.append(f"{name}: {what} memory grew by {growth:.1%}")
        for what in ("descriptors", "threads"):
            early, late = row[what]
            if late > early:
                found.append(f"{name}: {what} grew from {early:g} to {late:g}")
    early, late = result["metric_series"]
    if late > early:
        found.append(f"learner: metric series grew from {early} to {late}")
    return found


def table(record: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    result = record["result"]
    visits = ", ".join(f"{count} {end}" for end, count in sorted(result["visits"].items()))
    lines = [
        f"`{record['command']}`",
        "",
        f"{origin_text(record)}.",
        f"{result['minutes']:.0f} minutes, the first {result['warm_up_minutes']:.0f} of them "
        f"warm-up; {result['cores_used']:.2f} cores used. Visits by how they ended: {visits}. "
        + ", ".join(f"{name.replace('_', ' ')}: {result[name]:.0f}" for name in _COUNTED)
        + ".",
        f"Metric series of the learner: {result['metric_series'][0]} after the warm-up, "
        f"{result['metric_series'][1]} at the end.",
        "",
        "Medians of the first and the last fifth of the time after the warm-up:",
        "",
        "| process | own memory (USS), MB | drift | resident, MB | descriptors | threads |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in result["processes"].items():
        (own, own_end), (rss, rss_end) = row["own_mb"], row["resident_mb"]
        (files, files_end), (threads, threads_end) = row["descriptors"], row["threads"]
        lines.append(
            f"| {name} | {own:.1f} → {own_end:.1f} | {row['drift']:+.1%} | "
            f"{rss:.1f} → {rss_end:.1f} | {files:g} → {files_end:g} | "
            f"{threads:g} → {threads_end:g} |"
        )
    found = problems(result)
    lines += [
        "",
        "Nothing grew." if not found else "Not as it should be: " + "; ".join(found) + ".",
    ]
    return "\n".join(lines) + "\n\n![Memory, descriptors and threads](soak.svg)\n"


def picture(result: dict[str, Any], file: Path) -> None:
    """Plot resident memory, its change, descriptors and threads over time, a line per process."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    samples = result["samples"]
    minutes = [s["minute"] for s in samples]
    figure, axes = plt.subplots(1, 4, figsize=(17, 3.6))
    for name, row in result["processes"].items():
        resident = np.array([s["resident_mb"][name] for s in samples])
        change = 100 * (resident / row["resident_mb"][0] - 1)
        for axis, values in zip(
            axes,
            (
                resident,
                change,
                *([s[w][name] for s in samples] for w in ("descriptors", "threads")),
            ),
            strict=True,
        ):
            axis.plot(minutes, values, label=name)
    titles = ("resident memory, MB", "resident memory, change in %", "descriptors", "threads")
    for axis, title in zip(axes, titles, strict=True):
        axis.set(title=title, xlabel="minutes")
        axis.axvline(result["warm_up_minutes"], ls=":", c="grey")
    axes[0].set_ylim(bottom=0)
    axes[1].set_ylim(-5, 5)
    axes[1].axhline(100 * _MAX_DRIFT, ls="--", c="grey")
    for axis in axes[2:]:
        axis.set_ylim(bottom=0)
    axes[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(file, metadata={"Date": None})


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--warm-up", type=float, default=10.0, help="minutes that do not count")
    parser.add_argument("--folder", type=Path, default=RESULTS, help="where to write")
    parser.add_argument("--dirty", action="store_true", help="save from source not committed")
    arguments = parser.parse_args()
    if arguments.warm_up >= arguments.minutes:
        parser.error(f"--warm-up {arguments.warm_up:g} is not below --minutes")
    require_clean_source(arguments.dirty)
    origin = provenance("benchmarks.soak")
    result = asyncio.run(soak(arguments.minutes, arguments.warm_up))
    record: dict[str, Any] = {
        "benchmark": "soak",
        **origin,
        "load_average": psutil.getloadavg()[0],
        "result": result,
    }
    arguments.folder.mkdir(parents=True, exist_ok=True)
    file = arguments.folder / "soak.json"
    file.write_text(json.dumps(record) + "\n")
    file.with_suffix(".md").write_text(table(record))
    picture(result, file.with_suffix(".svg"))
    print(table(record))
    print(f"written: {file}, .md, .svg")
    raise SystemExit(1 if problems(result) else 0)


if __name__ == "__main__":
    run_command(main)
