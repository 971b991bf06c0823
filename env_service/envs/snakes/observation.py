"""Observations: 26 or 35 numbers, or 11 images; the global state; legal moves.

Everything is seen from the agent's own side: `seen(player, side)` numbers its team 0-2 and the
enemies 3-5, whichever side it plays. The board is a torus, so nothing else needs mirroring.
"""

import math

import numpy as np
from numpy.typing import NDArray

from murmur.env_service.compiled import compiled
from murmur.env_service.envs.snakes.game import (
    COLUMNS,
    NEIGHBOUR,
    NUM_ACTIONS,
    NUM_BEANS,
    NUM_SNAKES,
    ROWS,
    SNAKE,
    TEAM,
    Games,
)

VECTORS = {"vector26": 26, "vector35": 35}
NUM_IMAGES = 11
NUM_STATE_IMAGES = 2 * NUM_SNAKES + 1
ON = 255  # a learner reads bytes as 0 .. 1

NO_MASK, REVERSE, LEGAL = range(3)
MASKS = {"none": NO_MASK, "reverse": REVERSE, "legal": LEGAL}


@compiled()
def seen(player: int, side: int) -> int:
    """Convert a player's number to the given side's numbering, or back."""
    return (player + TEAM * side) % NUM_SNAKES


def vector_scale(width: int, normalize: bool) -> NDArray[np.float32]:
    """Return [width] factors that scale each number of a vector to about [-1, 1], or ones."""
    if not normalize:
        return np.ones(width, np.float32)
    place = [1 / ROWS, 1 / COLUMNS]
    bean = [2 / COLUMNS, 2 / ROWS, 2 / math.hypot(ROWS, COLUMNS)]
    scale = place + 4 * [1 / (SNAKE + NUM_SNAKES - 1)] + NUM_BEANS * place
    if width == VECTORS["vector35"]:
        scale += 2 * bean + [1.0]
    scale += (NUM_SNAKES - 1) * place
    if width == VECTORS["vector35"]:
        scale += 2 * [1.0]
    return np.array(scale, np.float32)


