"""The rules, each on a board made by hand."""

import numpy as np
import pytest

from murmur.env_service.envs.snakes import Config, Snakes
from murmur.env_service.envs.snakes.game import DOWN, LEFT, RIGHT, UP
from murmur.shared.wire.timestep import StepType
from tests.env_service.snakes.boards import Cell, board, body, deaths, rewards, step
from tests.env_service.snakes.plain import Luck


@pytest.mark.parametrize(
    ("snake", "direction", "head"),
    [
        ([(0, 3), (1, 3), (2, 3)], UP, (9, 3)),
        ([(9, 3), (8, 3), (7, 3)], DOWN, (0, 3)),
        ([(2, 0), (2, 1), (2, 2)], LEFT, (2, 19)),
        ([(2, 19), (2, 18), (2, 17)], RIGHT, (2, 0)),
    ],
)
def test_all_edges_wrap_around(snake: list[Cell], direction: int, head: Cell) -> None:
    env = board({0: snake})
    step(env, {0: direction})
    assert body(env, 0) == [head, *snake[:2]]
    assert rewards(env) == [0] * 6


def test_eating_grows_and_the_bean_comes_back_elsewhere() -> None:
    beans = [(3, 15), (0, 4), (3, 17), (3, 18), (3, 19)]
    env = board({0: [(0, 3), (0, 2), (0, 1)]}, beans)
    step(env)
    assert body(env, 0) == [(0, 4), (0, 3), (0, 2), (0, 1)]
    assert rewards(env) == [1, 0, 0, 0, 0, 0]
    left = [divmod(int(cell), 20) for cell in env.games.bean[0]]
    assert left[:4] == [(3, 15), (3, 17), (3, 18), (3, 19)]  # the new one is the youngest
    assert left[4] not in [cell for player in range(6) for cell in body(env, player)]


def test_first_player_wins_a_bean_and_heads_that_meet_kill_both() -> None:
    beans = [(1, 5), (3, 16), (3, 17), (3, 18), (3, 19)]
    left = [(1, column) for column in (4, 3, 2, 1)]
    right = [(1, column) for column in (6, 7, 8, 9)]
    env = board({1: left, 4: right}, beans)
    step(env, {1: RIGHT, 4: LEFT})
    assert env.games.eaten[0].tolist() == [0, 1, 0, 0, 0, 0]
    assert deaths(env) == [0, 1, 0, 0, 1, 0]
    # Both were worth 1. Player 1 grew to 5 and dies: 3 - 5 + 1; player 4 dies with 4: 3 - 4.
    assert rewards(env) == [0, -1, 0, 0, -1, 0]
    assert env.games.score[0].tolist() == [0] * 6
    assert len(body(env, 1)) == len(body(env, 4)) == 3


def test_heads_that_pass_through_each_other_hit_the_necks() -> None:
    env = board({0: [(1, 5), (1, 4), (1, 3)], 3: [(1, 6), (1, 7), (1, 8)]})
    step(env, {0: RIGHT, 3: LEFT})
    assert deaths(env) == [1, 0, 0, 1, 0, 0]


def test_only_the_owner_of_the_head_dies_in_a_body() -> None:
    wall = [(3, 5), (2, 5), (1, 5), (0, 5)]
    env = board({0: [(1, 4), (1, 3), (1, 2), (1, 1)], 5: wall})
    step(env, {5: DOWN})
    assert deaths(env) == [1, 0, 0, 0, 0, 0]
    assert rewards(env) == [-1, 0, 0, 0, 0, 0]
    assert body(env, 5) == [(4, 5), (3, 5), (2, 5), (1, 5)]


def test_a_tail_has_moved_away_unless_its_owner_ate() -> None:
    snakes = {0: [(1, 4), (1, 3), (1, 2)], 5: [(3, 5), (2, 5), (1, 5)]}
    env = board(snakes)
    step(env, {5: DOWN})
    assert deaths(env) == [0] * 6
    env = board(snakes, [(4, 5)])
    step(env, {5: DOWN})
    assert deaths(env) == [1, 0, 0, 0, 0, 0]
    assert len(body(env, 5)) == 4


