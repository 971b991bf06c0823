"""The learner's side of `murmur profile`: a trace of its next updates, when its run's folder asks.

`murmur profile` writes <run>/profile/<name>.request, which holds a number of updates. The learner
renames it to <name>.running, records that many updates on all its threads, writes
<name>.pt.trace.json.gz (for Perfetto and TensorBoard) and removes the .running file.
"""

import contextlib
import gzip
import json
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from murmur.learner_service.telemetry.profile_files import (
    FOLDER,
    METADATA,
    NVTX_VARIABLE,
    REQUEST,
    RUNNING,
    TRACE,
)
from murmur.shared.process.ledger import Ledger, since
from murmur.shared.process.process import logger

MAX_UPDATES = 1000  # a trace is kept in memory


def _ranges(
    made: Callable[[str], contextlib.AbstractContextManager[object]],
) -> Callable[[str], None]:
    """Return a function that draws a thread's present state as a range; for that thread alone.

    Args:
        made: function that makes a range of a state's name.
    """
    drawn = contextlib.ExitStack()

    def draw(state: str) -> None:
        drawn.close()
        drawn.enter_context(made(state))

    return draw


def nvtx_ranges() -> Callable[[str], None] | None:
    """A ledger's watcher for Nsight Systems: states are drawn beside kernels and graph launches.

    docs/idle-gpu.md has the command that sets NVTX_VARIABLE.

    Returns:
        None unless NVTX_VARIABLE is set to 1.
    """
    if os.environ.get(NVTX_VARIABLE) != "1":
        return None
    try:
        torch.cuda.nvtx.mark("murmur")  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        logger.warning("%s=1 has no effect: %s", NVTX_VARIABLE, error)
        return None
    return _ranges(torch.cuda.nvtx.range)


class Profiling:
    """Looks for requests and answers them. Used by the thread that learns."""

    def __init__(self, run_dir: Path, ledgers: Callable[[], list[Ledger]], cuda: bool) -> None:
        """Drop what an earlier learner of this run began.

        Args:
            run_dir: the run's folder.
            ledgers: those of the threads to be recorded.
            cuda: whether kernels are to be recorded too.
        """
        self._folder = run_dir / FOLDER
        self._ledgers = ledgers
        self._cuda = cuda
        self._profiler: profile | None = None
        self._running = Path()
        self._watchers: dict[Ledger, Callable[[str], None] | None] = {}  # as they were before
        for left_behind in self._folder.glob(f"*{RUNNING}"):
            left_behind.unlink(missing_ok=True)

    def look(self, updates: int) -> None:
        """Begin if there is a request; cheap, but too slow to run per message.

        Args:
            updates: made so far.
        """
        if self._profiler is not None:
            return
        for request in sorted(self._folder.glob(f"*{REQUEST}")):
            try:
                wanted = int(request.read_text())
                if not 1 <= wanted <= MAX_UPDATES:
                    raise ValueError(wanted)
                self._running = request.rename(request.with_suffix(RUNNING))
            except (OSError, ValueError) as error:
                logger.error("profile request %s cannot be answered: %s", request, error)
                request.unlink(missing_ok=True)
                continue
            self._begin(wanted)
            logger.info("profiling %d updates after update %d", wanted, updates + 1)
            return

    def _begin(self, updates: int) -> None:
        kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if self._cuda else [])
        self._wanted, self._seen = updates, 0
        self._profiler = profile(
            activities=kinds,
            # One update to warm up: the first recorded operations pay for the recorder's start.
            schedule=schedule(wait=0, warmup=1, active=updates, repeat=1),
            on_trace_ready=self._write,
            experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True),
        )
        self._profiler.start()

    def updated(self) -> None:
        """An update was made."""
        if self._profiler is None:
            return
        self._seen += 1
        if self._seen == 1:
            self._started, self._before = time.perf_counter(), self._seconds()
            for ledger in self._ledgers():
                self._watchers[ledger] = ledger.watcher
                ledger.watcher = _ranges(record_function)
        elif self._seen == self._wanted + 1:
            self._profiler.add_metadata_json(METADATA, json.dumps(self._summary()))
        self._profiler.step()
        if self._seen > self._wanted:
            self._profiler.stop()
            self._end()

    def _seconds(self) -> dict[str, dict[str, float]]:
        return {ledger.thread: ledger.seconds() for ledger in self._ledgers()}

    def _summary(self) -> dict[str, object]:
        """Updates, seconds, and what each thread did in them by its ledger."""
        spent = since(self._before, self._seconds())
        took = time.perf_counter() - self._started
        return {"updates": self._wanted, "seconds": took, "threads": spent}

    def _write(self, profiler: profile) -> None:
        trace = self._running.with_suffix(TRACE)
        plain, packed = self._running.with_suffix(".json"), self._running.with_suffix(".gz")
        names = {thread.native_id: thread.name for thread in threading.enumerate()}

        def name(found: re.Match[bytes]) -> bytes:
            return names.get(int(found[1]), found[0].decode()).encode()

        try:
            profiler.export_chrome_trace(str(plain))
            with plain.open("rb") as lines, gzip.open(packed, "wb") as file:
                for line in lines:  # which threads have their own name in there is up to chance
                    file.write(re.sub(rb"thread (\d+) \([^)]*\)", name, line))
            packed.rename(trace)
            logger.info("profile written: %s", trace)
        except (OSError, RuntimeError) as error:  # the training continues
            logger.error("profile %s cannot be written: %s", trace, error)
            packed.unlink(missing_ok=True)
        plain.unlink(missing_ok=True)

    def _end(self) -> None:
        for ledger, watcher in self._watchers.items():
            ledger.watcher = watcher
        self._watchers.clear()
        self._profiler = None
        self._running.unlink(missing_ok=True)

    def close(self) -> None:
        """Give up a profile under way: there will be no more updates."""
        if self._profiler is not None:
            self._profiler.on_trace_ready = None
            self._profiler.stop()
            self._end()
