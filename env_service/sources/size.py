"""The size of samples, as an option of a source, and the arrays that follow from it."""

from typing import Annotated

from pydantic import Field

from murmur.shared.wire.samples import IMAGE, MASK
from murmur.shared.wire.spec import ArraySpec

_Side = Annotated[int, Field(ge=8, le=4096)]
Size = _Side | tuple[_Side, _Side]


def height_and_width(size: int | tuple[int, int]) -> tuple[int, int]:
    """Return (height, width) of a size; a number stands for a square."""
    return (size, size) if isinstance(size, int) else size


def sample_arrays(size: tuple[int, int]) -> tuple[ArraySpec, ...]:
    """Return the specs of an RGB image [3, H, W] and a mask [H, W] of classes, both uint8."""
    return (
        ArraySpec(IMAGE, "uint8", (3, *size), per_agent=False),
        ArraySpec(MASK, "uint8", size, per_agent=False),
    )