@compiled()
def wrapped(offset: int, size: int) -> int:
    """Return the shorter offset on a torus of that size; of two equal ones, the direct one."""
    if offset > size // 2:
        return offset - size
    if offset < -(size // 2):
        return offset + size
    return offset


@compiled()
def _put_place(cell: int, out: NDArray[np.float32]) -> None:
    """Write a cell's row and column."""
    out[0], out[1] = cell // COLUMNS, cell % COLUMNS


@compiled()
def draw_vector(
    games: Games, n: int, player: int, scale: NDArray[np.float32], out: NDArray[np.float32]
) -> None:
    """Write a player's numbers: see docs/snakes.md.

    Args:
        games: all games.
        n: number of the game.
        player: player that observes.
        scale: [F] factors.
        out: [F] numbers, overwritten; F is 26 or 35.
    """
    side = player // TEAM
    head = games.body[n, player, 0]
    _put_place(head, out)
    for direction in range(NUM_ACTIONS):
        code = games.board[n, NEIGHBOUR[head, direction]]
        out[2 + direction] = code if code < SNAKE else SNAKE + seen(code - SNAKE, side)
    for i in range(NUM_BEANS):
        cell = games.bean[n, i]
        if cell >= 0:
            _put_place(cell, out[6 + 2 * i :])
        else:
            out[6 + 2 * i] = out[7 + 2 * i] = -1
    at = 6 + 2 * NUM_BEANS
    if len(out) > 26:
        _put_near_beans(games, n, head, out[at:])
        out[22] = games.length[n, player] / 20
        at = 23
    for other in range(NUM_SNAKES):
        if other != seen(player, side):
            _put_place(games.body[n, seen(other, side), 0], out[at:])
            at += 2
    if len(out) > 26:
        for i in range(2):
            enemy = seen(TEAM + i, side)
            cell = games.body[n, enemy, 0]
            rows = wrapped(cell // COLUMNS - head // COLUMNS, ROWS)
            columns = wrapped(cell % COLUMNS - head % COLUMNS, COLUMNS)
            distance = math.sqrt(rows * rows + columns * columns)
            lengths = games.length[n, enemy] / max(games.length[n, player], 1)
            out[33 + i] = lengths / (distance + 1)
    for i in range(len(out)):
        out[i] *= scale[i]


@compiled()
def _put_near_beans(games: Games, n: int, head: int, out: NDArray[np.float32]) -> None:
    """Fill out[:6]: offset (columns, rows) and torus distance of the two nearest beans.

    Of beans equally near the older comes first; a missing bean gives zeros.
    """
    nearest = -1
    for rank in range(2):
        best, least = -1, 1 << 30
        for i in range(NUM_BEANS):
            cell = games.bean[n, i]
            if cell >= 0 and i != nearest:
                rows = wrapped(cell // COLUMNS - head // COLUMNS, ROWS)
                columns = wrapped(cell % COLUMNS - head % COLUMNS, COLUMNS)
                distance = rows * rows + columns * columns
                if distance < least:
                    best, least = i, distance
                    out[3 * rank], out[3 * rank + 1] = columns, rows
                    out[3 * rank + 2] = math.sqrt(distance)
        if best < 0:
            out[3 * rank : 3 * rank + 3] = 0
        nearest = best


@compiled()
def draw_images(games: Games, n: int, player: int, out: NDArray[np.uint8]) -> None:
    """Fill out [11, CELLS] with a player's images; bodies include their heads.

    0 all bodies, 1 own head, 2 heads of the own team, 3 heads of the enemies, 4 beans, 5 own body,
    6-7 bodies of the team-mates, 8-10 bodies of the enemies.
    """
    side = player // TEAM
    me = seen(player, side)
    out[:] = 0
    mates = 0
    for number in range(NUM_SNAKES):
        other = seen(number, side)
        length = games.length[n, other]
        if number == me:
            image = 5
        elif number < TEAM:
            image = 6 + mates
            mates += 1
        else:
            image = 8 + number - TEAM
        for i in range(length):
            cell = games.body[n, other, i]
            out[0, cell] = out[image, cell] = ON
        if length > 0:
            out[2 + (number >= TEAM), games.body[n, other, 0]] = ON
            if number == me:
                out[1, games.body[n, other, 0]] = ON
    for cell in games.bean[n]:
        if cell >= 0:
            out[4, cell] = ON


@compiled()
def draw_state(games: Games, n: int, out: NDArray[np.uint8]) -> None:
    """Fill out [13, CELLS] with the board as seen from the learner's side.

    0-5 bodies, own team first, 6-11 their heads, 12 beans.
    """
    out[:] = 0
    for number in range(NUM_SNAKES):
        player = seen(number, games.side[n])
        length = games.length[n, player]
        for i in range(length):
            out[number, games.body[n, player, i]] = ON
        if length > 0:
            out[NUM_SNAKES + number, games.body[n, player, 0]] = ON
    for cell in games.bean[n]:
        if cell >= 0:
            out[2 * NUM_SNAKES, cell] = ON


@compiled()
def draw_mask(games: Games, n: int, player: int, kind: int, out: NDArray[np.uint8]) -> None:
    """Fill out [4] with a player's legal moves.

    REVERSE forbids turning back. LEGAL forbids cells that hold a snake, such as the neck, except
    tails, which mostly move away. If that leaves no move, all but turning back are legal.
    """
    legal = 0
    back = games.heading[n, player] ^ 1
    for direction in range(NUM_ACTIONS):
        out[direction] = direction != back
        if kind == LEGAL:
            cell = NEIGHBOUR[games.body[n, player, 0], direction]
            code = games.board[n, cell]
            if code >= SNAKE:
                owner = code - SNAKE
                out[direction] = games.body[n, owner, games.length[n, owner] - 1] == cell
            else:
                out[direction] = 1
            legal += out[direction]
    if kind == LEGAL and legal == 0:
        for direction in range(NUM_ACTIONS):
            out[direction] = direction != back
