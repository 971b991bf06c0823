"""The acceptance harness: its statistics by hand, its files, and a whole small test."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from benchmarks._stacked import stacked_against_loop
from benchmarks.acceptance import page, run, task
from benchmarks.acceptance.scores import (
    bootstrap_interval,
    interquartile_mean,
    scores,
    sums,
)
from benchmarks.acceptance.task import (
    Goal,
    built,
    defaults,
    experiment,
    load_task,
    published,
    task_names,
)
from murmur.doctor.machine import ROOT
from murmur.env_service.environment import make_environment
from murmur.env_service.sessions.evaluation_result import EvaluationResult
from murmur.runs.settings import with_plugin_defaults
from murmur.shared.config import PluginConfig
from murmur.shared.config.files import load
from murmur.shared.process.errors import ConfigError

TINY = {
    "title": "penalty k = 0",
    "score": {"divisor": 2, "unit": "payoff", "scripted": 250, "scripted_is": "the optimum"},
    "episodes": 6,
    "config": {
        "environment": {"name": "matrix", "game": "penalty", "penalty": 0.0},
        "env_server": {"envs_per_worker": 8},
        "network": {"name": "mlp", "hidden": [8]},
    },
    "algorithms": {
        "dmax": {"goals": [{"env_steps": 400, "at_least": 0}], "config": {}},
        "mappo": {
            "seeds": [2],
            "goals": [{"env_steps": 400, "at_least": -1}, {"env_steps": 800, "one_of": [1e6]}],
            "also": ["sampled"],
            "config": {"algorithm": {"name": "mappo", "batch_size": 100, "batch_number": 4}},
        },
    },
}


def test_interquartile_mean_by_hand() -> None:
    # Of five seeds' means, 100, 2, 3, 4 and -50, one goes at each end.
    scores = np.array([[100.0, 100], [0, 4], [5, 1], [4, 4], [-100, 0]])
    assert interquartile_mean(scores) == 3.0
    # Of one seed no episode is left out: three in four won are 0.75.
    assert interquartile_mean(np.array([[1.0, 1, 0, 1]])) == 0.75


def test_bootstrap_interval() -> None:
    assert bootstrap_interval(np.full((3, 10), 2.0)) == (2.0, 2.0)
    # Seeds that differ and episodes that do not: the interval spans the seeds.
    between = bootstrap_interval(np.repeat([[0.0], [1.0], [2.0]], 10, axis=1))
    assert between == (0.0, 2.0)
    drawn = np.random.default_rng(0).normal(5, 1, (4, 100))
    low, high = bootstrap_interval(drawn)
    assert low < interquartile_mean(drawn) < high
    assert high - low < 0.6
    assert (low, high) == bootstrap_interval(drawn)


def test_scores_of_so_many_steps() -> None:
    nan = float("nan")
    curve = np.array([[0, 1, 2, 3], [0, -1, nan, nan], [0, 0, 5, nan]])  # 3, 1 and 2 steps
    result = EvaluationResult("toy", "test", 1, {"return": curve[:, 1]}, {"return": curve})
    assert scores(result, 0).tolist() == [1, -1, 0]
    assert scores(result, 2).tolist() == [2, -1 + 0, 5]
    assert sums(curve, 0).tolist() == [3, -1, 5]
    # 3 - 1 + 0; -1 + 5 + 2; 5 + 3
    assert scores(result, 5).tolist() == [2, 6, 8]


def test_the_best_evaluation_has_the_highest_mean_over_seeds() -> None:
    curves = [{0: 1.0, 1: 5.0, 2: 4.0}, {0: 1.0, 2: 4.0, 1: 1.0, 3: 9.0}]  # one seed has not ended
    found = run._evaluated(curves, every=50, unpaid=1.0, divisor=2.0)
    assert (found["number"], found["best"]["env_steps"], found["last"]["env_steps"]) == (
        3,
        100,
        100,
    )
    assert found["best"]["means"] == [1.5, 1.5]
    assert run._evaluated([{0: 1.0}, {}], every=50, unpaid=1.0, divisor=2.0) == {}
    line = {"goal": ">= 0", "score": 1.0, "low": None, "high": None, "S": 1.0, "seeds": [1]}
    line |= {"env_steps": 100, "means": [1.0], "cpu_s": [None], "passed": True}
    results: dict[str, Any] = {"test": "A0", "title": "", "unit": "S", "divisor": 1, "episodes": 1}
    results |= {"scripted_is": "best", "anchors": {"random": 0.0, "scripted": 1.0}}
    results["entries"] = {"qmix": {"lines": [line | {"evaluations": found}]}}
    assert "qmix best of 3 1.5, after 100 steps; the last, after 100, 1.5." in page.page(results)


def test_later_steps_of_spread_pay_what_the_original_does() -> None:
    """Its velocities move first: v' = 0.75 v + f, x' = x + 0.1 v'."""
    n, seeds = 40, np.arange(40, dtype=np.uint64)
    environment = make_environment(PluginConfig(name="spread", episode_steps=26), n)
    observed = environment.reset(seeds).observation["observation"].copy()
    position, velocity = observed[..., 2:4], np.zeros((n, 3, 2), np.float32)
    landmarks = observed[:, 0, 4:10].reshape(n, 3, 2) + position[:, :1]
    push = 0.5 * np.array([[0, 0], [-1, 0], [1, 0], [0, -1], [0, 1]], np.float32)
    actions = np.random.default_rng(0).integers(5, size=(26, n, 3), dtype=np.int32)
    apart, paid, original = np.ones(n, bool), np.zeros((26, n)), np.zeros((25, n))
    for t, action in enumerate(actions):
        timestep = environment.step(action, np.zeros(n, bool), seeds)
        paid[t] = timestep.reward.sum(1)
        others = timestep.observation["observation"][..., 10:14].reshape(n, 3, 2, 2)
        apart &= np.linalg.norm(others, axis=-1).min((1, 2)) > 0.33
        if t < 25:
            velocity = 0.75 * velocity + push[action]
            position = position + 0.1 * velocity
            to = np.linalg.norm(position[:, None] - landmarks[:, :, None], axis=-1)
            original[t] = -1.5 * to.min(-1).sum(-1)
    assert apart.sum() > 3
    assert paid[1:, apart] == pytest.approx(original[:, apart], abs=1e-4)
    config = experiment("A5", load_task("A5"), "vdn", 1)
    config = config.model_copy(
        update={"evaluation": config.evaluation.model_copy(update={"first_seed": 0, "episodes": n})}
    )
    assert run._unpaid(config, 1) == pytest.approx(paid[0].mean(), abs=1e-4)


