"""Observations, masks and rewards by hand."""

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from murmur.env_service.envs.snakes import Snakes, egocentric, observation
from murmur.env_service.envs.snakes.game import DOWN, paint
from murmur.env_service.envs.snakes.ground import ground as new_ground
from murmur.env_service.envs.snakes.ground import survey
from murmur.shared.wire.spec import ACTION_MASK
from murmur.shared.wire.timestep import StepType
from tests.env_service.snakes.boards import board, body, lit, rewards, step

SNAKES = {
    0: [(0, 0), (1, 0), (2, 0)],
    1: [(5, 5), (5, 4), (5, 3)],
    2: [(7, 19), (7, 18), (7, 17)],
    3: [(0, 1), (0, 2), (0, 3)],
    4: [(9, 2), (9, 3), (9, 4), (9, 5), (9, 6), (9, 7)],
    5: [(3, 6), (4, 6), (5, 6)],
}
BEANS = [(9, 0), (0, 19), (4, 4), (9, 9), (2, 7)]
NUMBERS = [9, 0, 0, 19, 4, 4, 9, 9, 2, 7]  # of the beans
OTHERS_OF_0 = [5, 5, 7, 19, 0, 1, 9, 2, 3, 6]
# Player 3 is number 0 of its own side: then come 4, 5, and 0, 1, 2 as the enemies.
OTHERS_OF_3 = [9, 2, 3, 6, 0, 0, 5, 5, 7, 19]


def vector(env: Snakes, player: int, width: int, normalize: bool = False) -> list[float]:
    out = np.zeros(width, np.float32)
    scale = observation.vector_scale(width, normalize)
    observation.draw_vector(env.games, 0, player, scale, out)
    return [float(x) for x in out]


def test_vector26_by_hand() -> None:
    env = board(SNAKES, BEANS)
    # up: a bean; down: own neck, code 2; left: a bean; right: the head of player 3, code 5.
    assert vector(env, 0, 26) == [0, 0, 1, 2, 1, 5, *NUMBERS, *OTHERS_OF_0]
    # left of player 3's head is player 0, number 3 of the enemies' point of view: code 5.
    assert vector(env, 3, 26) == [0, 1, 0, 0, 5, 2, *NUMBERS, *OTHERS_OF_3]


def test_vector35_by_hand() -> None:
    env = board(SNAKES, BEANS)
    # Both beans are next to the head across an edge, the older one upwards: (columns, rows, d).
    near = [0, -1, 1, -1, 0, 1]
    # Player 3 is 1 away and as long; player 4 is 1 row, 2 columns away and twice as long.
    threat = [1 / 2 * 1, 1 / (math.sqrt(5) + 1) * 2]
    wanted = [0, 0, 1, 2, 1, 5, *NUMBERS, *near, 3 / 20, *OTHERS_OF_0, *threat]
    assert vector(env, 0, 35) == pytest.approx(wanted)
    # Player 3 sees players 0 and 1 as the first two enemies: 1 away; 5 rows, 4 columns away.
    near = [-1, -1, math.sqrt(2), -2, 0, 2]
    threat = [1 / 2, 1 / (math.sqrt(41) + 1)]
    wanted = [0, 1, 0, 0, 5, 2, *NUMBERS, *near, 3 / 20, *OTHERS_OF_3, *threat]
    assert vector(env, 3, 35) == pytest.approx(wanted)


def test_a_bean_that_is_not_there_is_at_minus_one() -> None:
    env = board({}, [(5, 10)])
    assert vector(env, 0, 26)[6:16] == [5, 10, *[-1] * 8]
    assert vector(env, 0, 26, normalize=True)[8:10] == pytest.approx([-1 / 10, -1 / 20])


def test_offsets_of_half_a_board_keep_their_sign() -> None:
    env = board({0: [(0, 0), (1, 0), (2, 0)]}, [(5, 10)])
    assert vector(env, 0, 35)[16:22] == pytest.approx([10, 5, math.hypot(10, 5), 0, 0, 0])
    env = board({0: [(5, 10), (5, 9), (5, 8)]}, [(0, 0)])
    assert vector(env, 0, 35)[16:19] == pytest.approx([-10, -5, math.hypot(10, 5)])


