"""Hand-made boards: who is not mentioned moves right, out of the way."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from murmur.env_service.envs.snakes import Config, Snakes
from murmur.env_service.envs.snakes.game import NEIGHBOUR, RIGHT, paint
from murmur.shared.wire.timestep import TimeStep

Cell = tuple[int, int]
GO = np.zeros(1, np.bool_)
SEED = np.array([5], np.uint64)
FAR_BEANS = [(3, column) for column in range(15, 20)]


def number(cell: Cell) -> int:
    return cell[0] * 20 + cell[1]


def blocked(player: int) -> list[Cell]:
    return [(4 + player, 12), (4 + player, 11), (4 + player, 10)]


def board(
    snakes: dict[int, Sequence[Cell]],
    beans: Sequence[Cell] = FAR_BEANS,
    time: int = 0,
    **options: object,
) -> Snakes:
    """One game of self-play with these snakes, heads first, and beans, oldest first."""
    env = Snakes(Config(**{"control": "both", "side": "first", **options}), 1)  # type: ignore[arg-type]
    env.reset(SEED)
    games = env.games
    games.bean[0] = -1
    games.bean[0, : len(beans)] = [number(cell) for cell in beans]
    games.time[0] = time
    for player in range(6):
        body = [number(cell) for cell in snakes.get(player, blocked(player))]
        games.body[0, player, : len(body)] = body
        games.length[0, player] = len(body)
        games.score[0, player] = len(body) - 3
        games.heading[0, player] = list(NEIGHBOUR[body[1]]).index(body[0])
    paint(games, 0)
    return env


def step(env: Snakes, moves: dict[int, int] | None = None) -> TimeStep:
    action = np.full((1, 6), RIGHT, np.int32)
    for player, direction in (moves or {}).items():
        action[0, player] = direction
    return env.step(action, GO, SEED)


def body(env: Snakes, player: int) -> list[Cell]:
    length = env.games.length[0, player]
    return [divmod(int(cell), 20) for cell in env.games.body[0, player, :length]]


def rewards(env: Snakes) -> list[int]:
    return list(map(int, env.games.reward[0]))


def deaths(env: Snakes) -> list[int]:
    return list(map(int, env.games.deaths[0]))


def lit(image: NDArray[np.uint8]) -> set[Cell]:
    """Cells of an image that are on; the others must be off."""
    assert set(np.unique(image)) <= {0, 255}
    return {(int(r), int(c)) for r, c in np.argwhere(image)}
