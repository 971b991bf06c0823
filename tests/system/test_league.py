"""A league, whole: snakes play themselves and their past, and are measured against greedy ones."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.conftest import Training

pytestmark = pytest.mark.system

LEAGUE = """
extends: snakes-league
env_server: {envs_per_worker: 8, metrics_port: 0}
algorithm: {batch_size: 100, batch_number: 4, data_passes: 1}
network: {hidden: [16]}
learner: {port: 0, metrics_port: 0, log_every_s: 0.000001}
league: {size: 2, every_updates: 3, latest: 0.3}
evaluation: {every_updates: 12, episodes: 4}
run: {max_minutes: 0}
"""


@pytest.fixture
def league(tmp_path: Path) -> Iterator[Training]:
    config = tmp_path / "league.yaml"
    config.write_text(LEAGUE)
    training = Training(config, tmp_path / "run", [])
    yield training
    training.close()


@pytest.mark.long
def test_league_trains_grows_and_can_be_measured(league: Training) -> None:
    checkpoints = league.run / "checkpoints"

    def kept() -> list[str]:
        return sorted(p.name for p in checkpoints.glob("league-*.pt"))

    def played() -> bool:
        metrics = {name for line in league.lines() for name in line["metrics"]}
        return {"points_past", "points_latest"} <= metrics

    league.until(lambda: len(kept()) >= 4 and played() and bool(league.lines("evaluation")), 300)
    league.close()
    assert kept()[:4] == [f"league-{n:06d}.pt" for n in (3, 6, 9, 12)]
    lines = league.lines()
    assert len({line["losses"]["critic_loss"] for line in lines if line["losses"]}) > 8
    assert not any("points_past" in line["metrics"] for line in lines if line["updates"] < 3)
    # Evaluations are of three agents against a script, training is of six.
    assert set(league.lines("evaluation")[-1]["metrics"]) >= {"win", "draw", "loss"}
    against_past_policies = subprocess.run(
        [
            *(sys.executable, "-m", "murmur", "evaluate", str(league.run)),
            *("--checkpoint", str(checkpoints / kept()[-1]), "--episodes", "4"),
            *("--set", "evaluation.environment.control=both", "--set", "league.latest=0"),
            *("--set", f"league.checkpoints=[{checkpoints / kept()[0]}]"),
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    for metric in ("win", "draw", "loss", "score_difference"):
        assert metric in against_past_policies.stdout
