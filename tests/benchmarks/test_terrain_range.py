"""Planners that know more and more of a terrain mission."""

import numpy as np

from benchmarks.terrain_range import Searcher, best_plan, reached
from murmur.env_service.envs.terrain import Config, TerrainEnvironment
from murmur.env_service.envs.terrain.planning import expected_entropy, game_of, position


def test_messages_go_on_along_a_chain_only() -> None:
    heard = np.eye(4, dtype=np.uint8)
    heard[0, 1] = heard[1, 0] = heard[1, 2] = heard[2, 1] = 1
    wanted = np.zeros((4, 4), np.bool_)
    wanted[:3, :3] = wanted[3, 3] = True
    np.testing.assert_array_equal(reached(heard), wanted)


def test_the_better_of_a_new_plan_and_the_old_one_is_kept() -> None:
    """Of four columns the interest is below (0, 1): one agent at (0, 0) flies there in one move."""
    config = Config(
        num_agents=1, area_x_m=5, area_y_m=5, altitudes_m=(2.0,), noise=(0.1,), num_actions=4
    )
    environment = TerrainEnvironment(config, 1)
    game = game_of(config, environment.mission)
    columns = position(np.array([[0, 0, 0], [0, 1, 0], [1, 0, 0]], np.int32), environment.mission)
    weight = np.zeros((len(game.rows), len(game.columns)))
    r0, _, c0, _ = game.spans[columns[1]]
    weight[r0, c0] = 1
    looks, bits = np.zeros(weight.shape, np.int16), expected_entropy(config.noise).ravel()
    for old in columns[1:]:
        found = best_plan(game, bits, columns[:1], weight, looks, np.array([[old]]), True)
        assert found.tolist() == [[columns[1]]]


def test_relays_tell_where_lost_agents_were() -> None:
    environment = TerrainEnvironment(Config(num_agents=3, budget=3), 1)
    timestep = environment.reset(np.array([1], np.uint64))
    searcher = Searcher(environment, "relays")
    # Agent 1 hears both others, which do not hear each other; then no agent hears another.
    environment.state.heard[0] = [[1, 1, 0], [1, 1, 1], [0, 1, 1]]
    start = position(environment.state.cells[0], environment.mission)
    action = searcher.act(timestep)
    assert searcher._known[:, :, 0].all()
    np.testing.assert_array_equal(searcher._flights[:, :, 0], np.tile(start, (3, 1)))
    timestep = environment.step(action, np.zeros(1, np.bool_), np.zeros(1, np.uint64))
    environment.state.heard[0] = np.eye(3)
    supposed = searcher._flights[1, :, 1].copy()
    searcher.act(timestep)
    np.testing.assert_array_equal(searcher._known[:, :, 1], np.eye(3))
    np.testing.assert_array_equal(searcher._flights[1, [0, 2], 1], supposed[[0, 2]])
