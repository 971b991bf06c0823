"""What is found in a run's folder."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from murmur.cli import main
from murmur.runs.run_folder import BLOCK, RunFolder
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.config.files import load, save
from murmur.shared.process.errors import CheckpointError, ConfigError
from murmur.shared.process.process import process_began


def test_the_latest_checkpoint_is_that_of_most_updates(tmp_path: Path) -> None:
    run, folder = RunFolder(tmp_path), tmp_path / "checkpoints"
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        run.checkpoint("latest")
    folder.mkdir()
    for updates in (999_950, 1_000_000, 990_000):  # numbers are six digits wide, or wider
        (folder / f"update-{updates:06d}.pt").touch()
    assert run.checkpoint("latest").name == "update-1000000.pt"
    assert run.checkpoint("best").name == "update-1000000.pt"
    (folder / "best.pt").touch()
    assert run.checkpoint("best").name == "best.pt"


@pytest.fixture
def config() -> ExperimentConfig:
    return load("spread", [], {})


def begin(config: ExperimentConfig, path: Path, time: float, *, checkpoint: bool) -> RunFolder:
    """A run whose configuration was written at `time`."""
    run = RunFolder.create(config, path)
    os.utime(save(config, run.path / "config.yaml"), (time, time))
    if checkpoint:
        (path / "checkpoints").mkdir()
        (path / "checkpoints" / "update-000001.pt").touch()
    run.lock.release()
    return run


def test_a_run_without_a_checkpoint_is_started_anew(
    tmp_path: Path, config: ExperimentConfig
) -> None:
    path = tmp_path / "early run"
    run = begin(config, path, 1, checkpoint=False)
    run.progress_file.write_text("the first start's")
    (path / "mine.txt").touch()
    assert run.again() == f"murmur train '{path}/config.yaml' --run '{path}'"
    RunFolder.create(config, path)
    (aside,) = path.glob("begun-*")
    assert (aside / "progress.jsonl").read_text() == "the first start's"
    assert {p.name for p in aside.iterdir()} == {"config.yaml", "logs", "progress.jsonl"}
    assert {p.name for p in path.iterdir()} == {aside.name, "logs", "mine.txt", "run.lock"}


def test_runs_begun_in_one_second_have_folders_of_their_own(
    tmp_path: Path, config: ExperimentConfig
) -> None:
    here = config.run.model_copy(update={"directory": str(tmp_path / "runs")})
    config = config.model_copy(update={"run": here})
    first, second = (RunFolder.create(config, None) for _ in range(2))
    assert first.path != second.path
    save(config, first.path / "config.yaml")
    (first.path / "checkpoints").mkdir()
    (first.path / "checkpoints" / "update-000001.pt").touch()
    assert RunFolder.newest(tmp_path / "runs", "spread").path == first.path


def test_run_that_can_continue_or_continues_is_not_started_again(
    tmp_path: Path, config: ExperimentConfig
) -> None:
    run = begin(config, tmp_path / "done", 1, checkpoint=True)
    assert run.again() == f"murmur train --resume --run {run.path}"
    with pytest.raises(ConfigError, match="holds a run already; add --resume"):
        RunFolder.create(config, run.path)
    run = begin(config, tmp_path / "begun", 1, checkpoint=False)
    for name in ("command.json", "learner.json"):
        (run.path / name).write_text(json.dumps({"pid": os.getppid()}))
        with pytest.raises(ConfigError, match=f"run of process {os.getppid()}, which is at work"):
            RunFolder.create(config, run.path)
        (run.path / name).unlink()


def test_a_process_is_known_by_its_number_and_its_age(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert run.process("learner.json") is None
    file = tmp_path / "learner.json"
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as child:
        file.write_text(json.dumps({"pid": child.pid}))
        assert run.process("learner.json") == child.pid
        os.utime(file, (1e9, 1e9))  # written long before: the number was another process's then
        assert run.process("learner.json") is None
        os.utime(file)
        # Where it is known when the process began, no jump of the clock changes the answer.
        began = process_began(child.pid)
        if began is not None:
            for at, pid in ((began, child.pid), (began + 1, None)):
                file.write_text(json.dumps({"pid": child.pid, "began": at}))
                for written in (1e9, 1e10):
                    os.utime(file, (written, written))
                    assert run.process("learner.json") == pid
        child.communicate(b"\n")
    assert run.process("learner.json") is None


def test_the_newest_run_is_one_with_a_checkpoint(tmp_path: Path, config: ExperimentConfig) -> None:
    with pytest.raises(ConfigError, match="no run under"):
        RunFolder.newest(tmp_path)
    begin(config, tmp_path / "spread-3", 3, checkpoint=False)
    with pytest.raises(ConfigError, match="no run with a checkpoint under"):
        RunFolder.newest(tmp_path)
    begin(config, tmp_path / "spread-1", 1, checkpoint=True)
    begin(config, tmp_path / "spread-2", 2, checkpoint=True)
    assert RunFolder.newest(tmp_path).path.name == "spread-2"
    assert RunFolder.newest(tmp_path, begun=True).path.name == "spread-3"
    begin(config, tmp_path / "one", 4, checkpoint=True)  # as `murmur learner --run runs/one` does
    assert RunFolder.newest(tmp_path).path.name == "one"


def test_a_name_that_begins_or_ends_as_another_does_is_another(
    tmp_path: Path, config: ExperimentConfig
) -> None:
    stamp = "20260101-120000"
    names = ["spread", "spread-2", "spread-20260202-130000", "my-spread", "spread.b", "spreadxb"]
    for i, name in enumerate(names):
        begin(config, tmp_path / f"{name}-{stamp}", 10 + i, checkpoint=True)
    for name in names:
        assert RunFolder.newest(tmp_path, name).path.name == f"{name}-{stamp}"
    with pytest.raises(ConfigError, match="no run of 'spre\\*' under"):
        RunFolder.newest(tmp_path, "spre*")


def test_settings_of_a_resumed_run_are_checked_first(
    tmp_path: Path,
    config: ExperimentConfig,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = begin(config, tmp_path / "done", 1, checkpoint=True)
    before = {p.name for p in run.path.iterdir()}
    command = ["murmur", "train", "--resume", "--run", str(run.path), "--set"]
    monkeypatch.setattr(sys, "argv", [*command, "algorithm.gama=3"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert "unknown key 'algorithm.gama'; did you mean 'gamma'?" in capsys.readouterr().err
    assert {p.name for p in run.path.iterdir()} == before


@pytest.mark.parametrize("content", ["", "run: [", "a: 1", "\0", "&a [*a]"])
def test_a_spoilt_configuration_of_a_run_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.yaml").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.yaml|is missing"):
        RunFolder.open(tmp_path).config()


def test_a_line_that_is_too_long_is_passed_over(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    long = b"x" * (2 * BLOCK + 5)
    good = [json.dumps({"kind": "progress", "updates": n}).encode() for n in (1, 2)]
    torn = b'{"kind": "progress", "upd'
    run.progress_file.write_bytes(b"\n".join([good[0], long, b"[" * 100_000, good[1], torn]))
    assert [r["updates"] for r in run.records("progress")] == [1, 2]
    assert [r["updates"] for r in run.newest_records("progress")] == [2, 1]
