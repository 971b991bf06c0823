"""The lattice of positions: its moves, their legality, and the settling of conflicts.

A position is a triple of indices (x, y, z); one move changes each of them by at most one.
"""

import numpy as np
from numpy.typing import NDArray

from murmur.env_service.compiled import compiled
from murmur.env_service.envs.terrain.config import Config

_PLANE = [(x, y) for x in (-1, 0, 1) for y in (-1, 0, 1)]

MOVES: dict[int, NDArray[np.int32]] = {
    4: np.array([(-1, 0, 0), (0, -1, 0), (0, 1, 0), (1, 0, 0)], np.int32),
    6: np.array([(0, 0, 1), (-1, 0, 0), (0, -1, 0), (0, 1, 0), (1, 0, 0), (0, 0, -1)], np.int32),
    9: np.array([(x, y, 0) for x, y in _PLANE], np.int32),
    27: np.array([(x, y, z) for z in (1, 0, -1) for x, y in _PLANE], np.int32),
}
"""num_actions -> [K, 3] int32, the change of (x, y, z) by each action. Staying is never legal."""


def lattice_shape(config: Config) -> tuple[int, int, int]:
    """Return the positions along x, y and z; the first two are the size of feature maps."""
    return (
        round(config.area_x_m / config.spacing_m) + 1,
        round(config.area_y_m / config.spacing_m) + 1,
        len(config.altitudes_m),
    )


@compiled()
def is_inside(cell: NDArray[np.int32], move: NDArray[np.int32], shape: NDArray[np.int32]) -> bool:
    """Return whether a move changes the position and stays on the lattice."""
    moves = False
    for axis in range(3):
        target = cell[axis] + move[axis]
        if target < 0 or target >= shape[axis]:
            return False
        moves = moves or move[axis] != 0
    return moves


@compiled()
def is_taken(cells: NDArray[np.int32], agent: int, move: NDArray[np.int32], count: int) -> bool:
    """Return whether one of the agents 0 .. count-1 is in the column that a move leads to."""
    for other in range(count):
        if (
            cells[other, 0] == cells[agent, 0] + move[0]
            and cells[other, 1] == cells[agent, 1] + move[1]
        ):
            return True
    return False


@compiled()
def action_mask(
    cells: NDArray[np.int32],
    moves: NDArray[np.int32],
    shape: NDArray[np.int32],
    collisions: bool,
    out: NDArray[np.uint8],
) -> None:
    """Compute the legal actions of each agent, before any agent moves.

    Leaving the lattice and staying are illegal. With `collisions`, so is a move into the column
    (x, y) where an agent with a lower id stands now, as long as another action remains.

    Args:
        cells: [A, 3] positions.
        moves: [K, 3] action set, one of MOVES.
        shape: [3] positions along each axis.
        collisions: true to mask the columns of agents with lower ids.
        out: [A, K] receives 1 for legal actions, else 0.
    """
    for agent in range(cells.shape[0]):
        remaining = 0
        for k in range(moves.shape[0]):
            out[agent, k] = is_inside(cells[agent], moves[k], shape)
            remaining += out[agent, k]
        if not collisions:
            continue
        for k in range(moves.shape[0]):
            if out[agent, k] and remaining > 1 and is_taken(cells, agent, moves[k], agent):
                out[agent, k] = 0
                remaining -= 1


@compiled()
def move_agents(
    cells: NDArray[np.int32],
    actions: NDArray[np.int32],
    moves: NDArray[np.int32],
    shape: NDArray[np.int32],
    executed: NDArray[np.int32],
) -> int:
    """Move all agents in the order of their ids; a later agent gives way to an earlier one.

    An action that leaves the lattice, or that leads into the column of an agent that has already
    moved in this step, is replaced by the next action (cyclically by index) that does neither. If
    there is none, the first legal one from the chosen action on is taken, conflict or not.

    Args:
        cells: [A, 3] positions; overwritten by the new ones.
        actions: [A] chosen actions.
        moves: [K, 3] action set, one of MOVES.
        shape: [3] positions along each axis.
        executed: [A] receives the executed actions.

    Returns:
        number of legal actions that were replaced to avoid a conflict.
    """
    num_actions = moves.shape[0]
    avoided = 0
    for agent in range(cells.shape[0]):
        fallback = -1
        chosen = -1
        for offset in range(num_actions):
            k = (actions[agent] + offset) % num_actions
            if not is_inside(cells[agent], moves[k], shape):
                continue
            if fallback < 0:
                fallback = k
            if not is_taken(cells, agent, moves[k], agent):
                chosen = k
                break
        if chosen < 0:
            chosen = fallback
        if fallback == actions[agent] and chosen != fallback:
            avoided += 1
        executed[agent] = chosen
        for axis in range(3):
            cells[agent, axis] += moves[chosen, axis]
    return avoided
