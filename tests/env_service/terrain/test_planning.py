"""Planning a terrain mission: the arithmetic, the search, the posterior, the baseline."""

import itertools
from typing import Any

import numpy as np
import pytest

from murmur.env_service.envs.terrain import (
    BASELINES,
    Config,
    TerrainEnvironment,
    planning,
    simulation,
)
from murmur.env_service.envs.terrain.planning import (
    Beliefs,
    Game,
    Worlds,
    best_path,
    block_sums,
    expected_entropy,
    game_of,
    weigher,
)
from murmur.shared.process.errors import ConfigError


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
    rules = game_of(config, simulation.mission(config))
    return rules, (len(rules.rows), len(rules.columns))


def test_a_wide_beam_finds_the_best_of_all_paths(game: tuple[Game, tuple[int, int]]) -> None:
    rules, shape = game
    random = np.random.default_rng(3)
    weight = random.random(shape)
    looks = np.zeros(shape, np.int16)
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
            worth = planning._worth(rules, np.array(path), weight, looks.copy())
            best = max(best, worth)
    path = np.zeros(steps, np.int64)
    found = best_path(rules, start, blocked, weight, looks.copy(), 4000, path)
    assert found == pytest.approx(best)
    assert planning._worth(rules, path, weight, looks.copy()) == pytest.approx(best)


def test_no_way_out_is_said(game: tuple[Game, tuple[int, int]]) -> None:
    rules, shape = game
    blocked = np.ones((1, len(rules.spans) // rules.levels), np.bool_)
    weight, looks = np.ones(shape), np.zeros(shape, np.int16)
    assert best_path(rules, 0, blocked, weight, looks, 8, np.zeros(1, np.int64)) == -1


def environment_of(**options: Any) -> TerrainEnvironment:
    return TerrainEnvironment(Config(**options), 1)


def test_half_planes_are_listed_and_one_is_certain_after_a_look() -> None:
    environment = environment_of()
    game = game_of(environment.config, environment.mission)
    weigh = weigher(environment.config, game)
    assert isinstance(weigh, Worlds)
    assert len(weigh._maps) == 124
    environment.reset(np.array([2], np.uint64))
    weight = weigh(environment.state.odds[0, -1])
    truth = environment.state.truth[0].astype(float)
    wanted = block_sums(truth / truth.sum(), game.rows, game.columns)
    assert weight.sum() == pytest.approx(1)
    assert np.abs(weight - wanted).sum() < 0.5  # 0 is certainty, 2 a wrong map


def test_sums_over_blocks_equal_bayes_rule_cell_by_cell() -> None:
    environment = environment_of(pixels=9)
    game = game_of(environment.config, environment.mission)
    maps = np.zeros((3, *environment.state.truth.shape[1:]), np.uint8)
    maps[0, :7], maps[1, :, 11:], maps[2, 5:20, 5:20] = 1, 1, 1
    odds = np.random.default_rng(1).uniform(0.9, 1.1, maps.shape[1:]).astype(np.float32)
    p = (odds / (1 + odds)).astype(float)
    log_likelihood = np.log(np.where(maps, p, 1 - p)).sum(axis=(1, 2))
    likelihood = np.exp(log_likelihood - log_likelihood.max())
    share = likelihood / likelihood.sum() / maps.sum(axis=(1, 2))
    wanted = block_sums((share[:, None, None] * maps).sum(0), game.rows, game.columns)
    np.testing.assert_allclose(Worlds(game, maps)(odds), wanted, rtol=1e-4)


def test_where_many_maps_are_drawn_cells_are_believed() -> None:
    environment = environment_of(world="gaussian", pixels=9)
    game = game_of(environment.config, environment.mission)
    weigh = weigher(environment.config, game)
    assert isinstance(weigh, Beliefs)
    odds = np.ones(environment.state.truth.shape[1:], np.float32)
    odds[0, 0] = 3
    cells = odds.size
    assert weigh(odds).sum() == pytest.approx(1)
    assert weigh(odds)[0, 0] > (0.75 / (0.75 + 0.5 * (cells - 1)))


def test_more_than_four_altitudes_are_refused() -> None:
    environment = environment_of(altitudes_m=(4.0, 6.0, 8.0, 10.0, 12.0), noise=(0.1,) * 5)
    with pytest.raises(ConfigError, match=r"at most 4 altitudes; .*altitudes_m has 5"):
        BASELINES["planner"](environment)


def flown(environment: TerrainEnvironment, baseline: str) -> tuple[float, int]:
    """Mean entropy of some episodes, and how many of their actions were replaced."""
    policy = BASELINES[baseline](environment)
    n = environment.num_envs
    timestep = environment.reset(np.arange(1, n + 1, dtype=np.uint64))
    running = np.zeros(n, np.bool_)
    while (timestep.discount > 0).all():
        timestep = environment.step(policy.act(timestep), running, np.zeros(n, np.uint64))
    metrics = timestep.metrics
    return float(metrics["entropy"].mean()), int(metrics["collisions_avoided"].sum())


def test_planners_learn_more_than_greedy_agents() -> None:
    config = Config(budget=8)
    team, planned, greedy = (
        flown(TerrainEnvironment(config, 2), name)[0]
        for name in ("team-planner", "planner", "information-gain")
    )
    assert team < planned < greedy


def test_a_planner_that_sees_the_map_learns_more() -> None:
    config = Config(world="raster", budget=8)
    omniscient, team = (
        flown(TerrainEnvironment(config, 2), name)[0]
        for name in ("omniscient-planner", "team-planner")
    )
    assert omniscient < team - 0.05


def test_planners_that_hear_each_other_never_collide() -> None:
    config = Config(budget=6, communication_range_m=100)
    alone, replaced = flown(TerrainEnvironment(config, 2), "planner")
    assert replaced == 0
    assert flown(TerrainEnvironment(config, 2), "team-planner") == (
        pytest.approx(alone, rel=0.1),
        0,
    )


def test_a_second_episode_is_planned_like_the_first() -> None:
    environment = TerrainEnvironment(Config(budget=3, num_agents=2), 1)
    policy, entropies = BASELINES["planner"](environment), []
    for _ in range(2):
        timestep = environment.reset(np.array([5], np.uint64))
        while timestep.discount > 0:
            action = policy.act(timestep)
            timestep = environment.step(action, np.zeros(1, np.bool_), np.zeros(1, np.uint64))
        entropies.append(timestep.metrics["entropy"][0])
    assert entropies[0] == entropies[1]
