"""`murmur profile`: what it asks for, what it says, and what it does without an answer."""

import gzip
import io
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import murmur.doctor.profile
from murmur.doctor.profile import read, record, self_seconds, show
from murmur.learner_service.telemetry.profile_files import FOLDER
from murmur.learner_service.telemetry.profiling import Profiling
from murmur.runs.run_folder import RunFolder
from murmur.shared.process.errors import ResourceError
from tests.system.conftest import PACED, Training, train

__all__ = ["train"]  # a fixture


def test_time_of_an_operation_is_without_what_it_calls() -> None:
    """On thread 1 [0, 10] holds [2, 5], which holds [3, 4], and [6, 8]; thread 2 overlaps."""
    spans = [
        {"tid": 1, "ts": 6.0, "dur": 2.0, "name": "copy"},
        {"tid": 1, "ts": 0.0, "dur": 10.0, "name": "linear"},
        {"tid": 1, "ts": 2.0, "dur": 3.0, "name": "copy"},
        {"tid": 1, "ts": 3.0, "dur": 1.0, "name": "empty"},
        {"tid": 2, "ts": 1.0, "dur": 4.0, "name": "linear"},
        {"tid": 1, "ts": 10.0, "dur": 1.0, "name": "empty"},  # begins where another ends
    ]
    seen = {name: (o.calls, round(1e6 * o.seconds, 6)) for name, o in self_seconds(spans).items()}
    assert seen == {"linear": (2, 10 - 3 - 2 + 4), "copy": (2, 3 - 1 + 2), "empty": (2, 2)}


