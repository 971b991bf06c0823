"""No benchmark rots: each one runs in its smoke form, and its result is written and read back."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from benchmarks import (
    _rank_messages,
    benchmarl,
    learning,
    ledger,
    sb3,
    snakes_matches,
    soak,
    sweep_curves,
    time_to_score,
)
from benchmarks._cores import two_cores
from murmur import results
from murmur.bench import run_benchmark, topics
from murmur.benchmarks.effort import Effort
from murmur.doctor import machine
from murmur.runs.settings import with_plugin_defaults
from murmur.shared.config.files import load

ELSEWHERE = {  # checked there for what comes of it, too
    "kills": "tests/chaos/test_contract.py",
    "kills_ranks": "tests/ranks/test_kills.py",
    "supply": "tests/benchmarks/test_supply.py",
}
# Five to fifteen seconds each: processes of their own.
SLOW = (
    "actions",
    "curriculum",
    "defaults",
    "doctor",
    "doctor_loaded",
    "faults",
    "latency",
    "launches",
    "ledger",
    "memory",
    "not_learning",
    "offline",
    "plan",
    "qplex",
    "ranks",
    "remedies",
    "security",
    "sessions",
    "snakes",
    "sources",
    "speaker_listener",
    "team_networks",
    "teams",
    "terrain_bound",
    "terrain_range",
    "training_rate",
    "transport",
    "turns",
    "update_interval",
    "vmas",
)


def few_rows_are_dropped(result: dict[str, Any]) -> None:
    """The whole case is tests/chaos/cases_defaults.py, in `make test-long`."""
    for task in result["tasks"].values():
        assert task["dropped, %"] < 2, task


def an_updates_parts_were_timed(result: dict[str, Any]) -> None:
    """The benchmark wraps what COMA calls; a part of another name would take no time."""
    for update in result["updates"]["1 thread"].values():
        parts = {name: x for name, x in update.items() if name.startswith("share_")}
        assert all(share > 0 for share in parts.values()), parts


CHECKS: dict[str, Callable[[dict[str, Any]], object]] = {
    "coma_update": an_updates_parts_were_timed,
    "defaults": few_rows_are_dropped,
}


@pytest.mark.system
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.long] if name in SLOW else [])
        for name in topics()
        if name not in ELSEWHERE
    ],
)
@pytest.mark.filterwarnings("ignore:The old environment creation API")  # of PettingZoo
def test_a_benchmark_runs_and_its_result_is_kept(name: str, tmp_path: Path) -> None:
    if missing := topics()[name].missing():
        pytest.skip(missing)
    file = run_benchmark(name, Effort.SMOKE, Console(), save=True, dirty=True, folder=tmp_path)
    assert file is not None
    saved = json.loads(file.read_text())
    assert saved["benchmark"] == name
    assert saved["result"]
    CHECKS.get(name, bool)(saved["result"])
    assert file.with_suffix(".md").read_text().startswith(f"# {name}\n")


@pytest.fixture
def allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results may be saved, whatever is changed here."""
    monkeypatch.setattr(results, "changed_files", list)


@pytest.mark.long
@pytest.mark.system
def test_ledger_adds_up_in_a_training_of_its_own() -> None:
    found = ledger.adds_up(5.0)
    shares = [thread.pop("in_a_state") for thread in found.values() if isinstance(thread, dict)]
    assert len(shares) == 4  # three threads of the learner, and the workers
    assert all(0.9 < share < 1.1 for share in shares), found


@pytest.mark.long
@pytest.mark.system
@pytest.mark.parametrize(
    "content", [_rank_messages.one_environment_a_message, _rank_messages.snakes_ddpg]
)
def test_messages_of_one_learner_and_of_two_are_counted(
    content: Callable[[int], dict[str, Any]],
) -> None:
    found = _rank_messages.compare(content, two_cores(), 1, 1.0)
    assert found["two / one, messages/s"] > 0
    for run in found["by run"].values():
        assert run["messages/s"] > 0
        assert run["learner, CPU-µs a message"] > 0


@pytest.mark.long
@pytest.mark.system
@pytest.mark.usefixtures("allowed")
def test_learning_keeps_its_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(learning, "RESULTS", tmp_path)
    settings = (
        "run.max_updates=1 run.max_minutes=2 evaluation.every_updates=1 evaluation.episodes=2 "
        "env_server.num_workers=1 env_server.envs_per_worker=4 network.name=mlp "
        "network.hidden=[8] learner.device=cpu"
    )
    command = ["learning", "spread", "--seeds", "1", "--episodes", "2", "--topic", "smoke"]
    command += [part for setting in settings.split() for part in ("--set", setting)]
    monkeypatch.setattr(sys, "argv", command)
    learning.main()
    learned = json.loads((tmp_path / "smoke-learning.json").read_text())
    assert learned["seeds"]["1"]["updates"] >= 1
    assert "| trained, seed 1 |" in (tmp_path / "smoke-learning.md").read_text()


