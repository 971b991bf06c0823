"""The planners that bound terrain: their arithmetic, their search, their posterior."""

import itertools

import numpy as np
import pytest

from env_service.envs.terrain import Config
from env_service.envs.terrain.environment import TerrainEnvironment
from murmur.benchmarks import terrain_bound
from murmur.benchmarks.terrain_bound import (
    Game,
    Worlds,
    best_path,
    expected_entropy,
    fly,
    game_of,
    truth,
)


def test_expected_entropy_of_looks_is_the_mean_over_reports() -> None:
    entropy = expected_entropy((0.25, 0.4))
    # One look with noise 1/4: p is 1/4 or 3/4, both of entropy H(1/4).
    quarter = 0.25 * 2 + 0.75 * np.log2(4 / 3)
    # Two: both right (9/16) or wrong (1/16): p = 9/10 or 1/10; else (6/16) p = 1/2, one bit.
    tenth = 0.1 * np.log2(10) + 0.9 * np.log2(10 / 9)
    assert entropy[0, 0] == pytest.approx(1)
    assert entropy[1, 0] == pytest.approx(quarter)
    assert entropy[2, 0] == pytest.approx(10 / 16 * tenth + 6 / 16)
    assert entropy[0, 1] == pytest.approx(-(0.4 * np.log2(0.4) + 0.6 * np.log2(0.6)))
    assert entropy[1, 1] < entropy[1, 0]


@pytest.fixture(scope="module")
def game() -> tuple[Game, tuple[int, int]]:
    """A mission of 4 x 4 positions at two altitudes."""
    config = Config(
        num_agents=1,
        area_x_m=15,
        area_y_m=15,
        altitudes_m=(5.0, 10.0),
        noise=(0.1, 0.3),
        pixels=9,
    )
    rules = game_of(TerrainEnvironment(config, 1))
    return rules, (len(rules.rows), len(rules.columns))


def test_a_wide_beam_finds_the_best_of_all_paths(game: tuple[Game, tuple[int, int]]) -> None:
    rules, shape = game
    random = np.random.default_rng(3)
    weight = random.random(shape)
    looks = np.zeros(shape, np.int64)
    steps, start = 4, 5
    blocked = np.zeros((steps, len(rules.spans) // rules.levels), np.bool_)
    blocked[1, [0, 1]] = True
    best = -1.0
    for actions in itertools.product(range(rules.targets.shape[1]), repeat=steps):
        at, path = start, []
        for t, k in enumerate(actions):
            at = rules.targets[at, k] if at >= 0 else -1
            if at < 0 or blocked[t, at // rules.levels]:
                break
            path.append(at)
        if len(path) == steps:
            worth = terrain_bound._worth(rules, np.array(path), weight, looks.copy())
            best = max(best, worth)
    path = np.zeros(steps, np.int64)
    found = best_path(rules, start, blocked, weight, looks.copy(), 4000, path)
    assert found == pytest.approx(best)
    assert terrain_bound._worth(rules, path, weight, looks.copy()) == pytest.approx(best)


def test_no_way_out_is_said(game: tuple[Game, tuple[int, int]]) -> None:
    rules, shape = game
    blocked = np.ones((1, len(rules.spans) // rules.levels), np.bool_)
    weight, looks = np.ones(shape), np.zeros(shape, np.int64)
    assert best_path(rules, 0, blocked, weight, looks, 8, np.zeros(1, np.int64)) == -1


def test_agents_in_one_column_are_never_planned() -> None:
    """Flying checks that every agent does what was planned for it."""
    environment = TerrainEnvironment(Config(num_agents=3, budget=3), 1)
    entropy, f1 = fly(environment, game_of(environment), truth, seed=1, width=4)
    assert 0 < entropy < 1
    assert 0 < f1 <= 1


def test_half_planes_are_listed_and_one_is_certain_after_a_look() -> None:
    config = Config()
    weigh = Worlds(config)
    assert len(weigh._maps) == 124
    environment = TerrainEnvironment(config, 1)
    action = np.zeros((1, config.num_agents), np.int32)
    environment.step(action, np.ones(1, np.bool_), np.array([2], np.uint64))
    weight = weigh(environment)
    assert weight.sum() == pytest.approx(1, abs=1e-4)
    assert np.abs(weight - truth(environment)).sum() < 0.5  # 0 is certainty, 2 a wrong map
