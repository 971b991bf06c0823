"""Memory limits of control groups, of both versions, wherever the process's group lies."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from murmur.shared.process.host_memory import MemoryKills, available_bytes, total_bytes
from tests.shared.test_cores import machine

MIB = 1 << 20
V1, V2 = "sys/fs/cgroup/memory", "sys/fs/cgroup"


def version_2(group: str, limit: str, used: int, cache: int = 0) -> dict[str, str]:
    folder = f"{V2}/{group}".rstrip("/")
    return {
        f"{folder}/memory.max": f"{limit}\n",
        f"{folder}/memory.high": "max\n",
        f"{folder}/memory.current": f"{used}\n",
        f"{folder}/memory.stat": f"anon 5\ninactive_file {cache}\nactive_file 7\n",
        f"{folder}/memory.events": "low 0\noom 3\noom_kill 2\noom_group_kill 0\n",
    }


def version_1(group: str, limit: int, used: int, cache: int = 0) -> dict[str, str]:
    folder = f"{V1}/{group}".rstrip("/")
    return {
        f"{folder}/memory.limit_in_bytes": f"{limit}\n",
        f"{folder}/memory.usage_in_bytes": f"{used}\n",
        f"{folder}/memory.stat": f"inactive_file 1\ntotal_inactive_file {cache}\n",
        f"{folder}/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
    }


SLURM = "system.slice/slurmstepd.scope/job_7/step_0"
CASES = {
    "the root of a container": ("0::/\n", version_2("", str(256 * MIB), 56 * MIB), 200),
    "a scope of systemd": (
        "0::/user.slice/run-u7.scope\n",
        version_2("user.slice/run-u7.scope", str(100 * MIB), 90 * MIB, cache=50 * MIB),
        60,
    ),
    "the job above the step": (
        f"0::/{SLURM}\n",
        {
            **version_2(SLURM, "max", 10 * MIB),
            **version_2("system.slice/slurmstepd.scope/job_7", str(64 * MIB), 32 * MIB),
        },
        32,
    ),
    "a group that must not grow": (
        "0::/a\n",
        {**version_2("a", "max", 10 * MIB), f"{V2}/a/memory.high": f"{30 * MIB}\n"},
        20,
    ),
    "version 1": ("4:memory:/t\n", version_1("t", 128 * MIB, 28 * MIB), 100),
    "version 1, its parent": (
        "4:memory:/t/u\n",
        {**version_1("t/u", (1 << 63) - 4096, 1 * MIB), **version_1("t", 80 * MIB, 70 * MIB)},
        10,
    ),
    "version 1 in a container": ("9:memory:/docker/1f\n", version_1("", 90 * MIB, 100 * MIB), 0),
    "version 1, mounted with another": (
        "4:cpu,memory:/t\n",
        {
            k.replace("memory/", "cpu,memory/", 1): v
            for k, v in version_1("t", 50 * MIB, 20 * MIB).items()
        },
        30,
    ),
    "version 2 beside version 1": (
        "4:cpu:/\n0::/a\n",
        {k.replace(V2, f"{V2}/unified"): v for k, v in version_2("a", "9999999", 9999999).items()},
        0,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_narrowest_group_counts(tmp_path: Path, name: str) -> None:
    groups, files, free = CASES[name]
    root = machine(tmp_path, groups, files)
    assert available_bytes(root) == free * MIB
    assert total_bytes(root) < 300 * MIB


@pytest.mark.parametrize(
    ("groups", "files"),
    [
        ("0::/\n", {}),
        ("0::/a\n", version_2("a", "max", 5)),
        ("4:memory:/a\n", version_1("a", (1 << 63) - 4096, 5)),
    ],
)
def test_without_a_limit_the_host_counts(
    tmp_path: Path, groups: str, files: dict[str, str]
) -> None:
    root = machine(tmp_path, groups, files)
    assert total_bytes(root) == psutil.virtual_memory().total
    assert available_bytes(root) > 300 * MIB


@pytest.mark.parametrize("version", [1, 2])
def test_a_kill_for_memory_is_explained(tmp_path: Path, version: int) -> None:
    files = version_1("t", 64 * MIB, 1) if version == 1 else version_2("t", str(64 * MIB), 1)
    root = machine(
        tmp_path,
        "4:memory:/t\n" if version == 1 else "0::/t\n",
        {**files, "proc/vmstat": "pgfault 7\noom_kill 4\n"},
    )
    kills = MemoryKills(root)
    assert kills.explanation() == ""
    (root / "proc/vmstat").write_text("oom_kill 5\n")
    assert kills.explanation() == "out of memory: the system had none left"
    file = next(root / name for name in files if name.endswith(("oom_control", "events")))
    file.write_text("oom_kill 3\n")
    assert kills.explanation().startswith("out of memory: control group ")
    assert kills.explanation().endswith("/t allows 64.0 MiB")
    assert MemoryKills(root).explanation() == ""


@pytest.mark.skipif(not os.access("/sys/fs/cgroup/memory", os.W_OK), reason="no groups to make")
def test_a_real_group_limits_and_explains(tmp_path: Path) -> None:
    group = Path("/sys/fs/cgroup/memory") / f"murmur-{os.getpid()}"
    group.mkdir()
    script = tmp_path / "killed.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import os, subprocess, sys
            from pathlib import Path
            Path("{group}/cgroup.procs").write_text(str(os.getpid()))
            from murmur.shared.process.host_memory import MemoryKills, available_bytes
            assert available_bytes() < 200 << 20, available_bytes()
            kills = MemoryKills()
            taken = subprocess.run([sys.executable, "-c", "bytearray(1 << 30)"])
            print(taken.returncode, kills.explanation())
            """
        )
    )
    try:
        (group / "memory.limit_in_bytes").write_text(str(200 << 20))
        done = subprocess.run(
            [sys.executable, script],
            env={**os.environ, "PYTHONPATH": os.getcwd()},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.stdout.strip() == f"-9 out of memory: control group {group} allows 200.0 MiB"
    finally:
        group.rmdir()
