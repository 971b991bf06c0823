"""Opponents: the scripts that play the other side, drawn for each episode.

The code GIVEN stands for a policy from elsewhere, such as a past checkpoint. The caller that
advances the games then puts its actions into columns 3-5 of the joint action
(`environment.advance`). They are chosen from the observations of agents 3-5, which `control: both`
draws from that side's point of view.
"""

import numpy as np
from numpy.typing import NDArray

from murmur.env_service.compiled import compiled
from murmur.env_service.envs.snakes.game import (
    COLUMNS,
    NEIGHBOUR,
    NUM_ACTIONS,
    NUM_BEANS,
    SNAKE,
    TEAM,
    Games,
)
from murmur.env_service.splitmix import draw

GIVEN, RANDOM, GREEDY = range(3)

_FAR = 1 << 30  # beyond every squared distance
_PARTS = 1 << 24  # of which greedy_share is a whole number


@compiled()
def assign(games: Games, n: int, opponent: int, greedy_share: float) -> None:
    """Choose the opponent of game n, which has just begun.

    Args:
        games: all games.
        n: number of the game.
        opponent: GIVEN, RANDOM, GREEDY, or -1 to draw one of the two scripts.
        greedy_share: probability of GREEDY, if drawn.
    """
    if opponent < 0:
        greedy = draw(games.opponent_luck, n, _PARTS) < greedy_share * _PARTS
        opponent = GREEDY if greedy else RANDOM
    games.opponent[n] = opponent


@compiled()
def act(games: Games, n: int, move: NDArray[np.int32]) -> None:
    """Choose the moves of game n's opponent: fill its three players' entries of move [6]."""
    first = TEAM * (1 - games.side[n])
    if games.opponent[n] == RANDOM:
        for player in range(first, first + TEAM):
            move[player] = draw(games.opponent_luck, n, NUM_ACTIONS)
    elif games.opponent[n] == GREEDY:
        greedy(games, n, first, move)


@compiled()
def greedy(games: Games, n: int, first: int, move: NDArray[np.int32]) -> None:
    """Choose greedy moves of three players towards beans.

    In their order each picks the bean nearest to its head that none before it has picked, then
    the neighboring cell nearest to that bean that holds no snake; ties go to the older bean, and
    to up, down, left, right in this order. If all four hold snakes the move is up. Distances are
    Euclidean on the flat board, although the snake's neighbors wrap around.

    Args:
        games: all games.
        n: number of the game.
        first: number of the first of the three players.
        move: [6] directions; the three players' entries are overwritten.
    """
    picked = 0  # bit i: bean i
    for player in range(first, first + TEAM):
        head = games.body[n, player, 0]
        target, least = -1, _FAR
        for i in range(NUM_BEANS):
            if games.bean[n, i] >= 0 and not picked >> i & 1:
                distance = flat_distance2(head, games.bean[n, i])
                if distance < least:
                    target, least = i, distance
        if target >= 0:
            picked |= 1 << target
        move[player], least = 0, _FAR
        for direction in range(NUM_ACTIONS):
            cell = NEIGHBOUR[head, direction]
            if games.board[n, cell] < SNAKE:
                distance = flat_distance2(cell, games.bean[n, target]) if target >= 0 else 0
                if distance < least:
                    move[player], least = direction, distance


@compiled()
def flat_distance2(a: int, b: int) -> int:
    """Return the squared Euclidean distance of two cells on the flat board."""
    return (a // COLUMNS - b // COLUMNS) ** 2 + (a % COLUMNS - b % COLUMNS) ** 2
