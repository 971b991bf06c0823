"""docs/your-environment.md, done as it says, in an empty folder."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from murmur.doctor.machine import ROOT

pytestmark = pytest.mark.system
PAGE = (ROOT / "docs" / "your-environment.md").read_text()


def blocks(language: str) -> list[str]:
    """The page's blocks of one language; "" are commands and what they print."""
    found = []
    for i, part in enumerate(PAGE.split("```")):
        first, _, rest = part.partition("\n")
        if i % 2 == 1 and first == language:
            found.append(rest)
    return found


(MEET,) = blocks("python")
(SETTINGS,) = blocks("yaml")
COMMANDS = [c for b in blocks("") for c in b.splitlines() if c.startswith("murmur ")]
SLIPS = [
    [cell.strip() for cell in line.split("|")[1:-1]]
    for line in PAGE.splitlines()
    if line.startswith("| `")
]


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """One command of the page; runs and evaluations are short."""
    settings = {
        "MURMUR__RUN__MAX_UPDATES": "12",
        "MURMUR__EVALUATION__EPISODES": "4",
        "MURMUR__LEARNER__PORT": "0",
        "MURMUR__LEARNER__METRICS_PORT": "0",
        "MURMUR__ENV_SERVER__METRICS_PORT": "0",
        "COLUMNS": "300",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    program, *arguments = command.split()
    assert program == "murmur"
    if arguments[0] == "report":
        arguments += ["--episodes", "4"]
    return subprocess.run(
        [sys.executable, "-P", "-m", "murmur", *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | settings,
        timeout=240,
        check=False,
    )


@pytest.mark.long
def test_every_command_of_the_page_works(tmp_path: Path) -> None:
    assert [c.split()[1] for c in COMMANDS] == [
        *("check-env", "train", "evaluate", "evaluate", "report", "export"),
    ]
    (tmp_path / "meet.py").write_text(MEET)
    (tmp_path / "meet.yaml").write_text(SETTINGS)
    printed = {}
    for command in COMMANDS:
        result = run(command, tmp_path)
        assert result.returncode == 0, command + "\n" + result.stdout + result.stderr
        printed[command] = result.stdout
    assert printed["murmur check-env meet:Meet"] in blocks("")  # as the page shows it
    assert "murmur report" in printed["murmur train meet.yaml"]
    assert "if the environment can render itself" in printed["murmur train meet.yaml"]
    assert " episodes of meet, " in printed["murmur evaluate"]
    assert "apart" in printed["murmur evaluate"]
    (folder,) = (tmp_path / "runs").iterdir()
    assert "meet:Meet" in (folder / "report.html").read_text().split("<details")[0]
    assert (folder / "policy.onnx").exists()


@pytest.mark.parametrize("number", range(len(SLIPS)))
def test_every_slip_gets_the_answer_of_the_page(number: int, tmp_path: Path) -> None:
    right, wrong, answer = SLIPS[number]
    assert MEET.count(right.strip("`")) == 1
    (tmp_path / "meet.py").write_text(MEET.replace(right.strip("`"), wrong.strip("`")))
    result = run("murmur check-env meet:Meet", tmp_path)
    assert result.returncode == 1
    said = [line.removeprefix("✗ ") for line in result.stdout.splitlines()[1:]]
    lines = answer.split("<br>")
    assert len(said) == len(lines)
    for line, wanted in zip(said, lines, strict=True):
        assert re.fullmatch(re.escape(wanted).replace(r"row\ N\)", r"row\ \d+\)"), line), line
