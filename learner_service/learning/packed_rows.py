"""Named arrays of rows side by side in one array, so that one launch gathers rows of all of them.

The array is of float32 numbers; what are none is kept as its bits, bytes by fours.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_WORD = 4  # bytes


class Part(NamedTuple):
    """Position of an array in a row.

    Attributes:
        name: name of the array.
        start: first number.
        stop: last number + 1.
        shape: shape of one agent's row.
        dtype: data type of the array.
    """

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]
    dtype: torch.dtype


Layout = tuple[Part, ...]


def packed(arrays: Mapping[str, Tensor], spare: int = 0) -> tuple[Layout, Tensor]:
    """Lay arrays side by side.

    Args:
        arrays: name -> [R, A, ...].
        spare: numbers of each agent's row to leave free at the end.

    Returns:
        where each is, and [R, A, W + spare].
    """
    parts: list[Tensor] = []
    layout, start = [], 0
    for name, x in arrays.items():
        part = _as_words(x)
        stop = start + part.shape[-1]
        layout.append(Part(name, start, stop, tuple(x.shape[2:]), x.dtype))
        parts.append(part)
        start = stop
    if spare:
        parts.append(parts[0].new_zeros((*parts[0].shape[:2], spare)))
    return tuple(layout), torch.cat(parts, -1)


def unpacked(layout: Layout, words: Tensor) -> dict[str, Tensor]:
    """Take apart what `packed` laid side by side: name -> [R, A, ...], of integers copies."""
    found = {}
    for name, start, stop, shape, dtype in layout:
        x = words[..., start:stop]
        if dtype.itemsize == 1:
            x = x.view(torch.uint8)[..., : math.prod(shape)].view(dtype)
        elif not dtype.is_floating_point:
            x = x.view(torch.int32).to(dtype)
        found[name] = x.reshape(*x.shape[:2], *shape).to(dtype)
    return found


def _as_words(x: Tensor) -> Tensor:
    """[R, A, F] float32."""
    numbers = x.unsqueeze(-1).flatten(2)
    if x.dtype.is_floating_point:
        return numbers.float()
    if x.element_size() > 1:
        return numbers.to(torch.int32).view(torch.float32)
    missing = -numbers.shape[-1] % _WORD
    numbers = numbers.view(torch.uint8)
    numbers = F.pad(numbers, (0, missing)) if missing else numbers.contiguous()
    return numbers.view(torch.float32)
