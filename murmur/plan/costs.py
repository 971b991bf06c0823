"""Costs of a run's steps, batches and updates, from the counts and the ledger that it logs."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, linear_regression
from typing import Any

from murmur.plan.model import Costs
from murmur.runs.run_folder import RunFolder
from murmur.shared.process.errors import ConfigError
from murmur.shared.process.ledger import since

_ACTING = ("act", "evaluate")  # states of the inference thread in which torch works
_LEARNING = ("sample", "forward", "backward", "optimize", "synchronize", "publish", "wait_rows")
_WAITING = ("wait_environments", "wait_learning", "wait_rows", "start")
_LEAST_S = 3.0  # a window of less says little
_HOST_SHARE = 0.7  # of a batch's host work that grows with its messages, where not measured
_JITTER = 0.1  # of a job's work: what steps and batches vary by on a quiet machine


@dataclass(frozen=True)
class Window:
    """Work of a learner between two of its records, and the processor time that it took.

    Attributes:
        seconds: length of the window [s].
        messages: observation messages.
        batches: inference batches.
        updates: updates made.
        rows: environment rows received.
        trained: environment rows that updates took.
        env_steps: environment steps received.
        grpc_s: processor seconds of the event loop.
        io_s: processor seconds of gRPC's own threads.
        host_s: seconds of the inference thread for storing and replying.
        copy_s: seconds of the inference thread for copies of observations.
        act_s: seconds of the inference thread in the policy.
        learn_s: seconds of learning and of the steps after an update.
        bytes: bytes of observation messages.
        workers_s: processor seconds of the environment servers; None: not known.
        learner_s: processor seconds of the learner's process.
        others: processors that other programs used meanwhile.
        eager: share of the learner's calls that ran without a CUDA graph; 0 on a CPU.
    """

    seconds: float
    messages: float
    batches: float
    updates: float
    rows: float
    trained: float
    env_steps: float
    grpc_s: float
    host_s: float
    act_s: float
    learn_s: float
    bytes: float
    workers_s: float | None = None
    learner_s: float = 0.0
    others: float = 0.0
    eager: float = 0.0
    io_s: float = 0.0
    copy_s: float = 0.0

    @property
    def batch(self) -> float:
        """Messages of a batch."""
        return self.messages / max(self.batches, 1)


def window(before: Mapping[str, Any], after: Mapping[str, Any]) -> Window:
    """Return the work between two records of progress.jsonl of one process.

    Raises:
        ConfigError: if no environment row came between them.
    """
    work = {k: v - before["work"].get(k, 0.0) for k, v in after["work"].items()}
    spent = since(before["ledger"], after["ledger"])
    inference = spent.get("inference", {})
    cpu = {k.removeprefix("cpu_s/"): v for k, v in work.items() if k.startswith("cpu_s/")}
    # The ledger has wall time by state: its shares divide the inference thread's CPU time.
    at_work = {s: v for s, v in inference.items() if s not in _WAITING}
    total = max(sum(at_work.values()), 1e-9)
    acting = sum(at_work.get(s, 0.0) for s in _ACTING) / total
    copying = at_work.get("transfer", 0.0) / total
    sync = "learner" not in spent
    learning = sum(at_work.get(s, 0.0) for s in (*_LEARNING, "log", "checkpoint")) / total
    of_inference = cpu.get("inference", 0.0)
    learn = of_inference * learning if sync else cpu.get("learner", 0.0)
    # Of torch's own threads a learner has some only if learner.num_threads is more than 1.
    others = max(0.0, work["cpu_s"] - sum(cpu.values()))
    if not work["requests"] or not work["batches"]:
        raise ConfigError(
            f"no environment row came in {after['time'] - before['time']:.0f} s: are environment "
            "servers connected? See the learner's log"
        )
    return Window(
        seconds=after["time"] - before["time"],
        messages=work["requests"],
        batches=work["batches"],
        updates=after["updates"] - before["updates"],
        rows=after["rows_received"] - before["rows_received"],
        trained=after["rows_trained"] - before["rows_trained"],
        env_steps=after["env_steps_received"] - before["env_steps_received"],
        grpc_s=cpu.get("grpc", 0.0),
        io_s=others,
        host_s=of_inference * max(0.0, 1 - acting - copying - (learning if sync else 0.0)),
        copy_s=of_inference * copying,
        act_s=of_inference * acting,
        learn_s=learn,
        bytes=work["received_bytes"],
        learner_s=work["cpu_s"],
        eager=_eager(before.get("graphs", {}), after.get("graphs", {})),
    )


def _eager(before: Mapping[str, Any], after: Mapping[str, Any]) -> float:
    """Return the share of the learner thread's calls without a graph, if some have one."""
    calls = since(before, after)
    replays, eager = (
        sum(count for name, count in calls.get(metric, {}).items() if name != "act")
        for metric in ("graph_replays", "eager_calls")
    )
    return eager / (eager + replays) if replays else 0.0


