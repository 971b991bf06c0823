"""Where a snake gets: the empty regions of a board, its beans, and who is where first."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from env_service.compiled import compiled
from env_service.envs.snakes.game import CELLS, NEIGHBOUR, NUM_ACTIONS, NUM_SNAKES, Games

Cells = NDArray[np.int16]
NEVER = CELLS  # later than any move of a search
_WITHOUT_RIVALS: Cells = np.full(CELLS, NEVER, np.int16)


class Ground(NamedTuple):
    """What the snakes of a game have in common, by cell, and memory for searches; each [CELLS].

    Attributes:
        free_at: number of the first move that can enter it if no snake eats; 0: no snake is there.
        to_bean: moves from an empty cell past all snakes to the nearest bean, or NEVER.
        region: number of the empty region it belongs to; NEVER for a snake's cell.
        size: by number of a region: its cells.
        rival: see survey_rivals.
        steps, queue: of a search.
    """

    free_at: Cells
    to_bean: Cells
    region: Cells
    size: Cells
    rival: Cells
    steps: Cells
    queue: Cells


def ground() -> Ground:
    """Memory, for one game at a time."""
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
    """Fill rival: number of the first move by which a snake other than this one can be there."""
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
    """Cells that can be reached from an empty cell or a tail past all snakes, itself included.

    Returns:
        their number, and the moves to the nearest bean, or NEVER.
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
    """Cells that a snake can be at before all others (`rival`) if it moves to `start` now."""
    if ground.rival[start] <= 1:
        return 0
    ground.steps[:] = NEVER
    ground.queue[0], ground.steps[start] = start, 1
    return _search(ground, 1, ground.steps, True, ground.rival)


@compiled()
def _search(ground: Ground, count: int, move: Cells, leaving: bool, before: Cells) -> int:
    """Breadth first from the cells in the queue; returns how many are in it at the end.

    Args:
        ground: its queue holds the cells to begin with and then all that are reached.
        count: of cells to begin with.
        move: [CELLS] number of the move that reaches a cell; NEVER where none has yet.
        leaving: whether snakes move on meanwhile (`free_at`), or stay where they are.
        before: [CELLS] a cell is entered only by an earlier move than this.
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
