"""Optuna's study behind a sweep, without processes: what it proposes, prunes and takes up."""

from pathlib import Path
from typing import Any

import pytest

from murmur.sweeps.folder import SweepFolder
from murmur.sweeps.spec import SweepConfig
from shared.config.section import validate

pytest.importorskip("optuna")
from murmur.sweeps.study import Searched

MATRIX = "environment: {name: matrix}\nalgorithm: {name: mappo}\nnetwork: {name: mlp}\n"


def open_search(folder: Path, **data: Any) -> SweepFolder:
    """A sweep of seven trials, and the configuration that it is of."""
    (folder / "matrix.yaml").write_text(MATRIX)
    search = {
        "configs": str(folder / "matrix.yaml"),
        "method": "optuna",
        "trials": 7,
        "vary": {
            "algorithm.gamma": {"uniform": [0.5, 1.0]},
            "algorithm.data_passes": {"integers": [1, 9]},
            "network.hidden": [[8], [16, 16]],
        },
    }
    sweep = SweepFolder.create(validate(SweepConfig, search | data), folder / "made")
    sweep.lock.release()
    return sweep


def evaluation(value: float, updates: int = 10) -> dict[str, Any]:
    return {"kind": "evaluation", "updates": updates, "metrics": {"return": {"mean": value}}}


def test_trials_are_proposed_pruned_and_taken_up(tmp_path: Path) -> None:
    sweep = open_search(tmp_path)
    queue = Searched(sweep)
    for value in range(5):
        run = queue.next()
        assert run is not None
        assert 0.5 <= run.settings["algorithm.gamma"] <= 1
        assert run.settings["network.hidden"] in ([8], [16, 16])
        assert sweep.config_file(run).is_file()
        assert not queue.evaluated(run, evaluation(value))
        run.state, run.last = "complete", float(value)
        queue.ended(run)
    good, bad = queue.next(), queue.next()
    assert good is not None
    assert bad is not None
    assert queue.next() is None  # all seven are proposed
    assert not queue.evaluated(good, evaluation(3.0))
    assert queue.evaluated(bad, evaluation(1.0))  # the median at update 10 is 2
    bad.state, good.state = "pruned", "running"
    queue.ended(bad)
    sweep.save()

    again = Searched(SweepFolder.open(sweep.path))  # after a kill: one run had begun
    run = again.next()
    assert run is not None
    assert run.name == good.name
    assert again.next() is None
    run.state, run.last = "complete", 3.5
    again.ended(run)
    trials = again.study.trials
    assert [t.value for t in trials if t.state.name == "COMPLETE"] == [0, 1, 2, 3, 4, 3.5]
    assert [t.number for t in trials if t.state.name == "PRUNED"] == [bad.trial]


def test_settings_that_do_not_fit_are_a_failed_trial(tmp_path: Path) -> None:
    # Of 8 environments, 3 sessions cannot be made; 1 and 2 can.
    vary = {"env_server.sessions_per_worker": {"integers": [1, 3]}}
    sweep = open_search(tmp_path, vary=vary, set={"env_server.envs_per_worker": 8}, trials=12)
    queue = Searched(sweep)
    begun = []
    while (run := queue.next()) is not None:
        begun.append(run)
    failed = [run for run in sweep.runs if run.state == "failed"]
    assert len(begun) + len(failed) == 12
    assert begun
    assert failed
    assert "is no multiple of sessions_per_worker 3" in failed[0].message


@pytest.mark.timeout(60)
def test_the_lock_of_a_search_that_was_killed_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_search(tmp_path)
    monkeypatch.chdir(tmp_path)
    Searched(SweepFolder.open(Path("made")))
    # As Optuna leaves it where the path is relative: a link to a file that does not exist.
    Path("made/optuna.log.lock").symlink_to("made/optuna.log")
    assert Searched(SweepFolder.open(Path("made"))).next() is not None
