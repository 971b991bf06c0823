"""Which environment `murmur evaluate` and `murmur render` play without a run's policy."""

import json
import os
from pathlib import Path

import pytest

from murmur.runs.run_folder import RunFolder
from murmur.shared.config.files import load, save
from tests.murmur.test_cli import murmur


@pytest.fixture
def two_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an older run of `matrix` and a newer one of `spread` under runs/."""
    monkeypatch.chdir(tmp_path)
    for age, config, overrides in (
        (100, "spread", ["environment.name=matrix"]),
        (0, "spread", []),
    ):
        run = RunFolder.create(load(config, overrides, {}), Path("runs") / f"run-{age}")
        file = save(load(config, overrides, {}), run.path / "config.yaml")
        os.utime(file, (1e9 - age, 1e9 - age))
    return tmp_path


BASELINE = ("evaluate", "--baseline", "random", "--episodes", "2")


def test_a_baseline_plays_the_newest_run_and_says_so(
    two_runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = murmur(monkeypatch, capsys, *BASELINE, "--json", "out.json")
    assert code == 0
    assert "environment: spread, of runs/run-0, the newest run" in out
    assert json.loads((two_runs / "out.json").read_text())["environment"].startswith("spread")


def test_a_baseline_plays_what_is_named(
    two_runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = murmur(monkeypatch, capsys, *BASELINE, "runs/run-100")
    assert "environment: matrix, of run runs/run-100" in out
    _, out, _ = murmur(monkeypatch, capsys, *BASELINE, "--config", "formation")
    assert "environment: formation, of configuration formation" in out
    code, _, err = murmur(monkeypatch, capsys, *BASELINE, "runs/run-0", "--config", "spread")
    assert code == 2
    assert "give one of them" in err


def test_a_baseline_without_any_run_asks_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for command in (BASELINE, ("render", "--baseline", "random")):
        code, _, err = murmur(monkeypatch, capsys, *command)
        assert code == 2
        assert "which environment?" in err
        assert "--config NAME" in err


def test_json_to_standard_output_is_nothing_but_json(
    two_runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = murmur(monkeypatch, capsys, *BASELINE, "--json", "-")
    assert code == 0
    assert json.loads(out)["title"] == "baseline random"
    assert "the newest run" in err
    assert not (two_runs / "-").exists()
