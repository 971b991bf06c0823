"""No benchmark rots: each one runs in its smoke form, and its result is written and read back."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from murmur.bench import run_benchmark, topics
from murmur.benchmarks.effort import Effort

ELSEWHERE = {"kills": "tests/chaos/test_contract.py"}  # which checks what comes of it, too


@pytest.mark.system
@pytest.mark.parametrize("name", [name for name in topics() if name not in ELSEWHERE])
def test_a_benchmark_runs_and_its_result_is_kept(name: str, tmp_path: Path) -> None:
    if missing := topics()[name].missing():
        pytest.skip(missing)
    file = run_benchmark(name, Effort.SMOKE, Console(), save=True, dirty=True, folder=tmp_path)
    assert file is not None
    saved = json.loads(file.read_text())
    assert saved["benchmark"] == name
    assert saved["result"]
    assert file.with_suffix(".md").read_text().startswith(f"# {name}\n")
