"""Symmetries that an environment announces: mirrored and turned worlds play by the same rules.

A symmetry defines how each observation and each action changes with the world. A learner can then
train on transitions as they would have been in the changed world. Rewards, and arrays that are not
named, stay as they are. The identity is implied.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from murmur.shared.process.errors import SpecError

MAX_SYMMETRIES = 64


@dataclass(frozen=True, slots=True)
class ArrayChange:
    """The change of one observation under a symmetry.

    A map [..., H, W] is mirrored (column c becomes W - 1 - c), then turned counter-clockwise. Of a
    vector [..., F] or a number, new entry i is signs[i] * (old entry order[i]) + offsets[i].

    Attributes:
        name: name of the observation.
        flip: map: true if it is mirrored.
        turns: map: number of quarter turns, 0 to 3.
        order: vector: permutation of its entries; empty: identity.
        signs: vector: factors of its entries; empty: 1.
        offsets: vector: summands of its entries; empty: 0.
    """

    name: str
    flip: bool = False
    turns: int = 0
    order: tuple[int, ...] = ()
    signs: tuple[float, ...] = ()
    offsets: tuple[float, ...] = ()

    @property
    def of_map(self) -> bool:
        """Return whether it changes places on a map, not entries of a vector."""
        return self.flip or self.turns != 0


@dataclass(frozen=True, slots=True)
class Symmetry:
    """One way in which the world can change.

    Attributes:
        name: name of the symmetry in messages.
        arrays: changes of observations; action masks follow from `action`.
        action: discrete: new number of each action. Continuous: new entry i of an action is old
            entry action[i]. Empty: actions stay.
        action_signs: continuous: factors of the new entries; empty: 1.
    """

    name: str
    arrays: tuple[ArrayChange, ...]
    action: tuple[int, ...] = ()
    action_signs: tuple[float, ...] = ()


def check_symmetry(
    symmetry: Symmetry,
    find: Callable[[str], tuple[int, ...] | None],
    num_actions: int,
    *,
    discrete: bool,
) -> None:
    """Check that a symmetry fits its environment.

    Args:
        symmetry: symmetry to check.
        find: function from the name of an observation to its shape; None if it may not change.
        num_actions: number of actions, or of entries of a continuous action.
        discrete: true if actions are discrete.

    Raises:
        SpecError: if it does not fit, naming the symmetry and the field.
    """
    where = f"symmetry {symmetry.name[:40]!r}"
    _check_permutation(f"{where}: action", symmetry.action, num_actions)
    _check_numbers(f"{where}: action_signs", symmetry.action_signs, num_actions)
    if discrete and symmetry.action_signs:
        raise SpecError(f"{where} gives discrete actions signs; leave them out")
    for change in symmetry.arrays:
        shape, what = find(change.name), f"{where}, observation {change.name[:40]!r}"
        if shape is None:
            raise SpecError(f"{what}: there is none of that name that a symmetry may change")
        vector = change.order or change.signs or change.offsets
        if change.of_map:
            fits = len(shape) >= 2 and 0 <= change.turns < 4 and not vector
            if not fits or (change.turns % 2 and shape[-2] != shape[-1]):
                raise SpecError(
                    f"{what} of shape {shape} cannot be mirrored or turned {change.turns} times; "
                    "it needs two dimensions, equal ones for quarter turns, and no order"
                )
            continue
        size = shape[-1] if shape else 1
        _check_permutation(f"{what}: order", change.order, size)
        _check_numbers(f"{what}: signs", change.signs, size)
        _check_numbers(f"{what}: offsets", change.offsets, size)


def _check_permutation(what: str, order: tuple[int, ...], size: int) -> None:
    if order and (len(order) != size or sorted(order) != list(range(size))):
        raise SpecError(f"{what} is no permutation of 0 to {size - 1}: {str(order)[:60]}")


def _check_numbers(what: str, numbers: tuple[float, ...], size: int) -> None:
    if numbers and (len(numbers) != size or not all(map(math.isfinite, numbers))):
        raise SpecError(f"{what} must be {size} finite numbers: {str(numbers)[:60]}")


@dataclass(frozen=True, slots=True)
class GridChange:
    """The effect of flip and turns on places (row, column) and directions on a grid.

    Attributes:
        order: index of the old coordinate that each new one comes from.
        signs: factors of the new coordinates.
        offsets: summands of a place's new coordinates; directions have none.
    """

    order: tuple[int, int]
    signs: tuple[int, int]
    offsets: tuple[int, int]

    def direction(self, step: Sequence[int]) -> tuple[int, int]:
        """Return a direction (rows, columns) in the changed world."""
        return (
            self.signs[0] * step[self.order[0]],
            self.signs[1] * step[self.order[1]],
        )

    def place(self, cell: Sequence[int]) -> tuple[int, int]:
        """Return a place (row, column) in the changed world."""
        row, column = self.direction(cell)
        return row + self.offsets[0], column + self.offsets[1]


def grid_change(height: int, width: int, *, flip: bool, turns: int) -> GridChange:
    """Return the effect of ArrayChange(flip, turns) on places of a map [height, width].

    A counter-clockwise turn of a map with W columns moves (row, column) to (W - 1 - column, row).
    """
    order, signs, offsets = (0, 1), (1, 1), (0, 0)
    rows, columns = height, width
    if flip:
        signs, offsets = (1, -1), (0, columns - 1)
    for _ in range(turns):
        order = (order[1], order[0])
        signs = (-signs[1], signs[0])
        offsets = (columns - 1 - offsets[1], offsets[0])
        rows, columns = columns, rows
    return GridChange(order, signs, offsets)
