"""The rules: six snakes move at once, eat, collide and restart, until 200 steps are over."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from murmur.env_service.compiled import compiled
from murmur.env_service.splitmix import draw, generator

ROWS, COLUMNS = 10, 20
CELLS = ROWS * COLUMNS  # cell = row * COLUMNS + column
NUM_SNAKES, TEAM = 6, 3  # players 0-2 against 3-5
NUM_BEANS = 5
START_LENGTH = 3
MAX_STEPS = 200
NUM_ACTIONS = 4
UP, DOWN, LEFT, RIGHT = range(NUM_ACTIONS)  # the reverse of direction k is k ^ 1
EMPTY, BEAN, SNAKE = 0, 1, 2  # codes of cells; player p's snake is SNAKE + p

_ROW, _COLUMN = np.divmod(np.arange(CELLS), COLUMNS)
NEIGHBOUR: NDArray[np.int64] = np.stack(
    [
        (_ROW - 1) % ROWS * COLUMNS + _COLUMN,
        (_ROW + 1) % ROWS * COLUMNS + _COLUMN,
        _ROW * COLUMNS + (_COLUMN - 1) % COLUMNS,
        _ROW * COLUMNS + (_COLUMN + 1) % COLUMNS,
    ],
    axis=1,
)
"""[CELLS, 4] the cell next to each, by direction; all edges wrap around."""

_SEARCH = np.array([RIGHT, DOWN, UP, LEFT])  # order in which a place to restart is searched


class Games(NamedTuple):
    """The states of N games; entry n belongs to game n.

    Attributes:
        body: [N, 6, CELLS] int16, cells of each snake from head to tail; stale beyond its length.
        length: [N, 6] int32; 0 for a snake that found no room to restart.
        heading: [N, 6] int32, direction of the last move.
        bean: [N, 5] int16, cells of the beans, oldest first; -1 for a missing bean.
        board: [N, CELLS] uint8, code of each cell.
        time: [N] int32, steps played.
        over: [N] bool, true if the game has ended.
        reward: [N, 6] int32, reward of the last step: change of length, restarts included.
        score: [N, 6] int32, sum of rewards: length - 3.
        deaths: [N, 6] int32, number of deaths.
        eaten: [N, 6] int32, number of beans eaten.
        luck: [N] uint64, state of the random generator of the rules.
        side: [N] int32, 0 if the learner's agents are players 0-2, 1 if 3-5.
        opponent: [N] int32, code of the player of the other side; see opponents.
        opponent_luck: [N] uint64, state of the opponent's random generator.
    """

    body: NDArray[np.int16]
    length: NDArray[np.int32]
    heading: NDArray[np.int32]
    bean: NDArray[np.int16]
    board: NDArray[np.uint8]
    time: NDArray[np.int32]
    over: NDArray[np.bool_]
    reward: NDArray[np.int32]
    score: NDArray[np.int32]
    deaths: NDArray[np.int32]
    eaten: NDArray[np.int32]
    luck: NDArray[np.uint64]
    side: NDArray[np.int32]
    opponent: NDArray[np.int32]
    opponent_luck: NDArray[np.uint64]


def games(num_envs: int) -> Games:
    """Allocate `num_envs` games; begin() starts each."""
    each = (num_envs, NUM_SNAKES)
    return Games(
        body=np.zeros((*each, CELLS), np.int16),
        length=np.zeros(each, np.int32),
        heading=np.zeros(each, np.int32),
        bean=np.full((num_envs, NUM_BEANS), -1, np.int16),
        board=np.zeros((num_envs, CELLS), np.uint8),
        time=np.zeros(num_envs, np.int32),
        over=np.zeros(num_envs, np.bool_),
        reward=np.zeros(each, np.int32),
        score=np.zeros(each, np.int32),
        deaths=np.zeros(each, np.int32),
        eaten=np.zeros(each, np.int32),
        luck=np.zeros(num_envs, np.uint64),
        side=np.zeros(num_envs, np.int32),
        opponent=np.zeros(num_envs, np.int32),
        opponent_luck=np.zeros(num_envs, np.uint64),
    )


@compiled()
def begin(games: Games, n: int, seed: np.uint64) -> None:
    """Restart game n: straight snakes at random places, then beans."""
    games.luck[n] = generator(seed, 0)
    games.opponent_luck[n] = generator(seed, 1)
    games.time[n], games.over[n] = 0, False
    games.reward[n] = 0
    games.score[n] = 0
    games.deaths[n] = 0
    games.eaten[n] = 0
    games.bean[n] = -1
    board, body = games.board[n], games.body[n]
    board[:] = EMPTY
    for player in range(NUM_SNAKES):
        while True:
            head = draw(games.luck, n, CELLS)
            heading = draw(games.luck, n, NUM_ACTIONS)
            middle = NEIGHBOUR[head, heading ^ 1]
            tail = NEIGHBOUR[middle, heading ^ 1]
            if board[head] == EMPTY and board[middle] == EMPTY and board[tail] == EMPTY:
                break
        body[player, 0], body[player, 1], body[player, 2] = head, middle, tail
        board[head] = board[middle] = board[tail] = SNAKE + player
        games.length[n, player] = START_LENGTH
        games.heading[n, player] = heading
    _refill(games, n)


@compiled()
def paint(games: Games, n: int) -> None:
    """Write game n's board from its snakes and beans."""
    board = games.board[n]
    board[:] = EMPTY
    for cell in games.bean[n]:
        if cell >= 0:
            board[cell] = BEAN
    for player in range(NUM_SNAKES):
        for i in range(games.length[n, player]):
            board[games.body[n, player, i]] = SNAKE + player