def test_normalised_vectors_are_the_same_on_another_scale() -> None:
    env = board(SNAKES, BEANS)
    place, far = [10, 20], math.hypot(5, 10)
    scale = [*place, 7, 7, 7, 7, *(5 * place), 10, 5, far, 10, 5, far, 1, *(5 * place), 1, 1]
    for player in range(6):
        raw = np.array(vector(env, player, 35))
        assert vector(env, player, 35, normalize=True) == pytest.approx(raw / scale)
        without = [*range(16), *range(23, 33)]
        short = np.array(vector(env, player, 26)) / np.array(scale)[without]
        assert vector(env, player, 26, normalize=True) == pytest.approx(short)


def test_images_by_hand() -> None:
    env = board(SNAKES, BEANS)
    out = np.zeros((11, 200), np.uint8)
    observation.draw_images(env.games, 0, 4, out)
    images = [lit(image) for image in out.reshape(11, 10, 20)]
    assert images[0] == {cell for snake in SNAKES.values() for cell in snake}
    assert images[1] == {(9, 2)}
    assert images[2] == {(0, 1), (9, 2), (3, 6)}
    assert images[3] == {(0, 0), (5, 5), (7, 19)}
    assert images[4] == set(BEANS)
    for image, player in zip(images[5:], (4, 3, 5, 0, 1, 2), strict=True):
        assert image == set(SNAKES[player])


def test_state_images_by_hand() -> None:
    env = board(SNAKES, BEANS)
    for side, order in ((0, (0, 1, 2, 3, 4, 5)), (1, (3, 4, 5, 0, 1, 2))):
        env.games.side[0] = side
        out = np.zeros((13, 200), np.uint8)
        observation.draw_state(env.games, 0, out)
        images = [lit(image) for image in out.reshape(13, 10, 20)]
        assert images[:6] == [set(SNAKES[player]) for player in order]
        assert images[6:12] == [{SNAKES[player][0]} for player in order]
        assert images[12] == set(BEANS)


def from_the_head(env: Snakes, player: int) -> NDArray[np.float32]:
    ground, out = new_ground(), np.zeros(egocentric.SIZE, np.float32)
    survey(env.games, 0, ground)
    egocentric.draw_egocentric(env.games, 0, player, ground, out)
    return out


def test_egocentric_by_hand() -> None:
    # Player 5 moves up from (3, 6). Player 1's head is two rows down, one column to the left.
    env = board(SNAKES, BEANS)
    out = from_the_head(env, 5)
    body, stays, bean, mates, enemies = out[:405].reshape(5, 9, 9)
    assert [(int(r), int(c)) for r, c in np.argwhere(enemies)] == [(6, 3)]
    # Of the neighbours only the own neck is taken, at the centre and below; (5, 6) is the tail.
    assert body[4, 4] == body[5, 4] == body[6, 4] == 1
    assert stays[4:7, 4] == pytest.approx([3 / 20, 2 / 20, 1 / 20])
    # Player 4's row 9 is four rows up across the edge, columns 2-7 are 4 to the left .. 1 right.
    assert body[0].tolist() == [1, 1, 1, 1, 1, 1, 0, 0, 0]
    assert stays[0, :6] == pytest.approx([6 / 20, 5 / 20, 4 / 20, 3 / 20, 2 / 20, 1 / 20])
    # Player 3's head (0, 1) is 5 columns away, so only player 4's is a team-mate's in sight.
    assert np.argwhere(mates).tolist() == [[0, 0]]
    # Beans (9, 9) four up, across the edge, and three to the right; (2, 7) one up and one to the
    # right; (4, 4) one down and two to the left.
    assert np.argwhere(bean).tolist() == [[0, 7], [3, 5], [5, 2]]
    nearest = out[405:410]
    # Ahead 1, right 1, two steps. Nearest team-mate: player 4, 3 rows and 5 columns. Nearest enemy:
    # player 1, 3 rows and 2 columns.
    assert nearest == pytest.approx([0.1, 0.1, 1 / 3, (8 - 2) / 10, (5 - 2) / 10])


