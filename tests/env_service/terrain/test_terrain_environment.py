"""The environment as a whole: contract, randomness, rewards, flight plans, baselines."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.terrain import REFERENCE, TIMES, curves
from murmur.env_service.checks import assert_environment
from murmur.env_service.compiled import compiled
from murmur.env_service.envs.terrain import BASELINES, Config, TerrainEnvironment, make
from murmur.env_service.envs.terrain.simulation import expected_gains, sampled
from murmur.shared.process.errors import ConfigError
from murmur.shared.wire.spec import ACTION_MASK, AGENT_CELL, STATE
from murmur.shared.wire.timestep import StepType, TimeStep

SMALL: dict[str, Any] = {"area_x_m": 20.0, "area_y_m": 25.0, "pixels": 15, "budget": 4}
GO = np.zeros(1, np.bool_)
SEED = np.array([7], np.uint64)


def actions(*values: int) -> NDArray[np.int32]:
    return np.array([values], np.int32)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {**SMALL, "num_actions": 27, "world": "gaussian", "communication_ranges_m": (0.0, 10.0)},
        {**SMALL, "num_actions": 9, "failure_rate": 0.5, "world": "raster", "num_agents": 8},
        {**SMALL, "num_actions": 4, "critic_channels": (), "actor_channels": ("prob",)},
        {**SMALL, "expected_gain": True},
        {**SMALL, "num_agents": 1, "budget": 0, "altitudes_m": (7.5,), "noise": (0.2,)},
    ],
)
def test_contract(options: dict[str, Any]) -> None:
    assert_environment(lambda n: make(Config(**options), n), max_rows=40)


def test_spec_of_the_reference() -> None:
    spec = make(Config(), 1).spec
    assert spec.num_agents == 4
    assert spec.max_episode_steps == 15
    shapes = {o.name: (o.shape, o.per_agent) for o in spec.observations}
    assert shapes["maps"] == ((7, 11, 11), True)
    assert shapes[STATE] == ((4, 11, 11), False)
    assert shapes[ACTION_MASK] == ((6,), True)
    assert spec.metrics[-3:] == ("altitude_share_5", "altitude_share_10", "altitude_share_15")


def test_expected_gain_of_ground_never_seen_by_hand() -> None:
    # Positions 25 m apart, so that no action leads to ground that was seen. With a belief of 0.5
    # and reports that err by 0.1, a look at a cell leaves H(0.1) of 1 bit. Only the report "of
    # interest", one of two, gives the cell a weight: (1 - H(0.1)) / 2 is gained for each cell.
    lattice = {"num_actions": 4, "spacing_m": 25.0, "altitudes_m": (5.0,), "noise": (0.1,)}
    env = make(Config(num_agents=1, expected_gain=True, **lattice), 4)
    step = env.reset(np.arange(4, dtype=np.uint64))
    left = 0.1 * np.log2(10) + 0.9 * np.log2(10 / 9)
    side = np.array([28, 56, 28])  # map cells that the camera sees at the borders and in between
    for n, (x, y) in enumerate(step.observation[AGENT_CELL][:, 0]):
        for k, (dx, dy) in enumerate([(-1, 0), (0, -1), (0, 1), (1, 0)]):
            legal = 0 <= x + dx <= 2 and 0 <= y + dy <= 2
            cells = side[x + dx] * side[y + dy] / 56**2 if legal else 0
            found = step.observation["expected_gain"][n, 0, k]
            assert found == pytest.approx(cells * (1 - left) / 2, abs=1e-4)


@pytest.mark.parametrize(
    ("n", "every", "kept"),
    [
        (5, 1, [10, 11, 12, 13, 14]),
        (7, 3, [10, 13, 16]),
        (8, 3, [12, 15]),
        (9, 3, [11, 14, 17]),
        (2, 3, [10, 11]),
    ],
)
def test_sampled_rows_lie_alike_from_both_ends(n: int, every: int, kept: list[int]) -> None:
    first, step, count = sampled(10, 10 + n, every)
    assert [first + i * step for i in range(count)] == kept


def test_estimated_gain_is_near_that_of_all_cells() -> None:
    env = TerrainEnvironment(Config(expected_gain=True), 4)
    seeds, go_on = np.arange(4, dtype=np.uint64), np.zeros(4, np.bool_)
    step = env.reset(seeds)
    gains = np.zeros(step.observation[ACTION_MASK].shape)
    for _ in range(6):
        mask = np.asarray(step.observation[ACTION_MASK])
        step = env.step(mask.argmax(-1).astype(np.int32), go_on, seeds)
        mask = np.asarray(step.observation[ACTION_MASK])
        expected_gains(env.mission, env.state, mask, 1, gains)
        estimated = np.asarray(step.observation["expected_gain"])
        np.testing.assert_array_equal(estimated[mask == 0], 0)
        error = estimated - gains / 56**2
        assert np.sqrt((error**2).mean()) < 0.05 * np.sqrt(((gains / 56**2) ** 2).mean())


def test_an_episode_has_sixteen_rows() -> None:
    env = make(Config(pixels=10), 1)
    step = env.reset(SEED)
    kinds = [int(step.step_type[0])]
    for _ in range(15):
        step = env.step(step.observation[ACTION_MASK].argmax(-1).astype(np.int32), GO, SEED)
        kinds.append(int(step.step_type[0]))
    assert kinds == [StepType.FIRST] + 14 * [StepType.MID] + [StepType.LAST]


def test_starts_are_distinct_columns_at_the_top() -> None:
    env = TerrainEnvironment(Config(**SMALL, num_agents=10), 50)
    env.reset(np.arange(50, dtype=np.uint64))
    cells = env.state.cells
    assert (cells[:, :, 2] == 2).all()
    for episode in cells:
        assert len({tuple(cell) for cell in episode[:, :2]}) == 10
    # uniform: each of the 5 x 6 columns is used by a third of the agents' episodes
    used = np.zeros((5, 6))
    np.add.at(used, (cells[:, :, 0], cells[:, :, 1]), 1)
    assert used.min() > 5


def test_everyone_hears_everyone_in_range_unless_messages_fail() -> None:
    def heard_share(**options: Any) -> float:
        env = TerrainEnvironment(Config(**SMALL, **options), 200)
        env.reset(np.arange(200, dtype=np.uint64))
        off_diagonal = ~np.eye(4, dtype=bool)
        return float(env.state.heard[:, off_diagonal].mean())

    assert heard_share(communication_range_m=100.0) == 1
    assert heard_share(communication_range_m=0.0) == 0
    assert heard_share(communication_range_m=100.0, failure_rate=1.0) == 0
    assert abs(heard_share(communication_range_m=100.0, failure_rate=0.3) - 0.7) < 0.04
    assert abs(heard_share(communication_ranges_m=(0.0, 100.0)) - 0.5) < 0.12


def test_conflicts_are_settled_and_counted() -> None:
    env = TerrainEnvironment(Config(**SMALL, num_agents=2, mask_collisions=False), 1)
    env.reset(SEED)
    env.state.cells[0] = [[1, 2, 1], [3, 2, 1]]
    step = env.step(actions(4, 1), GO, SEED)  # both into (2, 2)
    assert env.state.executed[0].tolist() == [4, 2]
    assert step.metrics["collisions_avoided"][0] == 1
    assert env.render_state(0)["executed_action"].tolist() == [4, 2]


def test_extra_rewards_add_up() -> None:
    base = {**SMALL, "num_agents": 2, "reward_scale": 0.0, "reward_offset": 0.0}

    def reward(**weight: float) -> list[float]:
        env = TerrainEnvironment(Config(**base, **weight), 1)
        env.reset(SEED)
        env.state.cells[0] = [[1, 2, 2], [3, 2, 1]]
        before = env.state.totals.interest_entropy[0]
        step = env.step(actions(4, 5), GO, SEED)  # agent 0 along x; agent 1 down to 5 m
        row: list[float] = step.reward[0].tolist()
        fall.append((before - env.state.totals.interest_entropy[0]) / env.state.truth[0].sum())
        coverage.append(env.state.totals.newly_seen[0] / env.state.truth[0].size)
        return row

    coverage: list[float] = []
    fall: list[float] = []
    # agent 0 at (10, 10, 15), agent 1 at (15, 10, 5): 5 m apart, both flew one spacing
    assert reward(distance_weight=0.1) == pytest.approx([-0.1, -0.1])
    assert reward(collision_weight=2.0) == [-2, -2]
    assert reward(collision_weight=2.0, collision_distance_m=4.9) == [0, 0]
    assert reward(altitude_weight=0.5) == pytest.approx([0.625, 0.625])
    # cells of 5.77 m / 15 = 0.385 m; radii 22 and 7 around columns 25 and 38: agent 1's 14 x 14
    # cells lie within 3 .. 47, so it shares all of them, agent 0 196 of 44 x 44
    assert reward(overlap_weight=1.0) == pytest.approx([-196 / 44**2, -1])
    assert reward(coverage_weight=3.0) == pytest.approx([3 * coverage[-1]] * 2)
    assert reward(interest_weight=2.0) == pytest.approx([2 * fall[-1]] * 2)
    assert fall[-1] > 0


def test_rewards_of_interest_sum_to_the_fall_of_the_metric() -> None:
    env = make(Config(**SMALL, num_agents=2, reward_scale=0, reward_offset=0, interest_weight=1), 1)
    first = env.reset(SEED)
    total, step = 0.0, first
    while step.step_type[0] != StepType.LAST:
        legal = step.observation["action_mask"].argmax(axis=-1).astype(np.int32)
        step = env.step(legal, GO, SEED)
        total += step.reward[0, 0]
    assert total == pytest.approx(first.metrics["entropy"][0] - step.metrics["entropy"][0])


def test_render_state() -> None:
    env = make(Config(**SMALL), 2)
    step = env.reset(np.array([1, 2], np.uint64))
    env.step(step.observation[ACTION_MASK].argmax(-1).astype(np.int32), np.zeros(2, bool), SEED)
    state = env.render_state(1)
    assert state["truth"].shape == state["prob"].shape == state["entropy"].shape == (51, 64)
    assert state["paths_m"].shape == (2, 4, 3)
    np.testing.assert_array_equal(state["paths_m"][-1], state["positions_m"])
    assert state["paths_m"][0, :, 2].tolist() == [15.0] * 4
    assert state["footprints"].shape == (4, 4)


def run(env: TerrainEnvironment, baseline: str) -> list[TimeStep]:
    policy = BASELINES[baseline](env)
    rows = [env.reset(SEED)]
    for _ in range(env.config.budget + 1):
        rows.append(env.step(policy.act(rows[-1]), GO, SEED))
    return rows


def test_a_flight_plan_starts_from_the_prior() -> None:
    env = TerrainEnvironment(Config(), 1)
    policy = BASELINES["lawnmower-10m"](env)
    step = env.reset(SEED)
    assert step.metrics["entropy"][0] == 1
    assert step.metrics["f1"][0] == step.metrics["coverage"][0] == 0
    assert (step.observation["maps"][0, :, 5] == 0.5).all()
    for _ in range(15):
        step = env.step(policy.act(step), GO, SEED)
    path = env.render_state(0)["paths_m"][1:]
    assert (path[:, :, 2] == 10).all()
    assert path[:7, 0, 0].tolist() == [10, 15, 20, 25, 30, 35, 40]
    assert path[[0, 8, 14], 0, :2].tolist() == [[10, 10], [40, 20], [10, 20]]
    assert path[[0, 8, 14], 1, :2].tolist() == [[10, 30], [40, 40], [10, 40]]
    assert path[[0, 8, 14], 3, :2].tolist() == [[30, 10], [40, 40], [40, 10]]
    assert step.step_type[0] == StepType.LAST


@pytest.mark.parametrize("name", BASELINES)
def test_baselines_fly_anywhere(name: str) -> None:
    config = Config(**{**SMALL, "num_agents": 5, "num_actions": 9})
    rows = run(TerrainEnvironment(config, 1), name)
    assert rows[-1].step_type[0] == StepType.LAST
    assert rows[-1].metrics["entropy"][0] < rows[0].metrics["entropy"][0]


def test_lawnmower_needs_its_altitude() -> None:
    with pytest.raises(ConfigError, match="lawnmower at 15 m"):
        BASELINES["lawnmower-15m"](make(Config(altitudes_m=(5.0,), noise=(0.1,)), 1))


@pytest.mark.parametrize("name", REFERENCE)
def test_baselines_reproduce_the_published_behaviour(name: str) -> None:
    baseline, _, silent = name.partition(", ")
    config = Config(communication_range_m=0.0) if silent else Config()
    result = curves(baseline, 50, config)
    # The lanes and maps are the same: only noise differs. Walks and starts are drawn otherwise.
    tolerance = 0.005 if "lawnmower" in name else 0.035
    for k, metric in enumerate(("entropy", "f1")):
        ours = result[metric][:, TIMES].mean(axis=0)
        np.testing.assert_allclose(ours, [p[k] for p in REFERENCE[name]], atol=tolerance)


def test_function_that_cannot_be_cached_is_still_compiled() -> None:
    namespace: dict[str, Any] = {}
    exec("def double(x):\n    return 2 * x", namespace)  # noqa: S102 - a function of no file
    assert compiled()(namespace["double"])(21) == 42
