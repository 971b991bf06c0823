"""The memory task: cue, delay and answer by hand; chance and perfection by its baselines."""

import numpy as np
import pytest

from murmur.env_service.checks import check_environment
from murmur.env_service.envs.memory import Config, make
from murmur.env_service.sessions.evaluate import run_baseline
from murmur.shared.config import PluginConfig
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.wire.timestep import StepType

FIRST, MID, LAST, _ = (int(s) for s in StepType)


def test_contract() -> None:
    assert check_environment(lambda n: make(Config(num_agents=3, delay=2), n)) == []


def test_an_episode_by_hand() -> None:
    game, seeds = make(Config(num_agents=2, num_cues=3, delay=2), 4), np.arange(4, dtype=np.uint64)
    go_on, wrong = np.zeros(4, np.bool_), np.full((4, 2), 1, np.int32)
    rows = [game.reset(seeds)]
    cue = rows[0].observation["observation"][..., :3].argmax(-1).astype(np.int32)
    answer = cue.copy()
    answer[0, 1] = (cue[0, 1] + 1) % 3  # one of the eight answers is wrong
    for action in (wrong, cue, answer):  # only the answer to the row that asks counts
        rows.append(game.step(action, go_on, seeds))
    assert [row.step_type.tolist() for row in rows] == [[k] * 4 for k in (FIRST, MID, MID, LAST)]
    assert (rows[0].observation["observation"][..., :3].sum(-1) == 1).all()
    assert all((row.observation["observation"][..., :3] == 0).all() for row in rows[1:])
    asked = [row.observation["observation"][0, 0, 3] for row in rows]
    assert asked == [0, 0, 1, 0]
    assert all((row.reward == 0).all() for row in rows[:3])
    assert rows[3].reward.tolist() == [[1, 0], [1, 1], [1, 1], [1, 1]]
    assert rows[3].metrics["correct"].tolist() == [0.5, 1, 1, 1]
    assert rows[3].discount.tolist() == [0, 0, 0, 0]
    restarted = game.step(wrong, np.array([True, False, False, False]), seeds + np.uint64(9))
    assert restarted.step_type[0] == FIRST
    assert restarted.observation["observation"][0, :, :3].sum() == 2


def test_baselines_know_all_or_nothing() -> None:
    config = ExperimentConfig(environment=PluginConfig(name="memory", num_cues=4))
    assert (run_baseline(config, "recall", 50, 1).metrics["correct"] == 1).all()
    # 400 episodes of two agents: a quarter, give or take five standard deviations.
    chance = run_baseline(config, "random", 400, 1).metrics["correct"].mean()
    assert chance == pytest.approx(0.25, abs=0.08)
