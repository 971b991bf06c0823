"""The figures of a GPU, from a stand-in for the driver's library."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from murmur.learner_service.telemetry.gpu import Gpu, by_name
from murmur.shared.process.nvml import cuda_version

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
int nvmlDeviceGetEnforcedPowerLimit(void *gpu, unsigned *mw) { *mw = 700000; return 0; }
int nvmlDeviceGetClockInfo(void *gpu, unsigned clock, unsigned *mhz) {
    *mhz = clock == 1 ? 1620 : clock == 2 ? 3201 : 0; return code("CLOCKS");
}
int nvmlDeviceGetMaxClockInfo(void *gpu, unsigned clock, unsigned *mhz) {
    *mhz = clock == 1 ? 1980 : clock == 2 ? 3201 : 0; return code("CLOCKS");
}
int nvmlDeviceGetPcieThroughput(void *gpu, unsigned counter, unsigned *kib) {
    *kib = counter == 1 ? 2048 : 16; return code("PCIE");
}
int nvmlDeviceGetName(void *gpu, char *name, unsigned n) { strncpy(name, "H200", n); return 0; }
int nvmlSystemGetDriverVersion(char *text, unsigned n) { strncpy(text, "570.1", n); return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *number) { *number = 12080; return 0; }
static int reasons(unsigned long long *bits) {
    *bits = strtoull(getenv("REASONS") ? getenv("REASONS") : "0", 0, 0); return 0;
}
#ifdef OLD_DRIVER
int nvmlDeviceGetCurrentClocksThrottleReasons(void *gpu, unsigned long long *bits) {
    return reasons(bits);
}
#else
int nvmlDeviceGetCurrentClocksEventReasons(void *gpu, unsigned long long *bits) {
    return reasons(bits);
}
#endif
int nvmlDeviceGetTemperature(void *gpu, unsigned sensor, unsigned *t) { *t = 61; return 0; }
int nvmlDeviceGetPowerUsage(void *gpu, unsigned *mw) { *mw = 340500; return 0; }
const char *nvmlErrorString(int c) { return c == 9 ? "Driver Not Loaded" : "Not Found"; }
"""
READ = """
import json, os, sys
from prometheus_client import generate_latest
from murmur.learner_service.telemetry.gpu import Gpu
from murmur.learner_service.telemetry.metrics import LearnerMetrics
metrics = LearnerMetrics()
for line in sys.stdin:
    for name in ("INIT", "UTILIZATION", "MEMORY", "CLOCKS", "PCIE", "REASONS"):
        os.environ.pop(name, None)  # the library asks the environment, too
    os.environ.update(json.loads(line))
    metrics.gpu = gpu = Gpu("abc")
    lines = generate_latest(metrics.registry).decode().splitlines()
    served = dict(line.split() for line in lines if line.startswith("murmur_learner_gpu"))
    print(json.dumps([gpu.trouble, served, gpu.describe(), gpu.recent(0.0)]), flush=True)
"""


