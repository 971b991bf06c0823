"""Progress and evaluations as CSV."""

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from learner_service.telemetry.progress import Progress, ProgressLog
from murmur.cli import main
from murmur.comparison.csv_export import write_csv
from murmur.runs.run_folder import RunFolder
from shared.process.errors import ConfigError


def begin(path: Path, *, losses: dict[str, float]) -> RunFolder:
    """A run with two lines of progress and an evaluation."""
    path.mkdir()
    (path / "config.yaml").write_text("environment: {name: spread}\n")
    p = Progress()
    log = ProgressLog(path, p, num_agents=3)
    for updates in (1, 2):
        p.updates, p.env_steps, p.losses = updates, 10 * updates, losses
        log.write({"device": {}})
    log.write_evaluation(
        2, 20, {"return": {"mean": 4.0, "std": 1.0, "ci95": [3.0, 5.0], "episodes": 9}}
    )
    log.close()
    return RunFolder(path)


def rows(file: Path) -> list[dict[str, Any]]:
    with file.open(newline="") as stream:
        return list(csv.DictReader(stream))


def test_several_runs_share_two_files(tmp_path: Path) -> None:
    runs = [begin(tmp_path / "a", losses={"x": 0.5}), begin(tmp_path / "b", losses={"y": 2.0})]
    with (tmp_path / "a" / "progress.jsonl").open("a") as file:
        file.write('{"kind": "progress", torn')
    counts = write_csv(runs, tmp_path / "out")
    assert {file.name: count for file, count in counts.items()} == {
        "progress.csv": 4,
        "evaluations.csv": 2,
    }
    progress = rows(tmp_path / "out" / "progress.csv")
    seen = [(r["run"], r["env_steps"], r["update/x"], r["update/y"]) for r in progress]
    assert seen == [
        *(("a", "10", "0.5", ""), ("a", "20", "0.5", "")),
        *(("b", "10", "", "2.0"), ("b", "20", "", "2.0")),
    ]
    evaluations = rows(tmp_path / "out" / "evaluations.csv")
    assert [r["run"] for r in evaluations] == ["a", "b"]
    first = evaluations[0]
    assert (first["metric"], first["mean"], first["low"], first["high"]) == (
        *("return", "4.0", "3.0"),
        "5.0",
    )
    assert (first["std"], first["episodes"], first["updates"]) == ("1.0", "9", "2")


def test_the_command_writes_beside_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = begin(tmp_path / "a", losses={})
    monkeypatch.setattr(sys, "argv", ["murmur", "csv", str(run.path)])
    with pytest.raises(SystemExit) as end:
        main()
    assert (end.value.code or 0) == 0
    assert "progress.csv, 2 rows" in capsys.readouterr().out
    (evaluation,) = [
        json.loads(line) for line in (run.path / "progress.jsonl").read_text().splitlines()[2:]
    ]
    assert rows(run.path / "evaluations.csv")[0]["time"] == str(evaluation["time"])


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    run = begin(tmp_path / "a", losses={})
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot write to '.*file/out'"):
        write_csv([run], tmp_path / "file" / "out")