def test_own_body_kills_but_the_own_tail_does_not() -> None:
    ring = [(1, 4), (2, 4), (2, 5), (1, 5)]
    env = board({0: ring})
    step(env)
    assert deaths(env) == [0] * 6
    env = board({0: [*ring, (1, 6)]})
    step(env)
    assert deaths(env) == [1, 0, 0, 0, 0, 0]
    assert rewards(env) == [-2, 0, 0, 0, 0, 0]


def test_turning_back_becomes_one_of_the_other_three() -> None:
    n = 900
    env = Snakes(Config(control="both", side="first"), n)
    seeds = np.arange(n, dtype=np.uint64)
    env.reset(seeds)
    before = env.games.heading.copy()
    luck = [int(state) for state in env.games.luck]
    env.step(before ^ 1, np.zeros(n, np.bool_), seeds)
    after, alive = env.games.heading, env.games.deaths == 0
    assert (after != before ^ 1)[alive].all()
    for game in range(5):
        draws = Luck(0, 0)
        draws.state = luck[game]
        wanted = [[k for k in range(4) if k != old ^ 1][draws.below(3)] for old in before[game]]
        assert (after[game] == wanted)[alive[game]].all()
    counts = np.bincount((before * 4 + after)[alive], minlength=16).reshape(4, 4)
    shares = counts / counts.sum(axis=1, keepdims=True)
    for old in range(4):
        np.testing.assert_allclose(np.delete(shares[old], old ^ 1), 1 / 3, atol=0.06)


# A restarting snake lies on the first three cells of a search: right, down, up, left.
DOOMED = {0: [(1, 5), (1, 4), (1, 3)], 3: [(1, 6), (1, 7), (1, 8)]}


def test_the_dead_start_anew_at_the_first_room_by_rows() -> None:
    env = board(DOOMED)
    step(env, {0: RIGHT, 3: LEFT})
    # From (0, 0): right (0, 1), down (1, 0); (0, 0) is their middle. Then from (0, 2) the same.
    assert body(env, 0) == [(0, 1), (0, 0), (1, 0)]
    assert body(env, 3) == [(0, 3), (0, 2), (1, 2)]
    assert env.games.heading[0, [0, 3]].tolist() == [RIGHT, RIGHT]


def test_room_is_what_is_connected_and_without_beans() -> None:
    env = board(DOOMED, [(0, 1), (1, 0), (0, 19), (9, 0), (1, 2)])
    step(env, {0: RIGHT, 3: LEFT})
    # (0, 0) is shut in. From (0, 2): right (0, 3), up (9, 2). Then (0, 4): right (0, 5), down.
    assert body(env, 0) == [(0, 3), (0, 2), (9, 2)]
    assert body(env, 3) == [(0, 5), (0, 4), (1, 4)]


def test_room_along_a_lane_is_taken_head_first() -> None:
    env = board(DOOMED, [(1, 0), (0, 19), (9, 0), (1, 1), (9, 1)])
    step(env, {0: RIGHT, 3: LEFT})
    assert body(env, 0) == [(0, 0), (0, 1), (0, 2)]
    assert env.games.heading[0, 0] == LEFT


def lap() -> list[Cell]:
    """A closed way over all 180 cells of rows 0-8, in walking order."""
    lanes = [
        [(row, column) for row in (range(1, 9) if column % 2 == 0 else range(8, 0, -1))]
        for column in range(20)
    ]
    return [cell for lane in lanes for cell in lane] + [(0, column) for column in range(19, -1, -1)]