@pytest.mark.long
@pytest.mark.system
@pytest.mark.usefixtures("allowed")
def test_curves_of_a_sweep_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine, "RESULTS", tmp_path)
    settings = (
        "run.max_updates=1 run.max_minutes=2 evaluation.every_updates=1 evaluation.episodes=2 "
        "env_server.num_workers=1 env_server.envs_per_worker=4 network.name=mlp "
        "network.hidden=[8] learner.device=cpu"
    )
    command = ["sweep_curves", "smoke", "--note", "A note.", "spread", "--seeds", "2"]
    command += [part for setting in settings.split() for part in ("--set", setting)]
    monkeypatch.setattr(sys, "argv", command)
    sweep_curves.main()
    kept = json.loads((tmp_path / "smoke-curves.json").read_text())
    ((group,),) = [task["groups"].values() for task in kept["tasks"].values()]
    assert group["iqm"] == pytest.approx(sum(group["scores"]) / 2)
    assert [run["rows_dropped"].get("lag", 0) for run in kept["runs"]] == [0, 0]
    per_minibatch = 2  # of policy and of critic, each once a pass
    assert {run["optimiser_steps"] % (4 * 4 * per_minibatch) for run in kept["runs"]} == {0}
    assert all(run["optimiser_steps"] for run in kept["runs"])
    assert "A note." in (tmp_path / "smoke-curves.md").read_text()


def test_matches_of_snakes_are_configurations_that_exist(tmp_path: Path) -> None:
    """A match itself is `evaluate_run`, which other tests play; here is what it is given."""
    for opponent, overrides in snakes_matches.opponents({"B": tmp_path / "best.pt"}).items():
        for side in snakes_matches._SIDES:
            changed = [*overrides, f"evaluation.environment.side={side}"]
            with_plugin_defaults(load("snakes-greedy", changed).for_evaluation())
            row = {"opponent": opponent, "moves": "drawn", "side": side}
            row |= dict.fromkeys(snakes_matches._METRICS, 0.5)
            record = results.provenance() | {"episodes": 2, "rows": [row]}
            cells = f"| {opponent} | drawn | {side} | 0.5 / 0.5 | 1 / 1 / 1 |"
            assert cells in snakes_matches.table(record)


def test_snakes_of_the_view_before_play_as_they_did() -> None:
    weight, seen = torch.rand(1, 482, 4), torch.rand(7, 491)
    before = np.delete(seen.numpy(), [465, 466, 467, 473, 474, 475, 481, 482, 483], axis=1)
    contents = {"actor": {"weight": weight, "bias": torch.rand(1, 4)}, "updates": 3}
    wide = snakes_matches.widened(contents)
    assert torch.allclose(seen @ wide["actor"]["weight"][0], torch.tensor(before) @ weight[0])
    assert wide["actor"]["bias"] is contents["actor"]["bias"]
    assert wide["updates"] == 3


@pytest.mark.long
@pytest.mark.system
@pytest.mark.usefixtures("allowed")
def test_a_soak_of_seconds_keeps_its_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gymnasium")
    options = ["--minutes", "0.05", "--warm-up", "0", "--folder", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["soak", *options])
    with pytest.raises(SystemExit):  # in seconds much grows
        soak.main()
    soaked = json.loads((tmp_path / "soak.json").read_text())
    assert soaked["result"]["updates"] >= 1
    assert (tmp_path / "soak.svg").is_file()


@pytest.mark.long
@pytest.mark.usefixtures("allowed")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torchrl")
def test_a_run_of_benchmarl_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("benchmarl", reason="BenchMARL is not installed")
    monkeypatch.setattr(benchmarl, "RESULTS", tmp_path)
    command = ["benchmarl", "navigation", "mappo", "--seeds", "1", "--frames", "6000"]
    monkeypatch.setattr(sys, "argv", command)
    benchmarl.main()
    kept = json.loads((tmp_path / "benchmarl-navigation-mappo.json").read_text())
    assert len(kept["seeds"]["1"]["returns"]["rollout"]) == 100


@pytest.mark.long
@pytest.mark.usefixtures("allowed")
def test_a_run_of_stable_baselines3_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sb3_contrib", reason="sb3-contrib is not installed")
    monkeypatch.setattr(sb3, "RESULTS", tmp_path)
    monkeypatch.setitem(sb3.STEPS, "factors", 2048)
    monkeypatch.setattr(sys, "argv", ["sb3", "factors", "--seeds", "1"])
    sb3.main()
    kept = json.loads((tmp_path / "sb3-factors.json").read_text())
    assert 0 < kept["seeds"]["1"]["MaskablePPO"]["score"] <= 1


@pytest.mark.long
@pytest.mark.system
@pytest.mark.usefixtures("allowed")
def test_times_to_a_score_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("stable_baselines3", reason="Stable-Baselines3 is not installed")
    monkeypatch.setattr(time_to_score, "RESULTS", tmp_path)
    monkeypatch.setattr(time_to_score, "FOLDER", tmp_path / "runs")
    few = replace(time_to_score.TASKS["cartpole"], steps=3072, interval=1024, updates=1)
    monkeypatch.setitem(time_to_score.TASKS, "cartpole", few)
    command = ["time_to_score", "--tasks", "cartpole", "--seeds", "1", "--save"]
    monkeypatch.setattr(sys, "argv", command)
    time_to_score.main()
    time_to_score.main()  # reads what was measured
    kept = json.loads((tmp_path / "time-to-score.json").read_text())["tasks"]["cartpole"]
    for runs in kept["runs"].values():
        points = runs["1"]["points"]
        assert len(points) >= 3
        assert all(0 < point["cpu_s"] < 120 for point in points)
        assert [p["wall_s"] for p in points] == sorted(p["wall_s"] for p in points)
    assert "| CartPole, PPO |" in (tmp_path / "time-to-score.md").read_text()
    assert (tmp_path / "time-to-score.svg").is_file()
