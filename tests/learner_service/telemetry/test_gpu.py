"""The figures of a GPU, from a stand-in for the driver's library."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from learner_service.telemetry.gpu import Gpu

STUB = """
#include <stdlib.h>
#include <string.h>
static int code(const char *name) { const char *v = getenv(name); return v ? atoi(v) : 0; }
int nvmlInitWithFlags(unsigned f) { return code("INIT"); }
int nvmlInit_v2(void) { return code("INIT"); }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **gpu) {
    *gpu = (void *)1;
    return strcmp(uuid, getenv("KNOWN")) ? 6 : 0;
}
int nvmlDeviceGetUtilizationRates(void *gpu, unsigned *rates) {
    rates[0] = 87; rates[1] = 40; return code("UTILIZATION");
}
int nvmlDeviceGetMemoryInfo(void *gpu, unsigned long long *memory) {
    memory[0] = 80; memory[1] = 50; memory[2] = 30; return code("MEMORY");
}
int nvmlDeviceGetTemperature(void *gpu, unsigned sensor, unsigned *t) { *t = 61; return 0; }
int nvmlDeviceGetPowerUsage(void *gpu, unsigned *mw) { *mw = 340500; return 0; }
const char *nvmlErrorString(int c) { return c == 9 ? "Driver Not Loaded" : "Not Found"; }
"""
READ = """
import json
from prometheus_client import generate_latest
from learner_service.telemetry.gpu import Gpu
from learner_service.telemetry.metrics import LearnerMetrics
metrics = LearnerMetrics()
metrics.gpu = gpu = Gpu("abc")
lines = generate_latest(metrics.registry).decode().splitlines()
served = dict(line.split() for line in lines if line.startswith("murmur_learner_gpu"))
print(json.dumps([gpu.trouble, served]))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs a C compiler on Linux")
    folder = tmp_path_factory.mktemp("nvml")
    (folder / "stub.c").write_text(STUB)
    options = ["-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1"]
    subprocess.run(
        [compiler, *options, "-o", folder / "libnvidia-ml.so.1", folder / "stub.c"], check=True
    )
    return folder


def read(library: Path, **answers: str) -> tuple[str, dict[str, float]]:
    """What a learner would say and serve, with the driver answering so."""
    environment = {**os.environ, "LD_LIBRARY_PATH": str(library), "KNOWN": "GPU-abc", **answers}
    done = subprocess.run(
        [sys.executable, "-c", READ], env=environment, capture_output=True, text=True, check=True
    )
    trouble, served = json.loads(done.stdout)
    return trouble, {k.removeprefix("murmur_learner_gpu_"): float(v) for k, v in served.items()}


ALL = {
    "utilization_ratio": 0.87,
    "memory_used_bytes": 30,
    "memory_total_bytes": 80,
    "temperature_celsius": 61,
    "power_watts": 340.5,
}


def test_all_figures(library: Path) -> None:
    assert read(library) == ("", ALL)
    assert read(library, KNOWN="MIG-abc") == ("", ALL)  # a part of a GPU


def test_what_a_gpu_does_not_support_is_left_out(library: Path) -> None:
    not_supported = "3"
    rest = {k: v for k, v in ALL.items() if k != "utilization_ratio"}
    assert read(library, UTILIZATION=not_supported) == ("", rest)
    rest = {k: v for k, v in rest.items() if "memory" not in k}
    assert read(library, UTILIZATION=not_supported, MEMORY=not_supported) == ("", rest)


def test_a_driver_that_does_not_answer_is_said(library: Path, tmp_path: Path) -> None:
    assert read(library, INIT="9") == ("NVML: Driver Not Loaded", {})
    assert read(library, KNOWN="GPU-other") == ("NVML: Not Found", {})


def test_without_the_library_or_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    missing = Gpu("abc")
    assert missing.trouble == "nvidia-ml-py is not installed"
    assert missing.read() == {}
