"""The observation from a snake's own head, turned so that it always moves ahead.

Left is left for every heading, so a policy learned for one heading holds for all four. The actions
turn with it: 0 ahead, 1 back, 2 left, 3 right.
"""

import numpy as np
from numpy.typing import NDArray

from murmur.env_service.compiled import compiled
from murmur.env_service.envs.snakes.game import (
    BEAN,
    CELLS,
    COLUMNS,
    DOWN,
    LEFT,
    MAX_STEPS,
    NEIGHBOUR,
    NUM_ACTIONS,
    NUM_BEANS,
    NUM_SNAKES,
    RIGHT,
    ROWS,
    SNAKE,
    TEAM,
    UP,
    Games,
)
from murmur.env_service.envs.snakes.ground import NEVER, Ground, room, survey_rivals, territory
from murmur.env_service.envs.snakes.observation import seen, wrapped
from murmur.env_service.envs.snakes.reward import lead

AHEAD = 0
TURNED: NDArray[np.int32] = np.array(
    [
        [UP, DOWN, LEFT, RIGHT],
        [DOWN, UP, RIGHT, LEFT],
        [LEFT, RIGHT, DOWN, UP],
        [RIGHT, LEFT, UP, DOWN],
    ],
    np.int32,
)
"""[4, 4] by heading and turn (ahead, back, left, right): the direction on the board."""

STEP = np.array([[-1, 0], [1, 0], [0, -1], [0, 1]])  # rows and columns, by direction
REACH = 4
WINDOW = 2 * REACH + 1
CHANNELS, PER_BEAN, PER_OTHER, PER_MOVE = 5, 5, 6, 8  # numbers for each
_SELF = 4 + TEAM
AREA = WINDOW * WINDOW
SIZE = (
    CHANNELS * AREA
    + PER_BEAN * NUM_BEANS
    + PER_OTHER * (NUM_SNAKES - 1)
    + PER_MOVE * (NUM_ACTIONS - 1)
    + _SELF
)
_LONG, _FAR = 20, 10  # lengths and lasting cells are given in units of 20, offsets in units of 10


@compiled()
def turn_of(heading: int, direction: int) -> int:
    """Return the turn that leads a snake of that heading into a direction of the board."""
    for turn in range(NUM_ACTIONS):
        if TURNED[heading, turn] == direction:
            return turn
    return AHEAD


