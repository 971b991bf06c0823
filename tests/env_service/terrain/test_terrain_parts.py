"""Lattice, camera, fusion, channels and rewards on examples small enough to redo by hand."""

import math

import cv2
import numpy as np
import pytest
from pydantic import ValidationError

from murmur.env_service.envs.terrain import (
    Config,
    altitude_diversity,
    channels,
    close_agents,
    footprint_overlap,
)
from murmur.env_service.envs.terrain.belief import (
    ODDS_MAX,
    ODDS_MIN,
    entropy_row,
    fuse,
    pool,
    scratch,
)
from murmur.env_service.envs.terrain.lattice import MOVES, action_mask, lattice_shape, move_agents
from murmur.env_service.envs.terrain.sensor import camera, footprint, map_shape, measure

LATTICE = np.array([11, 11, 3], np.int32)


def cells(*positions: tuple[int, int, int]) -> np.ndarray:
    return np.array(positions, np.int32)


def mask_of(positions: np.ndarray, num_actions: int, collisions: bool = True) -> list[list[int]]:
    out = np.zeros((len(positions), num_actions), np.uint8)
    action_mask(positions, MOVES[num_actions], LATTICE, collisions, out)
    return out.tolist()


def test_reference_geometry() -> None:
    assert lattice_shape(Config()) == (11, 11, 3)
    assert map_shape(Config()) == (493, 493)
    lens = camera(Config())
    assert lens.radius_x.tolist() == lens.radius_y.tolist() == [28, 57, 85]
    # 25 m / 0.10129 m = 246.8; at the corner the footprint is cut to the map
    rect = np.zeros(4, np.int64)
    footprint(lens, np.array([5, 5, 2], np.int32), (493, 493), rect)
    assert rect.tolist() == [246 - 85, 246 + 85, 246 - 85, 246 + 85]
    footprint(lens, np.array([0, 10, 0], np.int32), (493, 493), rect)
    assert rect.tolist() == [0, 28, 493 - 28, 493]


def test_boundary_mask() -> None:
    # actions: +z, -x, -y, +y, +x, -z
    assert mask_of(cells((0, 0, 2)), 6) == [[0, 0, 0, 1, 1, 1]]
    assert mask_of(cells((10, 5, 0)), 6) == [[1, 1, 1, 1, 0, 0]]
    # -x, -y, +y, +x
    assert mask_of(cells((0, 10, 1)), 4) == [[0, 1, 0, 1]]
    # neighbours row by row, staying (4) never
    assert mask_of(cells((0, 0, 1)), 9) == [[0, 0, 0, 0, 0, 1, 0, 1, 1]]
    assert sum(mask_of(cells((5, 5, 1)), 27)[0]) == 26
    assert sum(mask_of(cells((5, 5, 2)), 27)[0]) == 17


def test_collision_mask_binds_later_agents_only() -> None:
    # agent 1 stands at +x of agent 0: agent 0 is free, agent 1 may not move by -x
    positions = cells((4, 5, 1), (5, 5, 2))
    assert mask_of(positions, 6) == [[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]]
    assert mask_of(positions, 6, collisions=False)[1] == [0, 1, 1, 1, 1, 1]


def test_last_action_is_never_masked() -> None:
    shape = np.array([2, 1, 1], np.int32)
    out = np.zeros((2, 4), np.uint8)
    action_mask(cells((0, 0, 0), (1, 0, 0)), MOVES[4], shape, True, out)
    assert out.tolist() == [[0, 0, 0, 1], [1, 0, 0, 0]]


def test_later_agent_gives_way() -> None:
    positions = cells((4, 5, 1), (6, 5, 1), (0, 0, 1))
    executed = np.zeros(3, np.int32)
    # both go for (5, 5): agent 1's -x (1) becomes the next legal free one, -y (2)
    avoided = move_agents(positions, np.array([4, 1, 3], np.int32), MOVES[6], LATTICE, executed)
    assert avoided == 1
    assert executed.tolist() == [4, 2, 3]
    assert positions.tolist() == [[5, 5, 1], [6, 4, 1], [0, 1, 1]]


