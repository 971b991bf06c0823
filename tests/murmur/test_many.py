"""Many runs in the Python API: the results of `murmur sweep` and `murmur compare`."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import murmur
from murmur.sweeps.folder import SweepFolder
from murmur.sweeps.spec import load_spec
from tests.murmur.runs_on_disk import write_run

TINY: dict[str, Any] = {
    "environment": {"name": "matrix", "episode_steps": 5},
    "env_server": {"num_workers": 1, "envs_per_worker": 8},
    "algorithm": {"name": "mappo", "batch_size": 80, "batch_number": 1, "data_passes": 1},
    "network": {"name": "mlp", "hidden": [8]},
    "run": {"max_updates": 2},
    "learner": {"pipeline": "sync", "device": "cpu", "log_every_s": 0.001},
    "evaluation": {"every_updates": 2, "episodes": 4},
}


@pytest.mark.long
@pytest.mark.system
def test_sweep_returns_its_runs_and_tries_failed_ones_again(tmp_path: Path) -> None:
    file = tmp_path / "tiny.yaml"
    file.write_text(json.dumps(TINY))
    folder = tmp_path / "sweep"
    folder.mkdir()
    (folder / "tiny-seed-2").touch()  # in the place of the second run's folder
    with pytest.raises(murmur.MurmurError, match=r"1 of 2 runs failed .*seed-2.*resume=True"):
        murmur.sweep(file, seeds=2, folder=folder, overrides={"run.max_updates": np.int64(3)})
    (folder / "tiny-seed-2").unlink()
    runs = murmur.sweep(folder=folder, resume=True, progress=False)
    assert [run.config.run.seed for run in runs] == [1, 2]
    assert [run.latest().name for run in runs] == ["update-000003.pt"] * 2
    table = murmur.compare(runs, page=tmp_path / "page.html")
    assert table["runs"].tolist() == [2]
    assert table["iqm"][0] == np.mean([run.evaluations()["return"].iloc[-1] for run in runs])
    assert "murmur.compare(" in (tmp_path / "page.html").read_text()


def test_compare_returns_a_row_for_each_group(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in (1, 2, 3):
        at = f"run.seed={seed}"
        write_run(tmp_path / f"mappo-{seed}", [(1000, seed)], at)
        write_run(tmp_path / f"coma-{seed}", [(1000, 2 * seed)], at, "algorithm.name=coma")
    table = murmur.compare(tmp_path, by="algorithm.name")
    assert table.columns.tolist() == ["task", "group", "runs", "iqm", "low", "high", "min", "max"]
    assert table.set_index("group")["iqm"].to_dict() == {"coma": 4, "mappo": 2}  # means of three
    assert (table["low"] < table["iqm"]).all()
    assert table["max"].tolist() == [6, 3]
    assert "with fewer than 5" in capsys.readouterr().out
    single = murmur.compare([murmur.Run(tmp_path / "mappo-1")])
    assert single["low"].isna().all()


def test_wrong_calls_of_many_runs_are_told(tmp_path: Path) -> None:
    for call, words in (
        (lambda: murmur.sweep(), "which configurations"),
        (lambda: murmur.sweep("spread", seeds=2, resume=True), "continues a sweep as it is"),
        (lambda: murmur.sweep("spread", seeds=[1, 1], folder=tmp_path), "different numbers"),
        (lambda: murmur.sweep("spread", overrides={"run.seed": 1}), "chosen by the sweep"),
        (
            lambda: murmur.sweep("spread", vary={"algorithm.gama": [0.9]}, folder=tmp_path / "new"),
            r"algorithm\.gama",
        ),
        (lambda: murmur.sweep(folder=tmp_path, resume=True), "holds no sweep"),
        (lambda: murmur.compare(tmp_path), "holds no runs"),
    ):
        with pytest.raises(murmur.MurmurError, match=words):
            call()
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_that_cannot_run_unlocks_its_folder(tmp_path: Path) -> None:
    sweep = SweepFolder.create(load_spec(["spread"], {}), tmp_path)
    sweep.lock.release()
    sweep.config_file(sweep.runs[0]).write_text("run: [")
    with pytest.raises(murmur.MurmurError, match="no valid YAML"):
        murmur.sweep(folder=tmp_path, resume=True)
    SweepFolder.open(tmp_path, lock=True).lock.release()


def test_compare_names_the_extra_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(2):
        write_run(tmp_path / f"run-{i}", [(100, 1.0)], f"run.seed={i}")
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(murmur.MurmurError, match="report"):
        murmur.compare(tmp_path)


def test_a_sweep_is_resumed_by_its_folder_as_target(tmp_path: Path) -> None:
    with pytest.raises(murmur.MurmurError, match="holds no sweep"):
        murmur.sweep(tmp_path, resume=True)
    with pytest.raises(murmur.MurmurError, match="one sweep's folder"):
        murmur.sweep(tmp_path, folder=tmp_path, resume=True)
