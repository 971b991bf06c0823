"""Mirrored boards: the changes of observations and actions.

The rules are the same on a mirrored board, but for two: a dead snake restarts at the first free
place in row-major order, along a search that prefers right and down, and numbers of missing beans
(-1, -1) of vectors would be mirrored too. Both are rare, so the symmetries hold nearly always. What
is drawn at random (beans, the way of a snake that tries to turn back) is as likely mirrored.
"""

from itertools import chain

import numpy as np

from env_service.envs.snakes.config import Config
from env_service.envs.snakes.egocentric import (
    AREA,
    CHANNELS,
    PER_BEAN,
    PER_MOVE,
    PER_OTHER,
    SIZE,
    STEP,
    WINDOW,
)
from env_service.envs.snakes.game import COLUMNS, NUM_BEANS, NUM_SNAKES, ROWS, TEAM
from env_service.envs.snakes.observation import VECTORS, vector_scale
from shared.config.symmetry import ArrayChange, Symmetry, grid_change
from shared.wire.spec import AGENT_CELL, STATE

_MIRRORS = {"left and right": (True, 0), "up and down": (True, 2), "both": (False, 2)}


def symmetries(config: Config) -> tuple[Symmetry, ...]:
    """Return the symmetries of a configured game, without the identity."""
    agents = TEAM if config.control == "team" else NUM_SNAKES
    if config.observation == "egocentric":
        order, signs = _egocentric()
        arrays = _vector(config, agents, order, signs, [0.0] * SIZE)
        return (Symmetry("left and right", arrays, (0, 1, 3, 2)),)
    found = []
    for name, (flip, turns) in _MIRRORS.items():
        grid = grid_change(ROWS, COLUMNS, flip=flip, turns=turns)
        steps = [tuple(step) for step in STEP.tolist()]
        action = tuple(steps.index(grid.direction(step)) for step in steps)
        if config.observation == "images":
            changed = ("maps", STATE) if config.state else ("maps",)
            arrays = (
                *(ArrayChange(array, flip=flip, turns=turns) for array in changed),
                ArrayChange(
                    AGENT_CELL,
                    signs=tuple(map(float, grid.signs)),
                    offsets=tuple(map(float, grid.offsets)),
                ),
            )
        else:
            arrays = _vector(config, agents, *_numbers(config, action, flip=flip, turns=turns))
        found.append(Symmetry(name, arrays, action))
    return tuple(found)


def _vector(
    config: Config, agents: int, order: list[int], signs: list[float], offsets: list[float]
) -> tuple[ArrayChange, ...]:
    """Return the changes of an agent's vector, and of the state of all agents' vectors."""
    one = ArrayChange("observation", False, 0, tuple(order), tuple(signs), tuple(offsets))
    if not config.state:
        return (one,)
    size = len(order)
    every = tuple(size * agent + i for agent in range(agents) for i in order)
    whole = ArrayChange(STATE, False, 0, every, one.signs * agents, one.offsets * agents)
    return one, whole


def _egocentric() -> tuple[list[int], list[float]]:
    """Return order and signs of the egocentric numbers after swapping left and right."""
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


def _numbers(
    config: Config, action: tuple[int, ...], *, flip: bool, turns: int
) -> tuple[list[int], list[float], list[float]]:
    """Return order, signs and offsets of a vector of board coordinates; see draw_vector."""
    width = VECTORS[config.observation]
    grid = grid_change(ROWS, COLUMNS, flip=flip, turns=turns)
    scale = vector_scale(width, config.normalize)
    order, signs, offsets = list(range(width)), np.ones(width), np.zeros(width)
    for direction, new in enumerate(action):
        order[2 + new] = 2 + direction
    beans = range(6, 6 + 2 * NUM_BEANS, 2)
    first = 6 + 2 * NUM_BEANS + (7 if width > VECTORS["vector26"] else 0)
    others = range(first, first + 2 * (NUM_SNAKES - 1), 2)
    for at in chain((0,), beans, others):
        signs[at], signs[at + 1] = grid.signs
        offsets[at], offsets[at + 1] = grid.offsets * scale[at : at + 2]
    if width > VECTORS["vector26"]:  # offsets of the nearest beans: columns, rows, distance
        for at in (16, 19):
            signs[at], signs[at + 1] = grid.signs[1], grid.signs[0]
    return order, signs.tolist(), offsets.tolist()