@compiled()
def play(games: Games, n: int, action: NDArray[np.int32]) -> None:
    """Play one step of game n.

    Players move in the order of their numbers: each turns, moves its head, and either eats or
    moves its tail. Then collisions are settled on all bodies at once: a snake dies if its head
    shares its cell with another segment. All dead snakes leave the board, then restart in the
    order of their numbers; at last beans are replaced.

    Args:
        games: all games.
        n: number of the game.
        action: [6] direction of each player.
    """
    body, length, bean = games.body[n], games.length[n], games.bean[n]
    games.time[n] += 1
    for player in range(NUM_SNAKES):
        heading = games.heading[n, player]
        turn = action[player]
        if turn == heading ^ 1:  # no snake turns back: one of the other three, at random
            other = draw(games.luck, n, NUM_ACTIONS - 1)
            turn = other + (other >= turn)
        games.heading[n, player] = turn
        head = NEIGHBOUR[body[player, 0], turn]
        eats = _take(bean, head)
        length[player] += eats
        games.eaten[n, player] += eats
        games.reward[n, player] = eats
        for i in range(length[player] - 1, 0, -1):
            body[player, i] = body[player, i - 1]
        body[player, 0] = head
    dead = _judge(games, n)
    paint(games, n)
    room = True
    for player in range(NUM_SNAKES):
        if dead >> player & 1:
            room = _start_anew(games, n, player) and room
    _refill(games, n)
    full = NUM_BEANS + length.sum() > CELLS
    games.over[n] = full or not room or games.time[n] >= MAX_STEPS


@compiled()
def _judge(games: Games, n: int) -> int:
    """Settle the collisions of game n; return bit p for each player p that died."""
    body, length = games.body[n], games.length[n]
    crowd = games.board[n]  # for now: how many snake segments lie on each cell
    crowd[:] = 0
    for player in range(NUM_SNAKES):
        for i in range(length[player]):
            crowd[body[player, i]] += 1
    dead = 0
    for player in range(NUM_SNAKES):
        if crowd[body[player, 0]] > 1:
            dead |= 1 << player
    for player in range(NUM_SNAKES):
        if dead >> player & 1:
            games.deaths[n, player] += 1
            games.reward[n, player] += START_LENGTH - length[player]
            length[player] = 0
        games.score[n, player] += games.reward[n, player]
    return dead


@compiled()
def _take(bean: NDArray[np.int16], cell: int) -> int:
    """Remove the bean from a cell; the younger ones move up. Return 1 if there was one, else 0."""
    for i in range(NUM_BEANS):
        if bean[i] == cell:
            for j in range(i, NUM_BEANS - 1):
                bean[j] = bean[j + 1]
            bean[NUM_BEANS - 1] = -1
            return 1
    return 0


@compiled()
def _start_anew(games: Games, n: int, player: int) -> bool:
    """Put a dead snake on three connected empty cells; return whether there are any.

    They are the first three that a breadth-first search reaches (right, down, up, left) from the
    first empty cell in row-major order from which it reaches three.
    """
    board = games.board[n]
    found = np.empty(START_LENGTH, np.int64)
    for start in range(CELLS):
        if board[start] != EMPTY:
            continue
        found[0], count, done = start, 1, 0
        while done < count < START_LENGTH:
            for direction in _SEARCH:
                cell = NEIGHBOUR[found[done], direction]
                new = board[cell] == EMPTY
                for i in range(count):
                    new = new and cell != found[i]
                if new and count < START_LENGTH:
                    found[count] = cell
                    count += 1
            done += 1
        if count < START_LENGTH:
            continue
        if done == 1:  # both others are neighbours of the first: it is the middle
            found[0], found[1] = found[1], found[0]
        for i in range(START_LENGTH):
            games.body[n, player, i] = found[i]
            board[found[i]] = SNAKE + player
        games.length[n, player] = START_LENGTH
        for direction in range(NUM_ACTIONS):
            if NEIGHBOUR[found[1], direction] == found[0]:
                games.heading[n, player] = direction
        return True
    return False


@compiled()
def _refill(games: Games, n: int) -> None:
    """Put new beans on empty cells, uniformly, until there are five or no cell is left."""
    board, bean = games.board[n], games.bean[n]
    empty = 0
    for i in range(NUM_BEANS):
        if bean[i] >= 0:
            continue
        if empty == 0:
            empty = (board == EMPTY).sum()
            if empty == 0:
                return
        which = draw(games.luck, n, empty)
        for cell in range(CELLS):
            if board[cell] == EMPTY:
                if which == 0:
                    bean[i] = cell
                    board[cell] = BEAN
                    break
                which -= 1
        empty -= 1
