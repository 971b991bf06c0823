"""Checkpoints of several learners: whole sets, torn sets, and another number of learners."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from murmur.learner_service.checkpoint.folder import CheckpointFolder
from murmur.learner_service.checkpoint.parts import SLOTS, adopted, merged
from murmur.learner_service.ranks.group import Group
from murmur.shared.process.errors import CheckpointError
from tests.ranks.processes import JobError, Ranks


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Two ranks."""
    with Ranks() as two:
        yield two


def state(rank: int, rows: int, slot: int, episode: int) -> dict[str, Any]:
    """What a rank saves: 10 rows dropped, one slot under way."""
    return {
        "config": "{}",
        "algorithm": {
            "parts": {"net": {"w": torch.ones(2)}},
            "counts": {"updates": 7.0},
            "generator": torch.full((8,), rank, dtype=torch.uint8),
        },
        "generator": torch.full((4,), rank, dtype=torch.uint8),
        "progress": {
            "updates": 7,
            "updates_skipped": 1,
            "epochs": 0,
            "env_steps": 100,
            "own_env_steps": rows - 20,
            "env_steps_received": rows,
            "episodes": rank + 1,
            "rows_received": rows,
            "rows_trained": rows - 20,
            "rows_inserted": 0,
            "rows_dropped": {"lag": 10},
            "seconds": 3.0,
            "recent": {"return": [float(rank)]},
        },
        "slots": [(slot, episode, "ab")],
        "first_episode": rank,
        "memory": {slot: torch.zeros(1)},
        "returns": {slot: 0.5},
        "again": [slot],
        "best": 1.0,
    }


PARTS = [state(0, 60, 3, 5), state(1, 80, SLOTS + 3, 9)]


def test_the_same_number_of_learners_has_each_its_own() -> None:
    one = merged(PARTS, 1, 2)
    assert one["progress"] == PARTS[1]["progress"]
    assert one["algorithm"]["generator"].tolist() == [1] * 8
    assert one["algorithm"]["parts"] is PARTS[1]["algorithm"]["parts"]


def test_one_learner_takes_over_the_work_of_two() -> None:
    alone = merged(PARTS, 0, 1)
    p = alone["progress"]
    assert (p["rows_received"], p["rows_trained"], p["rows_dropped"]) == (140, 100, {"lag": 20})
    assert (p["updates"], p["updates_skipped"], p["env_steps"]) == (7, 1, 100)
    assert (p["own_env_steps"], p["episodes"]) == (100, 3)
    assert p["recent"] == {"return": [0.0, 1.0]}
    # Rank 1's episode has ended with it; its number is kept, so that it is not played again.
    assert alone["slots"] == [(3, 5, "ab"), (SLOTS + 3, 10, "")]
    assert list(alone["memory"]) == list(alone["returns"]) == alone["again"] == [3]
    assert alone["first_episode"] == 1
    assert alone["generator"].tolist() == [0] * 4


def test_a_further_learner_begins_without_rows() -> None:
    again = [merged([PARTS[0]], rank, 2) for rank in range(2)]
    assert again[0]["progress"] == {**PARTS[0]["progress"]}
    p = again[1]["progress"]
    assert (p["rows_received"], p["rows_dropped"], p["own_env_steps"]) == (0, {}, 0)
    assert (p["updates"], p["env_steps"]) == (7, 100)
    assert again[1]["generator"] is None
    assert again[1]["slots"] == []
    assert [adopted(rank, 2, 5) for rank in range(2)] == [[0, 2, 4], [1, 3]]


def test_a_rank_that_comes_back_has_its_slots_again() -> None:
    alone = merged(PARTS, 0, 1)
    again = merged([alone], 1, 2)
    assert again["slots"] == [(SLOTS + 3, 10, "")]


def _save(group: Group, run_dir: Path, *numbers: int) -> list[str]:
    folder = CheckpointFolder(run_dir, 2, group)
    for updates in numbers:
        folder.save(PARTS[group.rank], updates)
    group.all_ranks(True)
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def _load(group: Group, run_dir: Path) -> tuple[str, int, dict[str, float]]:
    path, loaded = CheckpointFolder(run_dir, 2, group).load_latest()
    return path.name, loaded["progress"]["rows_received"], loaded["algorithm"]["counts"]


def test_two_ranks_save_a_part_each_and_keep_the_latest(ranks: Ranks, tmp_path: Path) -> None:
    for names in ranks.call(_save, tmp_path, 1, 2, 3):
        assert names == [
            *("rank1-update-000002.pt", "rank1-update-000003.pt"),
            *("update-000002.pt", "update-000003.pt"),
        ]
    assert ranks.call(_load, tmp_path) == [
        ("update-000003.pt", 60, {"updates": 7.0}),
        ("update-000003.pt", 80, {"updates": 7.0}),
    ]
    path, alone = CheckpointFolder(tmp_path, 2).load_latest()
    assert path.name == "update-000003.pt"
    assert alone["progress"]["rows_received"] == 140
    # One learner continues: what the other left is deleted with its checkpoints.
    folder = CheckpointFolder(tmp_path, 2)
    for updates in (4, 5):
        folder.save(alone, updates)
    left = sorted(p.name for p in folder.path.iterdir())
    assert left == ["update-000004.pt", "update-000005.pt"]


@pytest.mark.parametrize("damage", ["missing", "torn", "other"])
def test_a_torn_set_is_refused_on_all_ranks(ranks: Ranks, tmp_path: Path, damage: str) -> None:
    ranks.call(_save, tmp_path, 1, 2)
    part = tmp_path / "checkpoints/rank1-update-000002.pt"
    if damage == "missing":
        part.unlink()
    elif damage == "torn":
        part.write_bytes(part.read_bytes()[:-200])
    else:  # of the set before: whole by itself
        part.write_bytes(part.with_name("rank1-update-000001.pt").read_bytes())
    assert [name for name, *_ in ranks.call(_load, tmp_path)] == ["update-000001.pt"] * 2
    assert (tmp_path / "checkpoints/update-000002.refused").exists()


def test_one_learner_refuses_a_set_whose_part_is_missing(ranks: Ranks, tmp_path: Path) -> None:
    ranks.call(_save, tmp_path, 1)
    (tmp_path / "checkpoints/rank1-update-000001.pt").unlink()
    with pytest.raises(CheckpointError, match="rank1-update-000001"):
        CheckpointFolder(tmp_path, 2).load_latest()


def _save_where_one_cannot(group: Group, run_dir: Path) -> list[str]:
    folder = CheckpointFolder(run_dir, 2, group)
    if group.rank:
        (run_dir / "checkpoints").mkdir(exist_ok=True)
        (run_dir / "checkpoints/rank1-update-000001.pt").mkdir()  # in the way
    folder.save(PARTS[group.rank], 1)
    return []


def test_a_rank_that_cannot_write_fails_the_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    for rank in range(2):
        ranks.start(rank, _save_where_one_cannot, tmp_path)
    with pytest.raises(JobError, match="another rank has no part"):
        ranks.result(0)
    with pytest.raises(JobError, match="cannot write checkpoint"):
        ranks.result(1)
    assert not (tmp_path / "checkpoints/update-000001.pt").exists()
