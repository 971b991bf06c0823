"""Mirrored and turned areas: the changes of observations and actions.

Three rules are not the same then. A UAV that gives way to another takes the next action by number.
Where a collision mask would leave no move, the last action by number remains. And the cell below a
camera is rounded down: unless the spacing is a whole number of map cells, a footprint is off by up
to one of them, of some hundred. What is drawn at random (camera errors, lost messages) is as likely
in the changed area.
"""

from env_service.envs.terrain.channels import ACTOR_SENT, CRITIC_SENT
from env_service.envs.terrain.config import Config
from env_service.envs.terrain.gain import EXPECTED_GAIN
from env_service.envs.terrain.lattice import MOVES, lattice_shape
from shared.config.symmetry import ArrayChange, Symmetry, grid_change
from shared.wire.spec import AGENT_CELL, STATE


def symmetries(config: Config) -> tuple[Symmetry, ...]:
    """Return the symmetries of a configured mission, without the identity.

    Flips and half turns; quarter turns too if area and camera are square. None if the channel
    `position` is there and has no middle: its own cell would move.
    """
    height, width, _ = lattice_shape(config)
    if "position" in config.actor_channels and not (height % 2 and width % 2):
        return ()
    square = config.area_x_m == config.area_y_m and config.fov_x_deg == config.fov_y_deg
    own, team = ("maps", STATE) if config.channels_by == "server" else (ACTOR_SENT, CRITIC_SENT)
    maps = (own, team) if config.critic_channels else (own,)
    moves = [tuple(move) for move in MOVES[config.num_actions].tolist()]
    found = []
    for flip in (False, True):
        for turns in range(4):
            if (turns % 2 and not square) or (not flip and not turns):
                continue
            grid = grid_change(height, width, flip=flip, turns=turns)
            cell = ArrayChange(
                AGENT_CELL,
                order=grid.order,
                signs=tuple(map(float, grid.signs)),
                offsets=tuple(map(float, grid.offsets)),
            )
            action = tuple(moves.index((*grid.direction(m[:2]), m[2])) for m in moves)
            arrays = [*(ArrayChange(m, flip=flip, turns=turns) for m in maps), cell]
            if config.expected_gain:  # new entry action[k] is old entry k
                order = tuple(action.index(k) for k in range(len(action)))
                arrays.append(ArrayChange(EXPECTED_GAIN, order=order))
            name = f"{'flip, ' if flip else ''}{90 * turns} degrees"
            found.append(Symmetry(name, tuple(arrays), action))
    return tuple(found)
