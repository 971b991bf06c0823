"""Origin of a result: machine, software, commit. Never names of people or hosts."""

import os
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from murmur.shared.config.extras import DISTRIBUTION
from murmur.shared.process.nvml import cuda_version

ROOT = Path(__file__).resolve().parents[2]
# An installed murmur has no place of its own for results: the working directory has.
RESULTS = (ROOT if (ROOT / "pyproject.toml").is_file() else Path()) / "benchmarks" / "results"
_CODE = (
    *("proto", "shared", "env_service", "learner_service", "murmur", "configs", "tests"),
    ":(glob)benchmarks/**/*.py",
)
_PARTS = ("core", "env", "learner", "zoo", "export", "report")  # whose versions a result names


def describe_machine() -> dict[str, Any]:
    """Return the processor, memory, accelerator and operating system."""
    gpu, detail = find_gpu()
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpu": gpu,
        **({"gpu_details": detail} if gpu else {}),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def find_gpu() -> tuple[str | None, str]:
    """Return the first NVIDIA GPU by name, without torch, or the reason why there is none.

    Returns:
        (name, "driver ..., CUDA ..., ... of ... GiB in use"), or (None, reason).
    """
    try:
        import pynvml
    except ModuleNotFoundError:
        return None, "nvidia-ml-py is not installed, so the driver cannot be asked"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return None, f"the NVIDIA driver does not answer ({error})"
    try:
        if pynvml.nvmlDeviceGetCount() == 0:
            return None, "the NVIDIA driver is there but shows no GPU"
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        driver = pynvml.nvmlSystemGetDriverVersion()
        cuda = cuda_version(pynvml.nvmlSystemGetCudaDriverVersion_v2())
        used, total = memory.used / 2**30, memory.total / 2**30
        versions_ = f"driver {driver}, CUDA {cuda}"
        return (
            str(pynvml.nvmlDeviceGetName(handle)),
            f"{versions_}, {used:.1f} of {total:.1f} GiB in use",
        )
    except pynvml.NVMLError as error:
        return None, f"the GPU cannot be asked ({error})"
    finally:
        pynvml.nvmlShutdown()


def commit() -> str:
    """Return the source's git commit, "-dirty" if it differs; "unknown" if murmur is installed."""
    found = _git("rev-parse", "--short=10", "HEAD").strip()
    if not found:
        return "unknown"
    return found + ("-dirty" if changed_files() else "")


def changed_files() -> list[str]:
    """Return files that differ from the commit or are new beside the code, results left out."""
    tracked = _git("status", "--porcelain", "--untracked-files=no")
    new = _git("status", "--porcelain", "--", *_CODE)
    lines = {line[3:] for line in (tracked + new).splitlines()}
    return sorted(line for line in lines if not line.startswith("benchmarks/results/"))


def _git(*words: str) -> str:
    """Return git's output about the source; "" if murmur is installed without it."""
    if not (ROOT / ".git").exists():
        return ""
    try:
        result = subprocess.run(
            ["git", "-C", str(ROOT), *words],  # noqa: S607 - git is where the user's PATH has it
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout


def installed_version(name: str) -> str | None:
    """Return a distribution's version, without its local part; None if it is not installed."""
    try:
        return metadata.version(name).partition("+")[0]
    except metadata.PackageNotFoundError:
        return None


def dependencies() -> dict[str, list[str]]:
    """Return what murmur asks for, by the part of murmur that needs it: "core", or an extra."""
    found: dict[str, list[str]] = {name: [] for name in _PARTS}
    for line in metadata.requires(DISTRIBUTION) or ():
        requirement, _, condition = line.partition(";")
        extra = re.search(r"extra == ['\"](\w+)", condition)
        part = extra[1] if extra else "core"
        if part in found:
            found[part] += re.findall(r"^[\w.-]+", requirement)
    return found


def versions() -> dict[str, str]:
    """Return installed versions of murmur and of its dependencies."""
    names = [name for part in dependencies().values() for name in part]
    found = {name: installed_version(name) for name in [DISTRIBUTION, *names]}
    return {name: version for name, version in found.items() if version}
