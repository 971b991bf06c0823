"""The table of each system: what it says follows from committed results."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import systems
from benchmarks.systems import Quoted, System, Target, page, targets
from murmur.doctor.machine import RESULTS


def seed_of(win: float, **more: float) -> dict[str, Any]:
    evaluation = {"win": {"mean": win, "low": win - 0.1, "high": win + 0.1}}
    return {"evaluation": evaluation, "env_steps": 1000, "episodes": 50, "minutes": 2, **more}


def table(tmp_path: Path, seeds: list[dict[str, Any]]) -> str:
    record = {
        "command": "train it",
        "commit": "abc",
        "seeds": {str(i): seed for i, seed in enumerate(seeds)},
        "baselines": {"random": {"win": {"mean": 0.25, "low": 0.25, "high": 0.25}}},
    }
    (tmp_path / "toy-learning.json").write_text(json.dumps(record))
    quoted = (Quoted("published: them", "9 steps", (0.5,)),)
    system = System("Toy", (("win", "won"),), {"us": "toy"}, ("random", "absent"), quoted)
    return systems._table(tmp_path, system)


def test_seeds_are_averaged_with_an_interval_over_them(tmp_path: Path) -> None:
    lines = table(tmp_path, [seed_of(0.5), seed_of(0.7), seed_of(0.9)]).splitlines()
    assert lines[2:7] == [
        "|  | seeds | budget | won |",
        "| --- | --- | --- | --- |",
        "| us | 3 | 50 episodes, 1,000 steps, 2 minutes | 0.7 [0.5, 0.9] |",
        "| baseline random |  |  | 0.25 |",
        "| published: them |  | 9 steps | 0.5 |",
    ]
    assert lines[-1] == "    train it    # abc"


def test_of_many_seeds_the_middle_half_counts(tmp_path: Path) -> None:
    lines = table(tmp_path, [seed_of(x) for x in (0.5, 0.6, 0.6, 9.0)]).splitlines()
    assert "steps, 2 minutes | 0.6 [" in lines[4]


def test_one_seed_has_the_interval_of_its_episodes(tmp_path: Path) -> None:
    assert "| us | 1 |" in table(tmp_path, [seed_of(0.5)])
    assert "0.5 [0.4, 0.6]" in table(tmp_path, [seed_of(0.5)])


@pytest.mark.parametrize("kept", [True, False])
def test_cpu_minutes_are_given_if_all_seeds_have_them(tmp_path: Path, kept: bool) -> None:
    last = seed_of(0.5, cpu_minutes=4) if kept else seed_of(0.5)
    assert ("3 CPU-minutes" in table(tmp_path, [seed_of(0.5, cpu_minutes=2), last])) == kept


def test_rewards_in_training_stand_beside_the_published_curve(tmp_path: Path) -> None:
    curve = [
        {"updates": 0, "return": -9.0},
        {"updates": 100, "training_return": -6.0},
        {"updates": 130, "training_return": -1.0},
    ]
    record = {"seeds": {"1": {"curve": curve}}}
    (tmp_path / "terrain-published-gpu-learning.json").write_text(json.dumps(record))
    rows = systems.rewards(tmp_path).splitlines()
    assert [row for row in rows if row[:3] == "| 1"] == ["| 100 | -0.10 | -0.05 |"]


def test_missed_targets_say_what_was_tried(tmp_path: Path) -> None:
    record = {"seeds": {"1": seed_of(0.3), "2": seed_of(0.3), "3": seed_of(0.3)}}
    (tmp_path / "toy.json").write_text(json.dumps(record))
    rows = [{"side": "first", "win": 0.4}, {"side": "second", "win": 0.2}]
    (tmp_path / "games.json").write_text(json.dumps({"rows": rows}))
    wanted = (
        Target("seeds", "toy", "win", 0.3),  # (0.3 + 0.3 + 0.3) / 3 is a little below 0.3
        Target("less", "toy", "win", 0.2, less=True, missed="too many."),
        Target("games", "games", "win", 0.3, match={"side": "second"}, missed="worse there."),
        Target("later", "", "win", 0.3, missed="takes a day."),
    )
    assert targets(tmp_path, wanted).splitlines()[4:] == [
        "| seeds | win >= 0.3 | 0.3 | met |",
        "| less | win <= 0.2 | 0.3 | missed |",
        "| games | win >= 0.3 | 0.2 | missed |",
        "| later | win >= 0.3 | not measured | missed |",
        "",
        "- less, win <= 0.2: too many.",
        "- games, win >= 0.3: worse there.",
        "- later, win >= 0.3: takes a day.",
    ]


def test_the_committed_tables_are_what_the_results_say() -> None:
    assert (RESULTS / "systems.md").read_text() == page(RESULTS)
