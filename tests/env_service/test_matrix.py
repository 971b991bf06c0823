"""Matrix games: payoffs by hand."""

import numpy as np
import pytest

from murmur.env_service.checks import check_environment
from murmur.env_service.envs.matrix import Config, make
from murmur.env_service.sessions.evaluate import run_baseline
from murmur.shared.config import PluginConfig
from murmur.shared.config.experiment import ExperimentConfig


@pytest.mark.parametrize("game", ["climbing", "penalty", "qtran"])
def test_contract(game: str) -> None:
    assert check_environment(lambda n: make(Config(game=game), n)) == []


def test_payoffs_by_hand() -> None:
    game = make(Config(episode_steps=2, penalty=-50), 3)
    seeds = np.zeros(3, np.uint64)
    game.reset(seeds)
    go_on = np.zeros(3, np.bool_)
    # (0, 0) pays 11, (1, 0) pays -30, (2, 1) pays 6.
    row = game.step(np.array([[0, 0], [1, 0], [2, 1]], np.int32), go_on, seeds)
    assert row.reward.tolist() == [[11, 11], [-30, -30], [6, 6]]
    row = game.step(np.array([[1, 1], [2, 2], [0, 2]], np.int32), go_on, seeds)
    assert row.metrics["payoff"].tolist() == [18, -25, 6]
    assert row.step_type.tolist() == [2, 2, 2]
    penalty = make(Config(game="penalty", penalty=-50), 2)
    penalty.reset(seeds[:2])
    row = penalty.step(np.array([[0, 0], [2, 0]], np.int32), go_on[:2], seeds[:2])
    assert row.reward[:, 0].tolist() == [-50, 10]
    qtran = make(Config(game="qtran"), 3)
    qtran.reset(seeds)
    row = qtran.step(np.array([[0, 0], [0, 2], [1, 2]], np.int32), go_on, seeds)
    assert row.reward[:, 0].tolist() == [8, -12, 0]


def test_random_play_gets_the_mean_payoff() -> None:
    config = ExperimentConfig(environment=PluginConfig(name="matrix"))
    # The nine payoffs of climbing sum to -31: 25 * -31 / 9 = -86.1.
    result = run_baseline(config, "random", 400, 1)
    assert result.metrics["payoff"].mean() == pytest.approx(-86.1, abs=12)
    # Their squares sum to 2031, so a step's payoff has variance 2031 / 9 - (31 / 9)² = 213.8, and
    # the mean of 4000 episodes the standard error sqrt(25 * 213.8 / 4000) = 1.16: give or take 3.
    result = run_baseline(config, "random", 4000, 1)
    assert result.metrics["payoff"].mean() == pytest.approx(25 * -31 / 9, abs=3 * 1.16)
    np.testing.assert_array_equal(result.metrics["return"], 2 * result.metrics["payoff"])


def test_random_play_follows_from_the_seed_of_its_episode() -> None:
    config = ExperimentConfig(environment=PluginConfig(name="matrix"))
    # Nothing of the game is random, so episodes that differ were played differently.
    curves = run_baseline(config, "random", 400, 1).curves["payoff"]  # in seven batches
    assert len(np.unique(curves, axis=0)) == 400
    again = run_baseline(config, "random", 70, 301).curves["payoff"]  # in two
    np.testing.assert_array_equal(again, curves[300:370])
