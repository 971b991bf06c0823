"""`murmur runs`: what is listed, and what is deleted."""

import io
import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import typer

from murmur.cli import many
from murmur.runs.run_list import list_runs
from murmur.shared.process.errors import ConfigError
from murmur.shared.process.files import write_whole
from murmur.shared.process.run_lock import RunLock
from tests.murmur.runs_on_disk import write_run


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    write_run(folder / "long", [(500, 3.0), (1000, 2.0)], "run.seed=7")
    write_run(folder / "half", [(500, 5.0)], "algorithm.name=coma")
    write_run(folder / "new", [], "run.seed=2", env_steps=10)
    (folder / "half" / "checkpoints" / "update-000001.pt").write_bytes(b"x" * 5000)
    return folder


def test_runs_are_listed_sorted_and_filtered(runs: Path) -> None:
    by_score = list_runs([str(runs)], sort="score")
    assert [(r.path.name, r.state, r.score, r.steps) for r in by_score] == [
        ("half", "stopped", 5.0, 500),
        ("long", "complete", 3.0, 1000),
        ("new", "begun", 0.0, 10),  # never evaluated: return of its training episodes
    ]
    assert list_runs([str(runs)], sort="size")[0].size > 5000
    assert [r.seed for r in list_runs([str(runs)], sort="name")] == [1, 7, 2]
    assert [r.path.name for r in list_runs([str(runs)], state="complete")] == ["long"]
    with pytest.raises(ConfigError, match="holds no runs"):
        list_runs([str(runs / "nothing")])


def test_an_unreadable_run_is_listed(runs: Path) -> None:
    (runs / "new" / "config.yaml").write_text("learner: {of_the_past: 1}\n")
    (found,) = list_runs([str(runs)], state="unreadable")
    assert found.path.name == "new"


def test_list_as_json(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    many.runs([str(runs)], sort="steps", json_file=Path("-"))
    shown = json.loads(capsys.readouterr().out)
    assert [run["steps"] for run in shown] == [1000, 500, 10]


def test_delete_asks_first(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    with pytest.raises(typer.Abort):
        many.runs([str(runs)], delete=True)
    assert len(list_runs([str(runs)])) == 3


def test_delete_removes_what_is_listed(runs: Path) -> None:
    many.runs([str(runs)], state="begun", delete=True, yes=True)
    assert sorted(path.name for path in runs.iterdir()) == ["half", "long"]


def test_a_run_at_work_is_never_deleted(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sleeper = [sys.executable, "-c", "input()"]
    with subprocess.Popen(sleeper, stdin=subprocess.PIPE) as learner:
        assert psutil.pid_exists(learner.pid)
        write_whole(runs / "half" / "learner.json", json.dumps({"pid": learner.pid}))
        assert list_runs([str(runs / "half")])[0].state == "running"
        with RunLock.acquire(runs / "new"):  # by a process on another machine, for example
            many.runs([str(runs)], delete=True, yes=True)
        shown = capsys.readouterr().out
        learner.communicate(b"\n")
    assert sorted(path.name for path in runs.iterdir()) == ["half", "new"]
    assert f"half is the run of process {learner.pid}" in shown.replace("\n", " ")
    assert "is in use by" in shown