def test_a_tail_may_stay_if_its_snake_can_eat() -> None:
    # Ahead of player 1 is the tail of player 5, whose head (3, 6) has (2, 6) before it.
    may_stay = slice(460 + 5, 484, 8)  # of the cells ahead, left and right
    for beans, expected in ((BEANS, [0, 0, 0]), ([*BEANS[:4], (2, 6)], [1, 0, 0])):
        env = board(SNAKES, beans)
        out = from_the_head(env, 1)
        assert out[may_stay].tolist() == expected


def test_territory_by_hand() -> None:
    # Player 0 goes right at (0, 3), between players 1 and 2 on rows 9 and 1, whose heads are on
    # column 7. All others are far away.
    snakes = {
        0: [(0, 3), (0, 2), (0, 1), (0, 0), (0, 19), (0, 18), (0, 17)],
        1: [(9, column) for column in range(7, -1, -1)],
        2: [(1, column) for column in range(7, -1, -1)],
    }
    env = board(snakes, [(5, 18)])
    out = from_the_head(env, 0)
    ahead, left, right = out[460:484].reshape(3, 8)[:, 6:]
    # It is at (0, 4) and (0, 5) by moves 1 and 2; at (0, 6) by move 3, but the others by move 2.
    assert ahead == pytest.approx([1 / 3, 2 / 7])
    assert left.tolist() == right.tolist() == [1, 0]


def test_a_dead_snake_is_not_seen() -> None:
    # Player 4 has died on player 5's tail, three cells ahead of player 3, and found no room.
    row = {3: [(9, 9), (9, 8), (9, 7)], 5: [(9, 15), (9, 14), (9, 13), (9, 12)]}
    env = board({**row, 4: [(9, 12), (9, 11), (9, 10)]})
    env.games.length[0, 4] = 0
    paint(env.games, 0)
    for player in (3, 4):
        assert np.isfinite(vector(env, player, 35)).all()
        images = np.zeros((11, 200), np.uint8)
        observation.draw_images(env.games, 0, player, images)
        assert lit(images[2].reshape(10, 20)) == {(9, 9), (9, 15)}
    assert not images[[1, 5]].any()
    state = np.zeros((13, 200), np.uint8)
    observation.draw_state(env.games, 0, state)
    assert not state[[4, 10]].any()
    out = from_the_head(env, 3)
    body, _, _, mates, _ = out[:405].reshape(5, 9, 9)
    assert body[1, 4] == 1
    assert not mates.any()
    assert not out[430:436].any()


def mask(env: Snakes, player: int, name: str) -> list[int]:
    out = np.zeros(4, np.uint8)
    observation.draw_mask(env.games, 0, player, observation.MASKS[name], out)
    return [int(x) for x in out]


def test_masks_by_hand() -> None:
    env = board(SNAKES, BEANS)
    assert mask(env, 0, "reverse") == [1, 0, 1, 1]
    assert mask(env, 0, "legal") == [1, 0, 1, 0]  # on the right is a head
    assert mask(env, 1, "reverse") == [1, 1, 0, 1]
    assert mask(env, 1, "legal") == [1, 1, 0, 1]  # on the right is player 5's tail
    assert mask(env, 3, "legal") == [1, 1, 0, 0]


def test_whoever_is_trapped_may_do_all_but_turn_back() -> None:
    around = [(7, 4), (6, 4), (5, 4), (4, 4), (4, 5), (4, 6), (5, 6), (6, 6), (7, 6)]
    env = board({0: [(5, 5), (6, 5), (7, 5)], 1: around})
    assert mask(env, 0, "legal") == [1, 0, 1, 1]
    assert mask(env, 1, "legal") == [0, 1, 1, 1]  # on the right is a tail


