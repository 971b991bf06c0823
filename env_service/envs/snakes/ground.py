"""Reachability on a board: empty regions, distances to beans, and first arrivals."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from murmur.env_service.compiled import compiled
from murmur.env_service.envs.snakes.game import CELLS, NEIGHBOUR, NUM_ACTIONS, NUM_SNAKES, Games

Cells = NDArray[np.int16]
NEVER = CELLS  # later than any move of a search
_WITHOUT_RIVALS: Cells = np.full(CELLS, NEVER, np.int16)


class Ground(NamedTuple):
    """Reachability by cell in one game, and memory for searches; each [CELLS].

    Attributes:
        free_at: number of the first move that can enter the cell if no snake eats; 0 if empty.
        to_bean: moves from an empty cell past all snakes to the nearest bean, or NEVER.
        region: number of the cell's empty region; NEVER for a snake's cell.
        size: number of cells in a region, by its number.
        rival: number of the first move of another snake into the cell; see survey_rivals.
        steps, queue: working memory of a search.
    """

    free_at: Cells
    to_bean: Cells
    region: Cells
    size: Cells
    rival: Cells
    steps: Cells
    queue: Cells


def ground() -> Ground:
    """Allocate memory for one game at a time."""
    return Ground(*(np.zeros(CELLS, np.int16) for _ in Ground._fields))


@compiled()
def survey(games: Games, n: int, ground: Ground) -> None:
    """Fill free_at, to_bean, region and size for game n."""
    ground.free_at[:] = 0
    for player in range(NUM_SNAKES):
        length = games.length[n, player]
        for i in range(length):
            cell = games.body[n, player, i]
            ground.free_at[cell] = max(ground.free_at[cell], length - i)
    ground.to_bean[:] = NEVER
    count = 0
    for cell in games.bean[n]:
        if cell >= 0:
            ground.queue[count], ground.to_bean[cell] = cell, 0
            count += 1
    _search(ground, count, ground.to_bean, False, _WITHOUT_RIVALS)
    ground.region[:] = NEVER
    ground.steps[:] = NEVER
    for cell in range(CELLS):
        if ground.free_at[cell] == 0 and ground.region[cell] == NEVER:
            ground.queue[0], ground.steps[cell] = cell, 0
            count = _search(ground, 1, ground.steps, False, _WITHOUT_RIVALS)
            ground.size[cell] = count
            for i in range(count):
                ground.region[ground.queue[i]] = cell


@compiled()
def survey_rivals(games: Games, n: int, player: int, ground: Ground) -> None:
    """Fill rival: number of the first move by which another snake can enter the cell."""
    ground.rival[:] = NEVER
    count = 0
    for other in range(NUM_SNAKES):
        if other != player and games.length[n, other] > 0:
            cell = games.body[n, other, 0]
            ground.queue[count], ground.rival[cell] = cell, 0
            count += 1
    _search(ground, count, ground.rival, True, _WITHOUT_RIVALS)


@compiled()
def room(ground: Ground, start: int) -> tuple[int, int]:
    """Count the cells that can be reached from an empty cell or a tail past all snakes.

    Returns:
        number of cells, the first included, and moves to the nearest bean, or NEVER.
    """
    if ground.region[start] < NEVER:
        return int(ground.size[ground.region[start]]), int(ground.to_bean[start])
    cells, bean = 1, NEVER
    for direction in range(NUM_ACTIONS):
        near = NEIGHBOUR[start, direction]
        region = ground.region[near]
        new = region < NEVER
        for earlier in range(direction):
            new = new and ground.region[NEIGHBOUR[start, earlier]] != region
        if new:
            cells += ground.size[region]
        bean = min(bean, ground.to_bean[near] + 1)
    return cells, bean


@compiled()
def territory(ground: Ground, start: int) -> int:
    """Count the cells that a snake can enter before all others if it moves to `start` now."""
    if ground.rival[start] <= 1:
        return 0
    ground.steps[:] = NEVER
    ground.queue[0], ground.steps[start] = start, 1
    return _search(ground, 1, ground.steps, True, ground.rival)


@compiled()
def _search(ground: Ground, count: int, move: Cells, leaving: bool, before: Cells) -> int:
    """Search breadth first from the cells in the queue; return the queue's final length.

    Args:
        ground: memory; its queue holds the first cells, then all that are reached.
        count: number of first cells.
        move: [CELLS] number of the move that reaches a cell; NEVER if none has yet.
        leaving: true if snakes move during the search (`free_at`), false if they stay.
        before: [CELLS] number of the move before which a cell must be entered.
    """
    done = 0
    while done < count:
        cell = ground.queue[done]
        done += 1
        number = move[cell] + 1
        latest = number if leaving else 0
        for direction in range(NUM_ACTIONS):
            near = NEIGHBOUR[cell, direction]
            if move[near] == NEVER and ground.free_at[near] <= latest and number < before[near]:
                move[near] = number
                ground.queue[count] = near
                count += 1
    return count
