"""Two learners of one run, in real processes, with sessions of their own."""

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from murmur.learner_service.checkpoint import files
from murmur.learner_service.checkpoint.folder import CheckpointFolder
from murmur.shared.config import PluginConfig
from murmur.shared.config.experiment import ExperimentConfig
from tests.learner_service.running import experiment, play
from tests.learner_service.toys import MatrixGame
from tests.ranks.learners import learner_ranks
from tests.wire import Client

ROWS = 400  # more than any test here needs


def config(**sections: dict[str, Any]) -> ExperimentConfig:
    """An update takes a session's unroll on each rank."""
    base: dict[str, dict[str, Any]] = {
        "algorithm": {"batch_size": 8, "batch_number": 1},
        "env_server": {"num_workers": 2, "envs_per_worker": 2, "sessions_per_worker": 1},
        "run": {"max_updates": 4},
        "learner": {"checkpoint_every_updates": 2, "group_check_every_updates": 1},
    }
    for name, section in sections.items():
        base[name] = {**base.get(name, {}), **section}
    return experiment(**base)


def player(
    port: int, payoff: tuple[tuple[float, ...], ...] = MatrixGame.CLIMBING
) -> threading.Thread:
    """A session of two environments on a thread of its own."""

    def run() -> None:
        game = MatrixGame(payoff, 2, 5)
        with Client(port, game.spec, 2) as client:
            play(client, client.hello(preferred_first_slot=0), game, ROWS)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def train(run_dir: Path, wanted: ExperimentConfig, size: int = 2, **options: Any) -> None:
    """A run of `size` learners, to its end."""
    with learner_ranks(run_dir, wanted, size, **options) as ranks:
        players = [player(ranks.ports(rank)[0]) for rank in range(size)]
        assert ranks.codes() == [0] * size
        for thread in players:
            thread.join()


def parts(run_dir: Path, updates: int, size: int = 2) -> list[dict[str, Any]]:
    """The files of a checkpoint, by rank."""
    folder = run_dir / "checkpoints"
    names = [f"update-{updates:06d}.pt"]
    names += [f"rank{rank}-{names[0]}" for rank in range(1, size)]
    return [files.load(folder / name) for name in names]


def require_balance(states: Sequence[dict[str, Any]]) -> None:
    """Every row that came to a rank was trained there, dropped for a reason, or is held."""
    for state in states:
        p = state["progress"]
        held = [u["arrays"]["step_type"].shape[1] * u["rows"] for u in state["storage"]["ready"]]
        settled = p["rows_trained"] + sum(p["rows_dropped"].values()) + sum(held)
        assert p["rows_received"] == settled


def test_two_learners_train_and_resume_as_one_and_as_two(tmp_path: Path) -> None:
    """2 -> 1 -> 2 learners: weights are exact, counters balance, no seed is played twice."""
    train(tmp_path, config())
    first = parts(tmp_path, 4)
    require_balance(first)
    assert [p["progress"]["updates"] for p in first] == [4, 4]
    steps = [p["progress"]["own_env_steps"] for p in first]
    assert first[0]["progress"]["env_steps"] == sum(steps)
    assert {slot >> 20 for slot, _, _ in first[1]["slots"]} == {1}
    lines = [json.loads(line) for line in (tmp_path / "progress.jsonl").read_text().splitlines()]
    assert lines[-1]["env_steps"] == sum(steps)
    assert lines[-1]["rows_received"] == sum(r["rows_received"] for r in lines[-1]["ranks"])

    train(tmp_path, config(run={"max_updates": 6}), size=1, resume=True)
    (alone,) = parts(tmp_path, 6, size=1)
    require_balance([alone])
    received = sum(p["progress"]["rows_received"] for p in first)
    assert alone["progress"]["rows_received"] > received
    assert alone["progress"]["env_steps"] > sum(steps)
    assert {slot for slot, *_ in first[1]["slots"]} <= {slot for slot, *_ in alone["slots"]}
    assert not (tmp_path / "counters-1.bin").exists()  # rank 0 counts on
    assert not (tmp_path / "learner-1.json").exists()

    train(tmp_path, config(run={"max_updates": 8}), resume=True)
    again = parts(tmp_path, 8)
    require_balance(again)
    assert sum(p["progress"]["rows_received"] for p in again) > alone["progress"]["rows_received"]
    episodes = dict((slot, episode) for slot, episode, _ in again[1]["slots"])
    assert all(episodes[slot] > episode for slot, episode, _ in first[1]["slots"])