@compiled()
def draw_egocentric(
    games: Games, n: int, player: int, ground: Ground, out: NDArray[np.float32]
) -> None:
    """Write a player's numbers in its own frame: see docs/snakes.md.

    Args:
        games: all games.
        n: number of the game.
        player: player that observes.
        ground: regions of this game, filled by ground.survey.
        out: [SIZE] numbers, overwritten.
    """
    out[:] = 0
    at = _draw_window(games, n, player, ground, out)
    at = _draw_beans(games, n, player, out, at)
    at = _draw_others(games, n, player, out, at)
    at = _draw_moves(games, n, player, ground, out, at)
    out[at] = games.length[n, player] / _LONG
    out[at + 1] = games.heading[n, player] in (UP, DOWN)
    out[at + 2] = 1 - games.time[n] / MAX_STEPS
    out[at + 3] = lead(games, n, player // TEAM) / _LONG
    out[at + 4 + player % TEAM] = 1


@compiled()
def _offset(games: Games, n: int, player: int, cell: int) -> tuple[int, int]:
    """Return a cell's offset (ahead, right) from a player's head, the shorter way round."""
    head, step = games.body[n, player, 0], STEP[games.heading[n, player]]
    rows = wrapped(cell // COLUMNS - head // COLUMNS, ROWS)
    columns = wrapped(cell % COLUMNS - head % COLUMNS, COLUMNS)
    return rows * step[0] + columns * step[1], rows * step[1] - columns * step[0]


@compiled()
def _steps_apart(games: Games, n: int, player: int, cell: int) -> int:
    """Count the moves from a player's head to a cell on an empty torus."""
    ahead, right = _offset(games, n, player, cell)
    return abs(ahead) + abs(right)


@compiled()
def _mark(games: Games, n: int, player: int, cell: int, channel: int) -> int:
    """Return a cell's index in a channel of the window, or -1 if it lies outside."""
    ahead, right = _offset(games, n, player, cell)
    if max(abs(ahead), abs(right)) > REACH:
        return -1
    return channel * AREA + (REACH - ahead) * WINDOW + REACH + right


@compiled()
def _draw_window(
    games: Games, n: int, player: int, ground: Ground, out: NDArray[np.float32]
) -> int:
    """Draw the window: bodies, their remaining steps, beans, heads of team-mates and enemies.

    The tail stays for one step, the cell before it for two, as long as the snake does not eat.
    """
    for cell in range(CELLS):
        if ground.free_at[cell] > 0:
            at = _mark(games, n, player, cell, 0)
            if at >= 0:
                out[at] = 1
                out[at + AREA] = min(ground.free_at[cell], _LONG) / _LONG
    for other in range(NUM_SNAKES):
        if games.length[n, other] > 0 and other != player:
            mate = other // TEAM == player // TEAM
            at = _mark(games, n, player, games.body[n, other, 0], 3 if mate else 4)
            if at >= 0:
                out[at] = 1
    for cell in games.bean[n]:
        at = _mark(games, n, player, cell, 2) if cell >= 0 else -1
        if at >= 0:
            out[at] = 1
    return CHANNELS * AREA


@compiled()
def _draw_beans(games: Games, n: int, player: int, out: NDArray[np.float32], at: int) -> int:
    """Write each bean's offset, nearness, and lead over team-mates and enemies, nearest first.

    Of beans equally near the older comes first; a missing bean gives zeros.
    """
    drawn = 0  # bit i: bean i
    for rank in range(NUM_BEANS):
        best, least = -1, CELLS
        for i in range(NUM_BEANS):
            if games.bean[n, i] >= 0 and not drawn >> i & 1:
                steps = _steps_apart(games, n, player, games.bean[n, i])
                if steps < least:
                    best, least = i, steps
        if best < 0:
            break
        drawn |= 1 << best
        cell = games.bean[n, best]
        mate = enemy = CELLS
        for other in range(NUM_SNAKES):
            if other != player:
                steps = _steps_apart(games, n, other, cell)
                if other // TEAM == player // TEAM:
                    mate = min(mate, steps)
                else:
                    enemy = min(enemy, steps)
        ahead, right = _offset(games, n, player, cell)
        numbers = out[at + PER_BEAN * rank :]
        numbers[0], numbers[1] = ahead / _FAR, right / _FAR
        numbers[2] = 1 / (1 + least)
        numbers[3], numbers[4] = (mate - least) / _FAR, (enemy - least) / _FAR
    return at + PER_BEAN * NUM_BEANS


@compiled()
def _draw_others(games: Games, n: int, player: int, out: NDArray[np.float32], at: int) -> int:
    """Write each other snake's head, nearness, length and heading; team-mates first."""
    side = player // TEAM
    step = STEP[games.heading[n, player]]
    for number in range(NUM_SNAKES):
        other = seen(number, side)
        if other == player:
            continue
        if games.length[n, other] > 0:
            cell = games.body[n, other, 0]
            ahead, right = _offset(games, n, player, cell)
            out[at], out[at + 1] = ahead / _FAR, right / _FAR
            out[at + 2] = 1 / (1 + abs(ahead) + abs(right))
            out[at + 3] = games.length[n, other] / _LONG
            rows, columns = STEP[games.heading[n, other]]
            out[at + 4] = rows * step[0] + columns * step[1]
            out[at + 5] = rows * step[1] - columns * step[0]
        at += PER_OTHER
    return at


@compiled()
def _draw_moves(
    games: Games, n: int, player: int, ground: Ground, out: NDArray[np.float32], at: int
) -> int:
    """Write the numbers of the moves ahead, to the left and to the right.

    For a cell without a snake, or with only a tail: the cells that can be reached from it past all
    snakes, as a share of the board and of the own length (at most 1); the nearness of the nearest
    bean on such a path; 1 if it holds the tail of another snake that can eat in this step, so that
    the tail may stay; and the territory behind the cell, as 1 / (1 + cells) and as a share of the
    own length (at most 1). For every cell: the shares of team-mates and enemies with heads beside
    it.
    """
    head, heading = games.body[n, player, 0], games.heading[n, player]
    survey_rivals(games, n, player, ground)
    for turn in (0, 2, 3):
        cell = NEIGHBOUR[head, TURNED[heading, turn]]
        first = 0
        if ground.free_at[cell] <= 1:
            cells, bean = room(ground, cell)
            out[at] = cells / CELLS
            out[at + 1] = min(1, cells / games.length[n, player])
            out[at + 2] = 1 / (1 + bean) if bean < NEVER else 0
            owner = int(games.board[n, cell]) - SNAKE
            out[at + 5] = owner >= 0 and owner != player and _beside_bean(games, n, owner)
            first = territory(ground, cell)
        for other in range(NUM_SNAKES):
            if other != player and games.length[n, other] > 0:
                beside = False
                for direction in range(NUM_ACTIONS):
                    beside = beside or NEIGHBOUR[cell, direction] == games.body[n, other, 0]
                if beside:
                    mate = other // TEAM == player // TEAM
                    out[at + (3 if mate else 4)] += 1 / (TEAM - 1) if mate else 1 / TEAM
        out[at + 6] = 1 / (1 + first)
        out[at + 7] = min(1, first / games.length[n, player])
        at += PER_MOVE
    return at


@compiled()
def _beside_bean(games: Games, n: int, player: int) -> bool:
    """Return whether a player can eat in this step."""
    for direction in range(NUM_ACTIONS):
        if games.board[n, NEIGHBOUR[games.body[n, player, 0], direction]] == BEAN:
            return True
    return False


def mirrored() -> tuple[list[int], list[float]]:
    """Return order and signs of the numbers after swapping left and right."""
    order, signs = np.arange(SIZE), np.ones(SIZE)
    windows = CHANNELS * AREA
    order[:windows] = order[:windows].reshape(-1, WINDOW)[:, ::-1].ravel()
    beans = windows + PER_BEAN * np.arange(NUM_BEANS)
    others = windows + PER_BEAN * NUM_BEANS + PER_OTHER * np.arange(NUM_SNAKES - 1)
    for to_the_right in (beans + 1, others + 1, others + 5):
        signs[to_the_right] = -1
    ahead = windows + PER_BEAN * NUM_BEANS + PER_OTHER * (NUM_SNAKES - 1)
    left, right = ahead + PER_MOVE, ahead + 2 * PER_MOVE
    block = np.arange(PER_MOVE)
    order[left + block], order[right + block] = right + block, left + block
    return order.tolist(), signs.tolist()
