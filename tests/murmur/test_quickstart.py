"""The quick start of the Python API runs as it is shipped: as a script and as a notebook."""

import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from murmur.doctor.machine import ROOT

EXAMPLES = ROOT / "examples"
UNTRAINED = -153  # mean return of `spread` before the first update


@pytest.fixture(autouse=True)
def _any_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("LEARNER__PORT", "LEARNER__METRICS_PORT", "ENV_SERVER__METRICS_PORT"):
        monkeypatch.setenv(f"MURMUR__{key}", "0")
    monkeypatch.setenv("MURMUR__LEARNER__DEVICE", "cpu")


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"-?\d+(?:\.\d+)?", text)]


@pytest.mark.long
@pytest.mark.system
def test_script_learns_stops_by_its_callback_and_acts(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / "quickstart.py"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "stopped; " in done.stdout  # long before its 200 updates
    *_, table, returns = done.stdout.splitlines()
    *_, last, low, high = numbers(table)
    assert last > -80
    assert low < last < high
    assert len(played := numbers(returns.partition("episodes:")[2])) == 4
    assert sum(played) / 4 > UNTRAINED / 1.5


@pytest.mark.system
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_notebook_trains_in_the_background_evaluates_and_acts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MURMUR__EVALUATION__EVERY_UPDATES", "0")  # saves a process
    notebook = nbformat.read(EXAMPLES / "quickstart.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "commit it without outputs"
    client = NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    outputs = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    _, training, ended, plot, evaluated, returns = outputs
    assert ", training)" in training[0]["data"]["text/plain"]
    assert ended[0]["data"]["text/plain"] == "True"
    assert "image/png" in plot[-1]["data"]
    assert evaluated[-1]["data"]["text/plain"].startswith("Summary(mean=-")
    assert sum(numbers(returns[0]["data"]["text/plain"])) / 4 > UNTRAINED / 1.5