def test_later_agent_leaves_a_column_that_an_earlier_one_enters() -> None:
    positions = cells((4, 5, 1), (5, 5, 1))
    executed = np.zeros(2, np.int32)
    # agent 0 enters agent 1's column; agent 1 wants to climb in it (0) and must leave: -x (1)
    avoided = move_agents(positions, np.array([4, 0], np.int32), MOVES[6], LATTICE, executed)
    assert avoided == 1
    assert positions.tolist() == [[5, 5, 1], [4, 5, 1]]


def test_illegal_action_is_replaced_but_is_no_avoided_collision() -> None:
    positions = cells((0, 0, 2))
    executed = np.zeros(1, np.int32)
    assert move_agents(positions, np.array([1], np.int32), MOVES[6], LATTICE, executed) == 0
    assert executed.tolist() == [3]  # -x and -y leave the lattice, +y does not


@pytest.mark.parametrize("noise", [0.01, 0.265, 0.375])
def test_camera_errs_as_often_as_configured(noise: float) -> None:
    truth = np.zeros((200, 200), np.uint8)
    truth[:, 100:] = 1
    rect = np.array([10, 180, 15, 185])
    words = np.zeros(170 * 170 // 4 + 1, np.uint64)
    reports = np.zeros((4, 170, 170), np.uint8)
    for k in range(4):
        measure(truth, rect, noise, np.uint64(k), words, reports[k])
    wrong = reports != truth[10:180, 15:185]
    std = math.sqrt(noise * (1 - noise) / wrong.size)
    assert abs(wrong.mean() - noise) < 4 * std + 2**-17
    centered = wrong - noise
    pairs = [
        (centered[0], centered[1]),  # another key
        (centered[:, :, 1:], centered[:, :, :-1]),  # the neighbour in a row
        (centered[:, 1:], centered[:, :-1]),  # the neighbour in a column
    ]
    for one, other in pairs:
        assert abs((one * other).mean()) < 4 * noise * (1 - noise) / math.sqrt(one.size)


def test_fusion_is_bayes_rule() -> None:
    # two looks at 10 m saying 1, then one at 15 m saying 0, at the first of two cells
    odds = np.ones((1, 2), np.float32)
    pooled = np.full((1, 1), 0.5)
    axis_x, axis_y = pool(1, 1), pool(2, 1)
    work = scratch(1, (1, 2), 1, 2)
    rect = np.array([0, 1, 0, 1])
    for said, accuracy in ((1, 0.735), (1, 0.735), (0, 0.625)):
        ratio = np.float32(accuracy / (1 - accuracy))
        fuse(odds, rect, np.array([[said]], np.uint8), ratio, axis_x, axis_y, pooled, work)
    # by Bayes: 0.735^2 0.375 / (0.735^2 0.375 + 0.265^2 0.625) = 0.202584 / 0.246475
    p = 0.735**2 * 0.375 / (0.735**2 * 0.375 + 0.265**2 * 0.625)
    assert p == pytest.approx(0.821927, abs=1e-6)
    assert odds[0, 0] / (1 + odds[0, 0]) == pytest.approx(p, abs=1e-6)
    assert odds[0, 1] == 1
    assert pooled[0, 0] == pytest.approx((p + 0.5) / 2, abs=1e-6)


def test_belief_is_clamped_before_an_update() -> None:
    odds = np.array([[1e9]], np.float32)
    work = scratch(1, (1, 1), 1, 1)
    one = pool(1, 1)
    report = np.zeros((1, 1), np.uint8)
    fuse(odds, np.array([0, 1, 0, 1]), report, np.float32(99), one, one, np.ones((1, 1)), work)
    assert odds[0, 0] == pytest.approx(9999 / 99, rel=1e-6)


def test_entropy_row() -> None:
    odds = np.concatenate([np.geomspace(1e-6, 1e6, 4001), [1.0]]).astype(np.float32)
    out = np.empty_like(odds)
    entropy_row(odds, out, scratch(1, (1, 1), 1, len(odds)))
    o = np.clip(odds, ODDS_MIN, ODDS_MAX).astype(np.float64)
    p = o / (1 + o)
    wanted = -p * np.log2(p) - (1 - p) * np.log2(1 - p)
    np.testing.assert_allclose(out, wanted, rtol=0, atol=1e-6)
    assert out[-1] == 1


@pytest.mark.parametrize(("cells", "bins"), [(493, 11), (60, 12), (17, 5), (7, 7)])
def test_pool_equals_opencv(cells: int, bins: int) -> None:
    axis = pool(cells, bins)
    image = np.random.default_rng(0).random((cells, 1))
    ours = np.diff(axis.overlap, axis=0).T @ image / axis.scale
    theirs = cv2.resize(image, (1, bins), interpolation=cv2.INTER_AREA)
    np.testing.assert_allclose(ours, theirs.reshape(bins, 1), atol=1e-6)
    np.testing.assert_allclose(
        axis.share, np.diff(axis.overlap, axis=0)[np.arange(cells), axis.first], atol=1e-6
    )


def test_weighted_entropy_channel() -> None:
    prob = np.array([[0.5, 0.75], [0.25, 1.0]])
    out = np.zeros((2, 2), np.float32)
    channels.weighted_entropy(prob, out)
    # H(0.75) = 0.811278, H(0.9999) = 0.001473; undecided weighs half, below it nothing
    np.testing.assert_allclose(out, [[0.5, 0.811278], [0, 0.001473]], atol=1e-6)


def test_position_channels() -> None:
    out = np.zeros((3, 3), np.float32)
    positions = cells((0, 0, 0), (1, 0, 1), (0, 1, 1))
    lattice = np.array([3, 3, 2], np.int32)
    channels.own_position(positions, np.array([1, 1, 0], np.uint8), 0, lattice, out)
    np.testing.assert_allclose(out, [[0, 0, 0], [0, 1 / 3, 1], [0, 2 / 3, 1]])
    channels.all_positions(positions, lattice, out)
    np.testing.assert_allclose(out, [[0.5, 1, 0], [1, 0, 0], [0, 0, 0]])


def test_footprint_channel() -> None:
    rects = np.array([[0, 2, 0, 2], [1, 4, 1, 4]])
    axis = pool(4, 2)
    out = np.zeros((2, 2), np.float32)
    shown = np.ones(2, np.uint8)
    channels.footprints(rects, shown, 0, 0.0, axis, axis, out)
    # own block: 1; top right: rows 0-1, columns 2-3, the other sees row 1: (0.5 + 0.5) / 4
    np.testing.assert_allclose(out, [[1, 0.25], [0.25, 0]])
    channels.footprints(rects, shown, -1, 1.0, axis, axis, out)
    np.testing.assert_allclose(out, [[1, 0.75], [0.75, 1]])


def test_image_channel() -> None:
    # a 4 x 4 image whose upper half is off the map; two rows of reports, accuracy 0.8
    seen = np.array([[1, 1, 0, 0], [1, 0, 0, 0]], np.uint8)
    out = np.zeros((2, 2))
    channels.pool_image(seen, (2, 0), (2, 4), (4, 4), 0.8, np.zeros(4, np.float32), out)
    np.testing.assert_allclose(out, [[0.5, 0.5], [(3 * 0.8 + 0.2) / 4, 0.2]], atol=1e-6)


def test_extra_reward_terms() -> None:
    # altitudes 5 and 15: var 25, one pair 10 apart
    np.testing.assert_allclose(altitude_diversity(np.array([[5.0, 15.0]])), [0.25 + 1.0])
    assert altitude_diversity(np.array([[5.0]])) == 0
    # 2 x 4 and 4 x 4 cells share 1 x 4
    rects = np.array([[[0, 2, 0, 4], [1, 5, 0, 4], [9, 10, 9, 10]]])
    np.testing.assert_allclose(footprint_overlap(rects), [[0.5, 0.25, 0]])
    metres = np.array([[[0.0, 0.0], [3.0, 4.0], [9.0, 4.0]]])
    np.testing.assert_allclose(close_agents(metres, 5.0), [[1, 1, 0]])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"area_x_m": 52.0}, "multiple of spacing_m"),
        ({"noise": (0.1,)}, "one for each of the 3 altitudes_m"),
        ({"noise": (0.1, 0.2, 0.5)}, "less than 0.5"),
        ({"altitudes_m": (10.0, 5.0, 15.0)}, "ascending"),
        ({"start_altitude_m": 7.0}, "not one of"),
        ({"actor_channels": ("prob", "prob")}, "twice"),
        ({"num_agents": 5, "area_x_m": 5.0, "area_y_m": 5.0}, "do not fit"),
        ({"altitude": 5}, "Extra inputs"),
    ],
)
def test_config_errors(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Config(**options)  # type: ignore[arg-type]