def test_anchors_do_not_depend_on_evaluations_during_training() -> None:
    test = load_task("A5").model_copy(update={"episodes": 4})
    config = experiment("A5", test, "qmix", 1)
    assert config.evaluation.environment
    assert run.anchors(test, config) == run.anchors(test, experiment("A5", test, "coma", 1))


@pytest.mark.parametrize(
    ("goal", "passes"),
    [
        ({"at_least": 4.0}, True),
        ({"at_least": 4.1}, False),
        ({"at_least": 5.0, "share_of_seeds": 0.5}, True),
        ({"at_least": 5.0, "share_of_seeds": 0.6}, False),
        ({"one_of": [3.5, 6.0]}, True),  # 3 and 5, each within 1
        ({"one_of": [6.0]}, False),
    ],
)
def test_goals(goal: dict[str, Any], passes: bool) -> None:
    means = np.array([[3.0, 3.0, 3.0, 3.0], [5.0, 5.0, 5.0, 5.0]])
    assert Goal(env_steps=1, **goal).passed(means) == passes


def test_a_lowered_goal_names_the_former_one() -> None:
    goal = Goal(env_steps=100, at_least=-17.4, was=-14)
    assert goal.text() == ">= -17.4 (was -14)"
    assert goal.passed(np.array([[-17.0]]))


def test_the_committed_table_holds_every_goal() -> None:
    """Measured or not."""
    shown = page.overview(published())
    assert shown in (ROOT / "docs" / "results.md").read_text()
    for name in published()[:-1]:
        found = [x for x in shown.splitlines() if x.startswith(f"| {name} |")]
        for algorithm, candidate in load_task(name).algorithms.items():
            for goal in candidate.goals:
                assert any(f"| {algorithm} |" in x and f"{goal.env_steps:,}" in x for x in found)


def test_the_committed_page_of_defaults_follows_the_results() -> None:
    shown = page.matrix(defaults())
    assert shown == page.MATRIX.read_text()
    for name in defaults():
        for algorithm in load_task(name).algorithms:
            assert f" | {algorithm} | " in "".join(
                x for x in shown.splitlines() if x.startswith(f"| {name} |")
            )