def test_launches_of_kernels_and_graphs_are_counted(tmp_path: Path) -> None:
    """Two updates: 6 kernels launched one by one, one graph of 4; each kernel runs 2 µs."""
    events = [{"name": "step", "ph": "i"}]

    def add(cat: str, name: str, count: int, dur: float) -> None:
        for _ in range(count):
            span = {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": cat, "dur": dur}
            events.append(span | {"ts": 10.0 * len(events)})

    add("cuda_runtime", "cudaLaunchKernel", 6, 5.0)
    add("cuda_runtime", "cudaGraphLaunch", 1, 8.0)
    add("kernel", "gemm", 10, 2.0)
    file = tmp_path / "one.pt.trace.json.gz"
    about = {"updates": 2, "seconds": 0.5, "threads": {}}
    file.write_bytes(gzip.compress(json.dumps({"murmur": about, "traceEvents": events}).encode()))
    seen = read(file)
    assert {name: o.calls for name, o in seen.calls.items()} == {
        **{"cudaLaunchKernel": 6, "cudaGraphLaunch": 1},
    }
    assert seen.kernels["gemm"].seconds == pytest.approx(20e-6)
    out = io.StringIO()
    show(seen, Console(file=out, width=200))
    words = " ".join(out.getvalue().split())
    assert "cudaLaunchKernel 3.000" in words
    assert "cudaGraphLaunch 0.500" in words


def _events(trace: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return events


@pytest.mark.system
@pytest.mark.parametrize("pipeline", ["async", pytest.param("sync", marks=pytest.mark.long)])
def test_the_updates_of_a_training(train: Callable[..., Training], pipeline: str) -> None:
    training = train("run", "--set", f"learner.pipeline={pipeline}", environment=PACED)
    training.until(lambda: training.updates() > 0)
    command = [sys.executable, "-m", "murmur", "profile", str(training.run), "--updates", "3"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    for part in ("3 updates in", "inference", "forward", "aten::", "ms an update"):
        assert part in done.stdout
    (trace,) = (training.run / FOLDER).iterdir()  # neither request nor anything half written
    assert f"written: {trace}" in done.stdout

    events = _events(trace)
    marks = Counter(e["name"] for e in events if e.get("cat") == "user_annotation")
    assert [marks[f"ProfilerStep#{i}"] for i in range(5)] == [0, 1, 1, 1, 0]
    threads = {e["tid"]: e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    learner = "learner" if pipeline == "async" else "inference"
    for thread, state in (("inference", "act"), (learner, "forward"), (learner, "synchronize")):
        assert thread in {threads.get(e["tid"]) for e in events if e.get("name") == state}

    seen = read(trace)
    assert seen.updates == 3
    assert set(seen.threads) == {"inference", learner}
    for spent in seen.threads.values():
        assert sum(spent.values()) == pytest.approx(seen.seconds, rel=0.01)
    assert seen.operations["aten::addmm"].calls >= 3
    updates = training.updates()
    training.until(lambda: training.updates() > updates)  # it continues


@pytest.mark.long
@pytest.mark.system
def test_a_training_that_ends_first(train: Callable[..., Training]) -> None:
    training = train("run", "--set", "run.max_updates=40")
    training.until(lambda: training.updates() > 0)
    with pytest.raises(ResourceError, match=r"gave the profile up: it ended.*learner\.log"):
        record(RunFolder.open(training.run), 1000, Console(quiet=True))
    assert training.wait() == 0, training.output()
    assert list((training.run / FOLDER).iterdir()) == []


def at_work(run: Path, pid: int) -> None:
    """Write which process the run's learner is."""
    (run / "learner.json").write_text(json.dumps({"pid": pid}))


def test_nobody_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_work(tmp_path, os.getpid())
    monkeypatch.setattr(murmur.doctor.profile, "_TAKEN_S", 0.0)
    with pytest.raises(ResourceError, match=r"the learner of .* did not answer within"):
        record(RunFolder(tmp_path), 1, Console(quiet=True))
    assert list((tmp_path / FOLDER).iterdir()) == []
    (tmp_path / FOLDER).rmdir()
    (tmp_path / FOLDER).write_text("")
    with pytest.raises(ResourceError, match=r"cannot write .*/profile"):
        record(RunFolder(tmp_path), 1, Console(quiet=True))


def test_a_learner_that_is_gone_is_not_waited_for(tmp_path: Path) -> None:
    missing = "no learner of .* is at work on this machine; to start it: murmur train"
    with pytest.raises(ResourceError, match=missing):
        record(RunFolder(tmp_path), 1, Console(quiet=True))
    with subprocess.Popen([sys.executable, "-S", "-c", ""]) as gone:
        pass
    at_work(tmp_path, gone.pid)
    with pytest.raises(ResourceError, match=missing):
        record(RunFolder(tmp_path), 1, Console(quiet=True))
    assert not (tmp_path / FOLDER).exists()


def test_a_learner_that_goes_is_not_waited_for(tmp_path: Path) -> None:
    folder = tmp_path / FOLDER
    code = f"import glob\nwhile not glob.glob({str(folder / '*.request')!r}): pass"
    with subprocess.Popen([sys.executable, "-S", "-c", code]) as learner:
        at_work(tmp_path, learner.pid)
        reaper = threading.Thread(target=learner.wait)
        reaper.start()
        with pytest.raises(ResourceError, match="is at work on this machine"):
            record(RunFolder(tmp_path), 1, Console(quiet=True))
        reaper.join()
    assert list(folder.iterdir()) == []


def test_a_learner_that_falls_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(murmur.doctor.profile, "_SILENT_S", 0.0)
    at_work(tmp_path, os.getpid())
    folder = tmp_path / FOLDER
    folder.mkdir()

    def take() -> None:
        while not (found := list(folder.glob("*.request"))):
            pass
        found[0].rename(found[0].with_suffix(".running"))

    learner = threading.Thread(target=take)
    learner.start()
    with pytest.raises(ResourceError, match="has logged nothing"):
        record(RunFolder(tmp_path), 1, Console(quiet=True))
    learner.join()
    Profiling(tmp_path, list, cuda=False)  # the next learner of this run
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("content", ["", "five", "0", "1001"])
def test_a_request_that_makes_no_sense(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / FOLDER
    folder.mkdir()
    (folder / "a.request").write_text(content)
    profiling = Profiling(tmp_path, list, cuda=False)
    profiling.look(7)
    profiling.updated()
    assert "a.request cannot be answered" in caplog.text
    assert list(folder.iterdir()) == []


def test_a_file_that_is_no_trace(tmp_path: Path) -> None:
    for content in (b"", b"no gzip", gzip.compress(b"{}")):
        (tmp_path / "trace").write_bytes(content)
        with pytest.raises(ResourceError, match="no trace of murmur profile"):
            read(tmp_path / "trace")