def costs_of(windows: Sequence[Window], *, threads: int = 1) -> Costs:
    """Fit costs to windows with batches of different sizes; of one, a share of them is assumed.

    Args:
        windows: windows of runs that differ in the number of sessions alone; workers_s is known of
            each.
        threads: torch threads of the learner.
    """
    messages = sum(w.messages for w in windows)
    updates = sum(w.updates for w in windows)
    trained = sum(w.trained for w in windows)
    learned = sum(w.learn_s for w in windows)
    batch_s, batch_message_s = line([(w.batch, w.host_s / w.batches) for w in windows], _HOST_SHARE)
    act_s, act_message_s = line([(w.batch, w.act_s / w.batches) for w in windows], 0.0)
    rows = sum(w.rows for w in windows)
    per_row = learned / trained if trained else 0.0
    return Costs(
        step_s=sum(w.workers_s or 0.0 for w in windows) / messages,
        message_s=sum(w.grpc_s for w in windows) / messages,
        io_message_s=sum(w.io_s for w in windows) / messages,
        copy_message_s=sum(w.copy_s for w in windows) / messages,
        batch_s=batch_s,
        batch_message_s=batch_message_s,
        act_s=act_s,
        act_message_s=act_message_s,
        update_s=0.0,
        update_row_s=per_row if updates else 0.0,
        message_bytes=sum(w.bytes for w in windows) / messages,
        threads=threads,
        steps_per_row=sum(w.env_steps for w in windows) / max(rows, 1),
        jitter=_JITTER,
        eager=max(w.eager for w in windows),
    )


def line(points: Iterable[tuple[float, float]], share: float) -> tuple[float, float]:
    """Fit a least-squares line through points: (value at 0, slope), neither negative.

    Args:
        points: (x, y); x is 1 or more.
        share: share of y that counts as the slope's if all points have one x.
    """
    xs, ys = zip(*points, strict=True)
    mean_x, mean_y = fmean(xs), fmean(ys)
    if sum((x - mean_x) ** 2 for x in xs) < (0.1 * mean_x) ** 2:
        return mean_y * (1 - share), mean_y * share / mean_x
    slope = min(max(0.0, linear_regression(xs, ys).slope), mean_y / mean_x)
    return mean_y - slope * mean_x, slope


def run_window(run: RunFolder) -> Window:
    """Return a run's work in its last process, without the warm-up in its first third.

    Raises:
        ConfigError: if its records are too few, or are of a version that did not count work.
    """
    records: list[dict[str, Any]] = []
    for record in run.newest_records("progress"):
        if records and record.get("work", {}).get("cpu_s", 0) > records[-1]["work"]["cpu_s"]:
            break  # of the process before
        if not record.get("work"):
            break
        records.append(record)
    if not records:
        raise ConfigError(
            f"'{run.path}' has no record of its work: it is of a version before `murmur plan`, or "
            "has just begun; train for a minute, or leave --run out, which measures here"
        )
    last = records[0]
    wanted = last["time"] - max(_LEAST_S, (last["time"] - records[-1]["time"]) * 2 / 3)
    first = next((r for r in records if r["time"] <= wanted), records[-1])
    if last["time"] - first["time"] < _LEAST_S:
        raise ConfigError(f"'{run.path}' has logged too little; try again in a few seconds")
    return window(first, last)


def load_costs(path: Path) -> Costs:
    """Load costs from a file.

    Raises:
        ConfigError: if the file cannot be read, or holds something else.
    """
    try:
        return Costs(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"--costs {path}: {error}") from None