def test_a_page_of_defaults_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before and now side by side, with what was not measured, and each seed."""
    monkeypatch.setattr(page, "RESULTS", tmp_path)
    line = {"env_steps": 20_000, "means": [-140.0, -150.0], "cpu_s": [50.0, None], "passed": True}
    for suffix, score in (("", -145.0), ("-before", -1631.0)):
        found = {"score": score, "low": score - 5, "high": score + 5}
        kept = {"anchors": {"random": -1220.0}, "entries": {"sac": {"lines": [line | found]}}}
        (tmp_path / f"acceptance-D1{suffix}.json").write_text(json.dumps(kept))
    sac, td3, _ = page.matrix(["D1"]).splitlines()[-3:]
    assert sac == (
        "| D1 | Pendulum | sac | 20,000 | -1.22e+03 | -250 | -1631 [-1636, -1626] | "
        "-145 [-150, -140] | -140, -150 | 50 | pass |"
    )
    assert td3.endswith("| td3 | 20,000 | -1.22e+03 | -250 |  |  |  |  | not measured |")


def test_the_curve_of_a_seed_is_thinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """First and last record with a return stay; returns are in published units."""
    monkeypatch.chdir(tmp_path)
    one = run.Run(experiment("D5", load_task("D5"), "mappo", 1))
    one.folder.path.mkdir(parents=True)
    (one.folder.path / "command.json").write_text(json.dumps({"commit": "abc"}))
    records = [
        {"kind": "progress", "env_steps": 10 * i, "return": -2.0 * i if i else None}
        for i in range(201)
    ]
    (one.folder.path / "progress.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    found = one.curve(divisor=2)
    assert found["commit"] == "abc"
    assert len(found["env_steps"]) == len(found["returns"]) == 50
    assert (found["env_steps"][0], found["env_steps"][-1]) == (10, 2000)
    assert found["returns"] == [-steps / 10 for steps in found["env_steps"]]


def test_curves_of_defaults_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean of the seeds over the steps that all have, and none of options beside a default."""
    monkeypatch.setattr(page, "RESULTS", tmp_path)
    seeds = {
        "1": {"env_steps": [100, 300], "returns": [-70.0, -50.0]},
        "2": {"env_steps": [200, 400], "returns": [-60.0, -40.0]},
    }
    kept = {"entries": {}, "curves": {"coma-critic": seeds, "vdn": seeds, "mappo": seeds}}
    (tmp_path / "acceptance-D5.json").write_text(json.dumps(kept | {"anchors": {"random": -78.0}}))
    (panel,) = page.curves(["D5"])
    assert panel.title == "D5: spread"
    assert list(panel.lines) == ["mappo", "vdn"]
    line = panel.lines["vdn"]
    assert line.x.tolist() == [200, 300]
    assert line.y.tolist() == [-60, -50]
    assert line.low.tolist() == [-60, -50]
    assert panel.levels == {"floor -60": -60, "floor -66": -66, "random": -78}


def test_a_goal_has_one_condition() -> None:
    with pytest.raises(ValueError, match="either at_least or one_of"):
        Goal(env_steps=1)


@pytest.mark.parametrize("name", [n for n in task_names() if n != "A9"])
def test_the_files_hold_configurations_that_exist(name: str) -> None:
    test = load_task(name)
    for algorithm in test.algorithms:
        config = experiment(name, test, algorithm, 1)
        if built(config):
            with_plugin_defaults(config)


def test_stacked_networks_equal_a_loop() -> None:
    line = stacked_against_loop("mappo", {"share_parameters": False}, updates=5)
    assert 0 < line["difference"] < 1e-6  # other kernels, so other rounding


@pytest.mark.long
@pytest.mark.system
def test_a_whole_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks, results = tmp_path / "tasks", tmp_path / "results"
    tasks.mkdir()
    (tasks / "t1.yaml").write_text(yaml.safe_dump(TINY))
    monkeypatch.setattr(task, "TESTS", tasks)
    for module in (run, page):
        monkeypatch.setattr(module, "RESULTS", results)
    monkeypatch.chdir(tmp_path)
    results.mkdir()
    (results / "acceptance-T1.json").write_text('{"entries": {}}')  # read again after each seed
    assert not run.run_task("T1", [], (), False)  # no policy earns a million

    saved = json.loads((results / "acceptance-T1.json").read_text())
    first, second = saved["entries"]["mappo"]["lines"]
    assert (first["passed"], second["passed"]) == (True, False)
    assert len(first["means"]) == 1
    assert first["S"] == 2 * first["score"]
    assert len(first["sampled"]["means"]) == len(first["trained_at"]) == 1
    assert all(x > 0 for x in first["cpu_s"] + first["minutes"])
    assert second["cpu_s"][0] > first["cpu_s"][0]
    assert saved["entries"]["dmax"] == {"not_built": True}
    # Uniform play earns (0 + 0 + 10 + 0 + 2 + 0 + 10 + 0 + 0) / 9 a round, 61 in 25.
    assert saved["anchors"]["random"] == pytest.approx(61, abs=25)
    text = (results / "acceptance-T1.md").read_text()
    assert "Not built: dmax." in text
    assert "By actions drawn from the policy, not its likeliest: mappo after 400 steps" in text
    assert "**fail**" in text

    # What is complete is not trained again: the checkpoints may even be gone.
    trained = tmp_path / "runs" / "acceptance" / "t1-mappo-seed2"
    shutil.rmtree(trained / "checkpoints")
    run.run_task("T1", ["mappo"], (2,), False)
    again = json.loads((results / "acceptance-T1.json").read_text())
    assert again["entries"]["mappo"]["lines"][0]["means"] == first["means"]
    assert again["entries"]["mappo"]["lines"][0]["cpu_s"] == first["cpu_s"]  # not the second's
    assert again["entries"]["dmax"] == {"not_built": True}

    # Other episodes cannot be played any more by what the policy was at the first goal.
    (tasks / "t1.yaml").write_text(yaml.safe_dump(dict(TINY, episodes=7)))
    with pytest.raises(ConfigError, match=r"trained to 800 .* after 400 is not to be seen"):
        run.run_task("T1", ["mappo"], (2,), False)

    # What 0 and 1 are follows the test.
    halved = dict(TINY, score=TINY["score"] | {"divisor": 4, "scripted": 125})
    (tasks / "t1.yaml").write_text(yaml.safe_dump(halved))
    run.run_task("T1", ["mappo"], (2,), False)
    half = json.loads((results / "acceptance-T1.json").read_text())["anchors"]
    assert half == {name: x / 2 for name, x in saved["anchors"].items()}

    with pytest.raises(ConfigError, match="no test of coma; it has dmax, mappo"):
        run.run_task("T1", ["coma"], (), False)
    changed = dict(TINY, config=TINY["config"] | {"network": {"name": "mlp", "hidden": [9]}})
    (tasks / "t1.yaml").write_text(yaml.safe_dump(changed))
    with pytest.raises(ConfigError, match="another configuration than the test has now"):
        run.run_task("T1", ["mappo"], (2,), False)


