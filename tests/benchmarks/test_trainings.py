"""A benchmark that is stopped lets its training save first."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks._trainings import run_training

ROOT = Path(__file__).parents[2]
TRAINING = """
import pathlib, signal, sys, time
def save(*_):
    pathlib.Path("saved").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("training", flush=True)
time.sleep(600)
"""
BENCHMARK = f"""
import sys
from benchmarks._trainings import run_training
from murmur.results import run_command
run_command(lambda: run_training([sys.executable, "-c", {TRAINING!r}]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_benchmark_lets_its_training_save(number: int, tmp_path: Path) -> None:
    benchmark = subprocess.Popen(
        [sys.executable, "-c", BENCHMARK],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    assert benchmark.stdout is not None
    assert benchmark.stdout.readline() == "training\n"
    os.killpg(benchmark.pid, number)  # as a terminal's Ctrl-C does
    _, errors = benchmark.communicate(timeout=60)
    assert (errors, benchmark.returncode) == ("stopped: the same command resumes\n", 130)
    assert (tmp_path / "saved").is_file()


def test_a_training_that_fails_ends_the_benchmark(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("w") as file, pytest.raises(subprocess.CalledProcessError):
        run_training([sys.executable, "-c", "import sys; sys.exit('no disk')"], file)
    assert log.read_text() == "no disk\n"