@pytest.mark.long
def test_two_learners_start_from_the_weights_of_one(tmp_path: Path) -> None:
    """Rank 0 reads the checkpoint; with next to no learning rate both keep its weights."""
    first, second = tmp_path / "first", tmp_path / "second"
    train(first, config(run={"max_updates": 1}), size=1)
    still = {"batch_size": 8, "batch_number": 1, "actor_lr": 1e-30, "critic_lr": 1e-30}
    train(second, config(run={"start_from": str(first), "seed": 8}, algorithm=still))
    before, after = parts(first, 1, size=1)[0], parts(second, 4)[0]
    assert [state["progress"]["updates"] for state in (before, after)] == [1, 4]
    for name in ("actor", "critic"):
        weights = after["algorithm"]["parts"][name]
        for key, value in before["algorithm"]["parts"][name].items():
            assert torch.equal(weights[key], value), (name, key)


def test_an_update_not_finite_on_one_rank_is_undone_on_both(tmp_path: Path) -> None:
    wanted = config(learner={"max_abs_reward": 9e18, "max_skipped_updates": 1})
    with learner_ranks(tmp_path, wanted) as ranks:
        payoffs = (MatrixGame.CLIMBING, ((1.6e19,) * 3,) * 3)  # 8e18 squared, and summed
        players = [player(ranks.ports(rank)[0], payoffs[rank]) for rank in range(2)]
        assert ranks.codes() == [2, 2]
        for thread in players:
            thread.join()
    written = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert written == ["batch-000000.pt", "rank1-batch-000000.pt"]
    rewards = [files.load(tmp_path / "checkpoints" / n)["arrays"]["reward"] for n in written]
    assert rewards[0].abs().max() < 100 < rewards[1].abs().max()


@pytest.mark.long
def test_learners_agree_on_the_largest_batch_that_fits(tmp_path: Path) -> None:
    """0: each rank looks for the largest within its half of the replay; the least one counts."""
    replay = {"batch_size": 0, "capacity_rows": 160, "start_rows": 40, "update_interval": 8}
    train(tmp_path, config().model_copy(update={
        "algorithm": PluginConfig(name="qmix", replay={**replay, "unroll_steps": 4}),
    }))  # fmt: skip
    found = json.loads((tmp_path / "batch-size.json").read_text())["batch_size"]
    assert 1 < found <= 80
    trained = [part["progress"]["rows_trained"] for part in parts(tmp_path, 4)]
    assert trained == [4 * found] * 2


@pytest.mark.long
def test_a_sync_run_of_two_learners_repeats_to_the_bit(tmp_path: Path) -> None:
    wanted = config(learner={"pipeline": "sync"})
    for name in ("one", "two"):
        train(tmp_path / name, wanted)
    one, two = (CheckpointFolder(tmp_path / n, 1).load(_last(tmp_path / n)) for n in ("one", "two"))
    weights = [_tensors(state["algorithm"]["parts"]) for state in (one, two)]
    assert weights[0].keys() == weights[1].keys() != set()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def _last(run_dir: Path) -> Path:
    return run_dir / "checkpoints/update-000004.pt"


def _tensors(state: Any, name: str = "") -> dict[str, torch.Tensor]:
    """All tensors of a state, by where they are."""
    if isinstance(state, torch.Tensor):
        return {name: state}
    items = state.items() if isinstance(state, dict) else []
    found: dict[str, torch.Tensor] = {}
    for key, value in items:
        found |= _tensors(value, f"{name}.{key}")
    return found
