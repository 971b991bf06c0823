"""`murmur check`: can this machine train, and how fast is it?"""

import json
import os
import shutil
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

import psutil
from rich.table import Table

from murmur.doctor.machine import (
    commit,
    dependencies,
    describe_machine,
    find_gpu,
    installed_version,
)
from murmur.runs.settings import has_torch
from murmur.shared.config.experiment import ENV_METRICS_PORT, EnvServerConfig
from murmur.shared.config.extras import DISTRIBUTION, install_command
from murmur.shared.config.learner import METRICS_PORT, PORT, LearnerConfig
from murmur.shared.process.host_memory import available_bytes, total_bytes
from murmur.shared.wire.channel import proxy_in_use
from murmur.text import plain

if TYPE_CHECKING:
    from murmur.kit.check_networks import Speed

Status = Literal["ok", "note", "fail"]
_MARKS = {"ok": "[green]✓[/]", "note": "[yellow]![/]", "fail": "[red]✗[/]"}


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    Attributes:
        topic: subject of the finding.
        status: "ok", "note" (worth knowing), "fail" (murmur will not work).
        text: description and, if something is wrong, the fix.
    """

    topic: str
    status: Status
    text: str


def check_machine(*, need_gpu: bool, measure: bool) -> list[Finding]:
    """Check everything without changes.

    Args:
        need_gpu: flag to report a missing GPU as a failure.
        measure: flag to time matrix products (two seconds).
    """
    findings = [*_machine(), *_gpu(need_gpu)]
    if measure and has_torch():
        findings += _speed()
    return [*findings, *_dependencies(), *_ports()]


def has_both_services() -> bool:
    """Return whether networks of environments can be built here: the extras env and learner."""
    return has_torch() and find_spec("numba") is not None


def findings_table(findings: list[Finding]) -> Table:
    """Return the findings as a table for the terminal."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for finding in findings:
        table.add_row(_MARKS[finding.status], plain(finding.topic), plain(finding.text))
    return table


def findings_json(findings: list[Finding], speeds: "Sequence[Speed]" = ()) -> str:
    """Return the findings as JSON, with the machine and the speeds of networks."""
    data = {
        "machine": describe_machine(),
        "commit": commit(),
        "findings": [asdict(f) for f in findings],
        "networks": [asdict(s) for s in speeds],
    }
    return json.dumps(data, indent=1)


def _machine() -> list[Finding]:
    machine = describe_machine()
    python_ok = sys.version_info >= (3, 11)
    free_memory = available_bytes() / 2**30
    memory, host = total_bytes(), psutil.virtual_memory().total
    free_disk = shutil.disk_usage(os.getcwd()).free / 2**30
    return [
        Finding(
            "Python",
            "ok" if python_ok else "fail",
            machine["python"] + ("" if python_ok else "; murmur needs 3.11 or newer"),
        ),
        Finding("murmur", "ok", f"{installed_version(DISTRIBUTION) or 'from source'}, {commit()}"),
        Finding("processor", "ok", f"{machine['cpu']}, {machine['cores']} cores for this process"),
        Finding(
            "memory",
            "ok" if free_memory > 2 else "note",
            f"{free_memory:.1f} of {memory / 2**30:.1f} GiB free"
            + (", by this process's control group" if memory < host else ""),
        ),
        Finding(
            "disk",
            "ok" if free_disk > 2 else "note",
            f"{free_disk:.1f} GiB free here" + ("" if free_disk > 2 else "; runs may not fit"),
        ),
    ]


def _gpu(needed: bool) -> list[Finding]:
    """Return the findings of the driver, then of torch: they fail for different reasons."""
    missing: Status = "fail" if needed else "note"
    name, detail = find_gpu()
    findings = [
        Finding("GPU driver", "ok" if name else missing, f"{name}, {detail}" if name else detail)
    ]
    if not has_torch():
        fix = f"torch is not installed: environments only ({install_command('learner')})"
        return [*findings, Finding("GPU in torch", missing, fix)]
    import torch

    from murmur.learner_service.device.device import half_precision, why_no_cuda

    if not torch.cuda.is_available():
        return [*findings, Finding("GPU in torch", missing, f"none: {why_no_cuda()}; CPU is used")]
    major, minor = torch.cuda.get_device_capability()
    text = (
        f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}, "
        f"torch {torch.__version__}, CUDA {torch.version.cuda}, "
        f"16-bit precision {half_precision()}"
    )
    return [*findings, Finding("GPU in torch", "ok", text)]


def _speed() -> list[Finding]:
    """Measure matrix products."""
    import torch

    from murmur.learner_service.device.device import product_seconds

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    findings = []
    size = 8192 if device.type == "cuda" else 1024
    for label, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        rate = 2 * size**3 / product_seconds(size, dtype, device, 1.0) / 1e12
        text = f"{rate:.3g} TFLOP/s ({size}×{size}, {device.type})"
        findings.append(Finding(f"matrix product {label}", "ok", text))
    return findings


def _dependencies() -> list[Finding]:
    """Check each group of dependencies."""
    findings = []
    for group, names in dependencies().items():
        found = {name: installed_version(name) for name in names}
        missing = [name for name, version in found.items() if version is None]
        status: Status = "ok"
        text = ", ".join(f"{name} {version}" for name, version in found.items())
        if missing:
            command = install_command("" if group == "core" else group)
            status = "fail" if group == "core" else "note"
            text = f"missing: {', '.join(missing)}; {command}"
        findings.append(Finding(f"packages: {group}", status, text))
    return findings


def _ports() -> list[Finding]:
    """Check whether the default ports can be bound, and name obstacles between two machines."""
    learner, server = LearnerConfig(), EnvServerConfig()
    findings = []
    if proxy := proxy_in_use("another-machine:50051"):
        words = "is set: environment servers reach a learner on another machine through it"
        findings.append(Finding("proxy", "note", f"{proxy} {words}, unless no_proxy names it"))
    for topic, host, port in (
        ("port of the learner", learner.host, PORT),
        ("metrics of the learner", learner.metrics_host, METRICS_PORT),
        ("metrics of the environment server", server.metrics_host, ENV_METRICS_PORT),
    ):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
                findings.append(Finding(topic, "ok", f"{host}:{port} is free"))
            except OSError as error:
                text = f"cannot bind {host}:{port}: {error.strerror}; `murmur train` takes another"
                findings.append(Finding(topic, "note", text))
    return findings
