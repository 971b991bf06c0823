"""Counts that outlive the process, however it ends."""

import os
import random
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from murmur.learner_service.telemetry.metrics import LearnerMetrics
from murmur.learner_service.telemetry.persistent_counters import PersistentCounters, counters_of
from murmur.shared.process.errors import ResourceError

KILLED = """
import os, signal, sys
from pathlib import Path
from murmur.learner_service.telemetry.metrics import LearnerMetrics
from murmur.learner_service.telemetry.persistent_counters import PersistentCounters
metrics = LearnerMetrics(PersistentCounters(Path(sys.argv[1])))
for _ in range(1000):
    metrics.counter("rows_received").inc(3)
metrics.counter("rows_dropped", reason="lag").inc(7)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_counters_continue_where_a_killed_process_left_them(tmp_path: Path) -> None:
    file = tmp_path / "counters.bin"
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", KILLED, str(file)], check=False, timeout=60)
        assert done.returncode == -9
    metrics = LearnerMetrics(PersistentCounters(file))
    read = metrics.registry.get_sample_value
    assert read("murmur_learner_rows_received_total") == 6000
    assert read("murmur_learner_rows_dropped_total", {"reason": "lag"}) == 14
    assert metrics.total("rows_dropped") == 14
    metrics.counter("rows_dropped", reason="session").inc()
    assert metrics.total("rows_dropped") == 15


def test_an_empty_file_of_counters_is_filled(tmp_path: Path) -> None:
    file = tmp_path / "counters.bin"
    file.touch()
    assert PersistentCounters(file).items() == {}


def test_a_damaged_file_of_counters_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "counters.bin"
    size = 256 * 128
    count = b'["rows_received", {}]'.ljust(120, b"\0")
    for content in (
        b"torn",
        bytes(size + 1),
        random.Random(1).randbytes(size),  # noqa: S311 - no secret
        (b"rows_received".ljust(120, b"\0") + bytes(8)).ljust(size, b"\0"),
        (count + struct.pack("<d", float("nan"))).ljust(size, b"\0"),
        (count + struct.pack("<d", -1.0)).ljust(size, b"\0"),
    ):
        file.write_bytes(content)
        with pytest.raises(ResourceError, match=r"counters\.bin holds no counters.*delete it"):
            PersistentCounters(file)
        assert file.read_bytes() == content


def test_a_folder_that_is_not_there_is_an_error_with_a_message(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match=r"cannot (write|use) .*counters\.bin: No such file"):
        PersistentCounters(tmp_path / "none" / "counters.bin")


def test_the_file_has_its_size_from_the_start(tmp_path: Path) -> None:
    """Blocks are there before the page is written to: a full disk must not show as SIGBUS."""
    file = tmp_path / "counters.bin"
    PersistentCounters(file)
    assert os.stat(file).st_blocks * 512 >= os.stat(file).st_size


def test_counts_of_ranks_that_are_gone_are_added_once(tmp_path: Path) -> None:
    for rank in range(5):
        metrics = LearnerMetrics(counters_of(tmp_path, rank, 5), rank)
        metrics.counter("rows_dropped", reason="lag").inc(10**rank)
    for _ in range(2):
        two = [LearnerMetrics(counters_of(tmp_path, rank, 2), rank) for rank in range(2)]
        assert [metrics.total("rows_dropped") for metrics in two] == [10101, 1010]
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["counters-1.bin", "counters.bin"]


def test_metrics_of_a_rank_are_labelled_with_it() -> None:
    metrics = LearnerMetrics(None, 3)
    metrics.counter("rows_dropped", reason="lag").inc(2)
    read = metrics.registry.get_sample_value
    assert read("murmur_learner_rows_dropped_total", {"reason": "lag", "rank": "3"}) == 2
    assert {s.labels["rank"] for f in metrics.registry.collect() for s in f.samples} == {"3"}


def test_counts_are_read_while_another_thread_adds_names(tmp_path: Path) -> None:
    def add(kept: PersistentCounters) -> None:
        for i in range(200):
            kept.slot(f"count {i}")

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for turn in range(20):
            kept = PersistentCounters(tmp_path / f"counters-{turn}.bin")
            adding = threading.Thread(target=add, args=(kept,))
            adding.start()
            while adding.is_alive():
                kept.items()
            assert len(kept.items()) == 200
    finally:
        sys.setswitchinterval(interval)
