"""Groups, refusals and pages of `murmur compare`, from real run folders."""

import json
from pathlib import Path

import pytest

from murmur.cli import many
from murmur.comparison.analysis import compare, learning_curve
from murmur.comparison.groups import environment_name
from murmur.comparison.page import render
from murmur.shared.process.errors import ConfigError
from tests.murmur.runs_on_disk import write_run

COMA = ("algorithm.name=coma",)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Three seeds of two algorithms: finals 1, 2, 3 of mappo and 2, 4, 6 of coma."""
    for seed in (1, 2, 3):
        at = f"run.seed={seed}"
        write_run(tmp_path / f"mappo-{seed}", [(500, 0.0), (1000, seed)], at)
        write_run(tmp_path / f"coma-{seed}", [(500, 9.0), (1000, 2 * seed)], at, *COMA)
    return tmp_path


def test_groups_are_named_by_what_differs(runs: Path) -> None:
    found = compare([str(runs)])
    assert {group.name: len(group.runs) for group in found.groups} == {"coma": 3, "mappo": 3}
    coma, mappo = found.groups
    assert coma.settings["algorithm.td_lambda"] == "0.8"  # listed, but needed for no name
    assert mappo.settings["algorithm.td_lambda"] == "–"
    (task,) = found.tasks
    assert task.name == "spread"
    assert task.iqm["mappo"].value == 2  # three runs: their mean
    assert task.iqm["coma"].value == 4
    # Pairs of (2, 4, 6) and (1, 2, 3): 1 + 0.5 + 0, then six wins -> 7.5 of 9
    assert task.improvement["coma", "mappo"].value == pytest.approx(7.5 / 9)
    assert found.notes[1].startswith("A group has 3 runs on a task: with fewer than 5")


def test_where_runs_work_sets_no_groups_apart(tmp_path: Path) -> None:
    for seed in (1, 2):
        name = f"run-{seed}"
        at = (
            f"run.seed={seed}",
            f"run.name={name}",
            f"learner.port={seed}",
            f"tracking.name={name}",
        )
        workers = ("env_server.num_workers=2",) * (seed - 1)
        write_run(tmp_path / name, [(1000, 1.0)], *at, *workers)
    assert [group.name for group in compare([str(tmp_path)]).groups] == ["all runs"]


def test_what_a_learner_chose_by_its_speed_sets_no_groups_apart(tmp_path: Path) -> None:
    for seed, (steps, lag, precision) in enumerate([(16, 1, "fp32"), (22, 2, "bf16")]):
        measured = {"algorithm.unroll_steps": steps, "learner.max_policy_lag": lag}
        chosen = measured | {"learner.precision": precision}
        at = (f"run.seed={seed}", *(f"{key}={value}" for key, value in chosen.items()))
        run = write_run(tmp_path / f"auto-{seed}", [(1000, 1.0)], *at)
        (run.path / "measured.json").write_text(json.dumps(measured))
        (run.path / "precision.json").write_text(json.dumps({"precision": precision}))
    assert [group.name for group in compare([str(tmp_path)]).groups] == ["all runs"]
    given = write_run(tmp_path / "given", [(1000, 1.0)], "algorithm.unroll_steps=16")
    names = [group.name for group in compare([str(tmp_path)]).groups]
    assert names == ["unroll_steps=auto", "unroll_steps=16"]
    # A resumed run may be given other steps than those once chosen.
    (given.path / "measured.json").write_text('{"algorithm.unroll_steps": 22}')
    assert [group.name for group in compare([str(tmp_path)]).groups] == names


def test_best_and_at_steps_choose_the_score(runs: Path) -> None:
    assert compare([str(runs)], best=True).tasks[0].iqm["coma"].value == 9
    assert compare([str(runs)], at_steps=700).tasks[0].iqm["mappo"].value == 0


def test_less_is_better_turns_the_order(runs: Path) -> None:
    task = compare([str(runs)], metric="-return").tasks[0]
    assert list(task.iqm) == ["mappo", "coma"]
    assert task.improvement["mappo", "coma"].value == pytest.approx(7.5 / 9)
    found = task.iqm["coma"]
    assert found.value == 4
    assert found.low is not None
    assert found.high is not None
    assert 2 <= found.low <= 4 <= found.high <= 6


def test_learning_curve_by_hand(tmp_path: Path) -> None:
    for seed, (first, last) in enumerate([(0.0, 10.0), (2.0, 20.0), (4.0, 30.0)]):
        write_run(tmp_path / str(seed), [(100, first), (200, last)], f"run.seed={seed}")
    found = compare([str(tmp_path)]).groups[0]
    line = learning_curve(found.runs)
    assert (line.x[0], line.x[-1]) == (100, 200)
    assert (line.y[0], line.y[-1]) == (2, 20)
    middle = abs(line.x - 150).argmin()  # interpolated linearly: 2 + 18 * (x - 100) / 100
    assert line.y[middle] == pytest.approx(2 + 0.18 * (line.x[middle] - 100))
    assert 10 <= line.low[-1] < 20 < line.high[-1] <= 30


def test_different_tasks_are_refused_with_what_differs(runs: Path) -> None:
    write_run(runs / "more", [(1000, 1.0)], "environment.num_agents=4")
    with pytest.raises(ConfigError, match=r"environment\.num_agents: 3, 4\); .*--across-tasks"):
        compare([str(runs)])


def test_different_step_counts_are_refused(runs: Path) -> None:
    write_run(runs / "short", [(500, 1.0)], "run.seed=4")
    words = r"short 500 \(begun\), coma-1 1000 \(complete\); --at-steps 500 .*--any-steps"
    with pytest.raises(ConfigError, match=words):
        compare([str(runs)])
    assert compare([str(runs)], any_steps=True).tasks[0].env_steps["mappo"] == (500, 1000)
    said: list[str] = []
    found = compare([str(runs)], at_steps=1000, say=said.append)
    assert said == ["left out: short: it ended after 500 environment steps"]
    assert len(found.groups[1].runs) == 3


def test_metrics_that_differ_are_refused(runs: Path) -> None:
    write_run(runs / "other", [(1000, 1.0)], "evaluation.best_metric=-coverage", metric="coverage")
    with pytest.raises(ConfigError, match=r"coma-1 by 'return', other by '-coverage'.*--metric"):
        compare([str(runs)])


def test_across_tasks_scores_are_scaled_by_task(runs: Path) -> None:
    for seed in (1, 2, 3):
        at = ("environment.num_agents=4", f"run.seed={seed}")
        write_run(runs / f"m4-{seed}", [(1000, 100.0 * seed)], *at)
        write_run(runs / f"c4-{seed}", [(1000, 300.0)], *at, *COMA)
    found = compare([str(runs)], across_tasks=True)
    assert [task.name for task in found.tasks] == ["num_agents=4", "num_agents=3"]
    assert found.overall is not None
    # mappo: (0, 0.5, 1) of 100 to 300, and (0, 0.2, 0.4) of 1 to 6; the middle four of six
    assert found.overall.iqm["mappo"].value == pytest.approx((0 + 0.2 + 0.4 + 0.5) / 4)
    page = render(found, "murmur compare runs --across-tasks")
    assert page.count("<svg") == 2 + 3 + 3


def test_what_goes_with_the_task_sets_no_groups_apart(runs: Path) -> None:
    for seed in (1, 2):
        for name, more in (("m", ()), ("c", COMA)):
            at = ("environment.num_agents=4", f"run.seed={seed}", "learner.keep_checkpoints=7")
            larger = ("network.name=mlp", "network.hidden=[8]")
            write_run(runs / f"{name}4-{seed}", [(1000, 1.0 * seed)], *at, *larger, *more)
    found = compare([str(runs)], across_tasks=True)
    assert [group.name for group in found.groups] == ["coma", "mappo"]
    assert found.groups[0].settings["network.hidden"] == "8; –"
    assert any("differ in network.name, network.hidden" in note for note in found.notes)


def test_unequal_runs_are_left_out_over_all_tasks(runs: Path) -> None:
    write_run(runs / "m4", [(1000, 1.0)], "environment.num_agents=4")
    found = compare([str(runs)], across_tasks=True)
    assert found.overall is None
    assert any("mappo is left out over all tasks" in note for note in found.notes)


def test_by_groups_by_one_key_and_says_what_else_differs(runs: Path) -> None:
    found = compare([str(runs)], by=["environment.num_agents"])
    assert [group.name for group in found.groups] == ["num_agents=3"]
    assert any("Runs of num_agents=3 differ in algorithm.name" in note for note in found.notes)
    assert any("seed 1 occurs more than once" in note for note in found.notes)
    with pytest.raises(ConfigError, match="--by nope: no run has this key"):
        compare([str(runs)], by=["nope"])


def test_runs_without_a_score_are_named(runs: Path) -> None:
    write_run(runs / "new", [], "run.seed=9")
    (runs / "new" / "progress.jsonl").unlink()
    said: list[str] = []
    compare([str(runs)], say=said.append)
    assert said == ["left out: new: no score of 'return' yet (begun)"]
    with pytest.raises(ConfigError, match="no run that is named has a score"):
        compare([str(runs / "new")])
    with pytest.raises(ConfigError, match=r"holds no runs; give folders"):
        compare([str(runs / "nowhere-*")])


def test_the_command_writes_one_page(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(runs)
    many.compare([str(runs / "*")])
    page = (runs / "compare.html").read_text()
    assert "coma – mappo on spread" in page
    assert page.count("<svg") == 3
    assert "http" not in page.replace("http://www.w3.org", "").replace("https://matplotlib.org", "")
    shown = capsys.readouterr().out
    assert "spread: interquartile mean (IQM) of return" in shown
    assert "written: compare.html" in shown


def test_a_task_is_named_after_what_a_factory_makes() -> None:
    made = {"environment.name": "gymnasium", "environment.factory": "gymnasium:make"}
    assert environment_name(made) == "gymnasium:make"
    assert environment_name({**made, "environment.arguments.id": "Hopper-v5"}) == "Hopper-v5"