def test_an_entry_stays_until_as_many_seeds_are_there() -> None:
    def lines(*seeds: int) -> list[dict[str, Any]]:
        return [{"env_steps": 5, "seeds": list(seeds)}]

    earlier = {"lines": [*lines(1, 2, 3), {"env_steps": 9, "seeds": [1, 2, 3, 4, 5]}]}
    assert run.is_partial(lines(1, 2), earlier, wanted=5)
    assert not run.is_partial(lines(1, 2, 3), earlier, wanted=5)
    assert not run.is_partial(lines(1), earlier, wanted=1)  # all that the test wants
    for nothing in ({}, {"not_built": True}, {"lines": lines(1)}):
        assert not run.is_partial(lines(1), nothing, wanted=5)


def test_a_page_of_all_takes_no_test(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["acceptance", "D1", "--matrix"])
    with pytest.raises(SystemExit):
        run.main()
    assert "--matrix is of D1, " in capsys.readouterr().err


def test_a_line_that_was_not_repeated_keeps_its_own_origin() -> None:
    where = {
        "date": "2026-01-02T00:00:00",
        "commit": "abc",
        "command": "old",
        "machine": {"cores": 2, "cpu": "EPYC", "gpu": None},
    }
    earlier: dict[str, Any] = {**where, "lines": [{"env_steps": 5}, {"env_steps": 9, "score": 1}]}
    once = run.with_earlier([{"env_steps": 5, "score": 2}], earlier)
    assert once == [
        {"env_steps": 5, "score": 2},
        {"env_steps": 9, "score": 1, "origin": where},
    ]
    again = run.with_earlier([{"env_steps": 5}], {**where, "commit": "new", "lines": once})
    assert again[1]["origin"]["commit"] == "abc"
    line = {"goal": ">= 0", "score": 1.0, "low": None, "high": None, "S": 1.0, "seeds": [1]}
    line |= {"means": [1.0], "cpu_s": [None], "passed": True}
    entry = {"algorithm": "mappo", **where, "command": "new"}
    results: dict[str, Any] = {"test": "A0", "title": "", "unit": "S", "divisor": 1, "episodes": 1}
    results |= {"scripted_is": "best", "anchors": {"random": 0.0, "scripted": 1.0}}
    results["entries"] = {"mappo": entry | {"lines": [x | line for x in once]}}
    shown = page.page(results)
    assert "- mappo: `new`, 2026-01-02, commit abc, 2 cores (EPYC), GPU: none" in shown
    assert "- mappo at 9 steps: `old`, 2026-01-02, commit abc, 2 cores (EPYC)" in shown
    assert "mappo at 5 steps" not in shown


def test_a_run_is_the_one_begun_wherever_its_file_lies(tmp_path: Path) -> None:
    config = experiment("A3", load_task("A3"), "qmix", seed=1)
    (tmp_path / "asked.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    begun = load(str(tmp_path / "asked.yaml"), environ={})
    assert begun.run.plugin_folders  # this one names modules, which are looked for beside it
    assert run._written(begun) == run._written(config)