def test_masked_moves_never_turn_back() -> None:
    env = board(SNAKES, BEANS, mask="legal")
    timestep = step(env)
    chosen = np.asarray(timestep.observation[ACTION_MASK]).argmax(axis=-1)
    assert (chosen != env.games.heading ^ 1).all()


# Player 0 eats: r = 1. Player 1, 5 long, runs into player 2: r = -2. Scores: 1, 0, 1 to 0, 0, 0.
EVENTFUL = {
    0: [(0, 5), (0, 4), (0, 3)],
    1: [(2, 5), (2, 4), (2, 3), (2, 2), (2, 1)],
    2: [(4, 6), (3, 6), (2, 6), (1, 6)],
}
EVENTFUL_BEANS = [(0, 6), (9, 0), (9, 1), (9, 2), (9, 3)]


def eventful(time: int = 0, **options: object) -> tuple[Snakes, list[float]]:
    env = board(EVENTFUL, EVENTFUL_BEANS, time, **options)
    timestep = step(env, {2: DOWN})
    assert (timestep.step_type[0] == StepType.LAST) == (time == 199)
    return env, [float(r) for r in timestep.reward[0]]


def test_game_reward_by_hand() -> None:
    env, paid = eventful()
    assert paid == [1, -2, 0, 0, 0, 0]
    assert rewards(env) == paid
    assert [len(body(env, player)) for player in range(6)] == [4, 3, 4, 3, 3, 3]


def distances(env: Snakes) -> list[float]:
    beans = [divmod(int(cell), 20) for cell in env.games.bean[0]]
    return [min(math.dist(body(env, player)[0], bean) for bean in beans) for player in range(6)]


@pytest.mark.parametrize(("time", "won", "lost"), [(0, 10, -5), (199, 50, -25)])
def test_shaped_reward_by_hand(time: int, won: float, lost: float) -> None:
    env, paid = eventful(time, reward="shaped")
    d = distances(env)
    wanted = [won + 20, won - d[1] - 10, won - d[2], lost - d[3], lost - d[4], lost - d[5]]
    assert paid == pytest.approx(wanted)
    _, paid = eventful(time, reward="shaped", shaped_extras=True)
    near = [0.1 / (x + 1) for x in d]
    extras = [0.15, near[1], *(x + 0.1 for x in near[2:])]
    assert paid == pytest.approx([w + e for w, e in zip(wanted, extras, strict=True)])


def test_shaped_reward_does_not_see_the_death_of_a_short_snake() -> None:
    env = board({0: [(1, 4), (1, 3), (1, 2)], 1: [(3, 5), (2, 5), (1, 5), (0, 5)]}, reward="shaped")
    timestep = step(env, {1: DOWN})
    assert env.games.deaths[0, 0] == 1
    assert timestep.reward[0, 0] == pytest.approx(10 - distances(env)[0])


def test_zero_sum_reward_by_hand() -> None:
    # Team means of r: -1/3 and 0. Player 0: 0.8 (1 - 0) + 0.2 (-1/3 - 0) = 11/15.
    wanted = np.array([11 / 15, -25 / 15, -1 / 15, 1 / 3, 1 / 3, 1 / 3])
    _, paid = eventful(reward="zero-sum")
    np.testing.assert_allclose(paid, wanted, rtol=1e-6)
    assert sum(paid) == pytest.approx(0, abs=1e-6)
    _, paid = eventful(199, reward="zero-sum")
    end = np.array([10, 10, 10, -10, -10, -10])
    np.testing.assert_allclose(paid, wanted + end, rtol=1e-6)


def test_a_draw_pays_neither_side() -> None:
    assert step(board({}, time=199, reward="zero-sum")).reward[0].tolist() == [0] * 6
    env = board({}, time=199, reward="shaped")
    assert step(env).reward[0].tolist() == pytest.approx([-d for d in distances(env)])