def test_the_game_ends_when_a_snake_finds_no_room() -> None:
    # Row 9 is players 1-5 nose to tail, then beans; player 5 eats, so player 4 runs into it.
    row = {p: [(9, 3 * p - 1), (9, 3 * p - 2), (9, 3 * p - 3)] for p in range(1, 6)}
    env = board({0: lap()[::-1], **row}, [(9, column) for column in range(15, 20)])
    timestep = step(env, {0: DOWN})
    assert deaths(env) == [0, 0, 0, 0, 1, 0]
    assert env.games.length[0].tolist() == [180, 3, 3, 3, 0, 4]  # 193 and 5 beans fit
    assert env.games.score[0].tolist() == [177, 0, 0, 0, 0, 1]
    assert timestep.step_type[0] == StepType.LAST
    assert timestep.discount[0] == 0
    assert timestep.metrics["win"][0] == 1


def test_the_game_ends_when_snakes_and_beans_exceed_the_board() -> None:
    row = {p: [(9, 3 * p - 1), (9, 3 * p - 2), (9, 3 * p - 3)] for p in range(1, 5)}
    row[5] = [(9, 15), (9, 14), (9, 13), (9, 12)]
    env = board({0: lap()[::-1], **row}, [(9, column) for column in range(17, 20)])
    timestep = step(env, {0: DOWN})  # 196 segments and 5 beans
    assert deaths(env) == [0] * 6
    assert timestep.step_type[0] == StepType.LAST
    shorter = {**row, 5: row[5][:3]}
    env = board({0: lap()[::-1], **shorter}, [(9, column) for column in range(17, 20)])
    assert step(env, {0: DOWN}).step_type[0] == StepType.MID  # 195


@pytest.mark.parametrize(
    ("snakes", "result"),
    [
        ({0: [(0, 5), (0, 4), (0, 3), (0, 2)]}, "win"),
        ({3: [(0, 5), (0, 4), (0, 3), (0, 2)]}, "loss"),
        ({2: [(0, 5), (0, 4), (0, 3), (0, 2)], 5: [(1, 5), (1, 4), (1, 3), (1, 2)]}, "draw"),
    ],
)
def test_after_200_steps_the_longer_team_wins(snakes: dict[int, list[Cell]], result: str) -> None:
    env = board(snakes, time=198)
    timestep = step(env)
    assert timestep.step_type[0] == StepType.MID
    assert [timestep.metrics[name][0] for name in ("win", "draw", "loss")] == [0, 0, 0]
    timestep = step(env)
    assert timestep.step_type[0] == StepType.LAST
    assert timestep.discount[0] == 0
    assert [name for name in ("win", "draw", "loss") if timestep.metrics[name][0]] == [result]
    difference = {"win": 1, "draw": 0, "loss": -1}[result]
    assert timestep.metrics["score_difference"][0] == difference
    timestep = step(board(snakes, time=199, side="second"))
    turned = {"win": "loss", "draw": "draw", "loss": "win"}[result]
    assert [name for name in ("win", "draw", "loss") if timestep.metrics[name][0]] == [turned]
    assert timestep.metrics["score_difference"][0] == -difference


def test_starts_are_straight_apart_and_uniform() -> None:
    n = 2000
    env = Snakes(Config(), n)
    seeds = np.arange(n, dtype=np.uint64)
    env.reset(seeds)
    games = env.games
    assert (games.length == 3).all()
    codes = np.stack([(games.board == code).sum(axis=1) for code in range(8)])
    assert (codes.T == [177, 5, 3, 3, 3, 3, 3, 3]).all()
    heads = np.bincount(games.body[:, :, 0].ravel(), minlength=200)
    assert 0.5 < heads.min() / heads.mean() < heads.max() / heads.mean() < 1.6
    np.testing.assert_allclose(
        np.bincount(games.heading.ravel()) / games.heading.size, 0.25, atol=0.02
    )
    beans = np.bincount(games.bean.ravel(), minlength=200)
    assert 0.5 < beans.min() / beans.mean() < beans.max() / beans.mean() < 1.6
    assert not env.step(np.zeros((n, 3), np.int32), np.ones(n, np.bool_), seeds).reward.any()