class Driver:
    """A process in which NVML is the stand-in."""

    def __init__(self, folder: Path, *options: str) -> None:
        compiler = shutil.which("cc")
        if compiler is None or sys.platform != "linux":
            pytest.skip("needs a C compiler on Linux")
        (folder / "stub.c").write_text(STUB)
        target = folder / "libnvidia-ml.so.1"
        options = ("-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1", *options)
        subprocess.run([compiler, *options, "-o", target, folder / "stub.c"], check=True)
        self._process = subprocess.Popen(
            [sys.executable, "-c", READ],
            env={**os.environ, "LD_LIBRARY_PATH": str(folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def _answer(self, answers: dict[str, str]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps({"KNOWN": "GPU-abc", **answers}), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def ask(self, **answers: str) -> tuple[str, dict[str, float], dict[str, str]]:
        """Trouble, figures and description of a learner whose driver answers like this."""
        trouble, served, about, _ = self._answer(answers)
        figures = {k.removeprefix("murmur_learner_gpu_"): float(v) for k, v in served.items()}
        return trouble, figures, about

    def read(self, **answers: str) -> tuple[str, dict[str, float]]:
        """Trouble and figures."""
        return self.ask(**answers)[:2]

    def recent(self, **answers: str) -> dict[str, float]:
        """The figures that progress.jsonl gets."""
        found: dict[str, float] = self._answer(answers)[3]
        return found

    def close(self) -> None:
        self._process.communicate(timeout=30)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    found = Driver(tmp_path_factory.mktemp("nvml"))
    yield found
    found.close()


LIMITS = (
    *("power_cap", "hardware_slowdown", "sync_boost", "software_thermal"),
    *("hardware_thermal", "power_brake"),
)
ALL = {
    "utilization_ratio": 0.87,
    "memory_utilization_ratio": 0.4,
    "memory_used_bytes": 30,
    "memory_total_bytes": 80,
    "temperature_celsius": 61,
    "power_watts": 340.5,
    "power_limit_watts": 700,
    'clock_hertz{clock="sm"}': 1.62e9,
    'clock_hertz{clock="memory"}': 3.201e9,
    'clock_max_hertz{clock="sm"}': 1.98e9,
    'clock_max_hertz{clock="memory"}': 3.201e9,
    'pcie_bytes_per_second{direction="to_device"}': 2048 * 1024,
    'pcie_bytes_per_second{direction="to_host"}': 16 * 1024,
    **{f'throttled{{reason="{reason}"}}': 0.0 for reason in LIMITS},
}


def test_all_figures(driver: Driver) -> None:
    assert driver.read() == ("", ALL)
    assert driver.read(KNOWN="MIG-abc") == ("", ALL)  # a part of a GPU


def test_what_a_gpu_does_not_support_is_left_out(driver: Driver) -> None:
    not_supported = "3"
    rest = {k: v for k, v in ALL.items() if "utilization_ratio" not in k}
    assert driver.read(UTILIZATION=not_supported) == ("", rest)
    rest = {k: v for k, v in ALL.items() if not k.startswith(("memory", "pcie", "clock"))}
    assert driver.read(MEMORY=not_supported, PCIE=not_supported, CLOCKS=not_supported) == (
        "",
        rest | {"memory_utilization_ratio": 0.4},
    )


def throttled(figures: dict[str, float]) -> set[str]:
    return {k.split('"')[1] for k, v in figures.items() if k.startswith("throttled") and v}


def test_reasons_for_low_clocks_are_named(driver: Driver) -> None:
    # NVML's bits: 0x4 power cap, 0x20 and 0x40 thermal; idle (0x1) and clocks set (0x2) are none.
    assert throttled(driver.read(REASONS="0x64")[1]) == {
        *("power_cap", "software_thermal", "hardware_thermal"),
    }
    assert throttled(driver.read(REASONS="0x3")[1]) == set()


def test_reasons_of_an_old_driver_are_the_same(tmp_path: Path) -> None:
    old = Driver(tmp_path, "-DOLD_DRIVER")
    figures = old.read(REASONS="0x88")[1]
    old.close()
    assert throttled(figures) == {"hardware_slowdown", "power_brake"}


def test_the_gpu_and_its_driver_are_described(driver: Driver) -> None:
    about = {"name": "H200", "driver": "570.1", "driver_cuda": "12.8", "memory": "0.0 GiB"}
    assert driver.ask()[2] == about
    assert driver.ask(INIT="9")[2] == {}
    assert cuda_version(13000) == "13.0"


def test_figures_by_one_name_each() -> None:
    figures = {("gpu_power_watts",): 3.0, ("gpu_clock_hertz", "sm"): 1.0}
    assert by_name(figures) == {"power_watts": 3.0, "clock_hertz_sm": 1.0}


def test_a_driver_that_does_not_answer_is_said(driver: Driver) -> None:
    assert driver.read(INIT="9") == ("NVML: Driver Not Loaded", {})
    assert driver.read(KNOWN="GPU-other") == ("NVML: Not Found", {})


def test_recent_figures_are_asked_for_again_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    gpu, now, power = Gpu("abc"), 100.0, iter([300.0, 400.0])
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(gpu, "read", lambda: {("gpu_power_watts",): next(power)})
    assert gpu.recent(5.0) == {"power_watts": 300.0}
    now = 104.0
    assert gpu.recent(5.0) == {"power_watts": 300.0}
    now = 105.0
    assert gpu.recent(5.0) == {"power_watts": 400.0}


def test_without_the_library_or_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    missing = Gpu("abc")
    assert missing.trouble == "nvidia-ml-py is not installed"
    assert missing.read() == missing.read_pcie() == {}
