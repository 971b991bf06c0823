"""A run that does not learn, as doctor and the live page tell it."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from murmur.cli import app
from murmur.doctor.learning import learning_lines
from murmur.learner_service.learning.stagnation import KIND
from murmur.live_page.alerts import learning_alert
from murmur.runs.run_folder import RunFolder
from murmur.shared.wire.notices import FILE, Notice, notice_line
from tests.murmur.runs_on_disk import write_run

SAID = "after 34 % this run is no better. Likeliest causes: (1) few updates: set algorithm.lr=1"
UNTRAINED = {"episodes": 20, "mean": 1.0, "std": 1.0, "low": 0.0, "high": 2.0}


def stagnant(path: Path, **returns: Any) -> RunFolder:
    run = write_run(path, [(100, 1.0)], returns=returns)
    cast = Notice("cast", "observation", "5 arrives as 4")
    (path / FILE).write_text(notice_line(cast) + notice_line(Notice(KIND, "return", SAID)))
    return run


@pytest.mark.parametrize(
    ("mean", "since"),
    [
        (1.1, "its last 50 episodes still return 1.1 ± 0.2772"),
        (9.0, "since then it has learned: its last episodes return 9 ± 0.2772"),
    ],
)
def test_what_was_said_comes_with_the_returns_since(
    mean: float, since: str, tmp_path: Path
) -> None:
    latest = {**UNTRAINED, "episodes": 50, "mean": mean}
    run = stagnant(tmp_path / "run", untrained=UNTRAINED, latest=latest)
    assert learning_lines(run) == [SAID, since]
    first, _ = learning_alert(run)
    assert first.what == "after 34 % this run is no better"
    assert first.fix.startswith("Likeliest causes: (1) few updates")


def test_doctor_says_it_even_where_nothing_else_can_be_said(tmp_path: Path) -> None:
    run = stagnant(tmp_path / "run")
    done = CliRunner().invoke(app, ["doctor", str(run.path), "--no-probe"])
    assert SAID in done.output


def test_a_run_that_learns_has_no_line(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [(100, 1.0)])
    assert learning_lines(run) == []
    assert list(learning_alert(run)) == []
    assert "returns" not in json.loads(run.progress_file.read_text().splitlines()[-1])
