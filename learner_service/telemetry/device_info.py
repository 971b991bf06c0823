"""Describe the device of a run, for the log's first lines, the metrics, and command.json."""

import contextlib
import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path

import torch

from murmur.learner_service.telemetry.gpu import Gpu
from murmur.shared.process.errors import ResourceError
from murmur.shared.process.files import write_whole
from murmur.shared.process.process import logger

FILE = "command.json"  # of the run's folder; `murmur train` writes all of it but KEY
KEY = "device"


def describe_device(device: torch.device, precision: str, gpu: Gpu | None) -> dict[str, str]:
    """Text about the device: name, driver, CUDA, memory, torch, precision; "" where unknown."""
    known = gpu.describe() if gpu is not None else {}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        known.setdefault("name", properties.name)
        known.setdefault("memory", f"{properties.total_memory / 2**30:.1f} GiB")
    return {
        "name": known.get("name") or platform.machine() or "cpu",
        "type": device.type,
        "driver": known.get("driver", ""),
        "driver_cuda": known.get("driver_cuda", ""),
        "cuda": (torch.version.cuda or "") if device.type == "cuda" else "",
        "memory": known.get("memory", ""),
        "torch": torch.__version__,
        "precision": precision,
    }


def device_text(about: Mapping[str, str]) -> str:
    """One line: for example "H200 (cuda), driver 570.1, CUDA 12.8, 139.8 GiB, torch 2.13, bf16"."""
    parts = [
        f"{about['name']} ({about['type']})",
        about["driver"] and f"driver {about['driver']}",
        about["cuda"] and f"CUDA {about['cuda']}",
        about["memory"],
        f"torch {about['torch']}",
        about["precision"],
    ]
    return ", ".join(part for part in parts if part)


def keep_device(run_dir: Path, about: Mapping[str, str]) -> None:
    """Add the device to the run's command.json; a file that cannot be written costs a warning.

    The file keeps its time: whether the process that it names is alive is decided by it.
    """
    path = run_dir / FILE
    try:
        data = json.loads(path.read_text())
        times = path.stat()
    except (OSError, ValueError):  # a learner that `murmur train` did not start
        data, times = {}, None
    if not isinstance(data, dict) or data.get(KEY) == about:
        return
    try:
        write_whole(path, json.dumps({**data, KEY: dict(about)}, indent=1))
    except ResourceError as error:
        logger.warning("the device is not noted: %s", error)
        return
    if times is not None:
        with contextlib.suppress(OSError):
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
