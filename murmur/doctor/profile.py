"""`murmur profile`: a trace of a learner's next updates, and a summary of it."""

import gzip
import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.status import Status
from rich.table import Table

from murmur.learner_service.telemetry.profile_files import (
    FOLDER,
    METADATA,
    REQUEST,
    RUNNING,
    TRACE,
)
from murmur.runs.run_folder import LineTail, RunFolder
from murmur.shared.process.errors import ResourceError
from murmur.shared.process.files import write_whole
from murmur.text import number, plain

_TAKEN_S = 120.0  # until the learner, perhaps in the middle of a long update, sees the request
_SILENT_S = 300.0  # without a line of progress, then it is dead or hangs
_TICK_S = 0.2
_OF_CUDA = ("cuda_runtime", "cuda_driver")  # cudaLaunchKernel, cudaGraphLaunch, cudaMemcpyAsync ...
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass
class Operation:
    """All calls of one operation.

    Attributes:
        calls: number of calls.
        seconds: seconds of the operation itself, without those that it calls, on all threads or, of
            a kernel, on the device.
    """

    calls: int = 0
    seconds: float = 0.0


@dataclass
class Profile:
    """Content of a trace.

    Attributes:
        updates: number of recorded updates.
        seconds: duration of the updates.
        threads: seconds by thread and state, from the learner's ledger.
        operations: operations of the processors, by name.
        kernels: kernels of the GPU, by name.
        calls: calls of CUDA's library by the processors: launches of kernels and graphs, copies,
            waits.
    """

    updates: int
    seconds: float
    threads: Mapping[str, Mapping[str, float]]
    operations: Mapping[str, Operation]
    kernels: Mapping[str, Operation]
    calls: Mapping[str, Operation]


def record(run: RunFolder, updates: int, console: Console) -> Path:
    """Trace the next updates of the run's learner; return the trace's file.

    Raises:
        ResourceError: if no learner is at work or answers, it ends before it is done, or nothing
            can be written.
    """
    folder = run.path / FOLDER
    request = folder / (time.strftime("%Y%m%d-%H%M%S") + f"-{os.getpid()}{REQUEST}")
    running, trace = request.with_suffix(RUNNING), request.with_suffix(TRACE)
    _require_learner(run)
    with suppress(OSError):  # the next line says what is wrong
        folder.mkdir(exist_ok=True)
    write_whole(request, str(updates))
    try:
        with console.status("waiting for the learner, which looks about once a second") as shown:
            _until_taken(request, run)
            _follow(running, run, updates, shown)
    finally:
        request.unlink(missing_ok=True)
    if not trace.exists():
        raise ResourceError(
            f"the learner gave the profile up: it ended, or could not write to '{folder}'; "
            f"see {run.logs / 'learner.log'}"
        )
    return trace


def _until_taken(request: Path, run: RunFolder) -> None:
    deadline = time.monotonic() + _TAKEN_S
    while request.exists():
        _require_learner(run)
        if time.monotonic() > deadline:
            raise ResourceError(
                f"the learner of '{run.path}' did not answer within {_TAKEN_S:.0f} s; see "
                f"{run.logs / 'learner.log'}"
            )
        time.sleep(_TICK_S)


def _require_learner(run: RunFolder) -> None:
    if run.process("learner.json") is None:
        raise ResourceError(
            f"no learner of '{run.path}' is at work on this machine; to start it: {run.again()}"
        )


def _follow(running: Path, run: RunFolder, wanted: int, shown: Status) -> None:
    """Wait until the learner is done with the request, and show how many updates it has."""
    shown.update(f"recording {wanted} updates")
    tail = LineTail(run.progress_file, skip=True)
    first = None  # the first update after the request only warms up
    heard = time.monotonic()
    while running.exists():
        for line in tail.records():
            heard = time.monotonic()
            if line.get("kind") == "progress":
                first = line["updates"] if first is None else first
                recorded = min(max(line["updates"] - first - 1, 0), wanted)
                shown.update(f"recording: {recorded} of {wanted} updates")
        if time.monotonic() - heard > _SILENT_S:
            raise ResourceError(
                f"the learner of '{run.path}' has logged nothing for {_SILENT_S:.0f} s; see "
                f"{run.logs / 'learner.log'}"
            )
        time.sleep(_TICK_S)


def read(trace: Path) -> Profile:
    """Read a trace.

    Raises:
        ResourceError: if it cannot be read or is none of murmur's.
    """
    try:
        with gzip.open(trace, "rt") as file:
            data = json.load(file)
        about, events = data[METADATA], data["traceEvents"]
    except (OSError, EOFError, ValueError, KeyError) as error:
        raise ResourceError(f"'{trace}' is no trace of murmur profile: {error!r}") from None
    spans = [e for e in events if e.get("ph") == "X"]
    return Profile(
        about["updates"],
        about["seconds"],
        about["threads"],
        self_seconds([e for e in spans if e.get("cat") == "cpu_op"]),
        self_seconds([e for e in spans if e.get("cat") in _ON_DEVICE]),
        self_seconds([e for e in spans if e.get("cat") in _OF_CUDA]),
    )


def self_seconds(spans: Sequence[Mapping[str, Any]]) -> dict[str, Operation]:
    """Return calls and seconds by name; a span's seconds are without those of the spans within it.

    Args:
        spans: spans of a trace: "tid", "ts" and "dur" in µs, "name"; on one thread they nest.
    """
    operations: dict[str, Operation] = {}
    open_spans: dict[Any, list[tuple[float, Operation]]] = {}  # by thread: (end, operation)
    for span in sorted(spans, key=lambda s: (s["ts"], -s["dur"])):
        stack = open_spans.setdefault((span.get("pid"), span["tid"]), [])
        while stack and stack[-1][0] <= span["ts"]:
            stack.pop()
        seconds = span["dur"] / 1e6
        if stack:
            stack[-1][1].seconds -= seconds
        operation = operations.setdefault(span["name"], Operation())
        operation.calls += 1
        operation.seconds += seconds
        stack.append((span["ts"] + span["dur"], operation))
    return operations


def show(seen: Profile, console: Console, rows: int = 12) -> None:
    """Print the time of the recorded updates by thread, kernel, CUDA call and operation."""
    each = number(1e3 * seen.seconds / seen.updates)
    console.print(
        f"{seen.updates} updates in {number(seen.seconds)} s, {each} ms each, the recorder's own "
        "work included",
        highlight=False,
        soft_wrap=True,
    )
    states = Table("thread", "state", "share", "ms an update", box=None, padding=(0, 2, 0, 0))
    for thread, spent in seen.threads.items():
        for state, seconds in sorted(spent.items(), key=lambda item: -item[1]):
            if seconds > 0.005 * seen.seconds:
                share = f"{100 * seconds / seen.seconds:.0f} %"
                states.add_row(
                    plain(thread), plain(state), share, number(1e3 * seconds / seen.updates)
                )
    console.print(states)
    for title, operations in (
        ("kernel", seen.kernels),
        ("CUDA call", seen.calls),
        ("operation", seen.operations),
    ):
        if not operations:
            continue
        table = Table(box=None, padding=(0, 2, 0, 0))
        table.add_column(title, no_wrap=True)
        table.add_column("calls an update")
        table.add_column("ms an update, itself")
        longest = sorted(operations.items(), key=lambda item: -item[1].seconds)
        for name, operation in longest[:rows]:
            calls = number(operation.calls / seen.updates)
            table.add_row(plain(name), calls, number(1e3 * operation.seconds / seen.updates))
        console.print()
        console.print(table)
